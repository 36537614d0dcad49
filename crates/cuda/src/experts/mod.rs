//! MoE feed-forward: the router sends each row through a few experts, `x += Σ_e weight[e] W_down[e]
//! h[e]`, `h[e] = a(W_gate[e] n) * (W_up[e] n)`; with biases, each product plus its expert's.
//!
//! A warp selects the experts of a row. For one row, each expert of it (a *slot*) is a product of
//! one row. For more, slots are ordered by expert, whose weights are read once: up to 16 rows have
//! a block's rows for all slots of an expert, and a slot has the bits that it has alone; of more
//! rows, blocks of the GEMM take up to 64 slots of one expert each. The grid covers the worst case,
//! in which as many experts are selected as can be, or every row selects every expert, and blocks
//! without a slot end at once. So nothing returns to the host, which launches the same kernels for
//! any selection, and a decode step can be recorded.

use bytemuck::NoUninit;
use kvant_backend::{Activation, BackendError, ExpertGroups, Experts, RouterScores, Routing, WeightSource};
use kvant_codec::DType;

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::matmul::{self, EXPERT_TILES_HEADER, ExpertSlots, MatmulArgs, Operand, SlotTile, Weights};
use crate::memory::Block;
use crate::norm::{NormParts, SUM_HEADER};
use crate::top_k::RANK_HEADER;
use crate::{Context, CudaError, DevicePtr, Launch, Source};

/// The kernels of this op besides its matrix products.
pub(crate) static SOURCE: Source = Source {
    name: "experts.cu",
    text: include_str!("experts.cu"),
    headers: &[EXPERT_TILES_HEADER, HALF_HEADER, RANK_HEADER, SUM_HEADER],
    constants: || {
        let constants = Constants::default().whole("MAX_FEW_SLOTS", MAX_FEW_SLOTS);
        let constants = constants.float("MIN_SCORE", RouterScores::SUM_EPSILON);
        constants.float("NEARNESS", RouterScores::NEARNESS)
    },
    options: &[],
};

/// Threads of a block of the kernels with one slot or value per thread.
const THREADS: u32 = 256;
/// Maximum number of slots of selected experts where a block has all of an expert: the threads of
/// the block that groups them.
const MAX_FEW_SLOTS: usize = 1024;
/// Threads of a warp.
const WARP: u32 = 32;
/// Maximum number of expert groups: one per lane of a warp.
pub(crate) const MAX_EXPERT_GROUPS: usize = WARP as usize;
/// Bytes of a tile.
const EXPERT_TILE_BYTES: usize = 12;

/// The weight matrices of experts, `[n_experts, n_out, n_in]`.
#[derive(Debug)]
pub struct CudaExperts {
    weights: Weights,
    dtype: DType,
    n_experts: usize,
    n_out: usize,
    n_in: usize,
}

impl CudaExperts {
    /// Uploads the matrices to the device.
    pub(crate) fn new(cx: &Context, source: WeightSource, n_experts: usize) -> Result<Self, BackendError> {
        matmul::check_type("experts", source.dtype)?;
        let WeightSource { dtype, n_out, n_in, bytes } = source;
        let n_out = n_out / n_experts;
        Ok(Self { weights: matmul::upload(cx, dtype, n_in, &bytes)?, dtype, n_experts, n_out, n_in })
    }
}

impl Experts for CudaExperts {
    fn n_experts(&self) -> usize {
        self.n_experts
    }

    fn n_out(&self) -> usize {
        self.n_out
    }

    fn n_in(&self) -> usize {
        self.n_in
    }
}

/// Inputs of the router.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Routes {
    /// `[rows, n_experts]`
    pub logits: DevicePtr,
    /// `[n_experts]`
    pub selection_bias: Option<DevicePtr>,
    /// `[n_experts]`
    pub scales: Option<DevicePtr>,
    pub n_experts: usize,
    pub routing: Routing,
}

/// The weights of a layer, shapes checked.
#[derive(Clone, Copy)]
pub(crate) struct Layer<'a> {
    pub activation: Activation,
    pub gate: &'a CudaExperts,
    pub up: &'a CudaExperts,
    pub down: &'a CudaExperts,
    /// Of gate and up, `[n_experts, n_ff]` each, and of down, `[n_experts, n]`.
    pub biases: Option<[DevicePtr; 3]>,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct RouteParams {
    logits: DevicePtr,
    selection_bias: DevicePtr,
    scales: DevicePtr,
    experts: DevicePtr,
    weights: DevicePtr,
    n_experts: u32,
    n_used: u32,
    scores: u32,
    normalizes: u32,
    scale: f32,
    n_expert_groups: u32,
    groups_used: u32,
    expert_group_size: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct GroupParams {
    experts: DevicePtr,
    order: DevicePtr,
    expert_tiles: DevicePtr,
    slots: u32,
    tiles_per_expert: u32,
    max_slots: u32,
    n_tiles: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct AllExpertsParams {
    experts: DevicePtr,
    slots: u32,
    n: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct AllSlotsParams {
    order: DevicePtr,
    expert_tiles: DevicePtr,
    rows: u32,
    n: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct CombineParams {
    y: DevicePtr,
    weights: DevicePtr,
    x: DevicePtr,
    rows: u32,
    n: u32,
    n_used: u32,
    accumulate: u32,
}

/// Adds the output of the experts to `x` `[rows, n]`, or writes it to `to`.
pub(crate) fn moe_ffn(
    cx: &Context,
    x: DevicePtr,
    [rows, n]: [usize; 2],
    norm: Option<NormParts>,
    routes: Routes,
    layer: Layer<'_>,
    to: Option<DevicePtr>,
) -> Result<(), CudaError> {
    if rows == 0 {
        return Ok(());
    }
    let (slots, n_ff) = (rows * routes.routing.n_used, layer.gate.n_out);
    let floats = |n: usize| cx.scratch(n * size_of::<f32>());
    let (experts, weights) = (floats(slots)?, floats(slots)?);
    route(cx, routes, rows, experts.ptr(), weights.ptr())?;
    let n_used = routes.routing.n_used;
    let Layer { activation, gate, up, down, .. } = layer;
    let tile = match slot_tile(cx, &[gate, up, down], rows, n_used) {
        SlotTile::Few if slots > MAX_FEW_SLOTS => SlotTile::Single,
        tile => tile,
    };
    let (expert_slots, _memory) = assign_slots(cx, tile, [routes.n_experts, n_used], rows, experts.ptr())?;

    let (hidden, expert_out) = (floats(slots * n_ff)?, floats(slots * n)?);
    let mut input = Operand::new(x, [rows, n], norm);
    let [of_gate, of_up, of_down] = layer.biases.map_or([None; 3], |biases| biases.map(Some));
    let product = |w: &CudaExperts, bias, y, slots_of_row| MatmulArgs {
        bias,
        expert_slots: Some(ExpertSlots {
            expert_bytes: matmul::matrix_bytes(w.dtype, [w.n_out, w.n_in]),
            slots_of_row,
            ..expert_slots
        }),
        ..MatmulArgs::new(&w.weights, w.dtype, w.n_out, y)
    };
    let mut gates = None;
    let products = [(gate, of_gate), (up, of_up)].map(|(w, bias)| product(w, bias, hidden.ptr(), n_used));
    let pending = matmul::gated_products(cx, &mut input, products, activation, &mut gates)?;
    let mut input = Operand::gated(hidden.ptr(), [slots, n_ff], pending);
    matmul::matmul(cx, &mut input, &product(down, of_down, expert_out.ptr(), 1))?;
    let launch = Launch::each("combine", rows * n, THREADS)?;
    let [rows, n, n_used] = [rows, n, n_used].map(|n| n as u32);
    let (x, accumulate) = to.map_or((x, 1), |to| (to, 0));
    let params =
        CombineParams { y: expert_out.ptr(), weights: weights.ptr(), x, rows, n, n_used, accumulate };
    cx.launch(cx.kernel(&SOURCE, "combine")?, launch, &params)
}

/// Runs the router: experts and their weights, `[slots]` each.
fn route(
    cx: &Context,
    Routes { logits, selection_bias, scales, n_experts, routing }: Routes,
    rows: usize,
    experts: DevicePtr,
    weights: DevicePtr,
) -> Result<(), CudaError> {
    let Routing { n_used, scores, normalizes, scale, expert_groups } = routing;
    let ExpertGroups { n: n_expert_groups, n_used: groups_used } =
        expert_groups.unwrap_or(ExpertGroups { n: 1, n_used: 1 });
    let expert_group_size = (n_experts / n_expert_groups) as u32;
    let [n_experts, n_used, n_expert_groups, groups_used] =
        [n_experts, n_used, n_expert_groups, groups_used].map(|n| n as u32);
    let params = RouteParams {
        logits,
        selection_bias: selection_bias.unwrap_or(0),
        scales: scales.unwrap_or(0),
        experts,
        weights,
        n_experts,
        n_used,
        scores: match scores {
            RouterScores::Softmax => 0,
            RouterScores::Sigmoid => 1,
            RouterScores::SparseMixer => 2,
            RouterScores::SqrtSoftplus => unreachable!("refused before"),
        },
        normalizes: u32::from(normalizes),
        scale,
        n_expert_groups,
        groups_used,
        expert_group_size,
    };
    cx.launch(cx.kernel(&SOURCE, "route")?, Launch::linear(rows as u32, WARP), &params)
}

/// Computes `y[r, i] = W[i] x[r, i]` for the parts of each row of `x` `[rows, n, n_in]`, as if
/// every row had selected every matrix.
pub(crate) fn project_each(
    cx: &Context,
    x: DevicePtr,
    rows: usize,
    w: &CudaExperts,
    y: DevicePtr,
) -> Result<(), CudaError> {
    let n = w.n_experts;
    let slots = rows * n;
    if slots == 0 || w.n_out == 0 {
        return Ok(());
    }
    let (expert_slots, _memory) = assign_all_slots(cx, slot_tile(cx, &[w], rows, n), n, rows)?;
    let expert_bytes = matmul::matrix_bytes(w.dtype, [w.n_out, w.n_in]);
    let expert_slots = Some(ExpertSlots { expert_bytes, ..expert_slots });
    let mut input = Operand::new(x, [slots, w.n_in], None);
    let product = MatmulArgs { expert_slots, ..MatmulArgs::new(&w.weights, w.dtype, w.n_out, y) };
    matmul::matmul(cx, &mut input, &product)
}

/// As [`assign_slots`], where each row uses all of `n` experts, in order.
fn assign_all_slots(
    cx: &Context,
    tile: SlotTile,
    n: usize,
    rows: usize,
) -> Result<(ExpertSlots, [Block; 2]), CudaError> {
    let slots = rows * n;
    let launch = Launch::each("project_each", slots, THREADS)?;
    if tile != SlotTile::Few {
        let experts = cx.scratch(slots * size_of::<u32>())?;
        let params = AllExpertsParams { experts: experts.ptr(), slots: slots as u32, n: n as u32 };
        cx.launch(cx.kernel(&SOURCE, "all_experts")?, launch, &params)?;
        return assign_slots(cx, tile, [n, n], rows, experts.ptr());
    }
    let (order, expert_tiles) = (cx.scratch(slots * size_of::<u32>())?, cx.scratch(n * EXPERT_TILE_BYTES)?);
    let [order_ptr, tiles_ptr] = [&order, &expert_tiles].map(Block::ptr);
    let params = AllSlotsParams { order: order_ptr, expert_tiles: tiles_ptr, rows: rows as u32, n: n as u32 };
    cx.launch(cx.kernel(&SOURCE, "all_slots")?, launch, &params)?;
    Ok((expert_slots(tile, [order_ptr, tiles_ptr], n, rows), [order, expert_tiles]))
}

/// Returns the assignment; the caller adds what depends on a matrix.
fn expert_slots(
    tile: SlotTile,
    [order, expert_tiles]: [DevicePtr; 2],
    n_expert_tiles: usize,
    rows: usize,
) -> ExpertSlots {
    ExpertSlots {
        expert_tiles,
        n_expert_tiles,
        order,
        tile,
        expert_bytes: 0,
        max_slots: rows,
        slots_of_row: 1,
    }
}

/// Assigns slots to blocks of rows; returns the assignment and the memory that holds it.
fn assign_slots(
    cx: &Context,
    tile: SlotTile,
    [n_experts, n_used]: [usize; 2],
    rows: usize,
    experts: DevicePtr,
) -> Result<(ExpertSlots, [Block; 2]), CudaError> {
    let slots = rows * n_used;
    let tiles_per_expert = rows.div_ceil(matmul::EXPERT_ROWS as usize);
    let n_expert_tiles = match tile {
        SlotTile::Single => slots,
        SlotTile::Few => slots.min(n_experts),
        SlotTile::Many => n_experts * tiles_per_expert,
    };
    let [order, expert_tiles] =
        [slots * size_of::<u32>(), n_expert_tiles * EXPERT_TILE_BYTES].map(|bytes| cx.scratch(bytes));
    let (order, expert_tiles) = (order?, expert_tiles?);
    let params = GroupParams {
        experts,
        order: order.ptr(),
        expert_tiles: expert_tiles.ptr(),
        slots: slots as u32,
        tiles_per_expert: tiles_per_expert as u32,
        max_slots: matmul::EXPERT_ROWS,
        n_tiles: n_expert_tiles as u32,
    };
    let (kernel, launch) = match tile {
        SlotTile::Single => ("single_slots", Launch::each("moe_ffn", slots, THREADS)?),
        SlotTile::Few => ("group_few_slots", Launch::linear(1, MAX_FEW_SLOTS as u32)),
        SlotTile::Many => ("group_slots", Launch::linear(n_experts as u32, WARP)),
    };
    cx.launch(cx.kernel(&SOURCE, kernel)?, launch, &params)?;
    let pointers = [&order, &expert_tiles].map(Block::ptr);
    Ok((expert_slots(tile, pointers, n_expert_tiles, rows), [order, expert_tiles]))
}

/// Returns the slots that a block may have, of `rows` rows with `n_used` of the experts each. From
/// two rows on an expert's weights are read once for all its slots.
fn slot_tile(cx: &Context, matrices: &[&CudaExperts], rows: usize, n_used: usize) -> SlotTile {
    let slots = rows * n_used;
    let has_tiles = |w: &&CudaExperts| {
        matmul::has_slot_tiles(cx, w.dtype, [w.n_out, w.n_in], rows, slots.min(w.n_experts))
    };
    match rows {
        matmul::MIN_GEMM_ROWS.. => SlotTile::Many,
        2.. if matrices.iter().all(has_tiles) => SlotTile::Few,
        _ => SlotTile::Single,
    }
}
