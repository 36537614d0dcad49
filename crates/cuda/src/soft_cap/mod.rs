//! Soft cap: `x = cap tanh(x / cap)` (arXiv 2408.00118).

use std::f64::consts::LOG2_E;

use bytemuck::NoUninit;

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::{Context, CudaError, DevicePtr, Header, Launch, Source};

/// The soft cap, for kernels that apply it to their own values.
pub(crate) const SOFT_CAP_HEADER: Header = Header { name: "bounded.cuh", text: include_str!("bounded.cuh") };

/// The kernel of this op.
pub(crate) static SOURCE: Source = Source {
    name: "soft_cap.cu",
    text: include_str!("soft_cap.cu"),
    headers: &[SOFT_CAP_HEADER, HALF_HEADER],
    constants: Constants::default,
    options: &[],
};

const THREADS: u32 = 256;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelParams {
    x: DevicePtr,
    n: u32,
    cap: f32,
    rate: f32,
    unused: u32,
}

/// Returns the parameter of `bounded` of `bounded.cuh` besides the cap: -2 log2 e / cap.
pub(crate) fn rate(cap: f32) -> f32 {
    (-2.0 * LOG2_E / f64::from(cap)) as f32
}

/// Applies the soft cap to `n` values.
pub(crate) fn soft_cap(cx: &Context, x: DevicePtr, n: usize, cap: f32) -> Result<(), CudaError> {
    if n == 0 {
        return Ok(());
    }
    let params = KernelParams { x, n: n as u32, cap, rate: rate(cap), unused: 0 };
    let launch = Launch::each("soft_cap", n, THREADS)?;
    cx.launch(cx.kernel(&SOURCE, "soft_cap")?, launch, &params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator;

    #[test]
    fn values_are_bounded_within_a_few_roundings_of_the_cap() {
        let Some(cx) = emulator::context(80) else { return };
        let mut x: Vec<f32> = (-600..=600).map(|i| i as f32 / 7.0).collect();
        x.extend([1e30, -1e30, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
        let on_x = emulator::upload(&cx, &x);
        let (n, cap) = (x.len() - 1, 30.0_f32);
        soft_cap(&cx, on_x.ptr(), n, cap).unwrap();
        let got = emulator::download(&cx, &on_x);
        for (got, x) in got[..1203].iter().zip(&x) {
            let want = f64::from(cap) * (f64::from(*x) / f64::from(cap)).tanh();
            // Derived in `bounded.cuh`.
            let tol = 4.0 * f64::from(f32::EPSILON * cap);
            assert!((f64::from(*got) - want).abs() <= tol, "{x}: {got} for {want}");
        }
        assert!(got[1203..].iter().all(|x| x.is_nan()), "{:?}", &got[1203..]);
    }
}
