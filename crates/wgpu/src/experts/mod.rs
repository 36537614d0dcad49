//! MoE feed-forward: the router sends each row through a few experts, `x += Σ_e weight[e] W_down[e]
//! h[e]`, `h[e] = a(W_gate[e] n) * (W_up[e] n)`; with biases, each product plus its expert's.
//!
//! Routing runs on the device, and products read its result there, so that nothing returns to the
//! host, which launches the same kernels for any selection.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{Activation, BackendError, ExpertGroups, Experts, Result, RouterScores, Routing};

use crate::constants::Constants;
use crate::elementwise::{self, MATH};
use crate::matmul::{self, Operand, Order, Rows, SelectedExperts, Weights};
use crate::top_k::RANK;
use crate::{Gpu, Part, Source, WgpuError, WgpuExperts, groups};

#[cfg(test)]
mod tests;

pub(crate) static ROUTE: Source = Source {
    parts: &[MATH, RANK, Part { name: "experts.wgsl", text: include_str!("experts.wgsl") }],
    constants: || {
        let constants = Constants::default().whole("THREADS", 32).whole("MAX_GROUPS", MAX_GROUPS);
        let constants = constants.float("NEARNESS", RouterScores::NEARNESS);
        constants.float("MIN_SCORE", RouterScores::SUM_EPSILON)
    },
};

pub(crate) static COMBINE: Source = Source {
    parts: &[Part { name: "combine.wgsl", text: include_str!("combine.wgsl") }],
    constants: || Constants::default().whole("THREADS", COMBINE_THREADS),
};

/// Maximum number of expert groups.
const MAX_GROUPS: usize = 64;
/// Threads of a workgroup that sums the outputs of experts, one value each.
const COMBINE_THREADS: usize = 64;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RouteParams {
    rows: u32,
    n_experts: u32,
    n_used: u32,
    scores: u32,
    normalizes: u32,
    has_selection_bias: u32,
    has_scales: u32,
    n_expert_groups: u32,
    groups_used: u32,
    scale: f32,
    nan_bits: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct CombineParams {
    n_values: u32,
    n: u32,
    n_used: u32,
    accumulates: u32,
}

/// Inputs of the router.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RouterInputs<'a> {
    /// `[rows, n_experts]`
    pub logits: &'a wgpu::Buffer,
    /// `[n_experts]`
    pub selection_bias: Option<&'a wgpu::Buffer>,
    /// `[n_experts]`
    pub scales: Option<&'a wgpu::Buffer>,
    pub n_experts: usize,
    pub routing: Routing,
}

/// The weights of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layer<'a> {
    pub activation: Activation,
    pub gate: &'a WgpuExperts,
    pub up: &'a WgpuExperts,
    pub down: &'a WgpuExperts,
    /// Of gate and up, `[n_experts, n_ff]` each, and of down, `[n_experts, n]`.
    pub biases: Option<[&'a wgpu::Buffer; 3]>,
}

/// Destination of the summed outputs, `[rows, n]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MoeOutput<'a> {
    pub to: &'a wgpu::Buffer,
    /// Whether to add to the destination.
    pub accumulates: bool,
}

/// Computes the MoE output for the rows of `input` `[rows, n]`. The caller has checked the shapes.
pub(crate) fn expert_ffn(
    gpu: &Gpu,
    input: Operand<'_>,
    sum: MoeOutput<'_>,
    router: RouterInputs<'_>,
    layer: Layer<'_>,
) -> Result<()> {
    let Layer { activation, gate, up, down, biases } = layer;
    let (rows, n_used) = (input.rows, router.routing.n_used);
    let (slots, n, n_ff, n_experts) = (rows * n_used, gate.n_in(), gate.n_out(), gate.n_experts());
    let floats = |values: usize, what| gpu.scratch(values * size_of::<f32>(), what);
    let (experts, expert_weights) = (floats(slots, "selected experts")?, floats(slots, "expert weights")?);
    route(gpu, router, rows, [&experts, &expert_weights])?;

    let [gate_bias, up_bias, down_bias] = biases.map_or([None; 3], |biases| biases.map(Some));
    let order = Order::new(gpu, &experts, slots, n_experts)?;
    let selected = SelectedExperts { experts: &experts, slots, slots_per_row: n_used, order: order.as_ref() };
    let multiply = |w: &WgpuExperts, selected, x: &mut Operand<'_>, y: &wgpu::Buffer, bias| {
        let weights = Weights { slabs: &w.slabs, dtype: w.dtype, first: 0, n_out: w.n_out(), n_in: w.n_in() };
        matmul::multiply_experts(gpu, weights, selected, x, y, bias)
    };
    let (gates, hidden) = (floats(slots * n_ff, "gates")?, floats(slots * n_ff, "hidden activations")?);
    let mut input = input.in_order(selected.order, n_used);
    multiply(gate, selected, &mut input, &gates, gate_bias)?;
    multiply(up, selected, &mut input, &hidden, up_bias)?;
    elementwise::activate(gpu, activation, &gates, &hidden, slots * n_ff)?;
    let expert_outputs = floats(slots * n, "expert outputs")?;
    let hidden = Rows { buffer: &hidden, first: 0, stride: n_ff };
    let mut hidden = Operand::new(gpu, hidden, [slots, n_ff], None).in_order(selected.order, 1);
    multiply(
        down,
        SelectedExperts { slots_per_row: 1, ..selected },
        &mut hidden,
        &expert_outputs,
        down_bias,
    )?;
    Ok(combine_experts(gpu, [&expert_outputs, &expert_weights], [rows, n, n_used], sum)?)
}

/// Runs the router: experts and their weights, `[slots]` each.
fn route(
    gpu: &Gpu,
    RouterInputs { logits, selection_bias, scales, n_experts, routing }: RouterInputs<'_>,
    rows: usize,
    [experts, expert_weights]: [&wgpu::Buffer; 2],
) -> Result<()> {
    let ExpertGroups { n, n_used } = routing.expert_groups.unwrap_or(ExpertGroups { n: 1, n_used: 1 });
    if n > MAX_GROUPS {
        return Err(BackendError::Unsupported {
            op: "expert_ffn",
            requested: format!("{n} expert groups"),
            has: format!("up to {MAX_GROUPS}"),
        });
    }
    let params = RouteParams {
        rows: rows as u32,
        n_experts: n_experts as u32,
        n_used: routing.n_used as u32,
        scores: match routing.scores {
            RouterScores::Softmax => 0,
            RouterScores::Sigmoid => 1,
            RouterScores::SparseMixer => 2,
            RouterScores::SqrtSoftplus => unreachable!("refused before"),
        },
        normalizes: routing.normalizes.into(),
        has_selection_bias: selection_bias.is_some().into(),
        has_scales: scales.is_some().into(),
        n_expert_groups: n as u32,
        groups_used: n_used as u32,
        scale: routing.scale,
        nan_bits: f32::NAN.to_bits(),
    };
    let kernel = gpu.kernel(&ROUTE, "route")?;
    let [selection_bias, scales] = [selection_bias, scales].map(|of| of.unwrap_or(gpu.unused_buffer()));
    let bindings = [(1, logits), (2, selection_bias), (3, scales), (4, experts), (5, expert_weights)];
    Ok(gpu.launch::<_, u32>(&kernel, groups(rows, 1), &params, &[], &bindings)?)
}

/// Computes `x += Σ share y` (or `x = ..`) over the slots of each row.
fn combine_experts(
    gpu: &Gpu,
    [expert_outputs, expert_weights]: [&wgpu::Buffer; 2],
    [rows, n, n_used]: [usize; 3],
    MoeOutput { to, accumulates }: MoeOutput<'_>,
) -> std::result::Result<(), WgpuError> {
    let [n_values, n, n_used] = [rows * n, n, n_used].map(|n| n as u32);
    let params = CombineParams { n_values, n, n_used, accumulates: accumulates.into() };
    let bindings = [(1, expert_outputs), (2, expert_weights), (3, to)];
    let kernel = gpu.kernel(&COMBINE, "combine")?;
    gpu.launch::<_, u32>(
        &kernel,
        groups((n_values as usize).div_ceil(COMBINE_THREADS), 1),
        &params,
        &[],
        &bindings,
    )
}
