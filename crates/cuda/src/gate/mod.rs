//! The gate of a gated feed-forward layer: `u *= a(g)`, `a(g) = g / (1 + exp(-z))` with the z of
//! the [`Activation`]; gates per row and per value, scaling by a factor, addition,
//! and xIELU.

use bytemuck::NoUninit;
use kvant_backend::{Activation, Gate, Xielu};

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::{Context, CudaError, DevicePtr, Header, Launch, Source};

/// The kernel of this op.
pub(crate) static SOURCE: Source = Source {
    name: "gate.cu",
    text: include_str!("gate.cu"),
    headers: &[HEADER, HALF_HEADER],
    constants: || constants(Constants::default()),
    options: &[],
};

/// The equation, for every kernel with a gate; requires [`constants`].
pub(crate) const HEADER: Header = Header { name: "gate.cuh", text: include_str!("gate.cuh") };

const THREADS: u32 = 256;

/// Adds the constants of [`HEADER`].
pub(crate) fn constants(constants: Constants) -> Constants {
    let [a, b] = Activation::GELU;
    let [rate, limit] = Activation::BOUNDED;
    let constants =
        constants.whole("GELU", number(Activation::Gelu) as usize).float("GELU_A", a).float("GELU_B", b);
    let constants = constants.whole("BOUNDED", number(Activation::Bounded) as usize);
    let constants = constants.whole("RELU", number(Activation::Relu) as usize);
    let constants = constants.whole("NORMAL_CDF", number(Activation::NormalCdf) as usize);
    let constants = constants.whole("LIMITED", number(Activation::Limited { limit: 1.0 }) as usize);
    let constants = constants.whole("CLAMPED", number(Activation::Clamped { limit: 1.0 }) as usize);
    constants.float("BOUND_RATE", rate).float("BOUND_LIMIT", limit)
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

/// A gate that is yet to be applied to values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PendingGate {
    /// As many as the values.
    pub g: DevicePtr,
    pub activation: Activation,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelParams {
    g: DevicePtr,
    u: DevicePtr,
    n: u32,
    activation: u32,
    limit: f32,
    unused: u32,
}

/// Computes `u *= a(g)` for `n` values.
pub(crate) fn gate(
    cx: &Context,
    PendingGate { g, activation }: PendingGate,
    u: DevicePtr,
    n: usize,
) -> Result<(), CudaError> {
    if n == 0 {
        return Ok(());
    }
    let (number, limit) = (number(activation), activation.limit());
    let params = KernelParams { g, u, n: n as u32, activation: number, limit, unused: 0 };
    let launch = Launch::each("gate", n, THREADS)?;
    cx.launch(cx.kernel(&SOURCE, "gate")?, launch, &params)
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct RowsParams {
    g: DevicePtr,
    y: DevicePtr,
    rows: u32,
    cols: u32,
    kind: u32,
    unused: u32,
}

/// Returns the number of a gate in kernels.
fn kind(gate: Gate) -> u32 {
    match gate {
        Gate::Sigmoid => 0,
        Gate::Silu => 1,
        Gate::Plain => 2,
        Gate::Softplus => 3,
        Gate::Gelu => 4,
    }
}

/// Multiplies each row of `y` `[rows, cols]` by the function `gate` of its g.
pub(crate) fn gate_rows(
    cx: &Context,
    gate: Gate,
    g: DevicePtr,
    y: DevicePtr,
    [rows, cols]: [usize; 2],
) -> Result<(), CudaError> {
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let params = RowsParams { g, y, rows: rows as u32, cols: cols as u32, kind: kind(gate), unused: 0 };
    let launch = Launch::each("gate_rows", rows * cols, THREADS)?;
    cx.launch(cx.kernel(&SOURCE, "gate_rows")?, launch, &params)
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct ValuesParams {
    g: DevicePtr,
    y: DevicePtr,
    n: u32,
    kind: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct ScaleParams {
    x: DevicePtr,
    n: u32,
    by: f32,
}

/// Multiplies `n` values by `by`.
pub(crate) fn scale(cx: &Context, x: DevicePtr, n: usize, by: f32) -> Result<(), CudaError> {
    if n == 0 {
        return Ok(());
    }
    let params = ScaleParams { x, n: n as u32, by };
    let launch = Launch::each("scale", n, THREADS)?;
    cx.launch(cx.kernel(&SOURCE, "scale")?, launch, &params)
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct AddParams {
    x: DevicePtr,
    y: DevicePtr,
    n: u32,
    unused: u32,
}

/// Adds `n` values of `y` to those of `x`.
pub(crate) fn add(cx: &Context, x: DevicePtr, y: DevicePtr, n: usize) -> Result<(), CudaError> {
    if n == 0 {
        return Ok(());
    }
    let params = AddParams { x, y, n: n as u32, unused: 0 };
    let launch = Launch::each("add", n, THREADS)?;
    cx.launch(cx.kernel(&SOURCE, "add")?, launch, &params)
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct XieluParams {
    x: DevicePtr,
    n: u32,
    positive: f32,
    negative: f32,
    slope: f32,
    eps: f32,
    unused: u32,
}

/// Applies xIELU to `n` values.
pub(crate) fn xielu(cx: &Context, x: DevicePtr, n: usize, numbers: Xielu) -> Result<(), CudaError> {
    if n == 0 {
        return Ok(());
    }
    let Xielu { positive, negative, slope, eps } = numbers;
    let params = XieluParams { x, n: n as u32, positive, negative, slope, eps, unused: 0 };
    let launch = Launch::each("xielu", n, THREADS)?;
    cx.launch(cx.kernel(&SOURCE, "xielu")?, launch, &params)
}

/// Multiplies `n` values of `y` by the function `values` of those of `g`.
pub(crate) fn gate_values(
    cx: &Context,
    values: Gate,
    g: DevicePtr,
    y: DevicePtr,
    n: usize,
) -> Result<(), CudaError> {
    if n == 0 {
        return Ok(());
    }
    let params = ValuesParams { g, y, n: n as u32, kind: kind(values) };
    let launch = Launch::each("gate_values", n, THREADS)?;
    cx.launch(cx.kernel(&SOURCE, "gate_values")?, launch, &params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator;

    #[test]
    fn gate_error_is_a_few_roundings_and_nan_is_preserved() {
        let Some(cx) = emulator::context(80) else { return };
        let g: Vec<f32> = (-1500..=1500).map(|i| i as f32 / 17.0).collect();
        let u: Vec<f32> = (0..g.len()).map(|i| (i % 13) as f32 - 6.5).collect();
        let all = [Activation::Silu, Activation::Gelu, Activation::Bounded, Activation::Relu];
        let limited = [Activation::Limited { limit: 3.0 }, Activation::Clamped { limit: 3.0 }];
        for activation in all.into_iter().chain([Activation::NormalCdf]).chain(limited) {
            for n in [0, 1, 255, 256, 257, g.len()] {
                let (on_g, on_u) = (emulator::upload(&cx, &g[..n]), emulator::upload(&cx, &u[..n]));
                gate(&cx, PendingGate { g: on_g.ptr(), activation }, on_u.ptr(), n).unwrap();
                for (i, got) in emulator::download(&cx, &on_u).into_iter().enumerate() {
                    let (g, u) = (f64::from(g[i]), f64::from(u[i]));
                    let [rate, limit] = Activation::BOUNDED.map(f64::from);
                    let (g, u) = match activation {
                        Activation::Bounded => (g.min(limit), 1.0 + u.clamp(-limit, limit)),
                        Activation::Clamped { .. } => (g.min(3.0), u.clamp(-3.0, 3.0)),
                        _ => (g, u),
                    };
                    let z = match activation {
                        Activation::Silu | Activation::Limited { .. } | Activation::Clamped { .. } => g,
                        Activation::Bounded => rate * g,
                        Activation::Gelu | Activation::NormalCdf => {
                            (8.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3))
                        }
                        Activation::Relu => g * f64::INFINITY,
                        Activation::Situ { .. } => unreachable!("no kernel has it"),
                    };
                    let g = if activation == Activation::NormalCdf { 1.0 } else { g };
                    let want = match activation {
                        Activation::Limited { .. } => (g / (1.0 + (-z).exp())).min(3.0) * u.clamp(-3.0, 3.0),
                        _ if g == 0.0 => 0.0,
                        _ => u * g / (1.0 + (-z).exp()),
                    };
                    // expf is within 2 ulp (CUDA's table of accuracies); a sum, a quotient and a
                    // product follow. Of GELU's z five roundings (two of them the constants') move
                    // the exponential by as many times |z|, and one rounding of the bounded SiLU's
                    // z does. Subnormal results lose digits, and exponentials beyond f32 give 0.
                    let of_z = match activation {
                        Activation::Silu | Activation::Relu => 0.0,
                        Activation::Limited { .. } | Activation::Clamped { .. } => 0.0,
                        Activation::Gelu | Activation::NormalCdf => 2.5 * z.abs(),
                        Activation::Bounded => 0.5 * z.abs(),
                        Activation::Situ { .. } => unreachable!("no kernel has it"),
                    };
                    let tol = (5.0 + of_z) * f64::from(f32::EPSILON) * want.abs()
                        + 1e-37
                        + (u * g).abs() / f64::from(f32::MAX);
                    let err = (f64::from(got) - want).abs();
                    assert!(err <= tol, "{activation:?} {g}: {got} for {want}");
                }
            }
            if activation == Activation::NormalCdf {
                let g = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 200.0, -200.0];
                let (on_g, on_u) = (emulator::upload(&cx, &g), emulator::upload(&cx, &[3.0; 5]));
                gate(&cx, PendingGate { g: on_g.ptr(), activation }, on_u.ptr(), 5).unwrap();
                let got = emulator::download(&cx, &on_u);
                assert!(got[0].is_nan() && got[1..] == [3.0, 0.0, 3.0, 0.0], "{got:?}");
                continue;
            }
            if activation == Activation::Bounded || limited.contains(&activation) {
                let (g, u) = ([f32::NAN, 1.0, 200.0, 7.0], [1.0, f32::NAN, 200.0, 7.0]);
                let (on_g, on_u) = (emulator::upload(&cx, &g), emulator::upload(&cx, &u));
                gate(&cx, PendingGate { g: on_g.ptr(), activation }, on_u.ptr(), 4).unwrap();
                let got = emulator::download(&cx, &on_u);
                assert!(got[0].is_nan() && got[1].is_nan() && got[2] == got[3], "{got:?}");
                continue;
            }
            let g = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 200.0, -200.0];
            let (on_g, on_u) = (emulator::upload(&cx, &g), emulator::upload(&cx, &[1.0; 5]));
            gate(&cx, PendingGate { g: on_g.ptr(), activation }, on_u.ptr(), 5).unwrap();
            let got = emulator::download(&cx, &on_u);
            let of_negative = if activation == Activation::Relu { got[2] == 0.0 } else { got[2].is_nan() };
            assert!(got[0].is_nan() && got[1] == f32::INFINITY && of_negative, "{got:?}");
            assert!(got[3] == 200.0 && got[4].abs() <= 1e-30, "{got:?}");
        }
    }
}
