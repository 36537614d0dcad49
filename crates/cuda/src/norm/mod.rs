//! RMS normalization (arXiv 1910.07467): `y = x / sqrt(mean(x²) + eps) * weight`; and LayerNorm
//! (arXiv 1607.06450), the same of `x - mean(x)`, plus a bias.

use bytemuck::NoUninit;

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::{Context, CudaError, DevicePtr, Header, Launch, Source};

/// The kernels of this op.
pub(crate) static SOURCE: Source = Source {
    name: "norm.cu",
    text: include_str!("norm.cu"),
    headers: &[HALF_HEADER, SUM_HEADER],
    constants,
    options: &[],
};

/// Sums over the threads of a warp or a block.
pub(crate) const SUM_HEADER: Header = Header { name: "sum.cuh", text: include_str!("sum.cuh") };

/// Threads of a block, which processes one row.
const THREADS: u32 = 256;

fn constants() -> Constants {
    Constants::default().whole("THREADS", THREADS as usize)
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct NormParams {
    x: DevicePtr,
    weight: DevicePtr,
    bias: DevicePtr,
    y: DevicePtr,
    cols: u32,
    eps: f32,
}

/// A norm's weight `[cols]` and eps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NormParts {
    pub weight: DevicePtr,
    pub eps: f32,
}

/// Kind of normalization.
#[derive(Debug, Clone, Copy)]
pub(crate) enum NormKind {
    /// RMS normalization.
    Rms,
    /// RMS normalization, added to the output buffer.
    AddRms,
    /// LayerNorm: `Rms` after subtracting the mean, plus a bias `[cols]` unless it is 0.
    Layer {
        /// The bias.
        bias: DevicePtr,
    },
}

/// Normalizes `rows` rows of `x` `[rows, cols]` into `y`. The caller has checked the shapes.
pub(crate) fn norm(
    cx: &Context,
    kind: NormKind,
    x: DevicePtr,
    norm: NormParts,
    [rows, cols]: [usize; 2],
    y: DevicePtr,
) -> Result<(), CudaError> {
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let (kernel, bias) = match kind {
        NormKind::Rms => ("rms_norm", 0),
        NormKind::AddRms => ("add_normed", 0),
        NormKind::Layer { bias } => ("layer_norm", bias),
    };
    let kernel = cx.kernel(&SOURCE, kernel)?;
    let params = NormParams { x, weight: norm.weight, bias, y, cols: cols as u32, eps: norm.eps };
    cx.launch(kernel, Launch::linear(rows as u32, THREADS), &params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator;
    use kvant_codec::random::Random;

    #[test]
    fn equals_the_equation_in_f64() {
        let Some(cx) = emulator::context(80) else { return };
        let mut random = Random::new(1);
        for (rows, cols, sigma) in
            [(1, 1, 1.0), (3, 31, 1e-3), (2, 255, 1.0), (2, 256, 100.0), (1, 257, 1.0), (5, 1536, 1.0)]
        {
            let (mut x, mut weight) = (vec![0.0; rows * cols], vec![0.0; cols]);
            random.fill_gaussian(&mut x, sigma);
            random.fill_gaussian(&mut weight, 1.0);
            let (on_x, on_w) = (emulator::upload(&cx, &x), emulator::upload(&cx, &weight));
            let y = emulator::uninitialized(&cx, rows * cols);
            let norm = NormParts { weight: on_w.ptr(), eps: 1e-6 };
            super::norm(&cx, NormKind::Rms, on_x.ptr(), norm, [rows, cols], y.ptr()).unwrap();
            let y = emulator::download(&cx, &y);
            let sum = emulator::upload(&cx, &x);
            super::norm(&cx, NormKind::AddRms, on_x.ptr(), norm, [rows, cols], sum.ptr()).unwrap();
            for ((sum, x), y) in emulator::download(&cx, &sum).into_iter().zip(&x).zip(&y) {
                // The product with the weight may be added before it is rounded.
                let tol = f32::EPSILON * (sum.abs() + y.abs());
                assert!((sum - (x + y)).abs() <= tol, "{rows} x {cols}: {sum} for {x} + {y}");
            }
            for (i, (&y, &x_i)) in y.iter().zip(&x).enumerate() {
                let row = &x[i / cols * cols..][..cols];
                let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / cols as f64;
                let factor = 1.0 / (mean + f64::from(1e-6f32)).sqrt();
                let want = f64::from(x_i) * factor * f64::from(weight[i % cols]);
                // A thread adds every 256th square, then 5 shuffles and 8 warps follow; the square
                // root halves the relative error. Six more roundings.
                let roundings = (cols.div_ceil(256) + 13) as f64 / 2.0 + 6.0;
                let err = (f64::from(y) - want).abs();
                let tol = roundings * f64::from(f32::EPSILON) * want.abs();
                assert!(err <= tol, "{rows} x {cols}, value {i}: {y} for {want}");
            }
        }
    }
}
