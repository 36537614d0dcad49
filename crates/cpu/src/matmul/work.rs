//! From the operands of an op to items of work for the threads: what is prepared, how it is split, where results go.

use std::ops::Range;

use kvant_codec::DType;

use super::floats::Floats;
use super::gemm::{self, FLOAT_TILE, Pair, TILE, Tiles, Workspace, row_block};
use super::panel::{PANEL, is_float, is_rotated};
use super::quantise::{Quantised, Source};
use super::simd::Simd;
use super::{CpuMatrix, MIN_PARALLEL_VALUES, Store, rows, silu, skinny, uses_panels};
use crate::norm::rms_norm;
use crate::shards::Shards;
use crate::{Isa, Pool, Tuning};

/// Matrices that share one parallel region.
const MAX_FUSED: usize = 4;
/// The fewest items per thread that a product of many rows is cut into.
const MIN_ITEMS_PER_THREAD: usize = 4;

/// The left operand: rows of `x` `[rows, n_in]`, normalised first when `norm` (weight `[n_in]`, eps) is given.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub x: &'a [f32],
    pub n_in: usize,
    pub norm: Option<(&'a [f32], f32)>,
}

impl Operand<'_> {
    fn rows(&self) -> usize {
        self.x.len() / self.n_in
    }
}

/// One product and where it goes.
pub(crate) struct Product<'a> {
    pub w: &'a CpuMatrix,
    /// `[n_out]`.
    pub bias: Option<&'a [f32]>,
    /// `[rows, n_out]`.
    pub y: Shards<'a, f32>,
    pub accumulate: bool,
    /// Multiplies the product by `silu(gate x)`; a matrix of the same shape, in panels of the same type.
    pub gate: Option<&'a CpuMatrix>,
}

impl Product<'_> {
    /// Takes outputs `first ..` of one row, as many as there are.
    pub(super) fn put(&self, row: usize, first: usize, values: &[f32]) {
        let n = values.len().min(self.w.n_out - first);
        let at = row * self.w.n_out + first;
        // SAFETY: the outputs of a panel, for the rows of an item, are put by the thread that has that item, and items
        // share neither panels nor rows.
        let y = unsafe { self.y.part(at..at + n) };
        match self.bias {
            Some(bias) if self.accumulate => {
                (0..n).for_each(|i| y[i] += values[i] + bias[first + i]);
            }
            Some(bias) => (0..n).for_each(|i| y[i] = values[i] + bias[first + i]),
            None if self.accumulate => (0..n).for_each(|i| y[i] += values[i]),
            // A whole panel is one store, not a call of `memcpy`.
            None => match (y.as_chunks_mut::<PANEL>(), values.as_chunks()) {
                (([y], []), ([values], [])) => *y = *values,
                _ => y.copy_from_slice(&values[..n]),
            },
        }
    }
}

/// Memory that lives as long as the device, so that a step allocates nothing once it has grown.
#[derive(Default)]
pub(crate) struct Scratch {
    pub tuning: Tuning,
    /// The input, normalised, `[rows, n_in]`.
    normed: Vec<f32>,
    /// Gate activations, `[rows, n_ff]`, where gate and up are not fused.
    gate: Vec<f32>,
    quantised: Quantised,
    rotated: Quantised,
    floats: Floats,
    /// One for each thread.
    workspaces: Vec<Workspace>,
}

/// Rows of a tile for `rows` input rows.
fn tile_rows(rows: usize, is_float: bool) -> usize {
    match rows {
        0..=2 => rows.max(1),
        3..=4 => 4,
        5..=6 => 6,
        7..=skinny::MAX_ROWS => skinny::MAX_ROWS,
        _ if is_float => FLOAT_TILE,
        _ => TILE,
    }
}

/// The products of one parallel region, at most [`MAX_FUSED`].
type Products<'a> = [Option<Product<'a>>; MAX_FUSED];

/// What the kernels of a region share.
#[derive(Clone, Copy)]
struct Region<'a> {
    pool: &'a Pool,
    products: &'a Products<'a>,
    /// The input in f32, `[rows, n_in]`, where a product reads it so.
    x: &'a [f32],
    tiles: Tiles<'a>,
    /// One for each thread.
    workspaces: &'a Shards<'a, Workspace>,
    n_in: usize,
    rows: usize,
    tuning: Tuning,
}

/// What the input is made into for a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Left as it is.
    Rows,
    /// Tiles of f32.
    Floats,
    /// Tiles in 8 bits.
    Codes,
    /// Tiles in 8 bits, rotated.
    Rotated,
}

impl Form {
    fn of(isa: Isa, dtype: DType) -> Self {
        match dtype {
            _ if !uses_panels(isa) => Self::Rows,
            dtype if is_float(dtype) => Self::Floats,
            dtype if is_rotated(dtype) => Self::Rotated,
            _ => Self::Codes,
        }
    }
}

/// Prepares the input as the products want it and computes them.
fn run(isa: Isa, pool: &Pool, scratch: &mut Scratch, input: Operand<'_>, products: &Products<'_>) {
    let rows = input.rows();
    let wants = |form| products.iter().flatten().any(|product| Form::of(isa, product.w.dtype) == form);
    let mut x = input.x;
    if wants(Form::Rows) || wants(Form::Floats) {
        x = normalise(pool, &mut scratch.normed, input);
    }
    if wants(Form::Floats) {
        scratch.floats.fill(pool, x, input.n_in, tile_rows(rows, true));
    }
    let source = |rotates| Source { x: input.x, n_in: input.n_in, norm: input.norm, rotates };
    if wants(Form::Codes) {
        scratch.quantised.fill(isa, pool, source(false), tile_rows(rows, false));
    }
    if wants(Form::Rotated) {
        scratch.rotated.fill(isa, pool, source(true), tile_rows(rows, false));
    }
    if scratch.workspaces.is_empty() {
        scratch.workspaces.resize(pool.n_threads(), Workspace::EMPTY);
    }
    let workspaces = &Shards::new(&mut scratch.workspaces);
    let tiles = Tiles { quantised: &scratch.quantised, rotated: &scratch.rotated, floats: &scratch.floats };
    let region =
        Region { pool, products, x, tiles, workspaces, n_in: input.n_in, rows, tuning: scratch.tuning };
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(simd) => region.run_panels(simd),
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni(simd) => region.run_panels(simd),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(simd) => region.run_panels(simd),
        _ => region.run_rows(),
    }
}

impl Region<'_> {
    /// Every product from file rows.
    fn run_rows(&self) {
        self.for_each_item(CpuMatrix::n_panels, |_, product, panel| self.file_rows(product, panel));
    }

    /// Every product from panels.
    #[cfg(target_arch = "x86_64")]
    fn run_panels<S: Simd>(&self, simd: S) {
        if self.rows <= skinny::MAX_ROWS { self.run_skinny(simd) } else { self.run_blocked(simd) }
    }

    fn run_skinny<S: Simd>(&self, simd: S) {
        let n_panels: usize = self.products.iter().flatten().map(|product| product.w.n_panels()).sum();
        let per_item = (n_panels / (self.tuning.items_per_thread.max(1) * self.pool.n_threads())).max(1);
        let n_items = |w: &CpuMatrix| w.n_panels().div_ceil(per_item);
        self.for_each_item(n_items, |thread, product, item| {
            let panels = item * per_item..product.w.n_panels().min((item + 1) * per_item);
            let [lent, _] = &mut self.workspace(thread).lent;
            skinny::multiply(simd, lent, product, self.tiles, panels, self.rows, self.tuning.prefetch);
        });
    }

    fn run_blocked<S: Simd>(&self, simd: S) {
        let n_pairs = |product: &Product<'_>| match product.gate {
            Some(_) => product.w.n_panels(),
            None => product.w.n_panels().div_ceil(2),
        };
        let per_block: usize = self.products.iter().flatten().map(n_pairs).sum();
        let least = (MIN_ITEMS_PER_THREAD * self.pool.n_threads()).div_ceil(per_block.max(1));
        let row_block = row_block(self.rows, self.tuning.row_block, least);
        let n_blocks = self.rows.div_ceil(row_block);
        self.pool.for_each_on(n_blocks * per_block, &|thread, item| {
            let first_row = item / per_block * row_block;
            let rows = first_row..self.rows.min(first_row + row_block);
            let (product, index) = locate(self.products, item % per_block, n_pairs);
            blocked(simd, self.workspace(thread), product, index, self.tiles, rows);
        });
    }

    fn for_each_item(
        &self,
        n_items: impl Fn(&CpuMatrix) -> usize + Sync,
        job: impl Fn(usize, &Product<'_>, usize) + Sync,
    ) {
        let n_items = |product: &Product<'_>| n_items(product.w);
        let total = self.products.iter().flatten().map(n_items).sum();
        self.pool.for_each_on(total, &|thread, item| {
            let (product, index) = locate(self.products, item, n_items);
            job(thread, product, index);
        });
    }

    /// The workspace of a thread, for the item it works on.
    #[cfg(target_arch = "x86_64")]
    #[expect(clippy::mut_from_ref, reason = "each thread has its own")]
    fn workspace(&self, thread: usize) -> &mut Workspace {
        // SAFETY: a thread works on one item at a time, and nobody else asks for its workspace.
        let own = unsafe { self.workspaces.part(thread..thread + 1) };
        &mut own[0]
    }

    /// The outputs of panel `panel`, by the reference.
    fn file_rows(&self, product: &Product<'_>, panel: usize) {
        let Store::Rows(bytes) = &product.w.store else { unreachable!("panels for the scalar kernel set") };
        let row_bytes = bytes.len() / product.w.n_out;
        for o in panel * PANEL..((panel + 1) * PANEL).min(product.w.n_out) {
            let row = &bytes[o * row_bytes..][..row_bytes];
            rows::row_products(product.w.dtype, row, self.x, self.n_in, |r, value| {
                product.put(r, o, &[value])
            });
        }
    }
}

/// The product that item `item` belongs to, and the item's index within it.
fn locate<'a, 'b>(
    products: &'a Products<'b>,
    mut item: usize,
    n_items: impl Fn(&Product<'_>) -> usize,
) -> (&'a Product<'b>, usize) {
    for product in products.iter().flatten() {
        if item < n_items(product) {
            return (product, item);
        }
        item -= n_items(product);
    }
    unreachable!("an item beyond the last product")
}

/// One pair of panels, for the rows of one row block: neighbours, or a panel of `up` and the same of `gate`.
#[cfg(target_arch = "x86_64")]
fn blocked<S: Simd>(
    simd: S,
    workspace: &mut Workspace,
    product: &Product<'_>,
    index: usize,
    tiles: Tiles<'_>,
    rows: Range<usize>,
) {
    let (w, mut lent) = (product.w, std::mem::take(&mut workspace.lent));
    let [one, two] = &mut lent;
    let pair = |panels| Pair { dtype: w.dtype, n_in: w.n_in, panels };
    if let Some(gate) = product.gate {
        let pair = pair([w.panels(index..index + 1, one), gate.panels(index..index + 1, two)]);
        gemm::multiply(simd, workspace, pair, tiles, rows, |row, [up, gate]| {
            let mut gated = *up;
            simd.gate(gate, &mut gated);
            product.put(row, index * PANEL, &gated);
        });
    } else {
        let (first, last) = (2 * index, w.n_panels() - 1);
        // An odd last panel is multiplied with itself for company.
        let second = last.min(first + 1);
        let pair = pair([w.panels(first..first + 1, one), w.panels(second..second + 1, two)]);
        gemm::multiply(simd, workspace, pair, tiles, rows, |row, [a, b]| {
            product.put(row, first * PANEL, a);
            if first < last {
                product.put(row, (first + 1) * PANEL, b);
            }
        });
    }
    workspace.lent = lent;
}

/// Computes every product on one input. Shapes have been checked.
pub(crate) fn project<'a>(
    isa: Isa,
    pool: &Pool,
    scratch: &mut Scratch,
    input: Operand<'_>,
    products: impl Iterator<Item = Product<'a>>,
) {
    let mut products = products.peekable();
    while products.peek().is_some() {
        run(isa, pool, scratch, input, &std::array::from_fn(|_| products.next()));
    }
}

/// `y = silu(gate x) * (up x)`, `y` `[rows, n_ff]`. Shapes have been checked.
pub(crate) fn gated_ffn(
    isa: Isa,
    pool: &Pool,
    scratch: &mut Scratch,
    input: Operand<'_>,
    gate: &CpuMatrix,
    up: &CpuMatrix,
    y: &mut [f32],
) {
    let product = |w, y, gate| Some(Product { w, bias: None, y: Shards::new(y), accumulate: false, gate });
    if uses_panels(isa) && gate.dtype == up.dtype {
        return run(isa, pool, scratch, input, &[product(up, y, Some(gate)), None, None, None]);
    }
    let (rows, n_ff) = (input.rows(), gate.n_out);
    let mut gated = std::mem::take(&mut scratch.gate);
    if gated.len() < rows * n_ff {
        gated.resize(rows * n_ff, 0.0);
    }
    run(isa, pool, scratch, input, &[product(gate, &mut gated, None), product(up, y, None), None, None]);
    let y = Shards::new(y);
    pool.for_each(rows, &|r| {
        let row = r * n_ff..(r + 1) * n_ff;
        // SAFETY: every row is taken by one call of this job.
        silu::gate(&gated[row.clone()], unsafe { y.part(row) });
    });
    scratch.gate = gated;
}

/// The rows of the operand, normalised into `normed` when a norm is given.
fn normalise<'a>(pool: &Pool, normed: &'a mut Vec<f32>, input: Operand<'a>) -> &'a [f32] {
    let Some((weight, eps)) = input.norm else { return input.x };
    let (n_in, rows) = (input.n_in, input.rows());
    if normed.len() < input.x.len() {
        normed.resize(input.x.len(), 0.0);
    }
    let out = Shards::new(normed);
    let job = |r: usize| {
        let row = r * n_in..(r + 1) * n_in;
        // SAFETY: every row is taken by one call of this job.
        rms_norm(&input.x[row.clone()], weight, eps, unsafe { out.part(row) });
    };
    if rows * n_in < MIN_PARALLEL_VALUES {
        (0..rows).for_each(job);
    } else {
        pool.for_each(rows, &job);
    }
    &normed[..input.x.len()]
}
