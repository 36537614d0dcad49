//! Rows of weights as the kernels read them.
//!
//! Most blocks of a file are a multiple of 4 bytes long, or of 16, and stay as they are. Those of q8_0, q4_0, q5_0, q3_K
//! and q6_K are 2 bytes longer than that: their one half moves behind the last block of the row, so that the codes lie
//! where they can be read by the word or 16 bytes at a time. A row then takes a multiple of 16 bytes.

use kvant_codec::DType;

use crate::memory::Block;
use crate::{Context, CudaError};

/// What is laid out anew at a time, in bytes.
const CHUNK: usize = 4 << 20;

/// Where in a block the half lies that moves, in bytes.
fn moved_half(dtype: DType) -> Option<usize> {
    match dtype {
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => Some(0),
        DType::Q3K | DType::Q6K => Some(dtype.block_bytes() - 2),
        _ => None,
    }
}

/// Bytes of a row in the file.
fn file_row_bytes(dtype: DType, n_in: usize) -> usize {
    dtype.row_bytes(n_in).expect("rows of whole blocks")
}

/// Bytes of a row of `n_in` weights, a whole number of blocks, on the device.
pub(crate) fn row_bytes(dtype: DType, n_in: usize) -> usize {
    let bytes = file_row_bytes(dtype, n_in);
    if moved_half(dtype).is_some() { bytes.next_multiple_of(16) } else { bytes }
}

/// Brings the rows of a matrix `[n_out, n_in]`, as in the file, to the device.
///
/// # Errors
/// [`CudaError::OutOfMemory`].
pub(crate) fn upload(cx: &Context, dtype: DType, n_in: usize, bytes: &[u8]) -> Result<Block, CudaError> {
    let (Some(half), true) = (moved_half(dtype), n_in > 0) else {
        let block = cx.arena().take(bytes.len())?;
        cx.gpu().write(block.ptr(), bytes)?;
        return Ok(block);
    };
    let (from, to) = (file_row_bytes(dtype, n_in), row_bytes(dtype, n_in));
    let block = cx.arena().take(bytes.len() / from * to)?;
    let rows = (CHUNK / to).max(1);
    let mut chunk = Vec::with_capacity(rows.min(bytes.len() / from) * to);
    let mut ptr = block.ptr();
    for file_rows in bytes.chunks(rows * from) {
        chunk.clear();
        file_rows.chunks_exact(from).for_each(|row| push_row(row, dtype.block_bytes(), half, to, &mut chunk));
        cx.gpu().write(ptr, &chunk)?;
        ptr += chunk.len() as u64;
    }
    Ok(block)
}

/// Appends a row with the halves at its end, and zeros up to `bytes`.
fn push_row(row: &[u8], block_bytes: usize, half: usize, bytes: usize, to: &mut Vec<u8>) {
    let end = to.len() + bytes;
    for block in row.chunks_exact(block_bytes) {
        to.extend_from_slice(&block[..half]);
        to.extend_from_slice(&block[half + 2..]);
    }
    for block in row.chunks_exact(block_bytes) {
        to.extend_from_slice(&block[half..half + 2]);
    }
    to.resize(end, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_move_behind_the_blocks_and_nothing_is_lost() {
        let mut row = Vec::new();
        push_row(&[1, 2, 3, 4, 5, 6, 7, 8], 4, 0, 16, &mut row);
        assert_eq!(row, [3, 4, 7, 8, 1, 2, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0]);
        push_row(&[1, 2, 3, 4, 5, 6, 7, 8], 4, 2, 8, &mut row);
        assert_eq!(row[16..], [1, 2, 5, 6, 3, 4, 7, 8]);
    }

    #[test]
    fn what_is_left_of_every_block_is_whole_words() {
        for dtype in crate::product::TYPES {
            let moved = if moved_half(dtype).is_some() { 2 } else { 0 };
            if dtype.block_len() > 1 {
                assert_eq!((dtype.block_bytes() - moved) % 4, 0, "{dtype}");
            }
        }
    }
}
