//! Rows of weights as the kernels read them.
//!
//! Most blocks of a file are a multiple of 4 bytes long, or of 16, and stay as they are. Those of q8_0, q4_0, q5_0, q3_K
//! and q6_K are 2 bytes longer than that: their one half moves behind the last block of the row, so that the codes lie
//! where they can be read by the word or 16 bytes at a time. A row then takes a multiple of 16 bytes.

use kvant_codec::DType;

use crate::memory::Block;
use crate::{Context, CudaError};

/// The most threads that lay out a piece, and the least bytes that are worth one.
const MAX_THREADS: usize = 8;
const MIN_SHARE: usize = 1 << 20;

/// Bytes of the half that moves.
const HALF: usize = 2;

/// Where in a block the half lies that moves, in bytes.
fn moved_half(dtype: DType) -> Option<usize> {
    match dtype {
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => Some(0),
        DType::Q3K | DType::Q6K => Some(dtype.block_bytes() - HALF),
        _ => None,
    }
}

/// Bytes of a block but for the half that moves.
pub(super) fn block_bytes(dtype: DType) -> usize {
    dtype.block_bytes() - if moved_half(dtype).is_some() { HALF } else { 0 }
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

/// Brings the rows of a matrix `[n_out, n_in]`, as in the file, to the device. They are laid out on several cores, as most
/// of the time goes into reading the mapped file.
///
/// # Errors
/// [`CudaError::OutOfMemory`].
pub(crate) fn upload(cx: &Context, dtype: DType, n_in: usize, bytes: &[u8]) -> Result<Block, CudaError> {
    if bytes.is_empty() {
        return cx.arena().take(0);
    }
    let (from, to) = (file_row_bytes(dtype, n_in), row_bytes(dtype, n_in));
    let n_bytes = bytes.len() / from * to;
    let block = cx.arena().take(n_bytes)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    let mut fill = |offset: usize, piece: &mut [u8]| {
        let file_rows = &bytes[offset / to * from..][..piece.len() / to * from];
        let rows = (piece.len() / to).div_ceil(threads).max(MIN_SHARE / to);
        std::thread::scope(|scope| {
            for (piece, file_rows) in piece.chunks_mut(rows * to).zip(file_rows.chunks(rows * from)) {
                scope.spawn(move || put_rows(dtype, file_rows, from, piece, to));
            }
        });
    };
    cx.gpu().upload(block.ptr(), n_bytes, to, &mut fill)?;
    Ok(block)
}

/// Lays rows of `from` bytes out as rows of `to` bytes.
fn put_rows(dtype: DType, file_rows: &[u8], from: usize, rows: &mut [u8], to: usize) {
    match moved_half(dtype) {
        None => rows.copy_from_slice(file_rows),
        Some(half) => {
            for (file_row, row) in file_rows.chunks_exact(from).zip(rows.chunks_exact_mut(to)) {
                put_row(file_row, dtype.block_bytes(), half, row);
            }
        }
    }
}

/// Writes a row with the halves behind its blocks, and zeros up to its end.
fn put_row(file_row: &[u8], block_bytes: usize, half: usize, row: &mut [u8]) {
    let rest = block_bytes - HALF;
    let (codes, halves) = row.split_at_mut(file_row.len() / block_bytes * rest);
    for (block, codes) in file_row.chunks_exact(block_bytes).zip(codes.chunks_exact_mut(rest)) {
        codes[..half].copy_from_slice(&block[..half]);
        codes[half..].copy_from_slice(&block[half + HALF..]);
    }
    let (halves, padding) = halves.split_at_mut(file_row.len() / block_bytes * HALF);
    for (block, to) in file_row.chunks_exact(block_bytes).zip(halves.chunks_exact_mut(HALF)) {
        to.copy_from_slice(&block[half..half + HALF]);
    }
    padding.fill(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_move_behind_the_blocks_and_nothing_is_lost() {
        let mut row = [9; 16];
        put_row(&[1, 2, 3, 4, 5, 6, 7, 8], 4, 0, &mut row);
        assert_eq!(row, [3, 4, 7, 8, 1, 2, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0]);
        put_row(&[1, 2, 3, 4, 5, 6, 7, 8], 4, 2, &mut row[..8]);
        assert_eq!(row[..8], [1, 2, 5, 6, 3, 4, 7, 8]);
    }

    #[test]
    fn what_is_left_of_every_block_is_whole_words() {
        for dtype in crate::product::TYPES {
            if dtype.block_len() > 1 {
                assert_eq!(block_bytes(dtype) % 4, 0, "{dtype}");
            }
        }
    }
}
