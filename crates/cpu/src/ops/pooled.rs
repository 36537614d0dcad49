//! Pools of consecutive tokens: see [`kvant_backend::Backend::pool_tokens`].

use std::ops::Range;

use kvant_backend::{TokenPool, TokenSpan};

use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::exp::exp;

/// Channels that a thread pools at a time.
const CHANNELS: usize = 64;

/// The operands of the op. Shapes have been checked.
#[derive(Clone, Copy)]
pub(crate) struct PoolArgs<'a> {
    pub pool: TokenPool,
    /// `[rows, n_in]`
    pub x: &'a [f32],
    /// `[rows, n_in]`
    pub gates: &'a [f32],
    /// `[stride, n_in]`
    pub bias: &'a [f32],
}

/// Pools the rows `rows` into `y` `[pooled rows, width]`, starting from `state`.
pub(crate) fn pool_tokens(
    threads: &Pool,
    args: PoolArgs<'_>,
    rows: TokenSpan,
    state: &mut [f32],
    y: &mut [f32],
) {
    let TokenPool { stride, width, overlaps } = args.pool;
    let (state, y) = (DisjointMut::new(state), DisjointMut::new(y));
    threads.for_each(width.div_ceil(CHANNELS), &|item| {
        let channels = item * CHANNELS..width.min((item + 1) * CHANNELS);
        // SAFETY: one call of this job takes these channels of the state.
        let sums = |half| unsafe { Sums::of(&state, half, width, &channels) };
        let (mut next, mut own) = (overlaps.then(|| sums(1)), sums(0));
        for (row, position) in (rows.first..).zip(rows.start..rows.end()) {
            if position.is_multiple_of(stride) {
                own.begin(next.as_ref().filter(|_| position > 0));
                next.iter_mut().for_each(|next| next.begin(None));
            }
            let add = |sums: &mut Sums<'_>, half: usize| {
                let n_in = args.pool.n_in();
                let columns = |row: usize| {
                    let first = row * n_in + half * width;
                    first + channels.start..first + channels.end
                };
                let (of_row, of_stride) = (columns(row), columns(position % stride));
                sums.add(&args.x[of_row.clone()], &args.gates[of_row], &args.bias[of_stride]);
            };
            add(&mut own, usize::from(overlaps));
            if let Some(next) = &mut next {
                add(next, 0);
            }
            if (position + 1).is_multiple_of(stride) {
                let at = (position / stride - rows.start / stride) * width;
                // SAFETY: one call of this job writes these channels.
                own.mean(unsafe { y.part(at + channels.start..at + channels.end) });
            }
        }
    });
}

/// Sums of some channels of a pool over the tokens so far, `exp(gate - max)` being the weight of a
/// token; without one, totals are 0.
struct Sums<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    total: &'a mut [f32],
}

impl<'a> Sums<'a> {
    /// Returns the sums of some channels in a state `[halves, 3, width]`.
    ///
    /// # Safety
    /// No other part of the state with these channels may be alive.
    unsafe fn of(
        state: &'a DisjointMut<'_, f32>,
        half: usize,
        width: usize,
        channels: &Range<usize>,
    ) -> Self {
        let part = |plane: usize| {
            let first = (3 * half + plane) * width;
            // SAFETY: the caller keeps the channels disjoint, and planes are.
            unsafe { state.part(first + channels.start..first + channels.end) }
        };
        Self { max: part(0), sum: part(1), total: part(2) }
    }

    /// Begins a pool with the tokens of another, or without any.
    fn begin(&mut self, with: Option<&Self>) {
        match with {
            Some(with) => {
                self.max.copy_from_slice(with.max);
                self.sum.copy_from_slice(with.sum);
                self.total.copy_from_slice(with.total);
            }
            None => [&mut *self.max, self.sum, self.total].into_iter().for_each(|of| of.fill(0.0)),
        }
    }

    /// Adds a token.
    fn add(&mut self, x: &[f32], gates: &[f32], bias: &[f32]) {
        let sums = self.max.iter_mut().zip(&mut *self.sum).zip(&mut *self.total);
        for (((max, sum), total), ((x, gate), bias)) in sums.zip(x.iter().zip(gates).zip(bias)) {
            let gate = gate + bias;
            let largest = if *total == 0.0 || gate > *max { gate } else { *max };
            let (kept, weight) = (exp(*max - largest), exp(gate - largest));
            *sum = *sum * kept + weight * x;
            *total = *total * kept + weight;
            *max = largest;
        }
    }

    /// Writes the weighted means.
    fn mean(&self, y: &mut [f32]) {
        let sums = self.sum.iter().zip(&*self.total);
        y.iter_mut().zip(sums).for_each(|(y, (sum, total))| *y = sum / total);
    }
}
