//! The ops of RWKV-7: see [`kvant_backend::Backend::shift_tokens`] and
//! [`kvant_backend::Backend::wkv7`].
//!
//! A thread processes a head for all rows, while its state stays in the L1 cache.

use std::ops::Range;

use kvant_backend::{FirstValues, Heads, StateHeads, TokenShift, TokenSpan, Wkv7Inputs, Wkv7Weights};

use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::exp::exp;
use crate::ops::norm::sum_of;
use crate::simd::isa::Isa;
use crate::simd::vec16::{Lanes, Op, with_lanes};

/// Columns of a state that are stored together.
const COLUMNS: usize = StateHeads::COLUMNS;
/// The largest head.
const MAX_DIM: usize = StateHeads::MAX_K_DIM;
/// `1 / √e`, the largest exponent of a decay.
const DECAY: f32 = 0.606_530_66;

/// Mixes the rows `rows` of `x`, starting from `state`, into `y`. Shapes have been checked.
pub(crate) fn shift_tokens(
    pool: &Pool,
    TokenShift { channels, n_mixes, rows: total }: TokenShift,
    rows: Range<usize>,
    state: &mut [f32],
    [x, amounts]: [&[f32]; 2],
    y: &mut [f32],
) {
    let row_of = |row: usize| &x[row * channels..(row + 1) * channels];
    let y = DisjointMut::new(y);
    let before = &*state;
    pool.for_each(rows.len() * n_mixes, &|item| {
        let (i, mix) = (item / n_mixes, item % n_mixes);
        let row = rows.start + i;
        let (x, earlier) = (row_of(row), if i == 0 { before } else { row_of(row - 1) });
        let at = (mix * total + row) * channels;
        // SAFETY: one call of this job writes each mix of each row.
        let y = unsafe { y.part(at..at + channels) };
        let amounts = &amounts[mix * channels..(mix + 1) * channels];
        for (((y, x), earlier), amount) in y.iter_mut().zip(x).zip(earlier).zip(amounts) {
            *y = x + amount * (earlier - x);
        }
    });
    if let Some(last) = rows.last() {
        state.copy_from_slice(row_of(last));
    }
}

/// Processes the rows `rows` into `y`, starting from `state`. Shapes have been checked.
pub(crate) fn wkv7(
    isa: Isa,
    pool: &Pool,
    heads: Heads,
    rows: TokenSpan,
    state: &mut [f32],
    inputs: Wkv7Inputs<&[f32]>,
    y: &mut [f32],
) {
    let (state, y) = (DisjointMut::new(state), DisjointMut::new(y));
    let size = heads.dim * heads.dim;
    pool.for_each(heads.n, &|head| {
        // SAFETY: one call of this job takes this head's state.
        let state = unsafe { state.part(head * size..(head + 1) * size) };
        let task = Head { heads, head, rows, inputs, y: &y, state };
        with_lanes!(isa, lanes => lanes.run(task), _ => task.run_scalar());
    });
}

/// A head, to be processed for all rows.
struct Head<'a> {
    heads: Heads,
    head: usize,
    rows: TokenSpan,
    inputs: Wkv7Inputs<&'a [f32]>,
    y: &'a DisjointMut<'a, f32>,
    /// `[dim / 16][dim][16]`: columns are values.
    state: &'a mut [f32],
}

/// What a row does to the state, `[dim]` each.
struct Row {
    receptance: [f32; MAX_DIM],
    value: [f32; MAX_DIM],
    decay: [f32; MAX_DIM],
    /// The key whose value the state loses, and the negative of what it loses of it.
    removal: [f32; MAX_DIM],
    loss: [f32; MAX_DIM],
    /// The key that it gains.
    key: [f32; MAX_DIM],
}

impl Row {
    const EMPTY: Self = Self {
        receptance: [0.0; MAX_DIM],
        value: [0.0; MAX_DIM],
        decay: [0.0; MAX_DIM],
        removal: [0.0; MAX_DIM],
        loss: [0.0; MAX_DIM],
        key: [0.0; MAX_DIM],
    };
}

impl<'a> Head<'a> {
    /// Returns the values of this head in row `i` of `of`.
    fn row_of(&self, of: &'a [f32], i: usize) -> &'a [f32] {
        let Heads { n, dim } = self.heads;
        &of[((self.rows.first + i) * n + self.head) * dim..][..dim]
    }

    /// Returns the values of this head in a weight.
    fn weight(&self, of: &'a [f32]) -> &'a [f32] {
        &of[self.head * self.heads.dim..][..self.heads.dim]
    }

    /// Computes what row `i` does to the state.
    #[inline(always)]
    fn prepare(&self, i: usize, to: &mut Row) {
        let Wkv7Inputs { receptance, key, value, decay, rate, first, weights, .. } = self.inputs;
        let dim = self.heads.dim;
        to.receptance[..dim].copy_from_slice(self.row_of(receptance, i));
        to.value[..dim].copy_from_slice(self.row_of(value, i));
        if let Some(FirstValues { values, share }) = first {
            let of_first = self.row_of(values, i).iter().zip(self.row_of(share, i));
            for (value, (first, share)) in to.value.iter_mut().zip(of_first) {
                *value += (first - *value) * sigmoid(*share);
            }
        }
        for (decay, w) in to.decay.iter_mut().zip(self.row_of(decay, i)) {
            *decay = exp(-DECAY * sigmoid(*w));
        }
        let keys = self.row_of(key, i);
        for ((n, k), factor) in to.removal.iter_mut().zip(keys).zip(self.weight(weights.removal)) {
            *n = k * factor;
        }
        let removal = &mut to.removal[..dim];
        let length = sum_of(removal, |x| x * x).sqrt().max(Wkv7Inputs::<()>::MIN_LENGTH);
        removal.iter_mut().for_each(|n| *n /= length);
        let rates = self.row_of(rate, i).iter().zip(self.weight(weights.replacement));
        for ((((loss, key), n), k), (rate, replacement)) in
            to.loss.iter_mut().zip(&mut to.key).zip(&*removal).zip(keys).zip(rates)
        {
            let rate = sigmoid(*rate);
            *loss = -n * rate;
            *key = k * (1.0 + (rate - 1.0) * replacement);
        }
    }

    /// Computes the output of row `i` from what it reads of the state, `y`.
    #[inline(always)]
    fn finish(&self, i: usize, row: &Row, y: &mut [f32]) {
        let Wkv7Weights { bonus, norm, norm_bias, .. } = self.inputs.weights;
        let dim = self.heads.dim;
        let mean = sum_of(y, |v| v) / dim as f32;
        let variance = sum_of(y, |v| (v - mean) * (v - mean)) / dim as f32;
        let factor = 1.0 / (variance + Wkv7Inputs::<()>::NORM_EPS).sqrt();
        let read = row.key.iter().zip(&row.receptance).zip(self.weight(bonus));
        let own: f32 = read.map(|((k, r), bonus)| k * r * bonus).sum();
        let norms = self.weight(norm).iter().zip(self.weight(norm_bias));
        let rows = row.value.iter().zip(self.row_of(self.inputs.gate, i));
        for ((y, (norm, bias)), (value, gate)) in y.iter_mut().zip(norms).zip(rows) {
            *y = ((*y - mean) * factor * norm + bias + own * value) * gate;
        }
    }

    /// Returns the output of row `i`.
    fn output(&self, i: usize) -> &'a mut [f32] {
        let Heads { n, dim } = self.heads;
        let at = ((self.rows.first + i) * n + self.head) * dim;
        // SAFETY: no other item has these columns, and each row's are taken once.
        unsafe { self.y.part(at..at + dim) }
    }

    /// Evaluates the equation, column by column.
    fn run_scalar(self) {
        let (dim, mut row) = (self.heads.dim, Row::EMPTY);
        for i in 0..self.rows.n {
            self.prepare(i, &mut row);
            let y = self.output(i);
            for (column, y) in y.iter_mut().enumerate() {
                let first = column / COLUMNS * dim * COLUMNS + column % COLUMNS;
                let at = |i: usize| first + i * COLUMNS;
                let lost: f32 = (0..dim).map(|i| self.state[at(i)] * row.removal[i]).sum();
                *y = 0.0;
                for i in 0..dim {
                    let state = &mut self.state[at(i)];
                    *state = row.decay[i] * *state + row.loss[i] * lost + row.key[i] * row.value[column];
                    *y += *state * row.receptance[i];
                }
            }
            self.finish(i, &row, y);
        }
    }
}

impl Op for Head<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (dim, mut row) = (self.heads.dim, Row::EMPTY);
        for i in 0..self.rows.n {
            self.prepare(i, &mut row);
            let y = self.output(i);
            let blocks = self.state.as_chunks_mut::<COLUMNS>().0.chunks_exact_mut(dim);
            let values = row.value.as_chunks::<COLUMNS>().0;
            for ((state, y), value) in blocks.zip(y.as_chunks_mut::<COLUMNS>().0).zip(values) {
                let (mut lost, mut sums) = ([lanes.splat(0.0); 2], [lanes.splat(0.0); 2]);
                for (i, state) in state.iter().enumerate() {
                    let n = lanes.splat(row.removal[i]);
                    lost[i % 2] = lanes.mul_add(lanes.load(state), n, lost[i % 2]);
                }
                let (lost, value) = (lanes.add(lost[0], lost[1]), lanes.load(value));
                for (i, state) in state.iter_mut().enumerate() {
                    let gained = lanes.mul(lanes.splat(row.key[i]), value);
                    let changed = lanes.mul_add(lanes.splat(row.loss[i]), lost, gained);
                    let next = lanes.mul_add(lanes.splat(row.decay[i]), lanes.load(state), changed);
                    lanes.store(next, state);
                    sums[i % 2] = lanes.mul_add(next, lanes.splat(row.receptance[i]), sums[i % 2]);
                }
                lanes.store(lanes.add(sums[0], sums[1]), y);
            }
            self.finish(i, &row, y);
        }
    }
}

/// The logistic function.
#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}
