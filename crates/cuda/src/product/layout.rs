//! Rows of weights as the kernels read them.
//!
//! Most blocks of a file are a multiple of 4 bytes long, or of 16, and stay as they are. Those of q8_0, q4_0, q5_0, q3_K,
//! q6_K and iq4_nl are 2 bytes longer than that, those of mxfp4 one, of nvfp4 four and of iq4_xs eight: these bytes, scales,
//! move behind the last block of the row, so that the codes lie where they can be read by the word or 16 bytes at a time. A
//! row then takes a multiple of 16 bytes.

use std::ops::Range;

use kvant_codec::DType;

use crate::memory::Block;
use crate::{Context, CudaError};

/// The most threads that lay out a piece, and the least bytes that are worth one.
const MAX_THREADS: usize = 8;
const MIN_SHARE: usize = 1 << 20;

/// The bytes of a block that move.
fn moved(dtype: DType) -> Option<Range<usize>> {
    match dtype {
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 | DType::IQ4NL => Some(0..2),
        DType::Q3K | DType::Q6K => Some(dtype.block_bytes() - 2..dtype.block_bytes()),
        DType::IQ4XS => Some(0..8),
        DType::MXFP4 => Some(0..1),
        DType::NVFP4 => Some(0..4),
        _ => None,
    }
}

/// Bytes of a block but for those that move.
pub(super) fn block_bytes(dtype: DType) -> usize {
    dtype.block_bytes() - moved(dtype).map_or(0, |moved| moved.len())
}

/// Bytes of a row in the file.
fn file_row_bytes(dtype: DType, n_in: usize) -> usize {
    dtype.row_bytes(n_in).expect("rows of whole blocks")
}

/// Bytes of a row of `n_in` weights, a whole number of blocks, on the device.
pub(crate) fn row_bytes(dtype: DType, n_in: usize) -> usize {
    let bytes = file_row_bytes(dtype, n_in);
    if moved(dtype).is_some() { bytes.next_multiple_of(16) } else { bytes }
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
    match moved(dtype) {
        None => rows.copy_from_slice(file_rows),
        Some(moved) => {
            for (file_row, row) in file_rows.chunks_exact(from).zip(rows.chunks_exact_mut(to)) {
                put_row(file_row, dtype.block_bytes(), moved.clone(), row);
            }
        }
    }
}

/// Writes a row with what moves behind its blocks, and zeros up to its end.
fn put_row(file_row: &[u8], block_bytes: usize, moved: Range<usize>, row: &mut [u8]) {
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
    fn what_is_left_of_every_block_is_whole_words() {
        for dtype in crate::product::TYPES {
            if dtype.block_len() > 1 {
                assert_eq!(block_bytes(dtype) % 4, 0, "{dtype}");
            }
        }
    }
}
