//! Operations of encoders between their matrix products: plain loops over rows on the host, which
//! the compiler vectorizes, split over threads.

use std::thread;

use crate::{Kernels, Result, limits};

/// A function of single values: the activation of a feed-forward layer without gates, or of a
/// gate, in an encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pointwise {
    /// GELU in its tanh form (arXiv 1606.08415).
    GeluTanh,
    /// GELU, `x Φ(x)`.
    Gelu,
    /// SiLU, `x / (1 + exp(-x))`.
    Silu,
    /// ReLU.
    Relu,
    /// The hyperbolic tangent.
    Tanh,
}

/// Minimum of values per thread.
const SHARE: usize = 1 << 14;

/// Passes whole rows of `values` `[.., row]` to `f`, on up to `n_threads` threads.
pub fn for_rows(values: &mut [f32], row: usize, n_threads: usize, f: impl Fn(&mut [f32]) + Sync) {
    let n_shares = n_threads.min(values.len() / SHARE).max(1);
    if n_shares == 1 {
        return values.chunks_exact_mut(row).for_each(f);
    }
    let share = (values.len() / row).div_ceil(n_shares) * row;
    thread::scope(|scope| {
        for share in values.chunks_mut(share) {
            let f = &f;
            scope.spawn(move || share.chunks_exact_mut(row).for_each(f));
        }
    });
}

/// Computes `x = f(x)` of all values, on all cores.
pub fn apply(values: &mut [f32], f: Pointwise) {
    // Threads take whole cache lines.
    const WIDTH: usize = 256;
    let whole = values.len() / WIDTH * WIDTH;
    let (rows, rest) = values.split_at_mut(whole);
    for_rows(rows, WIDTH, limits::n_cores(), |row| apply_to_row(row, f));
    apply_to_row(rest, f);
}

/// Computes `x = f(x)` of the first `len` values of a buffer, through memory of the host.
pub(crate) fn apply_to_buffer<K: Kernels>(
    device: &K,
    x: &mut K::Buffer,
    len: usize,
    f: Pointwise,
) -> Result<()> {
    let mut values = vec![0.0; len];
    device.read(x, 0, &mut values)?;
    apply(&mut values, f);
    device.write(x, &values)
}

/// Computes `x = f(x)` of the values of a row.
pub fn apply_to_row(row: &mut [f32], f: Pointwise) {
    let [a, b] = crate::Activation::GELU;
    match f {
        Pointwise::GeluTanh => row.iter_mut().for_each(|x| *x *= sigmoid(*x * (a + b * *x * *x))),
        Pointwise::Gelu => row.iter_mut().for_each(|x| *x *= 0.5 * (1.0 + erf(*x * FRAC_1_SQRT_2))),
        Pointwise::Silu => row.iter_mut().for_each(|x| *x *= sigmoid(*x)),
        // NaN stays NaN.
        Pointwise::Relu => row.iter_mut().for_each(|x| *x = if *x < 0.0 { 0.0 } else { *x }),
        Pointwise::Tanh => row.iter_mut().for_each(|x| *x = x.tanh()),
    }
}

const FRAC_1_SQRT_2: f32 = std::f32::consts::FRAC_1_SQRT_2;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The error function, within 5e-7: Abramowitz and Stegun, 7.1.26.
fn erf(x: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let of_t =
        t * (0.254_829_6 + t * (-0.284_496_74 + t * (1.421_413_7 + t * (-1.453_152 + t * 1.061_405_4))));
    (1.0 - of_t * exp(-x * x)).copysign(x)
}

/// Returns `exp(x)`, within 3 units in the last place where the result is normal, and at least the
/// smallest normal number.
fn exp(x: f32) -> f32 {
    // Adding this constant leaves the rounded integer in the low bits.
    const TO_WHOLE: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let n = x * std::f32::consts::LOG2_E + TO_WHOLE;
    let whole = n - TO_WHOLE;
    // ln 2 in two parts: the first subtraction is exact.
    let r = x - whole * 0.693_359_4 + whole * 2.121_944_4e-4;
    let series = 1.0
        + r * (1.0
            + r * (0.5 + r * (0.166_666_67 + r * (0.041_666_66 + r * (0.008_333_1 + r * 0.001_392_8)))));
    let power = f32::from_bits((n.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    series * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points() -> impl Iterator<Item = f32> {
        (-8000..8000).map(|i| i as f32 * 0.0109)
    }

    #[test]
    fn exponentials_are_those_of_more_digits() {
        for x in points().filter(|x| *x > -87.0) {
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((got - want).abs() <= 3e-7 * want, "exp({x}): {got}, {want}");
        }
        assert!(exp(f32::NEG_INFINITY) < 1e-37 && exp(-1e30) > 0.0);
    }

    /// Compares with a series of erf that needs no other constants.
    #[test]
    fn the_error_function_is_its_series() {
        for x in points().filter(|x| x.abs() < 4.0) {
            let (z, mut term, mut sum) = (f64::from(x), f64::from(x), f64::from(x));
            for n in 1..120 {
                term *= -z * z / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            let want = sum * 2.0 / std::f64::consts::PI.sqrt();
            let got = f64::from(erf(x));
            assert!((got - want).abs() < 5e-7, "erf({x}): {got}, {want}");
        }
    }

    #[test]
    fn rows_are_the_same_on_any_number_of_threads() {
        let values: Vec<f32> = points().map(f32::sin).chain(points().map(|x| x / 9.0)).take(31_992).collect();
        let run = |n_threads| {
            let mut values = values.clone();
            for_rows(&mut values, 24, n_threads, |row| apply_to_row(row, Pointwise::Silu));
            values
        };
        let alone = run(1);
        assert_ne!(alone, values);
        for n_threads in [2, 3, 64] {
            assert_eq!(run(n_threads), alone);
        }
    }
}
