//! Short convolutions over the rows of a sequence, channel by channel: see
//! [`kvant_backend::Backend::short_conv`].
//!
//! A thread processes some channels row by row; the inputs of the most recent rows are in a ring
//! buffer. The taps of a result are added to the bias from the oldest to the newest, in whichever
//! step they arrived.

use std::ops::Range;

use kvant_backend::{ConvForm, ShortConv};

use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::exp::exp;

/// Channels of a work item.
const CHUNK: usize = 64;

/// Convolves the rows `rows` of `x` `[rows, n_in]` into `y` `[rows, channels]`, starting from
/// `state`. Shapes have been checked.
pub(crate) fn short_conv(
    pool: &Pool,
    conv: ShortConv,
    rows: Range<usize>,
    state: &mut [f32],
    [x, kernel]: [&[f32]; 2],
    y: &mut [f32],
) {
    let ShortConv { channels, taps, form } = conv;
    let (state, y) = (DisjointMut::new(state), DisjointMut::new(y));
    pool.for_each(channels.div_ceil(CHUNK), &|item| {
        let of_row =
            |row: usize| row * channels + item * CHUNK..row * channels + channels.min((item + 1) * CHUNK);
        let n = of_row(0).len();
        // The input of row i is at i modulo the taps, where rows of the state count first.
        let mut ring = [[0.0; CHUNK]; ShortConv::MAX_TAPS];
        for (row, entered) in ring[..taps - 1].iter_mut().enumerate() {
            // SAFETY: one call of this job takes these channels of state and output.
            entered[..n].copy_from_slice(unsafe { state.part(of_row(row)) });
        }
        for (i, row) in rows.clone().enumerate() {
            let x = &x[row * conv.n_in()..(row + 1) * conv.n_in()];
            conv_input(form, x, of_row(0), &mut ring[(i + taps - 1) % taps]);
            // SAFETY: as above.
            let y = unsafe { y.part(of_row(row)) };
            y.copy_from_slice(&kernel[of_row(taps)]);
            for tap in 0..taps {
                let weights = &kernel[of_row(tap)];
                for ((y, u), w) in y.iter_mut().zip(&ring[(i + tap) % taps]).zip(weights) {
                    *y += w * u;
                }
            }
            conv_output(form, x, of_row(1), y);
        }
        for row in 0..taps - 1 {
            // SAFETY: as above.
            unsafe { state.part(of_row(row)) }.copy_from_slice(&ring[(rows.len() + row) % taps][..n]);
        }
    });
}

/// Computes the convolution input of the row `x`, for these channels.
#[inline(always)]
fn conv_input(form: ConvForm, x: &[f32], channels: Range<usize>, entered: &mut [f32; CHUNK]) {
    match form {
        ConvForm::Gated => {
            let n = x.len() / 3;
            let values = &x[2 * n + channels.start..2 * n + channels.end];
            for ((u, b), x) in entered.iter_mut().zip(&x[channels]).zip(values) {
                *u = b * x;
            }
        }
        ConvForm::Silu => entered[..channels.len()].copy_from_slice(&x[channels]),
    }
}

/// Applies the output gate or activation of the row `x` to `y`; `second` are these channels of its
/// second part.
#[inline(always)]
fn conv_output(form: ConvForm, x: &[f32], second: Range<usize>, y: &mut [f32]) {
    match form {
        ConvForm::Gated => y.iter_mut().zip(&x[second]).for_each(|(y, c)| *y *= c),
        ConvForm::Silu => y.iter_mut().for_each(|y| *y /= 1.0 + exp(-*y)),
    }
}
