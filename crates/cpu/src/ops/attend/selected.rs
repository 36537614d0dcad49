//! Attention to selected tokens and to pooled keys: see
//! [`kvant_backend::Backend::attend_selected`] and [`kvant_backend::Backend::attend_pooled`].
//!
//! The keys and values of a row's tokens are decoded once, into scratch memory that a selection
//! bounds, and read by all query heads.

use kvant_backend::{AttendParams, KvBatchEntry, PooledBatchEntry, TokenSpan};
use kvant_codec::Side;
use kvant_codec::tile::{TILE, prepare_query, restore_row};

use super::AttendArgs;
use super::decode::DecodeRows;
use super::select::tiles;
use super::selection::{Blocks, RowSpan, SelectedRows};
use super::view::View;
use crate::host::disjoint::DisjointMut;
use crate::host::page::CpuPage;
use crate::host::pool::Pool;
use crate::ops::channel_scales::HeadScales;
use crate::ops::context::KernelContext;
use crate::simd::isa::Isa;
use crate::simd::vec16::{Lanes, Op, with_lanes};

/// Scratch memory, reused between calls.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Decoded keys `[tokens, dim]`, and values unless they are part of the keys.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Decoded for several rows: pooled keys, and the tokens of a window.
    shared: [Vec<f32>; 2],
    /// Selected tokens of several rows.
    union: Union,
}

/// Query heads that share the loads of keys and values.
const HEADS: usize = 4;
/// Tokens that a thread decodes at a time.
const DECODED: usize = 64;
const LANES: usize = 16;

/// Divides the rows that have more tokens than they select: those that read all tokens of the 128
/// that are stored together, as rows that attend to all tokens do, and the others.
pub(crate) fn divide(isa: Isa, parts: &[KvBatchEntry<'_, CpuPage>], blocks: Blocks<'_>) -> [Vec<RowSpan>; 2] {
    let [mut whole, mut apart] = [Vec::new(), Vec::new()];
    for (part, entry) in parts.iter().enumerate() {
        for position in entry.rows.start.max(blocks.of.first_position())..entry.rows.end() {
            let row = position - entry.rows.start;
            let is_whole = isa != Isa::Scalar && blocks.reads_all(entry.rows.first + row, position);
            let spans = if is_whole { &mut whole } else { &mut apart };
            match spans.last_mut() {
                Some(RowSpan { part: last, rows }) if *last == part && rows.end == row => rows.end += 1,
                _ => spans.push(RowSpan { part, rows: row..row + 1 }),
            }
        }
    }
    [whole, apart]
}

/// Attends to the tokens of the selected blocks of these rows.
///
/// Those in one tile, which read every token in the same form, share what they decode: each token
/// that some of them attend to, once.
pub(crate) fn attend_selected(
    mut context: KernelContext<'_, Scratch>,
    args: AttendArgs<'_>,
    SelectedRows { blocks, spans }: SelectedRows<'_>,
    out: &mut [f32],
) {
    let mut union = std::mem::take(&mut context.scratch.union);
    for RowSpan { part, rows } in spans {
        let part = &args.parts[*part];
        let first = part.rows.start + rows.start;
        for positions in tiles(TokenSpan { n: rows.end, ..part.rows }, first) {
            let tile = positions.start / TILE;
            let first_row = part.rows.first + positions.start - part.rows.start;
            for kv_head in 0..args.p.n_kv_heads {
                let of = [&part.layer.k[kv_head], part.layer.values(kv_head)];
                let [keys, values] = of.map(|tensor| View::new(part, tensor, args.step_tiles));
                let own_values = (!part.layer.is_shared_kv()).then_some(values);
                union.find(positions.clone(), |row, position, tokens| {
                    blocks.tokens(first_row + row, kv_head, position, tokens);
                });
                let stored = |view| Source::Stored { view, tile };
                let is_shared = positions.len() > 1;
                if is_shared {
                    union.decode(context.isa, context.pool, 0, stored(keys), keys.dim());
                    own_values.iter().for_each(|&view| {
                        union.decode(context.isa, context.pool, 1, stored(view), view.dim())
                    });
                }
                for row in 0..positions.len() {
                    let source = |of: usize, view| match is_shared {
                        true => Source::Slotted { rows: &union.decoded[of], slots: &union.slots },
                        false => stored(view),
                    };
                    let tokens = Numbered { source: source(0, keys), numbers: union.of_row(row) };
                    let values = own_values.map(|view| source(1, view));
                    let row = Row { part, row: first_row + row, tokens, values, pooled: None };
                    attend_row(context.reborrow(), args, row, kv_head, out);
                }
            }
        }
    }
    context.scratch.union = union;
}

/// The tokens that some rows attend to, and the decoded ones that they share.
#[derive(Debug, Default)]
struct Union {
    /// Tokens of each row, one after the other, and where they end.
    tokens: Vec<usize>,
    ends: Vec<usize>,
    /// The tokens of all, ascending.
    all: Vec<usize>,
    /// The place of each token among all of them, if it is there.
    slots: Vec<u32>,
    /// Decoded keys and values of all.
    decoded: [Vec<f32>; 2],
}

impl Union {
    /// Finds the tokens of the rows at `positions`, which `tokens_of` writes for each.
    fn find(
        &mut self,
        positions: std::ops::Range<usize>,
        mut tokens_of: impl FnMut(usize, usize, &mut Vec<usize>),
    ) {
        let Self { tokens, ends, all, slots, .. } = self;
        [&mut *tokens, &mut *ends, &mut *all].into_iter().for_each(Vec::clear);
        slots.clear();
        slots.resize(positions.end, 0);
        let mut of_row = Vec::new();
        for (row, position) in positions.enumerate() {
            tokens_of(row, position, &mut of_row);
            of_row.iter().for_each(|&token| slots[token] = 1);
            tokens.extend_from_slice(&of_row);
            ends.push(tokens.len());
        }
        for (token, slot) in slots.iter_mut().enumerate().filter(|(_, slot)| **slot > 0) {
            *slot = all.len() as u32;
            all.push(token);
        }
    }

    /// Returns the tokens of a row.
    fn of_row(&self, row: usize) -> &[usize] {
        let start = row.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.tokens[start..self.ends[row]]
    }

    /// Decodes the keys (0) or values (1) of all tokens.
    fn decode(&mut self, isa: Isa, pool: &Pool, of: usize, source: Source<'_>, dim: usize) {
        gather(isa, pool, source, dim, &self.all, room(&mut self.decoded[of], self.all.len() * dim));
    }
}

/// Numbers of the selected pooled keys, ascending, `[rows, n_used]`.
#[derive(Clone, Copy)]
pub(crate) struct PooledNumbers<'a> {
    pub of_rows: &'a [f32],
    pub n_used: usize,
}

/// Most values of pooled keys that are decoded for all rows of a step together: 64 MiB.
const MAX_SHARED: usize = 1 << 24;

/// Attends to the tokens of each row and to the pooled keys that it sees, or to those selected.
///
/// Rows of a step share what they decode: the window of the rows in a tile, which read every token
/// in the same form, and all keys, if rows select as many together.
pub(crate) fn attend_pooled(
    mut context: KernelContext<'_, Scratch>,
    args: AttendArgs<'_>,
    pooled: &[PooledBatchEntry<'_, CpuPage>],
    selected: Option<PooledNumbers<'_>>,
    out: &mut [f32],
) {
    let [mut shared_keys, mut window] = std::mem::take(&mut context.scratch.shared);
    let (mut tokens, mut numbers) = (Vec::new(), Vec::new());
    for (part, pooled) in args.parts.iter().zip(pooled) {
        let views = [(part, args.step_tiles), (&pooled.keys, None)];
        let [own, keys] = views.map(|(part, step_tiles)| View::new(part, &part.layer.k[0], step_tiles));
        let (rows, dim) = (part.rows, keys.dim());
        let n_keys = pooled.n_seen(rows.end() - 1);
        let n_read = selected.map_or(n_keys, |selected| selected.n_used.min(n_keys));
        let are_shared = rows.n > 1 && n_read * rows.n >= n_keys && n_keys * dim <= MAX_SHARED;
        if are_shared {
            numbers.clear();
            numbers.extend(0..n_keys);
            let all = room(&mut shared_keys, n_keys * dim);
            gather(context.isa, context.pool, Source::Stored { view: keys, tile: 0 }, dim, &numbers, all);
        }
        for positions in tiles(rows, 0) {
            let tile = positions.start / TILE;
            let stored = [own, keys].map(|view| Source::Stored { view, tile });
            let first = part.layer.window_start(positions.start);
            if positions.len() > 1 {
                tokens.clear();
                tokens.extend(first..positions.end);
                let all = room(&mut window, tokens.len() * dim);
                gather(context.isa, context.pool, stored[0], dim, &tokens, all);
            }
            let of_tokens = match positions.len() {
                1 => stored[0],
                _ => Source::Decoded { rows: &window, first },
            };
            let of_keys =
                if are_shared { Source::Decoded { rows: &shared_keys, first: 0 } } else { stored[1] };
            for position in positions {
                let row = rows.first + position - rows.start;
                let n_seen = pooled.n_seen(position);
                tokens.clear();
                tokens.extend(part.layer.window_start(position)..=position);
                numbers.clear();
                match selected.filter(|selected| n_seen > selected.n_used) {
                    Some(PooledNumbers { of_rows, n_used }) => {
                        let of_row = of_rows[row * n_used..][..n_used].iter();
                        numbers.extend(of_row.map(|&number| number as usize));
                    }
                    None => numbers.extend(0..n_seen),
                }
                let pooled = Some(Numbered { source: of_keys, numbers: &numbers });
                let tokens = Numbered { source: of_tokens, numbers: &tokens };
                let row = Row { part, row, tokens, values: None, pooled };
                attend_row(context.reborrow(), args, row, 0, out);
            }
        }
    }
    context.scratch.shared = [shared_keys, window];
}

/// Rows of a tensor of keys.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// In their tiles, as a query in tile `tile` reads them.
    Stored { view: View<'a>, tile: usize },
    /// Decoded before, from number `first` on.
    Decoded { rows: &'a [f32], first: usize },
    /// Decoded before, each in its slot.
    Slotted { rows: &'a [f32], slots: &'a [u32] },
}

impl Source<'_> {
    /// Reads the row of this number; `last` holds what it decodes beside it.
    fn read(&self, isa: Isa, last: &mut LastTile, number: usize, row: &mut [f32]) {
        match self {
            Self::Stored { view, tile } => last.read(isa, view, *tile, number, row),
            Self::Decoded { rows, first } => {
                row.copy_from_slice(&rows[(number - first) * row.len()..][..row.len()]);
            }
            Self::Slotted { rows, slots } => {
                row.copy_from_slice(&rows[slots[number] as usize * row.len()..][..row.len()]);
            }
        }
    }
}

/// Some rows of a tensor of keys.
#[derive(Clone, Copy)]
struct Numbered<'a> {
    source: Source<'a>,
    numbers: &'a [usize],
}

/// A row and its tokens.
#[derive(Clone, Copy)]
struct Row<'a> {
    part: &'a KvBatchEntry<'a, CpuPage>,
    /// Index in the batch.
    row: usize,
    /// The keys of its tokens.
    tokens: Numbered<'a>,
    /// Their values, unless they are part of the keys.
    values: Option<Source<'a>>,
    /// Pooled keys beside them.
    pooled: Option<Numbered<'a>>,
}

fn attend_row(
    KernelContext { isa, pool, scratch }: KernelContext<'_, Scratch>,
    AttendArgs { p, q, sinks, step_tiles, .. }: AttendArgs<'_>,
    Row { part, row, tokens, values: own_values, pooled }: Row<'_>,
    kv_head: usize,
    out: &mut [f32],
) {
    let keys = View::new(part, &part.layer.k[kv_head], step_tiles);
    let values = View::new(part, part.layer.values(kv_head), step_tiles);
    let Scratch { keys: decoded_keys, values: decoded_values, .. } = scratch;
    let n = tokens.numbers.len() + pooled.map_or(0, |pooled| pooled.numbers.len());
    let decoded_keys = room(decoded_keys, n * keys.dim());
    let (of_tokens, of_pooled) = decoded_keys.split_at_mut(tokens.numbers.len() * keys.dim());
    gather(isa, pool, tokens.source, keys.dim(), tokens.numbers, of_tokens);
    if let Some(Numbered { source, numbers }) = pooled {
        gather(isa, pool, source, keys.dim(), numbers, of_pooled);
    }
    let decoded_values = room(decoded_values, if own_values.is_some() { n * values.dim() } else { 0 });
    if let Some(source) = own_values {
        gather(isa, pool, source, values.dim(), tokens.numbers, decoded_values);
    }
    let (decoded_keys, decoded_values) = match own_values {
        Some(_) => (&*decoded_keys, &*decoded_values),
        None => (&*decoded_keys, &*decoded_keys),
    };

    let balance = HeadScales::of(part, kv_head);
    let (group, out) = (p.n_heads / p.n_kv_heads, DisjointMut::new(out));
    let n_values = values.tensor.spec.stored_value_dim();
    pool.for_each(group.div_ceil(HEADS), &|item| {
        let heads = kv_head * group + item * HEADS..kv_head * group + group.min((item + 1) * HEADS);
        let mut queries = vec![0.0; HEADS * keys.dim()];
        for (head, query) in heads.clone().zip(queries.chunks_exact_mut(keys.dim())) {
            let mut own = q[(row * p.n_heads + head) * p.k_head_dim..][..p.k_head_dim].to_vec();
            if let Some(balance) = &balance {
                balance.query.apply(0..p.k_head_dim, &own.clone(), &mut own);
            }
            prepare_query(keys.tensor.spec.rotates, &own, query);
        }
        let (mut weights, mut sums) = (vec![0.0; HEADS * n], vec![0.0; HEADS * n_values]);
        let rows = HeadRows { rows: decoded_keys, dim: keys.dim(), of_heads: &queries, out: &mut weights };
        with_lanes!(isa, lanes => lanes.run(Scores(rows)), _ => rows.score());
        for (head, scores) in heads.clone().zip(weights.chunks_exact_mut(n)) {
            softmax(p, sinks.map(|sinks| sinks[head]), scores);
        }
        let rows = HeadRows { rows: decoded_values, dim: values.dim(), of_heads: &weights, out: &mut sums };
        with_lanes!(isa, lanes => lanes.run(Sums(rows)), _ => rows.sum());
        for (head, sums) in heads.zip(sums.chunks_exact_mut(n_values)) {
            let at = (row * p.n_heads + head) * p.v_head_dim;
            // SAFETY: one call of this job writes the output of each head.
            let out = unsafe { out.part(at..at + p.v_head_dim) };
            restore_row(values.tensor.spec.rotates, sums, out);
            if let Some(of_out) = balance.as_ref().and_then(|balance| balance.out) {
                let unscaled = out.to_vec();
                of_out.apply(0..p.v_head_dim, &unscaled, out);
            }
        }
    });
}

/// Returns the first `len` values of scratch memory, whatever they are: writing zeros first would
/// take one thread as long as decoding takes all.
fn room(scratch: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if scratch.len() < len {
        scratch.resize(len, 0.0);
    }
    &mut scratch[..len]
}

/// Reads the rows of these numbers, of `dim` values each, into `rows`.
fn gather(isa: Isa, pool: &Pool, source: Source<'_>, dim: usize, numbers: &[usize], rows: &mut [f32]) {
    let rows = DisjointMut::new(rows);
    pool.for_each(numbers.len().div_ceil(DECODED), &|item| {
        let first = item * DECODED;
        let mut last = LastTile::default();
        for (i, &number) in numbers.iter().enumerate().skip(first).take(DECODED) {
            // SAFETY: one call of this job writes each row.
            source.read(isa, &mut last, number, unsafe { rows.part(i * dim..(i + 1) * dim) });
        }
    });
}

/// The tile that was decoded last: all of its rows take less time than one by itself.
#[derive(Default)]
struct LastTile {
    number: Option<usize>,
    /// `[tokens, dim]`
    rows: Vec<f32>,
}

impl LastTile {
    /// Reads a row as a query in tile `of_query` does.
    fn read(&mut self, isa: Isa, view: &View<'_>, of_query: usize, token: usize, row: &mut [f32]) {
        let (number, dim) = (token / TILE, row.len());
        if self.number != Some(number) {
            let tile = view.stored(of_query, number);
            let layout = tile.layout;
            if layout.side() == Side::K || layout.dtype().code().is_none() {
                return view.read(of_query, token, row);
            }
            self.rows.resize(TILE * dim, 0.0);
            let decode = DecodeRows { tile, out: &mut self.rows };
            with_lanes!(isa, lanes => lanes.run(decode), _ => return view.read(of_query, token, row));
            self.number = Some(number);
        }
        row.copy_from_slice(&self.rows[token % TILE * dim..][..dim]);
    }
}

/// Replaces the products of a query and keys by attention weights, beside the sink of their head.
fn softmax(p: &AttendParams, sink: Option<f32>, scores: &mut [f32]) {
    for score in &mut *scores {
        *score *= p.scale;
        if let Some(cap) = p.soft_cap {
            // A score that is not finite must not become the cap.
            *score = cap * (*score / cap).tanh() + 0.0 * *score;
        }
    }
    let max = scores.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|score| *score = (*score - max).exp());
    let of_sink = sink.map_or(0.0, |sink| f64::from((sink - max).exp()));
    let by = 1.0 / (of_sink + scores.iter().map(|&weight| f64::from(weight)).sum::<f64>()) as f32;
    scores.iter_mut().for_each(|weight| *weight *= by);
}

/// Decoded rows, what heads multiply with them, and the results.
struct HeadRows<'a> {
    /// `[tokens, dim]`
    rows: &'a [f32],
    dim: usize,
    /// Queries `[HEADS, dim]`, or weights `[HEADS, tokens]`; zero beyond the heads of a group.
    of_heads: &'a [f32],
    /// Scores `[HEADS, tokens]`, or the first values of weighted sums `[HEADS, n]`.
    out: &'a mut [f32],
}

impl HeadRows<'_> {
    /// The reference of [`Scores`], in f64.
    fn score(self) {
        let n = self.rows.len() / self.dim;
        for (query, out) in self.of_heads.chunks_exact(self.dim).zip(self.out.chunks_exact_mut(n)) {
            for (row, out) in self.rows.chunks_exact(self.dim).zip(out) {
                let products = query.iter().zip(row).map(|(&q, &k)| f64::from(q) * f64::from(k));
                *out = products.sum::<f64>() as f32;
            }
        }
    }

    /// The reference of [`Sums`], in f64.
    fn sum(self) {
        let (n, width) = (self.rows.len() / self.dim, self.out.len() / HEADS);
        for (weights, out) in self.of_heads.chunks_exact(n).zip(self.out.chunks_exact_mut(width)) {
            for (i, out) in out.iter_mut().enumerate() {
                let values = self.rows.iter().skip(i).step_by(self.dim);
                *out = weights.iter().zip(values).map(|(&w, &v)| f64::from(w) * f64::from(v)).sum::<f64>()
                    as f32;
            }
        }
    }
}

/// Computes the product of each query and each row.
struct Scores<'a>(HeadRows<'a>);

impl Op for Scores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let HeadRows { rows, dim, of_heads, out } = self.0;
        let (n, width) = (rows.len() / dim, dim / LANES);
        let of_heads = of_heads.as_chunks::<LANES>().0;
        let of_heads: [_; HEADS] = std::array::from_fn(|head| &of_heads[head * width..][..width]);
        for (i, row) in rows.as_chunks::<LANES>().0.chunks_exact(width).enumerate() {
            let mut sums = [lanes.splat(0.0); HEADS];
            for (d, x) in row.iter().enumerate() {
                let x = lanes.load(x);
                for (sum, query) in sums.iter_mut().zip(of_heads) {
                    *sum = lanes.mul_add(x, lanes.load(&query[d]), *sum);
                }
            }
            for (head, sum) in sums.into_iter().enumerate() {
                out[head * n + i] = lanes.sum(sum);
            }
        }
    }
}

/// Computes the sum of the rows for each head, weighted.
struct Sums<'a>(HeadRows<'a>);

/// Vectors of a row that are summed at once.
const TOGETHER: usize = 4;

impl Op for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let width = self.0.out.len() / HEADS / LANES;
        let in_groups = width / TOGETHER * TOGETHER;
        (0..in_groups).step_by(TOGETHER).for_each(|first| self.0.sum_columns::<L, TOGETHER>(lanes, first));
        (in_groups..width).for_each(|first| self.0.sum_columns::<L, 1>(lanes, first));
    }
}

impl HeadRows<'_> {
    /// Sums vectors `first..first + W` of the rows.
    #[inline(always)]
    fn sum_columns<L: Lanes, const W: usize>(&mut self, lanes: L, first: usize) {
        let (n, n_values) = (self.rows.len() / self.dim, self.out.len() / HEADS);
        let mut sums = [[lanes.splat(0.0); W]; HEADS];
        for (i, row) in self.rows.chunks_exact(self.dim).enumerate() {
            let row = &row[first * LANES..].as_chunks::<LANES>().0[..W];
            let row: [L::Floats; W] = std::array::from_fn(|w| lanes.load(&row[w]));
            for (head, sums) in sums.iter_mut().enumerate() {
                let weight = lanes.splat(self.of_heads[head * n + i]);
                sums.iter_mut().zip(row).for_each(|(sum, x)| *sum = lanes.mul_add(x, weight, *sum));
            }
        }
        for (head, sums) in sums.into_iter().enumerate() {
            let out = &mut self.out[head * n_values + first * LANES..].as_chunks_mut::<LANES>().0[..W];
            sums.into_iter().zip(out).for_each(|(sum, out)| lanes.store(sum, out));
        }
    }
}
