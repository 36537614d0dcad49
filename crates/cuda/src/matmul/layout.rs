//! Layout of weight rows in device memory.
//!
//! Most blocks of a file are a multiple of 4 bytes long, or of 16, and stay unchanged. Those of
//! q8_0, q4_0, q5_0, q3_K, q6_K, iq4_nl and tq3t are 2 bytes longer than that, of mxfp4 one, of
//! nvfp4, q4_g128, fp8_g128, nf4_g64 and fp4_g64 four, of iq4_xs eight and of nvfp4_g256 20: these
//! bytes, scales, move behind the last block of the row, so that the codes are aligned for reads of
//! 4 or 16 bytes. A row of blocks takes a multiple of 16 bytes.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use kvant_codec::finite::F16_MAX;
use kvant_codec::{DType, Rotation, factored_fp4, fp8, nf4};

use crate::memory::Block;
use crate::{Context, CudaError, DevicePtr};

/// Maximum number of threads that lay out a piece, and minimum bytes per thread.
const MAX_THREADS: usize = 8;
const MIN_THREAD_BYTES: usize = 1 << 20;

/// Matrices on the device.
#[derive(Debug)]
pub(crate) struct Weights {
    block: Block,
    /// Power of two for the conversion to f16: weights times 2^-exponent are in the range of f16,
    /// the largest from 2^14 on and less than 2^15. 0 for f16, and for codes of weights within f16,
    /// which stay unchanged.
    pub exponent: i32,
}

impl Weights {
    /// Returns the address of the first row.
    pub fn ptr(&self) -> DevicePtr {
        self.block.ptr()
    }
}

/// Exponent of the largest weight in f16, and the smallest exponent that is raised to it: nearly
/// zero weights need not be raised all the way.
const HALF_EXPONENT: i32 = 14;
const MIN_EXPONENT: i32 = -100;

/// Magnitude below which the scales of a block in f16 exclude weights beyond f16: no format has
/// weights of more than 4,096 times its scale (q6_K: 128 times 32).
const SMALL_SCALE: f32 = 8.0;

/// Returns the offsets in a block of its scales and minima in f16.
pub(super) fn half_scales(dtype: DType) -> &'static [usize] {
    match dtype.layout() {
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K | DType::TQ3_1S | DType::TQ4_1S => &[0, 2],
        DType::Q2K => &[80, 82],
        DType::Q3K => &[108],
        DType::Q6K => &[208],
        DType::MXFP4 | DType::NVFP4 | DType::NVFP4G256 | DType::F16 => &[],
        _ => &[0],
    }
}

/// Returns whether the scales of a block of codes exclude weights beyond f16.
fn is_small(dtype: DType, block: &[u8]) -> bool {
    let half = |at: &usize| half::f16::from_le_bytes([block[*at], block[at + 1]]).to_f32();
    match dtype {
        // 6 times 2^(e - 127), 2,688 times the factor, and f16 itself.
        DType::MXFP4 => block[0] <= 127 + 13,
        DType::NVFP4G256 => block.first_chunk().is_some_and(|&bits| f32::from_le_bytes(bits).abs() < 24.0),
        _ => half_scales(dtype).iter().all(|at| half(at).abs() < SMALL_SCALE),
    }
}

/// Returns the largest magnitude among the finite weights of blocks of codes; 0 where all are
/// within f16. Those of types with a rotation count as if they were rotated to one value.
fn largest_code(dtype: DType, bytes: &[u8]) -> f32 {
    let mut weights = vec![0.0; dtype.block_len()];
    let rotated = match dtype {
        DType::TQ3_1S | DType::TQ4_1S | DType::TQ3T => (Rotation::tq().len() as f32).sqrt(),
        _ => 1.0,
    };
    let blocks = bytes.chunks_exact(dtype.block_bytes()).filter(|block| !is_small(dtype, block));
    let largest = blocks.fold(0.0, |largest: f32, block| {
        kvant_codec::decode(dtype, block, &mut weights).expect("one block");
        let finite = weights.iter().filter(|weight| weight.is_finite());
        finite.fold(largest, |largest, weight| largest.max(weight.abs() * rotated))
    });
    if largest <= F16_MAX { 0.0 } else { largest.min(f32::MAX) }
}

/// Returns the largest magnitude among the finite weights of `bytes`, as the bits of an f32; 0 for
/// f16, and for codes of weights within f16. Blocks of fp8_g128, nf4_g64 and fp4_g64 count as if
/// each had the largest code, as those of most writers do.
fn largest_bits(dtype: DType, bytes: &[u8]) -> u32 {
    const INFINITE: u32 = f32::INFINITY.to_bits();
    let finite = |bits: u32| if bits & INFINITE == INFINITE { 0 } else { bits & !(1 << 31) };
    let largest = |bits: &mut dyn Iterator<Item = u32>| bits.map(finite).fold(0, u32::max);
    match dtype {
        DType::F32 => largest(&mut bytes.as_chunks().0.iter().map(|&float| u32::from_le_bytes(float))),
        DType::BF16 => {
            largest(&mut bytes.as_chunks().0.iter().map(|&upper| u32::from(u16::from_le_bytes(upper)) << 16))
        }
        DType::FP8G128 => {
            let scales = bytes.as_chunks::<{ fp8::BYTES }>().0.iter().map(fp8::scale);
            largest(&mut scales.map(|scale| (scale.abs().min(f32::MAX / fp8::MAX) * fp8::MAX).to_bits()))
        }
        DType::NF4G64 | DType::FP4G64 => {
            let scales = bytes.as_chunks::<{ nf4::BYTES }>().0.iter().map(nf4::scale);
            largest(&mut scales.map(f32::to_bits))
        }
        DType::F16 => 0,
        _ => largest_code(dtype, bytes).to_bits(),
    }
}

/// Returns [`Weights::exponent`] of matrices whose largest weight has these bits.
fn exponent_of(largest_bits: u32) -> i32 {
    if largest_bits == 0 {
        return 0;
    }
    ((largest_bits >> (f32::MANTISSA_DIGITS - 1)) as i32 - 127 - HALF_EXPONENT).max(MIN_EXPONENT)
}

/// Returns the bytes of a block that move.
fn moved(dtype: DType) -> Option<Range<usize>> {
    match dtype.layout() {
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 | DType::IQ4NL | DType::TQ3T => Some(0..2),
        DType::Q3K | DType::Q6K => Some(dtype.block_bytes() - 2..dtype.block_bytes()),
        DType::IQ4XS => Some(0..8),
        DType::MXFP4 => Some(0..1),
        DType::NVFP4 | DType::Q4G128 | DType::FP8G128 | DType::NF4G64 | DType::FP4G64 => Some(0..4),
        DType::NVFP4G256 => Some(0..factored_fp4::HEADER),
        _ => None,
    }
}

/// Returns the bytes of a block without those that move.
pub(super) fn block_bytes(dtype: DType) -> usize {
    dtype.block_bytes() - moved(dtype).map_or(0, |moved| moved.len())
}

/// Returns the bytes of `n` consecutive weights, whole blocks: those that stay, and those that
/// move.
pub(super) fn bytes_of(dtype: DType, n: usize) -> [usize; 2] {
    let kept_bytes = block_bytes(dtype);
    [kept_bytes, dtype.block_bytes() - kept_bytes].map(|bytes| bytes * n / dtype.block_len())
}

/// Returns the bytes of a row in the file.
fn file_row_bytes(dtype: DType, n_in: usize) -> usize {
    dtype.row_bytes(n_in).expect("rows of whole blocks")
}

/// Returns the bytes of a row of `n_in` weights, a whole number of blocks, on the device.
pub(crate) fn row_bytes(dtype: DType, n_in: usize) -> usize {
    let bytes = file_row_bytes(dtype, n_in);
    if dtype.block_len() > 1 { bytes.next_multiple_of(16) } else { bytes }
}

/// Uploads the rows of a matrix `[n_out, n_in]`, as in the file. Several cores lay them out, as
/// reading the mapped file takes most of the time.
///
/// # Errors
/// [`CudaError::OutOfMemory`].
pub(crate) fn upload(cx: &Context, dtype: DType, n_in: usize, bytes: &[u8]) -> Result<Weights, CudaError> {
    if bytes.is_empty() {
        return Ok(Weights { block: cx.arena().take(0)?, exponent: 0 });
    }
    let (from, to) = (file_row_bytes(dtype, n_in), row_bytes(dtype, n_in));
    let n_bytes = bytes.len() / from * to;
    let block = cx.arena().take(n_bytes)?;
    let largest = AtomicU32::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    let mut fill = |offset: usize, piece: &mut [u8]| {
        let file_rows = &bytes[offset / to * from..][..piece.len() / to * from];
        let rows = (piece.len() / to).div_ceil(threads).max(MIN_THREAD_BYTES / to);
        std::thread::scope(|scope| {
            for (piece, file_rows) in piece.chunks_mut(rows * to).zip(file_rows.chunks(rows * from)) {
                let largest = &largest;
                scope.spawn(move || {
                    put_rows(dtype, file_rows, from, piece, to);
                    largest.fetch_max(largest_bits(dtype, file_rows), Ordering::Relaxed);
                });
            }
        });
    };
    cx.gpu().upload(block.ptr(), n_bytes, to, &mut fill)?;
    Ok(Weights { block, exponent: exponent_of(largest.into_inner()) })
}

/// Lays the rows of `tokens` of a table, as in the file, out as on the device.
pub(crate) fn lay_out_rows(dtype: DType, n_in: usize, bytes: &[u8], tokens: &[u32], rows: &mut [u8]) {
    let (from, to) = (file_row_bytes(dtype, n_in), row_bytes(dtype, n_in));
    for (&token, row) in tokens.iter().zip(rows.chunks_exact_mut(to)) {
        put_rows(dtype, &bytes[token as usize * from..][..from], from, row, to);
    }
}

/// Lays rows of `from` bytes out as rows of `to` bytes.
fn put_rows(dtype: DType, file_rows: &[u8], from: usize, rows: &mut [u8], to: usize) {
    for (file_row, row) in file_rows.chunks_exact(from).zip(rows.chunks_exact_mut(to)) {
        match moved(dtype) {
            Some(moved) => put_row(file_row, dtype.block_bytes(), moved, row),
            None => {
                row[..from].copy_from_slice(file_row);
                row[from..].fill(0);
            }
        }
    }
}

/// Writes a row with the moved bytes behind its blocks, and zeros up to its end.
fn put_row(file_row: &[u8], block_bytes: usize, moved: Range<usize>, row: &mut [u8]) {
    // As constants, sizes make a move of each copy, not a call: rows of embeddings come here in
    // every step.
    match (block_bytes, moved) {
        (18, Range { start: 0, end: 2 }) => put_blocks(file_row, 18, 0..2, row),
        (22, Range { start: 0, end: 2 }) => put_blocks(file_row, 22, 0..2, row),
        (34, Range { start: 0, end: 2 }) => put_blocks(file_row, 34, 0..2, row),
        (block_bytes, moved) => put_blocks(file_row, block_bytes, moved, row),
    }
}

#[inline(always)]
fn put_blocks(file_row: &[u8], block_bytes: usize, moved: Range<usize>, row: &mut [u8]) {
    let rest = block_bytes - moved.len();
    let (codes, scales) = row.split_at_mut(file_row.len() / block_bytes * rest);
    for (block, codes) in file_row.chunks_exact(block_bytes).zip(codes.chunks_exact_mut(rest)) {
        codes[..moved.start].copy_from_slice(&block[..moved.start]);
        codes[moved.start..].copy_from_slice(&block[moved.end..]);
    }
    let (scales, padding) = scales.split_at_mut(file_row.len() / block_bytes * moved.len());
    for (block, to) in file_row.chunks_exact(block_bytes).zip(scales.chunks_exact_mut(moved.len())) {
        to.copy_from_slice(&block[moved.clone()]);
    }
    padding.fill(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_move_behind_the_blocks_and_nothing_is_lost() {
        let mut row = [9; 16];
        put_row(&[1, 2, 3, 4, 5, 6, 7, 8], 4, 0..2, &mut row);
        assert_eq!(row, [3, 4, 7, 8, 1, 2, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0]);
        put_row(&[1, 2, 3, 4, 5, 6, 7, 8], 4, 2..4, &mut row[..8]);
        assert_eq!(row[..8], [1, 2, 5, 6, 3, 4, 7, 8]);
        put_row(&[1, 2, 3, 4, 5, 6, 7, 8], 4, 0..1, &mut row[..8]);
        assert_eq!(row[..8], [2, 3, 4, 6, 7, 8, 1, 5]);
    }

    #[test]
    fn the_largest_finite_weight_becomes_a_half_near_the_largest() {
        let bytes = |weights: &[f32]| weights.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>();
        let upper = |weights: &[f32]| {
            weights.iter().flat_map(|w| ((w.to_bits() >> 16) as u16).to_le_bytes()).collect::<Vec<_>>()
        };
        let cases: [(&[f32], i32); 6] = [
            (&[0.0, -0.0], 0),
            (&[1.0, -16384.0, 3.0], 0),
            (&[f32::NAN, 32768.0, f32::NEG_INFINITY], 1),
            (&[-3.0e38], 113),
            (&[0.25, 0.375], -16),
            (&[1e-40], -100),
        ];
        for (weights, want) in cases {
            assert_eq!(exponent_of(largest_bits(DType::F32, &bytes(weights))), want, "{weights:?}");
            if weights != [1e-40] {
                assert_eq!(exponent_of(largest_bits(DType::BF16, &upper(weights))), want, "{weights:?}");
            }
        }
        assert_eq!(largest_bits(DType::F16, &bytes(&[1e6])), 0);
        let mut blocks = [0; 2 * fp8::BYTES];
        kvant_codec::encode(DType::FP8G128, &[[0.25; 128], [-3.0; 128]].concat(), &mut blocks).unwrap();
        assert_eq!(exponent_of(largest_bits(DType::FP8G128, &blocks)), -13);
        let mut blocks = [0; 2 * nf4::BYTES];
        kvant_codec::encode(DType::NF4G64, &[[0.25; 64], [-3.0; 64]].concat(), &mut blocks).unwrap();
        assert_eq!(exponent_of(largest_bits(DType::NF4G64, &blocks)), -13);
    }

    #[test]
    fn codes_beyond_f16_alone_are_scaled() {
        for dtype in crate::matmul::TYPES {
            let floats = [DType::F32, DType::F16, DType::BF16];
            if [&floats[..], &[DType::FP8G128, DType::NF4G64, DType::FP4G64]].concat().contains(&dtype) {
                continue;
            }
            let mut block = vec![0; dtype.block_bytes()];
            let usual: Vec<f32> = (0..dtype.block_len()).map(|i| (i % 7) as f32 - 3.0).collect();
            kvant_codec::encode(dtype, &usual, &mut block).unwrap();
            assert_eq!(largest_bits(dtype, &block), 0, "{dtype}");
            // Scales that writers hardly ever have, but may.
            let scales = half_scales(dtype);
            for at in scales {
                block[*at..at + 2].copy_from_slice(&half::f16::from_f32(60_000.0).to_le_bytes());
            }
            if scales.is_empty() {
                continue;
            }
            let mut weights = vec![0.0; dtype.block_len()];
            kvant_codec::decode(dtype, &block, &mut weights).unwrap();
            let largest = weights.iter().fold(0.0, |largest: f32, w| largest.max(w.abs()));
            assert!(largest > F16_MAX, "{dtype}: {largest}");
            let in_halves = largest * 2f32.powi(-exponent_of(largest_bits(dtype, &block)));
            assert!((2f32.powi(11)..2f32.powi(15)).contains(&in_halves), "{dtype}: {in_halves}");
        }
    }

    #[test]
    fn remaining_block_bytes_are_whole_words() {
        for dtype in crate::matmul::TYPES {
            if dtype.block_len() > 1 {
                assert_eq!(block_bytes(dtype) % 4, 0, "{dtype}");
            }
        }
    }
}
