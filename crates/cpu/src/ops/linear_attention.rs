//! Linear attention, with a matrix state per head (gated delta rule, Kimi's or Mamba-2): see
//! [`kvant_backend::Backend::linear_attention`].
//!
//! The columns of a state are independent, so a thread processes a few of them for all rows while
//! they stay in the L1 cache: every row reads and writes them there, without rearrangement for many
//! rows. Keys, queries and the two gates, which all columns of a head share, are prepared first.

use kvant_backend::{StateHeads, StateInputs, StateRule, TokenSpan};

use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::context::KernelContext;
use crate::ops::norm::sum_of;
use crate::simd::vec16::{Lanes, Op, with_lanes};

/// Columns of a block.
const COLUMNS: usize = StateHeads::COLUMNS;
/// Blocks of columns of a work item: their sums are independent, which hides the latency of
/// additions.
const BLOCKS: usize = 4;

/// Scratch memory, reused between calls.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Queries, then keys, as multiplied with states, `[rows, 2, n_k_heads, k_dim]`.
    prepared_qk: Vec<f32>,
    /// Decays of the states, `[rows, n_steps]`.
    decays: Vec<f32>,
    /// Factors on the written values, `[rows, n_v_heads]`.
    write_gates: Vec<f32>,
}

/// Processes the rows `rows` into `y`, starting from `state`. Shapes have been checked.
pub(crate) fn linear_attention(
    KernelContext { isa, pool, scratch }: KernelContext<'_, Scratch>,
    heads: &StateHeads,
    rows: TokenSpan,
    state: &mut [f32],
    inputs: StateInputs<&[f32]>,
    y: &mut [f32],
) {
    prepare(pool, scratch, heads, rows, inputs);
    let Scratch { prepared_qk, decays, write_gates } = &*scratch;
    let (state, y) = (DisjointMut::new(state), DisjointMut::new(y));
    let per_head = heads.v_dim / COLUMNS;
    let items = per_head.div_ceil(BLOCKS);
    pool.for_each(heads.n_v_heads * items, &|item| {
        let (head, first) = (item / items, item % items * BLOCKS);
        let blocks = first..per_head.min(first + BLOCKS);
        let block_len = heads.k_dim * COLUMNS;
        let at = (head * per_head + blocks.start) * block_len..(head * per_head + blocks.end) * block_len;
        let task = ColumnBlocks {
            heads,
            rows,
            head,
            first,
            prepared_qk,
            decays,
            write_gates,
            qkv: inputs.qkv,
            skip: match inputs.rule {
                StateRule::GatedDeltaNet { .. } | StateRule::KimiDelta { .. } => None,
                StateRule::Mamba2 { skip } => Some(skip[head]),
            },
            y: &y,
            // SAFETY: one call of this job takes these blocks.
            state: unsafe { state.part(at) },
        };
        with_lanes!(isa, lanes => lanes.run(task), _ => task.run_scalar());
    });
}

/// Prepares the keys, queries and gates that all columns of a head share.
fn prepare(
    pool: &Pool,
    scratch: &mut Scratch,
    heads: &StateHeads,
    rows: TokenSpan,
    inputs: StateInputs<&[f32]>,
) {
    let (dim, n_v_heads) = (heads.k_dim, heads.n_v_heads);
    let n_qk = 2 * heads.n_k_heads * dim;
    let (n_steps, n_each) = (inputs.rule.n_steps(heads), inputs.rule.n_steps(heads) / n_v_heads);
    let Scratch { prepared_qk, decays, write_gates } = scratch;
    for (values, n) in [(&mut *prepared_qk, n_qk), (&mut *decays, n_steps), (&mut *write_gates, n_v_heads)] {
        values.resize(rows.n * n, 0.0);
    }
    let [prepared_qk, decays, write_gates] =
        [prepared_qk, decays, write_gates].map(|of| DisjointMut::new(of));
    pool.for_each(rows.n, &|i| {
        let row = rows.first + i;
        let qk = &inputs.qkv[row * heads.n_qkv()..][..n_qk];
        // SAFETY: one call of this job writes each row.
        let [prepared_qk, decays, write_gates] = unsafe {
            [
                prepared_qk.part(i * n_qk..(i + 1) * n_qk),
                decays.part(i * n_steps..(i + 1) * n_steps),
                write_gates.part(i * n_v_heads..(i + 1) * n_v_heads),
            ]
        };
        match inputs.rule {
            StateRule::GatedDeltaNet { eps, .. } | StateRule::KimiDelta { eps, .. } => {
                // L2-normalized, queries to 1 / √k_dim.
                let qk = qk.chunks_exact(dim).zip(prepared_qk.chunks_exact_mut(dim));
                for (head, (x, unit)) in qk.enumerate() {
                    let length = (sum_of(x, |x| x * x) + eps).sqrt();
                    let scale = if head < heads.n_k_heads { 1.0 / (dim as f32).sqrt() } else { 1.0 };
                    unit.iter_mut().zip(x).for_each(|(unit, x)| *unit = x * (scale / length));
                }
            }
            StateRule::Mamba2 { .. } => prepared_qk.copy_from_slice(qk),
        }
        let bound = match inputs.rule {
            StateRule::KimiDelta { bound, .. } => bound,
            StateRule::GatedDeltaNet { .. } | StateRule::Mamba2 { .. } => None,
        };
        // Steps first, then what they make of a state.
        for (at, decay) in decays.iter_mut().enumerate() {
            let step = inputs.step[row * n_steps + at] + inputs.bias[at];
            *decay = if bound.is_some() { step } else { step.max(0.0) + (-step.abs()).exp().ln_1p() };
        }
        match inputs.rule {
            StateRule::GatedDeltaNet { write, .. } | StateRule::KimiDelta { write, .. } => {
                let write = &write[row * n_v_heads..][..n_v_heads];
                write_gates.iter_mut().zip(write).for_each(|(gate, w)| *gate = 1.0 / (1.0 + (-w).exp()));
            }
            StateRule::Mamba2 { .. } => write_gates.copy_from_slice(decays),
        }
        for (decays, rate) in decays.chunks_exact_mut(n_each).zip(inputs.decay) {
            for decay in decays {
                let exponent = rate * *decay;
                *decay = bound.map_or(exponent, |bound| bound / (1.0 + (-exponent).exp())).exp();
            }
        }
    });
}

/// Some blocks of columns of a head, to be processed for all rows.
struct ColumnBlocks<'a> {
    heads: &'a StateHeads,
    rows: TokenSpan,
    head: usize,
    /// Index of the first block within the head.
    first: usize,
    prepared_qk: &'a [f32],
    decays: &'a [f32],
    write_gates: &'a [f32],
    qkv: &'a [f32],
    /// Factor of the skip connection from value to output; `None` for the delta rule.
    skip: Option<f32>,
    y: &'a DisjointMut<'a, f32>,
    /// `[blocks][k_dim][16]`
    state: &'a mut [f32],
}

/// The inputs and the output of a row.
struct Row<'a> {
    key: &'a [f32],
    query: &'a [f32],
    /// `[blocks * 16]`
    value: &'a [f32],
    /// `[1]`, or `[k_dim]`.
    decays: &'a [f32],
    write_gate: f32,
    skip: Option<f32>,
    y: &'a mut [f32],
}

impl<'a> ColumnBlocks<'a> {
    fn row(&self, i: usize) -> Row<'a> {
        let StateHeads { n_k_heads, n_v_heads, k_dim, v_dim, .. } = *self.heads;
        let (n_qkv, row) = (self.heads.n_qkv(), self.rows.first + i);
        let vector = |side: usize| {
            let head = self.heads.key_head(self.head) + side * n_k_heads;
            &self.prepared_qk[(2 * i * n_k_heads + head) * k_dim..][..k_dim]
        };
        let width = self.state.len() / k_dim;
        let at = self.head * v_dim + self.first * COLUMNS;
        let value = &self.qkv[row * n_qkv + 2 * n_k_heads * k_dim + at..][..width];
        let (head, n_each) = (i * n_v_heads + self.head, self.decays.len() / self.write_gates.len());
        let (decays, write_gate) = (&self.decays[head * n_each..][..n_each], self.write_gates[head]);
        let at = row * n_v_heads * v_dim + at;
        // SAFETY: no other item has these columns, and each row's are taken once.
        let y = unsafe { self.y.part(at..at + width) };
        Row { key: vector(1), query: vector(0), value, decays, write_gate, skip: self.skip, y }
    }

    /// Evaluates the equation, column by column.
    fn run_scalar(self) {
        let dim = self.heads.k_dim;
        for i in 0..self.rows.n {
            let Row { key, query, value, decays, write_gate, skip, y } = self.row(i);
            for (column, (value, y)) in value.iter().zip(y).enumerate() {
                let block = &mut self.state[column / COLUMNS * dim * COLUMNS..][..dim * COLUMNS];
                let column = || (column % COLUMNS..dim * COLUMNS).step_by(COLUMNS);
                // One for all dims, or one for each.
                column().zip(decays.iter().cycle()).for_each(|(at, decay)| block[at] *= decay);
                let change = match skip {
                    None => {
                        let retrieved: f32 = column().zip(key).map(|(at, k)| block[at] * k).sum();
                        (value - retrieved) * write_gate
                    }
                    Some(_) => value * write_gate,
                };
                *y = skip.map_or(0.0, |skip| skip * value);
                for ((at, k), q) in column().zip(key).zip(query) {
                    block[at] += k * change;
                    *y += block[at] * q;
                }
            }
        }
    }

    /// Processes `B` blocks from block `block` on, for one row whose decays are `PER_DIM` or one.
    #[inline(always)]
    fn blocks<L: Lanes, const B: usize, const PER_DIM: bool>(
        lanes: L,
        state: &mut [f32],
        row: &mut Row<'_>,
        block: usize,
    ) {
        let dim = row.key.len();
        let decays = &row.decays[..if PER_DIM { dim } else { 1 }];
        let (state, _) = state[block * dim * COLUMNS..(block + B) * dim * COLUMNS].as_chunks_mut::<COLUMNS>();
        let (values, ys) = (row.value.as_chunks::<COLUMNS>().0, row.y.as_chunks_mut::<COLUMNS>().0);
        let write_gate = lanes.splat(row.write_gate);
        let (mut change, mut sums) = ([lanes.splat(0.0); B], [lanes.splat(0.0); B]);
        match row.skip {
            None => {
                let mut retrieved = [lanes.splat(0.0); B];
                for (i, &k) in row.key.iter().enumerate() {
                    // A decay of all dims is applied to the sum.
                    let k = lanes.splat(if PER_DIM { k * decays[i] } else { k });
                    for b in 0..B {
                        retrieved[b] = lanes.mul_add(lanes.load(&state[b * dim + i]), k, retrieved[b]);
                    }
                }
                for b in 0..B {
                    let value = lanes.load(&values[block + b]);
                    let retrieved = match PER_DIM {
                        true => retrieved[b],
                        false => lanes.mul(lanes.splat(decays[0]), retrieved[b]),
                    };
                    change[b] = lanes.mul(lanes.sub(value, retrieved), write_gate);
                }
            }
            Some(skip) => {
                let skip = lanes.splat(skip);
                for b in 0..B {
                    let value = lanes.load(&values[block + b]);
                    (change[b], sums[b]) = (lanes.mul(value, write_gate), lanes.mul(value, skip));
                }
            }
        }
        for (i, (&k, &q)) in row.key.iter().zip(row.query).enumerate() {
            let (k, q) = (lanes.splat(k), lanes.splat(q));
            let decay = lanes.splat(decays[if PER_DIM { i } else { 0 }]);
            for b in 0..B {
                let at = &mut state[b * dim + i];
                let next = lanes.mul_add(k, change[b], lanes.mul(decay, lanes.load(at)));
                lanes.store(next, at);
                sums[b] = lanes.mul_add(next, q, sums[b]);
            }
        }
        for b in 0..B {
            lanes.store(sums[b], &mut ys[block + b]);
        }
    }

    /// Processes all rows.
    #[inline(always)]
    fn run_lanes<L: Lanes, const PER_DIM: bool>(self, lanes: L) {
        let n_blocks = self.state.len() / (self.heads.k_dim * COLUMNS);
        for i in 0..self.rows.n {
            let mut row = self.row(i);
            if n_blocks == BLOCKS {
                Self::blocks::<L, BLOCKS, PER_DIM>(lanes, self.state, &mut row, 0);
            } else {
                for block in 0..n_blocks {
                    Self::blocks::<L, 1, PER_DIM>(lanes, self.state, &mut row, block);
                }
            }
        }
    }
}

impl Op for ColumnBlocks<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        match self.decays.len() > self.write_gates.len() {
            true => self.run_lanes::<L, true>(lanes),
            false => self.run_lanes::<L, false>(lanes),
        }
    }
}
