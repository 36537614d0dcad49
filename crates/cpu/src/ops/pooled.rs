//! Pools of consecutive tokens: see [`kvant_backend::Backend::pool_tokens`].

use kvant_backend::{TokenPool, TokenSpan};

use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::exp::exp;

/// Channels that a thread pools at a time.
const CHANNELS: usize = 32;

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
    let TokenPool { stride, width, .. } = args.pool;
    let of_channel = args.pool.n_state() / width;
    let (state, y) = (DisjointMut::new(state), DisjointMut::new(y));
    threads.for_each(width.div_ceil(CHANNELS), &|item| {
        for channel in item * CHANNELS..width.min((item + 1) * CHANNELS) {
            // SAFETY: one call of this job takes the state of each channel.
            let state = unsafe { state.part(channel * of_channel..(channel + 1) * of_channel) };
            let mut kept = Kept { pool: args.pool, state };
            for (row, position) in (rows.first..).zip(rows.start..rows.end()) {
                kept.put(args, row, position, channel);
                if (position + 1).is_multiple_of(stride) {
                    let number = position / stride;
                    let at = (number - rows.start / stride) * width + channel;
                    // SAFETY: one call of this job writes this channel.
                    let y = unsafe { y.part(at..at + 1) };
                    y[0] = kept.pooled(number);
                }
            }
        }
    });
}

/// Tokens that later pools read, of one channel: `[halves, slots, 2]`, each value before its gate.
struct Kept<'a> {
    pool: TokenPool,
    state: &'a mut [f32],
}

impl Kept<'_> {
    /// Returns the index of the value of the token at `position`.
    fn index(&self, half: usize, position: usize) -> usize {
        let slots = self.state.len() / self.n_halves() / 2;
        2 * (half * slots + position % slots)
    }

    fn n_halves(&self) -> usize {
        self.pool.n_in() / self.pool.width
    }

    /// Keeps the values of a row and their gates.
    fn put(
        &mut self,
        PoolArgs { pool, x, gates, bias }: PoolArgs<'_>,
        row: usize,
        position: usize,
        channel: usize,
    ) {
        for half in 0..self.n_halves() {
            let column = half * pool.width + channel;
            let (at, to) = (row * pool.n_in() + column, self.index(half, position));
            self.state[to] = x[at];
            self.state[to + 1] = gates[at] + bias[position % pool.stride * pool.n_in() + column];
        }
    }

    /// Returns the pooled value of the stride `number`.
    fn pooled(&self, number: usize) -> f32 {
        let stride = self.pool.stride;
        let of_stride = |number: usize| number * stride..(number + 1) * stride;
        let own = of_stride(number).map(|position| self.index(self.n_halves() - 1, position));
        let before = number.checked_sub(1).filter(|_| self.pool.overlaps).map_or(0..0, of_stride);
        let tokens = before.map(|position| self.index(0, position)).chain(own);
        let gate = |at: usize| self.state[at + 1];
        let max = tokens.clone().map(gate).fold(f32::NEG_INFINITY, |max, x| if x > max { x } else { max });
        let (mut sum, mut total) = (0.0, 0.0);
        for at in tokens {
            let weight = exp(gate(at) - max);
            sum += weight * self.state[at];
            total += weight;
        }
        sum / total
    }
}
