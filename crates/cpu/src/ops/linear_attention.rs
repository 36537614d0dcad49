//! Linear attention, with a matrix state per head (gated delta rule or Mamba-2): see
//! [`kvant_backend::Backend::recur`].
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
    /// Decay of the state, and factor on the written value, `[rows, n_v_heads]`.
    gates: Vec<[f32; 2]>,
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
    let Scratch { prepared_qk, gates } = &*scratch;
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
            gates,
            qkv: inputs.qkv,
            skip: match inputs.rule {
                StateRule::GatedDeltaNet { .. } => None,
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
    scratch.prepared_qk.resize(rows.n * n_qk, 0.0);
    scratch.gates.resize(rows.n * n_v_heads, [0.0; 2]);
    let (prepared_qk, gates) =
        (DisjointMut::new(&mut scratch.prepared_qk), DisjointMut::new(&mut scratch.gates));
    pool.for_each(rows.n, &|i| {
        let row = rows.first + i;
        let qk = &inputs.qkv[row * heads.n_qkv()..][..n_qk];
        // SAFETY: one call of this job writes each row.
        let (prepared_qk, gates) = unsafe {
            (prepared_qk.part(i * n_qk..(i + 1) * n_qk), gates.part(i * n_v_heads..(i + 1) * n_v_heads))
        };
        match inputs.rule {
            StateRule::GatedDeltaNet { eps, .. } => {
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
        for (head, [decay, write_gate]) in gates.iter_mut().enumerate() {
            let step = inputs.step[row * n_v_heads + head] + inputs.bias[head];
            let step = step.max(0.0) + (-step.abs()).exp().ln_1p();
            *decay = (inputs.decay[head] * step).exp();
            *write_gate = match inputs.rule {
                StateRule::GatedDeltaNet { write, .. } => {
                    1.0 / (1.0 + (-write[row * n_v_heads + head]).exp())
                }
                StateRule::Mamba2 { .. } => step,
            };
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
    gates: &'a [[f32; 2]],
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
    decay: f32,
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
        let [decay, write_gate] = self.gates[i * n_v_heads + self.head];
        let at = row * n_v_heads * v_dim + at;
        // SAFETY: no other item has these columns, and each row's are taken once.
        let y = unsafe { self.y.part(at..at + width) };
        Row { key: vector(1), query: vector(0), value, decay, write_gate, skip: self.skip, y }
    }

    /// Evaluates the equation, column by column.
    fn run_scalar(self) {
        let dim = self.heads.k_dim;
        for i in 0..self.rows.n {
            let Row { key, query, value, decay, write_gate, skip, y } = self.row(i);
            for (column, (value, y)) in value.iter().zip(y).enumerate() {
                let block = &mut self.state[column / COLUMNS * dim * COLUMNS..][..dim * COLUMNS];
                let column = || (column % COLUMNS..dim * COLUMNS).step_by(COLUMNS);
                let change = match skip {
                    None => {
                        let retrieved: f32 = column().zip(key).map(|(at, k)| block[at] * k).sum();
                        (value - decay * retrieved) * write_gate
                    }
                    Some(_) => value * write_gate,
                };
                *y = skip.map_or(0.0, |skip| skip * value);
                for ((at, k), q) in column().zip(key).zip(query) {
                    block[at] = decay * block[at] + k * change;
                    *y += block[at] * q;
                }
            }
        }
    }

    /// Processes `B` blocks from block `block` on, for one row.
    #[inline(always)]
    fn blocks<L: Lanes, const B: usize>(lanes: L, state: &mut [f32], row: &mut Row<'_>, block: usize) {
        let dim = row.key.len();
        let (state, _) = state[block * dim * COLUMNS..(block + B) * dim * COLUMNS].as_chunks_mut::<COLUMNS>();
        let (values, ys) = (row.value.as_chunks::<COLUMNS>().0, row.y.as_chunks_mut::<COLUMNS>().0);
        let (decay, write_gate) = (lanes.splat(row.decay), lanes.splat(row.write_gate));
        let (mut change, mut sums) = ([lanes.splat(0.0); B], [lanes.splat(0.0); B]);
        match row.skip {
            None => {
                let mut retrieved = [lanes.splat(0.0); B];
                for (i, &k) in row.key.iter().enumerate() {
                    let k = lanes.splat(k);
                    for b in 0..B {
                        retrieved[b] = lanes.mul_add(lanes.load(&state[b * dim + i]), k, retrieved[b]);
                    }
                }
                for b in 0..B {
                    let value = lanes.load(&values[block + b]);
                    change[b] = lanes.mul(lanes.sub(value, lanes.mul(decay, retrieved[b])), write_gate);
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
}

impl Op for ColumnBlocks<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let n_blocks = self.state.len() / (self.heads.k_dim * COLUMNS);
        for i in 0..self.rows.n {
            let mut row = self.row(i);
            if n_blocks == BLOCKS {
                Self::blocks::<L, BLOCKS>(lanes, self.state, &mut row, 0);
            } else {
                for block in 0..n_blocks {
                    Self::blocks::<L, 1>(lanes, self.state, &mut row, block);
                }
            }
        }
    }
}
