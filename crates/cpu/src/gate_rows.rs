//! Gates of whole rows, `y = y / (1 + exp(-g))`, and of single values; a factor on all of them.

use kvant_backend::{Activation, Gate};

use crate::Pool;
use crate::exp::exp;
use crate::shards::Shards;

/// Multiplies each row of `y` `[rows, cols]` by the sigmoid of its value of `gates` `[rows]`, or more.
pub(crate) fn gate_rows(pool: &Pool, y: &mut [f32], gates: &[f32], cols: usize) {
    let rows = y.len().checked_div(cols).unwrap_or(0);
    let y = Shards::new(y);
    pool.for_each(rows, &|row| {
        let divisor = 1.0 + exp(-gates[row]);
        // SAFETY: every row is taken by one call of this job.
        let y = unsafe { y.part(row * cols..(row + 1) * cols) };
        y.iter_mut().for_each(|y| *y /= divisor);
    });
}

/// Values of an item of work.
const PIECE: usize = 4 * 1024;

/// Multiplies each value of `y` by what `gate` makes of its value of `gates`.
pub(crate) fn gate(pool: &Pool, y: &mut [f32], gates: &[f32], gate: Gate) {
    let len = y.len();
    let y = Shards::new(y);
    pool.for_each(len.div_ceil(PIECE), &|piece| {
        let piece = piece * PIECE..len.min((piece + 1) * PIECE);
        // SAFETY: every piece is taken by one call of this job.
        let pairs = unsafe { y.part(piece.clone()) }.iter_mut().zip(&gates[piece]);
        match gate {
            Gate::Sigmoid => pairs.for_each(|(y, g)| *y /= 1.0 + exp(-g)),
            Gate::Silu => pairs.for_each(|(y, g)| *y *= g / (1.0 + exp(-g))),
            Gate::Gelu => {
                let [a, b] = Activation::GELU;
                pairs.for_each(|(y, g)| *y *= g / (1.0 + exp(-(g * (a + b * (g * g))))));
            }
            Gate::Plain => pairs.for_each(|(y, g)| *y *= g),
            // A comparison, so that NaN stays what it is.
            Gate::Relu => pairs.for_each(|(y, &g)| *y *= if g < 0.0 { 0.0 } else { g }),
        }
    });
}

/// Multiplies each value of `x` by `by`.
pub(crate) fn scale(pool: &Pool, x: &mut [f32], by: f32) {
    let len = x.len();
    let x = Shards::new(x);
    pool.for_each(len.div_ceil(PIECE), &|piece| {
        let piece = piece * PIECE..len.min((piece + 1) * PIECE);
        // SAFETY: every piece is taken by one call of this job.
        unsafe { x.part(piece) }.iter_mut().for_each(|x| *x *= by);
    });
}
