//! The MoE feed-forward layer: the router sends each row to a few experts.
//!
//! ```text
//! x[r] += sum_e weight[r, e] W_down[e] (a(W_gate[e] n) * (W_up[e] n))
//! n = norm(x[r]),  e over the experts of row r
//! ```
//!
//! with an optional bias added to each product.
//!
//! Rows are grouped by expert ([`route`]), so that each expert's weights are read once for all its
//! rows: tiles are filled with the rows of a group, and the kernels of dense products multiply
//! them. The rows of all groups, in sequence, are *slots*: activations between the two products are
//! in slot order. Expert outputs are added to a row in ascending order of experts, so that its bits
//! do not depend on the other rows of the batch.
//!
//! A thread's items are panels of its slice of every expert ([`partition`](super::partition)): of
//! one expert in the first product, whose results are disjoint, and of all experts, one after the
//! other, in the second, whose results are summed.

mod per_slice;
mod route;
pub(super) mod scratch;
mod select;

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use kvant_backend::{Activation, BackendError, Experts, InputSquares, WeightSource};

use super::dispatch::{blocked, file_rows, panels_of_pairs};
use super::forms::{Forms, InputForm, normalize, tile_rows};
use super::gemm::{MAX_PAIRS, Workspace, row_block};
use super::gemv::with_tile_rows;
use super::kernel_set::{KernelSet, of_rows, with_set};
use super::matrix::{CpuMatrix, WeightLayout, uses_panels};
use super::panel::Panels;
use super::partition::{PAIR, Partition};
use super::product::{Gating, Operand, Product, Scatter};
use super::quantize::{GroupTiles, Source};
use super::scratch::{Scratch, for_threads};
use super::tuning::Tuning;
use super::{gate, gemv};
use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::context::KernelContext;
use crate::simd::isa::Isa;
pub(crate) use per_slice::project_each;
pub(crate) use route::Choice;
use route::{Group, Routes};
use scratch::ExpertScratch;

/// The weight matrices of experts, all of one shape and type.
#[derive(Debug)]
pub struct CpuExperts {
    matrices: Vec<CpuMatrix>,
    /// Receives the inputs of each, if they are watched.
    inputs: Option<Arc<InputSquares>>,
}

impl CpuExperts {
    /// Takes the weights of `source`, `n_experts` matrices in sequence, packed for the kernels of
    /// `isa`.
    ///
    /// # Errors
    /// As [`CpuMatrix::new`].
    pub(crate) fn new(
        isa: Isa,
        pool: &Pool,
        source: WeightSource,
        n_experts: usize,
    ) -> Result<Self, BackendError> {
        let mapped = Self::mapped(source, n_experts);
        let laid_out = mapped.packed(isa, pool, 0..n_experts)?;
        Ok(laid_out.map_or(mapped, |matrices| Self { matrices, inputs: None }))
    }

    /// Takes the weights of `source` and leaves them in the mapped file.
    pub(crate) fn mapped(source: WeightSource, n_experts: usize) -> Self {
        let WeightSource { dtype, n_out, n_in, bytes } = source;
        let (n_out, len) = (n_out / n_experts, bytes.len() / n_experts);
        let part = |e: usize| WeightLayout::Rows(bytes.slice(e * len..(e + 1) * len));
        let matrix = |e: usize| CpuMatrix { dtype, n_out, n_in, store: part(e), inputs: None };
        Self { matrices: (0..n_experts).map(matrix).collect(), inputs: None }
    }

    /// Returns these experts packed for the kernels of `isa`; `None` if they already have the
    /// layout of its kernels.
    fn packed(
        &self,
        isa: Isa,
        pool: &Pool,
        experts: impl Iterator<Item = usize>,
    ) -> Result<Option<Vec<CpuMatrix>>, BackendError> {
        if !uses_panels(isa) {
            return Ok(None);
        }
        let rows = experts.map(|e| match &self.matrices[e].store {
            WeightLayout::Rows(bytes) => Some(&bytes[..]),
            WeightLayout::Panels(_) => None,
        });
        let Some(rows) = rows.collect::<Option<Vec<_>>>() else { return Ok(None) };
        let CpuMatrix { dtype, n_out, n_in, .. } = *self.any();
        let all = Panels::several(pool, dtype, [n_out, n_in], &rows)?;
        let matrix =
            |panels| CpuMatrix { dtype, n_out, n_in, store: WeightLayout::Panels(panels), inputs: None };
        Ok(Some(all.into_iter().map(matrix).collect()))
    }

    /// Adds the squares of inputs to `squares` from now on.
    pub(crate) fn watch_inputs(&mut self, squares: &Arc<InputSquares>) {
        self.inputs = Some(Arc::clone(squares));
    }

    /// Returns one of the matrices, for their common shape and type.
    fn any(&self) -> &CpuMatrix {
        &self.matrices[0]
    }
}

impl Experts for CpuExperts {
    fn n_experts(&self) -> usize {
        self.matrices.len()
    }

    fn n_out(&self) -> usize {
        self.any().n_out
    }

    fn n_in(&self) -> usize {
        self.any().n_in
    }
}

/// The matrices of experts, and their biases.
#[derive(Clone, Copy)]
pub(crate) struct Biased<'a> {
    pub w: &'a CpuExperts,
    /// `[n_experts, n_out]`
    pub bias: Option<&'a [f32]>,
    /// The matrices of each group, if they were packed for this step.
    laid_out: Option<&'a [CpuMatrix]>,
}

impl<'a> Biased<'a> {
    pub fn new(w: &'a CpuExperts, bias: Option<&'a [f32]>) -> Self {
        Self { w, bias, laid_out: None }
    }

    /// Returns the matrix of expert `e`, the expert of group `index`.
    fn matrix(&self, index: usize, e: usize) -> &'a CpuMatrix {
        self.laid_out.map_or(&self.w.matrices[e], |groups| &groups[index])
    }

    /// Returns the bias of expert `e`, `[n_out]`.
    fn bias_of(&self, e: usize) -> Option<&'a [f32]> {
        let n_out = self.w.n_out();
        self.bias.map(|bias| &bias[e * n_out..(e + 1) * n_out])
    }
}

/// The operands of the op. Shapes have been checked.
#[derive(Clone, Copy)]
pub(crate) struct ExpertFfn<'a> {
    /// Weight `[n]` and eps.
    pub norm: Option<(&'a [f32], f32)>,
    pub choice: Choice<'a>,
    pub activation: Activation,
    pub gate: Biased<'a>,
    pub up: Biased<'a>,
    pub down: Biased<'a>,
}

/// Adds the outputs of the experts to `x` `[rows, n]`, or writes them to `to`.
///
/// # Errors
/// [`BackendError::OutOfMemory`] where experts have to be packed.
pub(crate) fn moe_ffn(
    KernelContext { isa, pool, scratch }: KernelContext<'_, Scratch>,
    layer: ExpertFfn<'_>,
    x: &mut [f32],
    to: Option<&mut [f32]>,
) -> Result<(), BackendError> {
    let ExpertFfn { norm, choice, activation, gate, up, down } = layer;
    let Scratch { tuning, normed, forms, workspaces, experts: own, .. } = scratch;
    let ExpertScratch { routes, tiles, picked, gates, hidden } = own;
    routes.choose(choice, gate.w.n_experts());
    let lay = |of: Biased<'_>| of.w.packed(isa, pool, routes.groups.iter().map(|group| group.expert));
    let is_alone = ptr::eq(gate.w, up.w) && up.bias.is_none();
    let laid_out = [if is_alone { None } else { lay(gate)? }, lay(up)?, lay(down)?];
    let [gate, up, down] =
        [0, 1, 2].map(|i| Biased { laid_out: laid_out[i].as_deref(), ..[gate, up, down][i] });
    let tiles = tile_positions(isa, tiles, &routes.groups);
    let stage = MoeStage { isa, pool, tuning: *tuning, groups: &routes.groups, tiles };
    let workspaces = for_threads(workspaces, pool);
    let n_hidden = routes.rows.len() * gate.w.n_out();
    grow(hidden, n_hidden);

    let input = Operand { x, n_in: gate.w.n_in(), norm };
    routes.watch([gate.w, up.w], pool, normed, input);
    stage.pick(forms, [gate.w, up.w], input, &routes.rows, normed, picked);
    if is_alone {
        stage.project_slots(forms, workspaces, picked, up, None, hidden);
        stage.for_slots(&mut hidden[..n_hidden], up.w.n_out(), |_, u| gate::ungated(activation, u));
    } else if uses_panels(isa) && gate.w.any().dtype == up.w.any().dtype {
        stage.project_slots(forms, workspaces, picked, up, Some((gate, activation)), hidden);
    } else {
        grow(gates, n_hidden);
        stage.project_slots(forms, workspaces, picked, gate, None, gates);
        stage.project_slots(forms, workspaces, picked, up, None, hidden);
        let n_ff = gate.w.n_out();
        stage.for_slots(&mut hidden[..n_hidden], n_ff, |slot, u| {
            gate::gate(activation, &gates[slot * n_ff..(slot + 1) * n_ff], u);
        });
    }
    routes.watch_slots(down.w, hidden);
    let source =
        Source { x: &hidden[..n_hidden], row_indices: None, n_in: down.w.n_in(), norm: None, rotates: false };
    stage.fill(forms, [down.w, down.w], source, hidden);
    let sum = match to {
        Some(to) => {
            to.fill(0.0);
            to
        }
        None => x,
    };
    stage.combine_slots(forms, workspaces, hidden, down, routes, sum);
    Ok(())
}

impl Routes {
    /// Adds the rows of `input` to the statistics of the experts that they are routed to.
    fn watch(&self, weights: [&CpuExperts; 2], pool: &Pool, normed: &mut Vec<f32>, input: Operand<'_>) {
        if weights.iter().all(|of| of.inputs.is_none()) {
            return;
        }
        let x = normalize(pool, normed, input);
        let row = |slot: usize| &x[self.rows[slot] as usize * input.n_in..][..input.n_in];
        for inputs in weights.iter().filter_map(|of| of.inputs.as_ref()) {
            for Group { expert, slots } in &self.groups {
                inputs.add(*expert, slots.clone().map(row));
            }
        }
    }

    /// Adds rows in slot order, `[slots, n_in]`, to the statistics of their experts.
    fn watch_slots(&self, weights: &CpuExperts, x: &[f32]) {
        let Some(inputs) = &weights.inputs else { return };
        let n_in = weights.n_in();
        for Group { expert, slots } in &self.groups {
            inputs.add(*expert, slots.clone().map(|slot| &x[slot * n_in..][..n_in]));
        }
    }
}

/// Returns the positions of the tiles of each group; see [`ExpertScratch::tiles`].
fn tile_positions<'a>(
    isa: Isa,
    tiles: &'a mut [Vec<GroupTiles>; 2],
    groups: &[Group],
) -> [&'a [GroupTiles]; 2] {
    for (tiles, is_float) in tiles.iter_mut().zip([false, true]) {
        tiles.clear();
        for Group { slots, .. } in groups {
            let at = tiles.last().map_or(0, GroupTiles::end);
            let tile_rows = tile_rows(of_rows(isa, slots.len()), slots.len(), is_float);
            tiles.push(GroupTiles { rows: slots.clone(), at, tile_rows });
        }
    }
    tiles.each_ref().map(|tiles| &tiles[..])
}

/// Grows `values` to at least `len`. Memory is reused between steps.
fn grow(values: &mut Vec<f32>, len: usize) {
    if values.len() < len {
        values.resize(len, 0.0);
    }
}

/// Shared state of both products of a layer.
struct MoeStage<'a> {
    isa: Isa,
    pool: &'a Pool,
    tuning: Tuning,
    groups: &'a [Group],
    /// See [`ExpertScratch::tiles`].
    tiles: [&'a [GroupTiles]; 2],
}

impl MoeStage<'_> {
    /// Converts the rows of `input` of each group to the forms that these weights require.
    fn pick(
        &self,
        forms: &mut Forms,
        weights: [&CpuExperts; 2],
        input: Operand<'_>,
        rows: &[u32],
        normed: &mut Vec<f32>,
        picked: &mut Vec<f32>,
    ) {
        let Operand { x, n_in, norm } = input;
        if self.wants(weights, InputForm::Rows) || self.wants(weights, InputForm::Floats) {
            let x = normalize(self.pool, normed, input);
            picked.clear();
            rows.iter().for_each(|&row| picked.extend_from_slice(&x[row as usize * n_in..][..n_in]));
        }
        self.fill(forms, weights, Source { x, row_indices: Some(rows), n_in, norm, rotates: false }, picked);
    }

    /// Fills the tiles that these weights require, from `source` or from its rows in f32,
    /// `[slots, n_in]`.
    fn fill(&self, forms: &mut Forms, weights: [&CpuExperts; 2], source: Source<'_>, rows: &[f32]) {
        let (isa, pool, [codes, floats]) = (self.isa, self.pool, self.tiles);
        if self.wants(weights, InputForm::Floats) {
            forms.floats.fill_groups(pool, rows, source.n_in, floats);
        }
        if self.wants(weights, InputForm::Codes) {
            forms.quantized.fill_groups(isa, pool, source, codes);
        }
        if self.wants(weights, InputForm::Rotated) {
            forms.rotated.fill_groups(isa, pool, Source { rotates: true, ..source }, codes);
        }
    }

    fn wants(&self, weights: [&CpuExperts; 2], form: InputForm) -> bool {
        weights.iter().any(|weights| InputForm::of(self.isa, weights.any().dtype) == form)
    }

    /// Computes `y = W x + b`, `[slots, n_out]`, each slot with its expert's matrix; or
    /// `y = a(G x + c) * (W x + b)` with a gate.
    fn project_slots(
        &self,
        forms: &Forms,
        workspaces: &mut [Workspace],
        x: &[f32],
        up: Biased<'_>,
        gate: Option<(Biased<'_>, Activation)>,
        y: &mut [f32],
    ) {
        let n_panels = up.w.any().n_panels();
        let cut = self.cut(self.per_item(self.groups.len() * n_panels));
        let of_thread = |thread| cut.n_items_of(self.groups.len(), n_panels, thread);
        let y = DisjointMut::new(y);
        self.pool.for_shares_with(workspaces, of_thread, &|workspace, thread, item| {
            let (index, panels) = cut.panels_of(n_panels, thread, item);
            let Group { expert, slots } = &self.groups[index];
            let bias = up.bias_of(*expert);
            let gate = gate.map(|(gate, activation)| {
                let biases = gate.bias_of(*expert).zip(bias).map(|(gate, up)| [gate, up]);
                Gating { w: gate.matrix(index, *expert), activation, biases }
            });
            let (w, to) = (up.matrix(index, *expert), Scatter::Rows(slots.start));
            let bias = bias.filter(|_| gate.is_none());
            let product = Product { w, bias, y, to, accumulate: false, gate };
            // SAFETY: every item runs once, and no other item has these panels of this expert.
            unsafe { self.multiply(forms, workspace, x, &product, index, panels) };
        });
    }

    /// Computes `y[row] += factor (W x + b)` for the row and the router weight of each slot, with
    /// its expert's matrix.
    fn combine_slots(
        &self,
        forms: &Forms,
        workspaces: &mut [Workspace],
        x: &[f32],
        down: Biased<'_>,
        routes: &Routes,
        y: &mut [f32],
    ) {
        let n_panels = down.w.any().n_panels();
        let cut = self.cut(self.per_item(n_panels).max(self.min_run(n_panels)));
        let of_thread = |thread| cut.n_items(n_panels, thread);
        let y = DisjointMut::new(y);
        self.pool.for_shares_with(workspaces, of_thread, &|workspace, thread, item| {
            let panels = cut.panels(n_panels, thread, item);
            for (index, Group { expert, slots }) in self.groups.iter().enumerate() {
                let (rows, factors) = (&routes.rows[slots.clone()], &routes.weights[slots.clone()]);
                let to = Scatter::Picked { rows, factors };
                let (w, bias) = (down.matrix(index, *expert), down.bias_of(*expert));
                let product = Product { w, bias, y, to, accumulate: true, gate: None };
                // SAFETY: every item runs once, no other item has these panels, and it takes one
                // expert after the other.
                unsafe { self.multiply(forms, workspace, x, &product, index, panels.clone()) };
            }
        });
    }

    /// Runs `job` on each slot of `u`, `[slots, n]`.
    fn for_slots(&self, u: &mut [f32], n: usize, job: impl Fn(usize, &mut [f32]) + Sync) {
        let slots = u.len() / n.max(1);
        let u = DisjointMut::new(u);
        self.pool.for_each(slots, &|slot| {
            // SAFETY: one call of this job writes each slot.
            job(slot, unsafe { u.part(slot * n..(slot + 1) * n) });
        });
    }

    /// Returns the partition of panels for the threads of this stage.
    fn cut(&self, per_item: usize) -> Partition {
        Partition { n_threads: self.pool.n_threads(), per_item }
    }

    /// Returns the panels per item, out of `n_panels`: whole pairs.
    fn per_item(&self, n_panels: usize) -> usize {
        let per_item = n_panels / (self.tuning.items_per_thread.max(1) * self.pool.n_threads());
        per_item.max(1).next_multiple_of(PAIR)
    }

    /// Returns the minimum panels of an item that processes them for one expert after the other:
    /// each run of them begins with lines that are not prefetched, so that runs are long where rows
    /// are few and memory bandwidth is the bound.
    fn min_run(&self, n_panels: usize) -> usize {
        let are_few = self.groups.iter().all(|group| group.slots.len() <= gemv::MAX_ROWS);
        if are_few { n_panels.div_ceil(2 * self.pool.n_threads()) } else { 1 }
    }

    /// Computes some panels of a product for the rows of group `index`.
    ///
    /// # Safety
    /// No other thread has these panels for the rows of the product's destination.
    unsafe fn multiply(
        &self,
        forms: &Forms,
        workspace: &mut Workspace,
        x: &[f32],
        product: &Product<'_>,
        index: usize,
        panels: Range<usize>,
    ) {
        with_set!(
            of_rows(self.isa, self.groups[index].slots.len()),
            // SAFETY: by the contract of this function.
            set => unsafe { self.panels(set, forms, workspace, product, index, panels) },
            _ => {
                let (slots, n_in) = (self.groups[index].slots.clone(), product.w.n_in);
                // SAFETY: by the contract of this function.
                let outputs = unsafe { product.outputs(panels, 0..slots.len()) };
                file_rows(outputs, &x[slots.start * n_in..slots.end * n_in]);
            }
        );
    }

    /// As [`MoeStage::multiply`].
    ///
    /// # Safety
    /// As [`MoeStage::multiply`].
    unsafe fn panels<S: KernelSet>(
        &self,
        set: S,
        forms: &Forms,
        workspace: &mut Workspace,
        product: &Product<'_>,
        index: usize,
        panels: Range<usize>,
    ) {
        let rows = self.groups[index].slots.len();
        let tiles = forms.tiles(self.tiles.map(|tiles| (tiles[index].at, tiles[index].tile_rows)));
        if rows <= gemv::MAX_ROWS {
            // SAFETY: by the contract of this function.
            let outputs = unsafe { product.outputs(panels, 0..rows) };
            return with_tile_rows!(rows, T => {
                gemv::multiply::<_, T>(set.vectors(), outputs, tiles, self.tuning.prefetch_for(T));
            });
        }
        let block = row_block::<S>(rows, self.tuning.row_block, 1);
        let at_once = panels_of_pairs(product, MAX_PAIRS);
        for first_row in (0..rows).step_by(block) {
            for first in panels.clone().step_by(at_once) {
                let pairs = first..panels.end.min(first + at_once);
                // SAFETY: by the contract of this function; groups of pairs are processed one after
                // the other.
                let outputs = unsafe { product.outputs(pairs, first_row..rows.min(first_row + block)) };
                blocked(set, workspace, outputs, tiles);
            }
        }
    }
}
