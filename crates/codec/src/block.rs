//! Rows of values to rows of blocks and back.

use half::{bf16, f16};

use crate::finite::{clamp, to_f16};
use crate::{Codebook, CodecError, DType, block32, turbo};

/// Encodes `values` into `bytes` in the byte layout of `dtype`.
///
/// Deterministic. NaN is stored as 0 and values outside [`DType::max_abs`] are clamped to it, so the result always
/// decodes to finite numbers. Turbo blocks are rotated with [`Rotation::kv`], TQ blocks with [`Rotation::tq`].
///
/// # Errors
/// [`CodecError::NotWholeBlocks`] unless `values` is a whole number of blocks, [`CodecError::BufferSize`] unless
/// `bytes` has exactly the length they take.
pub fn encode(dtype: DType, values: &[f32], bytes: &mut [u8]) -> Result<(), CodecError> {
    check(dtype, values.len(), bytes.len())?;
    match dtype {
        DType::F32 => pack(values, bytes, |&[v], b| *b = clamp(v, f32::MAX).to_le_bytes()),
        DType::F16 => pack(values, bytes, |&[v], b| *b = to_f16(v).to_le_bytes()),
        DType::BF16 => {
            pack(values, bytes, |&[v], b| *b = bf16::from_f32(clamp(v, dtype.max_abs())).to_le_bytes());
        }
        DType::Q8_0 => pack(values, bytes, block32::pack_q8_0),
        DType::Q4_0 => pack(values, bytes, block32::pack_q4_0),
        DType::Q4_1 => pack(values, bytes, block32::pack_q4_1),
        DType::Q5_0 => pack(values, bytes, block32::pack_q5_0),
        DType::Q5_1 => pack(values, bytes, block32::pack_q5_1),
        DType::Turbo2 => {
            pack(values, bytes, |x, b: &mut [u8; 34]| turbo::pack_block(&Codebook::GAUSS2, x, b));
        }
        DType::Turbo3 => {
            pack(values, bytes, |x, b: &mut [u8; 50]| turbo::pack_block(&Codebook::GAUSS3, x, b));
        }
        DType::Turbo4 => {
            pack(values, bytes, |x, b: &mut [u8; 66]| turbo::pack_block(&Codebook::GAUSS4, x, b));
        }
        _ => return Err(CodecError::NotYet { dtype }),
    }
    Ok(())
}

/// Decodes `bytes` in the byte layout of `dtype` into `values`.
///
/// Reads any bytes: scales that a foreign writer left infinite or NaN decode to such numbers. Turbo and TQ blocks
/// are rotated back, so `values` are in the domain of what was encoded.
///
/// # Errors
/// As [`encode`].
pub fn decode(dtype: DType, bytes: &[u8], values: &mut [f32]) -> Result<(), CodecError> {
    check(dtype, values.len(), bytes.len())?;
    match dtype {
        DType::F32 => unpack(bytes, values, |&b| [f32::from_le_bytes(b)]),
        DType::F16 => unpack(bytes, values, |&b| [f16::from_le_bytes(b).to_f32()]),
        DType::BF16 => unpack(bytes, values, |&b| [bf16::from_le_bytes(b).to_f32()]),
        DType::Q8_0 => unpack(bytes, values, block32::unpack_q8_0),
        DType::Q4_0 => unpack(bytes, values, block32::unpack_q4_0),
        DType::Q4_1 => unpack(bytes, values, block32::unpack_q4_1),
        DType::Q5_0 => unpack(bytes, values, block32::unpack_q5_0),
        DType::Q5_1 => unpack(bytes, values, block32::unpack_q5_1),
        DType::Turbo2 => {
            unpack(bytes, values, |b: &[u8; 34]| turbo::unpack_block(&Codebook::GAUSS2, b));
        }
        DType::Turbo3 => {
            unpack(bytes, values, |b: &[u8; 50]| turbo::unpack_block(&Codebook::GAUSS3, b));
        }
        DType::Turbo4 => {
            unpack(bytes, values, |b: &[u8; 66]| turbo::unpack_block(&Codebook::GAUSS4, b));
        }
        _ => return Err(CodecError::NotYet { dtype }),
    }
    Ok(())
}

/// Whether `bytes` is what `values` numbers take.
fn check(dtype: DType, values: usize, bytes: usize) -> Result<(), CodecError> {
    let expected = dtype.row_bytes(values)?;
    if bytes != expected {
        return Err(CodecError::BufferSize { dtype, values, expected, got: bytes });
    }
    Ok(())
}

/// Runs `block` over the `N` values and `B` bytes of each block. The sizes come from the signature of `block`.
fn pack<const N: usize, const B: usize>(
    values: &[f32],
    bytes: &mut [u8],
    block: impl Fn(&[f32; N], &mut [u8; B]),
) {
    let ((values, []), (bytes, [])) = (values.as_chunks(), bytes.as_chunks_mut()) else {
        unreachable!("block of {N} values and {B} bytes disagrees with its DType");
    };
    values.iter().zip(bytes).for_each(|(v, b)| block(v, b));
}

/// The other way round.
fn unpack<const N: usize, const B: usize>(
    bytes: &[u8],
    values: &mut [f32],
    block: impl Fn(&[u8; B]) -> [f32; N],
) {
    let ((bytes, []), (values, [])) = (bytes.as_chunks(), values.as_chunks_mut()) else {
        unreachable!("block of {N} values and {B} bytes disagrees with its DType");
    };
    bytes.iter().zip(values).for_each(|(b, v)| *v = block(b));
}
