//! Elementwise ops: gates, scaling, addition, soft caps, xIELU, column copies.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{Activation, Columns, Gate, Xielu};

use crate::constants::Constants;
use crate::{Gpu, Part, Source, WgpuError, groups};

/// Functions shared by many sources.
pub(crate) const MATH: Part = Part { name: "math.wgsl", text: include_str!("../math.wgsl") };

/// The activations of feed-forward layers; they require [`MATH`] and [`gate_constants`].
pub(crate) const GATE: Part = Part { name: "gate.wgsl", text: include_str!("gate.wgsl") };

pub(crate) static SOURCE: Source = Source {
    parts: &[MATH, GATE, Part { name: "elementwise.wgsl", text: include_str!("elementwise.wgsl") }],
    constants: || {
        gate_constants(Constants::default())
            .whole("THREADS", THREADS)
            .whole("GATE_SIGMOID", Gate::Sigmoid as usize)
            .whole("GATE_SILU", Gate::Silu as usize)
            .whole("GATE_PLAIN", Gate::Plain as usize)
            .whole("GATE_SOFTPLUS", Gate::Softplus as usize)
    },
};

/// Adds the constants of [`GATE`].
pub(crate) fn gate_constants(constants: Constants) -> Constants {
    let [rate, limit] = Activation::BOUNDED;
    let [a, b] = Activation::GELU;
    constants
        .whole("SILU", number(Activation::Silu) as usize)
        .whole("GELU", number(Activation::Gelu) as usize)
        .whole("RELU", number(Activation::Relu) as usize)
        .whole("NORMAL_CDF", number(Activation::NormalCdf) as usize)
        .whole("LIMITED", number(Activation::Limited { limit: 1.0 }) as usize)
        .whole("CLAMPED", number(Activation::Clamped { limit: 1.0 }) as usize)
        .float("GELU_A", a)
        .float("GELU_B", b)
        .float("BOUND_RATE", rate)
        .float("BOUND_LIMIT", limit)
}

/// Returns the number of an activation in kernels.
pub(crate) fn number(activation: Activation) -> u32 {
    match activation {
        Activation::Silu => 0,
        Activation::Gelu => 1,
        Activation::Bounded => 2,
        Activation::Relu => 3,
        Activation::NormalCdf => 4,
        Activation::Limited { .. } => 5,
        Activation::Clamped { .. } => 6,
        Activation::Situ { .. } => unreachable!("the op has refused SiTU"),
    }
}

const THREADS: usize = 64;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    n: u32,
    kind: u32,
    cols: u32,
    width: u32,
    first: u32,
    factor: f32,
    /// The other numbers of xIELU.
    negative: f32,
    slope: f32,
    eps: f32,
}

fn launch(
    gpu: &Gpu,
    name: &'static str,
    params: Params,
    g: Option<&wgpu::Buffer>,
    y: &wgpu::Buffer,
) -> Result<(), WgpuError> {
    let kernel = gpu.kernel(&SOURCE, name)?;
    let bindings: Vec<_> = g.map(|g| (1, g)).into_iter().chain([(2, y)]).collect();
    gpu.launch::<_, u32>(&kernel, groups((params.n as usize).div_ceil(THREADS), 1), &params, &[], &bindings)
}

fn params(n: usize) -> Params {
    Params { n: n as u32, ..Params::zeroed() }
}

/// Computes `y = a(g) y`, a the activation, for `n` values.
pub(crate) fn activate(
    gpu: &Gpu,
    activation: Activation,
    g: &wgpu::Buffer,
    y: &wgpu::Buffer,
    n: usize,
) -> Result<(), WgpuError> {
    let params = Params { kind: number(activation), factor: activation.limit(), ..params(n) };
    launch(gpu, "activate", params, Some(g), y)
}

/// Multiplies `n` values of `y` by the gate function of `g`.
pub(crate) fn gate(
    gpu: &Gpu,
    gate: Gate,
    g: &wgpu::Buffer,
    y: &wgpu::Buffer,
    n: usize,
) -> Result<(), WgpuError> {
    launch(gpu, "gate", Params { kind: gate as u32, ..params(n) }, Some(g), y)
}

/// Multiplies each row of `y` by the gate function of its g.
pub(crate) fn gate_rows(
    gpu: &Gpu,
    gate: Gate,
    g: &wgpu::Buffer,
    y: &wgpu::Buffer,
    [rows, cols]: [usize; 2],
) -> Result<(), WgpuError> {
    let params = Params { kind: gate as u32, cols: cols as u32, ..params(rows * cols) };
    launch(gpu, "gate_rows", params, Some(g), y)
}

/// Computes `x = factor x` for `n` values.
pub(crate) fn scale(gpu: &Gpu, x: &wgpu::Buffer, n: usize, factor: f32) -> Result<(), WgpuError> {
    launch(gpu, "scale", Params { factor, ..params(n) }, None, x)
}

/// Computes `x = cap tanh(x / cap)` for `n` values.
pub(crate) fn soft_cap(gpu: &Gpu, x: &wgpu::Buffer, n: usize, cap: f32) -> Result<(), WgpuError> {
    launch(gpu, "soft_cap", Params { factor: cap, ..params(n) }, None, x)
}

/// Computes `x = x + y` for `n` values.
pub(crate) fn add(gpu: &Gpu, x: &wgpu::Buffer, y: &wgpu::Buffer, n: usize) -> Result<(), WgpuError> {
    launch(gpu, "add", params(n), Some(y), x)
}

/// Applies xIELU to `n` values.
pub(crate) fn xielu(gpu: &Gpu, x: &wgpu::Buffer, n: usize, numbers: Xielu) -> Result<(), WgpuError> {
    let Xielu { positive, negative, slope, eps } = numbers;
    launch(gpu, "xielu", Params { factor: positive, negative, slope, eps, ..params(n) }, None, x)
}

/// Copies rows of `src` `[rows, n]` to columns of `dst`.
pub(crate) fn copy_columns(
    gpu: &Gpu,
    src: &wgpu::Buffer,
    [rows, n]: [usize; 2],
    dst: &wgpu::Buffer,
    to: Columns,
) -> Result<(), WgpuError> {
    let Columns { width, first } = to;
    let params = Params { cols: n as u32, width: width as u32, first: first as u32, ..params(rows * n) };
    launch(gpu, "copy_columns", params, Some(src), dst)
}
