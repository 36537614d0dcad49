//! Gates of whole rows: `y = y / (1 + exp(-g))`.

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
