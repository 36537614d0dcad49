//! The gate of a gated feed-forward layer: `u *= silu(g)`, `silu(g) = g / (1 + exp(-g))`.

use bytemuck::NoUninit;

use crate::constants::Constants;
use crate::{Context, CudaError, DevicePtr, Launch, Source};

/// The kernel of this op.
pub(crate) static SOURCE: Source = Source {
    name: "silu.cu",
    text: include_str!("silu.cu"),
    headers: &[],
    constants: Constants::default,
    options: &[],
};

const THREADS: u32 = 256;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelParams {
    g: DevicePtr,
    u: DevicePtr,
    n: u32,
    unused: u32,
}

/// `u *= silu(g)` for `n` values.
pub(crate) fn gate(cx: &Context, g: DevicePtr, u: DevicePtr, n: usize) -> Result<(), CudaError> {
    if n == 0 {
        return Ok(());
    }
    let params = KernelParams { g, u, n: n as u32, unused: 0 };
    let launch = Launch::linear(params.n.div_ceil(THREADS), THREADS);
    cx.launch(cx.kernel(&SOURCE, "silu_gate")?, launch, &params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator;

    #[test]
    fn the_gate_is_within_a_few_roundings_and_bad_numbers_stay_visible() {
        let Some(cx) = emulator::context(80) else { return };
        let g: Vec<f32> = (-1500..=1500).map(|i| i as f32 / 17.0).collect();
        let u: Vec<f32> = (0..g.len()).map(|i| (i % 13) as f32 - 6.5).collect();
        for n in [0, 1, 255, 256, 257, g.len()] {
            let (on_g, on_u) = (emulator::upload(&cx, &g[..n]), emulator::upload(&cx, &u[..n]));
            gate(&cx, on_g.ptr(), on_u.ptr(), n).unwrap();
            for (i, got) in emulator::download(&cx, &on_u).into_iter().enumerate() {
                let (g, u) = (f64::from(g[i]), f64::from(u[i]));
                let want = u * g / (1.0 + (-g).exp());
                // expf is within 2 ulp (CUDA's table of accuracies); a sum, a quotient and a product follow.
                let err = (f64::from(got) - want).abs();
                assert!(err <= 5.0 * f64::from(f32::EPSILON) * want.abs(), "{g}: {got} for {want}");
            }
        }
        let g = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 200.0, -200.0];
        let (on_g, on_u) = (emulator::upload(&cx, &g), emulator::upload(&cx, &[1.0; 5]));
        gate(&cx, on_g.ptr(), on_u.ptr(), 5).unwrap();
        let got = emulator::download(&cx, &on_u);
        assert!(got[0].is_nan() && got[1] == f32::INFINITY && got[2].is_nan(), "{got:?}");
        assert!(got[3] == 200.0 && got[4].abs() <= 1e-30, "{got:?}");
    }
}
