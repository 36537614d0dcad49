//! Dispatch of a product: prepares the input, divides the op into work items for the threads, and
//! scatters the results.

use std::iter;
use std::ops::Range;
use std::ptr;

use kvant_backend::Activation;

use super::bf16::Bf16Rows;
use super::forms::{Forms, InputForm, normalize, tile_rows};
use super::gemm::{self, Rounded, Tiles, Workspace, row_block};
use super::gemv::with_tile_rows;
use super::kernel_set::{KernelSet, of_rows, with_set};
use super::matrix::{CpuMatrix, WeightLayout, uses_panels};
use super::outputs::Outputs;
use super::partition::{PAIR, Partition};
use super::prefill_precision::PrefillPrecision;
use super::product::{Gating, Operand, Product, Scatter};
use super::quantize::Source;
use super::scratch::{Scratch, for_threads};
use super::tuning::Tuning;
use super::{gate, gemv, rows};
use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::context::KernelContext;
use crate::simd::isa::Isa;
use crate::simd::matmul::Simd;
use crate::simd::matmul::format::PANEL;

/// Matrices that share one parallel region.
const MAX_FUSED: usize = 4;
/// Minimum items per thread of a product of many rows.
const MIN_ITEMS_PER_THREAD: usize = 4;

/// The products of one parallel region, at most [`MAX_FUSED`].
type Products<'a> = [Option<Product<'a>>; MAX_FUSED];

/// Shared state of the kernels of a region.
#[derive(Clone, Copy)]
struct Region<'a> {
    pool: &'a Pool,
    products: &'a Products<'a>,
    tiles: Tiles<'a>,
    rows: usize,
    tuning: Tuning,
}

/// Computes every product on one input, some of them at a time. Shapes have been checked.
pub(crate) fn project<'a>(
    KernelContext { isa, pool, scratch }: KernelContext<'_, Scratch>,
    input: Operand<'_>,
    products: &mut dyn Iterator<Item = Product<'a>>,
) {
    let (rows, tuning) = (input.rows(), scratch.tuning);
    if rows == 0 {
        return;
    }
    let isa = of_rows(isa, rows);
    let in_halves =
        scratch.prefill_precision == PrefillPrecision::Bf16 && isa.multiplies_bf16() && rows > gemv::MAX_ROWS;
    loop {
        let products: &Products<'_> = &std::array::from_fn(|_| products.next());
        if products[0].is_none() {
            return;
        }
        let wants = |form| {
            let of_product = |product: &Product<'_>| InputForm::of_run(isa, product.w.dtype, in_halves);
            products.iter().flatten().any(|product| of_product(product) == form)
        };
        watch(pool, &mut scratch.normed, input, products);
        let x = prepare(isa, pool, &mut scratch.forms, &mut scratch.normed, input, wants);
        let workspaces = for_threads(&mut scratch.workspaces, pool);
        let mut tiles =
            scratch.forms.tiles([false, true].map(|is_float| (0, tile_rows(isa, rows, is_float))));
        if in_halves {
            tiles.halves = Some(Rounded {
                tiles: scratch.forms.halves.each_ref().map(Bf16Rows::tiles),
                of_codes: isa.has_matrix_unit(),
            });
        }
        let region = Region { pool, products, tiles, rows, tuning };
        let has_panels = uses_panels(isa);
        if has_panels && rows > gemv::MAX_ROWS {
            with_set!(isa,
                set => region.run_blocked(set, workspaces),
                _ => unreachable!("{} reads file rows", isa.name())
            );
            continue;
        }
        let per_item = if has_panels { region.panels_per_item() } else { 1 };
        let cut = |_: &Product<'_>| Partition { n_threads: pool.n_threads(), per_item };
        pool.for_shares(|thread| 0..n_items(products, cut, thread), &|_, thread, item| {
            let (product, panels) = locate(products, cut, thread, item);
            // SAFETY: every item runs once, and no other item has these panels.
            let outputs = unsafe { product.outputs(panels, 0..rows) };
            with_set!(isa,
                set => with_tile_rows!(rows, T => {
                    gemv::multiply::<_, T>(set.vectors(), outputs, tiles, tuning.prefetch_for(T));
                }),
                _ => file_rows(outputs, x)
            );
        });
    }
}

/// Adds the rows of the input, normalized if products want them so, to the statistics of the
/// matrices.
fn watch(pool: &Pool, normed: &mut Vec<f32>, input: Operand<'_>, products: &Products<'_>) {
    let matrices = products.iter().flatten().flat_map(|of| [Some(of.w), of.gate.map(|gate| gate.w)]);
    let mut inputs = matrices.flatten().filter_map(|w| w.inputs.as_ref()).peekable();
    if inputs.peek().is_some() {
        let x = normalize(pool, normed, input);
        inputs.for_each(|inputs| inputs.add(0, x.chunks_exact(input.n_in)));
    }
}

/// Fills the forms of the input that products want, and returns its rows in f32, normalized if
/// products want them so.
fn prepare<'a>(
    isa: Isa,
    pool: &Pool,
    forms: &mut Forms,
    normed: &'a mut Vec<f32>,
    input: Operand<'a>,
    wants: impl Fn(InputForm) -> bool,
) -> &'a [f32] {
    let (rows, mut x) = (input.rows(), input.x);
    if [InputForm::Rows, InputForm::Floats, InputForm::Halves, InputForm::RotatedHalves]
        .into_iter()
        .any(&wants)
    {
        x = normalize(pool, normed, input);
    }
    if wants(InputForm::Floats) {
        forms.floats.fill(pool, x, input.n_in, tile_rows(isa, rows, true));
    }
    let source =
        |rotates| Source { x: input.x, row_indices: None, n_in: input.n_in, norm: input.norm, rotates };
    if wants(InputForm::Codes) {
        forms.quantized.fill(isa, pool, source(false), tile_rows(isa, rows, false));
    }
    if wants(InputForm::Rotated) {
        forms.rotated.fill(isa, pool, source(true), tile_rows(isa, rows, false));
    }
    for (form, halves) in [InputForm::Halves, InputForm::RotatedHalves].into_iter().zip(&mut forms.halves) {
        if wants(form) {
            let rotates = form == InputForm::RotatedHalves;
            with_set!(
                isa,
                set => halves.fill(set.vectors(), pool, x, input.n_in, rotates),
                _ => unreachable!("{} multiplies no bf16", isa.name())
            );
        }
    }
    x
}

impl Region<'_> {
    /// Returns the panels of an item of a GEMV.
    fn panels_per_item(&self) -> usize {
        let n_panels: usize = self.products.iter().flatten().map(|product| product.w.n_panels()).sum();
        (n_panels / (self.tuning.items_per_thread.max(1) * self.pool.n_threads())).max(1)
    }

    fn run_blocked<S: KernelSet>(&self, set: S, workspaces: &mut [Workspace]) {
        let n_threads = self.pool.n_threads();
        let n_items = |pairs, thread| {
            n_items(
                self.products,
                |product| Partition { n_threads, per_item: panels_of_pairs(product, pairs) },
                thread,
            )
        };
        let all = |pairs| (0..n_threads).map(|thread| n_items(pairs, thread)).sum::<usize>().max(1);
        let min_items = MIN_ITEMS_PER_THREAD * n_threads;
        let pairs = (all(1) / min_items).clamp(1, gemm::MAX_PAIRS);
        let cut = |product: &Product<'_>| Partition { n_threads, per_item: panels_of_pairs(product, pairs) };
        let per_block = |thread| n_items(pairs, thread);
        let row_block = row_block::<S>(self.rows, self.tuning.row_block, min_items.div_ceil(all(pairs)));
        let n_blocks = self.rows.div_ceil(row_block);
        self.pool.for_shares_with(
            workspaces,
            |thread| n_blocks * per_block(thread),
            &|workspace, thread, item| {
                let first_row = item / per_block(thread) * row_block;
                let rows = first_row..self.rows.min(first_row + row_block);
                let (product, panels) = locate(self.products, cut, thread, item % per_block(thread));
                // SAFETY: every item runs once, and no other item has these panels for these rows.
                blocked(set, workspace, unsafe { product.outputs(panels, rows) }, self.tiles);
            },
        );
    }
}

/// Computes outputs by the reference, for the rows of `x` `[rows, n_in]`.
pub(super) fn file_rows(mut outputs: Outputs<'_, '_>, x: &[f32]) {
    let w = outputs.product.w;
    let WeightLayout::Rows(bytes) = &w.store else { unreachable!("panels for the scalar kernel set") };
    let row_bytes = bytes.len() / w.n_out;
    for o in outputs.panels.start * PANEL..w.n_out.min(outputs.panels.end * PANEL) {
        let row = &bytes[o * row_bytes..][..row_bytes];
        rows::row_products(w.dtype, row, x, w.n_in, |r, value| outputs.put(r, o, &[value]));
    }
}

/// Returns the number of items of thread `thread`: those of its slice of each product.
fn n_items(products: &Products<'_>, cut: impl Fn(&Product<'_>) -> Partition, thread: usize) -> usize {
    let of_product = |product: &Product<'_>| cut(product).n_items(product.w.n_panels(), thread);
    products.iter().flatten().map(of_product).sum()
}

/// Returns the product that item `item` of thread `thread` belongs to, and its panels.
fn locate<'a, 'b>(
    products: &'a Products<'b>,
    cut: impl Fn(&Product<'_>) -> Partition,
    thread: usize,
    mut item: usize,
) -> (&'a Product<'b>, Range<usize>) {
    for product in products.iter().flatten() {
        let (cut, n_panels) = (cut(product), product.w.n_panels());
        let n_items = cut.n_items(n_panels, thread);
        if item < n_items {
            return (product, cut.panels(n_panels, thread, item));
        }
        item -= n_items;
    }
    unreachable!("an item beyond the last product")
}

/// Returns the panels of a product that are multiplied as `pairs` pairs: neighbours, or a panel of
/// `up` and the same of `gate`.
pub(super) fn panels_of_pairs(product: &Product<'_>, pairs: usize) -> usize {
    if product.gate.is_some() { pairs } else { PAIR * pairs }
}

/// Computes outputs of at most [`gemm::MAX_PAIRS`] pairs of panels for the rows of one row block.
pub(super) fn blocked<S: KernelSet>(
    set: S,
    workspace: &mut Workspace,
    mut outputs: Outputs<'_, '_>,
    tiles: Tiles<'_>,
) {
    let Outputs { product, panels, rows } = &outputs;
    let (w, gate, rows, last) = (product.w, product.gate, rows.clone(), panels.end - 1);
    let first = panels.start;
    let per_pair = panels_of_pairs(product, 1);
    let n_pairs = panels.len().div_ceil(per_pair);
    let pairs: [_; gemm::MAX_PAIRS] = std::array::from_fn(|pair| {
        let index = last.min(first + pair * per_pair);
        match gate {
            Some(gate) => [w.panel(index), gate.w.panel(index)],
            // An odd last panel is paired with itself.
            None => [w.panel(index), w.panel(last.min(index + 1))],
        }
    });
    let pairs = gemm::Pairs { dtype: w.dtype, n_in: w.n_in, panels: &pairs[..n_pairs] };
    gemm::multiply(set, workspace, pairs, tiles, rows, |rows, sums| {
        let of_panel = sums.len() / (n_pairs * PAIR);
        if let Some(gate) = gate {
            for (panel, sums) in (first..).zip(sums.chunks_exact_mut(PAIR * of_panel)) {
                let (u, g) = sums.split_at_mut(of_panel);
                gate.apply(set.vectors(), panel, &mut g[..rows.len()], &mut u[..rows.len()]);
            }
        }
        // Row by row, so that contiguous outputs are written together.
        let next_panel = of_panel * PAIR / per_pair;
        for (t, row) in rows.enumerate() {
            let panels = sums[t..].iter().step_by(next_panel).take(last + 1 - first);
            outputs.put_panels(set, row, first, panels);
        }
    });
    if S::NON_TEMPORAL {
        set.vectors().store_fence();
    }
}

/// Computes `y = a(gate x) * (up x)`, `y` `[rows, n_ff]`, `a` the activation. Shapes have been
/// checked.
pub(crate) fn gated_ffn(
    mut context: KernelContext<'_, Scratch>,
    input: Operand<'_>,
    activation: Activation,
    gate: &CpuMatrix,
    up: &CpuMatrix,
    y: &mut [f32],
) {
    let product = |w, y, gate| Product {
        w,
        bias: None,
        y: DisjointMut::new(y),
        to: Scatter::Rows(0),
        accumulate: false,
        gate,
    };
    let (pool, n_ff) = (context.pool, up.n_out);
    let for_rows = |y: &mut [f32], gate: &(dyn Fn(usize, &mut [f32]) + Sync)| {
        let y = DisjointMut::new(y);
        pool.for_each(input.rows(), &|r| {
            // SAFETY: one call of this job writes each row.
            gate(r, unsafe { y.part(r * n_ff..(r + 1) * n_ff) });
        });
    };
    if ptr::eq(gate, up) {
        project(context, input, &mut iter::once(product(up, y, None)));
        return for_rows(y, &|_, u| gate::ungated(activation, u));
    }
    if uses_panels(context.isa) && gate.dtype == up.dtype {
        let gate = Some(Gating { w: gate, activation, biases: None });
        return project(context, input, &mut iter::once(product(up, y, gate)));
    }
    let rows = input.rows();
    let mut gated = std::mem::take(&mut context.scratch.gate);
    if gated.len() < rows * n_ff {
        gated.resize(rows * n_ff, 0.0);
    }
    let products = [product(gate, &mut gated, None), product(up, y, None)];
    project(context.reborrow(), input, &mut products.into_iter());
    for_rows(y, &|r, u| gate::gate(activation, &gated[r * n_ff..(r + 1) * n_ff], u));
    context.scratch.gate = gated;
}

#[cfg(test)]
mod tests {
    use kvant_backend::WeightSource;
    use kvant_codec::DType;

    use super::*;

    /// The slice that it has packed: see [`Partition`].
    #[test]
    fn a_thread_has_its_slice_of_every_product_of_a_region() {
        let pool = Pool::new(1).unwrap();
        let sizes = [12, 3, 2, 1];
        let matrices = sizes.map(|n_panels| {
            let (n_out, n_in) = (n_panels * PANEL, 1);
            let bytes = vec![0; size_of::<f32>() * n_out * n_in].into();
            CpuMatrix::new(Isa::Scalar, &pool, WeightSource { dtype: DType::F32, n_out, n_in, bytes })
                .unwrap()
        });
        let products: Products<'_> = matrices.each_ref().map(|w| {
            let (y, to) = (DisjointMut::new(&mut []), Scatter::Rows(0));
            Some(Product { w, bias: None, y, to, accumulate: false, gate: None })
        });
        for n_threads in [1, 2, 3, 17] {
            for thread in 0..n_threads {
                let packing = Partition { n_threads, per_item: 1 };
                let packed = sizes.map(|n_panels| {
                    let items = 0..packing.n_items(n_panels, thread);
                    items.flat_map(|item| packing.panels(n_panels, thread, item)).collect::<Vec<_>>()
                });
                for per_item in [1, 2, 8] {
                    let cut = |_: &Product<'_>| Partition { n_threads, per_item };
                    let mut multiplied = sizes.map(|_| Vec::new());
                    for item in 0..n_items(&products, cut, thread) {
                        let (product, panels) = locate(&products, cut, thread, item);
                        let index = matrices.iter().position(|w| std::ptr::eq(w, product.w)).unwrap();
                        multiplied[index].extend(panels);
                    }
                    assert_eq!(multiplied, packed, "thread {thread} of {n_threads}, {per_item} to an item");
                }
            }
        }
    }
}
