//! The reference product: weight rows in file order, decoded a block at a time by the codec.
//!
//! ```text
//! y[r, o] = sum_i w[o, i] * x[r, i]     w [n_out, n_in] of any type, x [rows, n_in] in f32
//! ```
//!
//! A chunk of a weight row is decoded once for up to [`BATCH`] input rows; no decoded buffer is
//! larger.

use kvant_codec::{DType, decode};

/// Values decoded at a time: a whole number of blocks of every type.
const PIECE: usize = 256;
/// Input rows that share a decoded chunk.
const BATCH: usize = 64;
/// Partial sums of a dot product, side by side in a fixed order.
const LANES: usize = 16;

/// Multiplies one weight row (bytes `row`) with each row of `x` `[rows, n_in]`, and passes the
/// results to `put(input row, value)`.
pub(crate) fn row_products(
    dtype: DType,
    row: &[u8],
    x: &[f32],
    n_in: usize,
    mut put: impl FnMut(usize, f32),
) {
    let piece_bytes = PIECE / dtype.block_len() * dtype.block_bytes();
    let mut weights = [0.0; PIECE];
    for (batch, x) in x.chunks(BATCH * n_in).enumerate() {
        let mut sums = [[0.0; LANES]; BATCH];
        for (at, bytes) in row.chunks(piece_bytes).enumerate() {
            let first = at * PIECE;
            let weights = &mut weights[..PIECE.min(n_in - first)];
            decode(dtype, bytes, weights).expect("pieces are whole blocks");
            for (x, sums) in x.chunks_exact(n_in).zip(&mut sums) {
                add_products(weights, &x[first..first + weights.len()], sums);
            }
        }
        for (r, sums) in sums.iter().take(x.len() / n_in).enumerate() {
            put(batch * BATCH + r, sums.iter().sum());
        }
    }
}

/// Adds the products of two chunks to the partial sums.
#[inline]
fn add_products(w: &[f32], x: &[f32], sums: &mut [f32; LANES]) {
    let ((w, w_rest), (x, x_rest)) = (w.as_chunks::<LANES>(), x.as_chunks::<LANES>());
    for (w, x) in w.iter().zip(x) {
        for ((sum, w), x) in sums.iter_mut().zip(w).zip(x) {
            *sum += w * x;
        }
    }
    for ((sum, w), x) in sums.iter_mut().zip(w_rest).zip(x_rest) {
        *sum += w * x;
    }
}
