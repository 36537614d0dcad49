//! Matrices as bytes.

use kvant_codec::DType;

use crate::error::LinearError;

/// Returns the bytes of a matrix `[n_out, n_in]` of this type.
///
/// # Errors
/// A type of KV caches alone, rows that are not whole blocks, no rows or columns, or a size that no
/// memory has.
pub fn quantized_size(dtype: DType, [n_out, n_in]: [usize; 2]) -> Result<usize, LinearError> {
    if !dtype.is_weight() {
        return Err(LinearError::NotWeights(dtype));
    }
    if n_out == 0 || n_in == 0 {
        return Err(LinearError::size("weights", "rows and columns", format!("[{n_out}, {n_in}]")));
    }
    let row = dtype.row_bytes(n_in)?;
    row.checked_mul(n_out).ok_or_else(|| {
        LinearError::size("weights", "a size within the address space", format!("[{n_out}, {n_in}]"))
    })
}

/// Encodes a matrix `[n_out, n_in]`; the result has [`quantized_size`] bytes.
///
/// # Errors
/// As [`quantized_size`]; another number of weights, or one that is not finite.
pub fn quantize_weights(
    dtype: DType,
    weights: &[f32],
    [n_out, n_in]: [usize; 2],
) -> Result<Vec<u8>, LinearError> {
    let mut bytes = vec![0; quantized_size(dtype, [n_out, n_in])?];
    if Some(weights.len()) != n_out.checked_mul(n_in) {
        return Err(LinearError::size("weights", format!("[{n_out}, {n_in}]"), weights.len()));
    }
    if let Some(at) = weights.iter().position(|v| !v.is_finite()) {
        return Err(LinearError::NotFinite { row: at / n_in });
    }
    kvant_codec::encode(dtype, weights, &mut bytes)?;
    Ok(bytes)
}
