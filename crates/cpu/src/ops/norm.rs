//! RMSNorm (arXiv 1910.07467): `y = x / sqrt(mean(x²) + eps) * weight`; and LayerNorm (arXiv
//! 1607.06450), which is that of `x - mean(x)`.

use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;

/// Partial sums side by side, so that the compiler can use vectors of any width. The order of the
/// additions is fixed, so every kernel set gives the same result.
const LANES: usize = 16;

/// Returns the sum of `term` over `x`.
#[inline(always)]
pub(crate) fn sum_of(x: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        for (sum, v) in sums.iter_mut().zip(chunk) {
            *sum += term(*v);
        }
    }
    sums.iter().sum::<f32>() + rest.iter().map(|&v| term(v)).sum::<f32>()
}

/// Returns the sum of the products of x and y, which is as long.
pub(crate) fn product_of(x: &[f32], y: &[f32]) -> f32 {
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let mut sums = [0.0; LANES];
    for (x, y) in x.iter().zip(y) {
        for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
            *sum += x * y;
        }
    }
    sums.iter().sum::<f32>() + x_rest.iter().zip(y_rest).map(|(x, y)| x * y).sum::<f32>()
}

/// Returns the factor `1 / sqrt(mean(x²) + eps)` of a row.
#[inline(always)]
pub(crate) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of(x, |v| v * v) / x.len() as f32 + eps).sqrt()
}

/// Normalizes the row `x` into `y`, both as long as `weight`.
#[inline(always)]
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let factor = inverse_rms(x, eps);
    for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
        *y = x * factor * w;
    }
}

/// Adds the rows of `y` `[rows, weight.len()]`, normalized, to those of `x`. Shapes have been
/// checked.
pub(crate) fn add_normed(pool: &Pool, x: &mut [f32], y: &[f32], rows: usize, weight: &[f32], eps: f32) {
    let n = weight.len();
    let x = DisjointMut::new(x);
    pool.for_each(rows, &|row| {
        let row = row * n..(row + 1) * n;
        let y = &y[row.clone()];
        let factor = inverse_rms(y, eps);
        // SAFETY: one call of this job writes each row.
        for ((x, y), w) in unsafe { x.part(row) }.iter_mut().zip(y).zip(weight) {
            *x += y * factor * w;
        }
    });
}

/// Parameters of a LayerNorm.
#[derive(Clone, Copy)]
pub(crate) struct LayerNorm<'a> {
    pub weight: &'a [f32],
    pub bias: Option<&'a [f32]>,
    pub eps: f32,
}

/// Applies LayerNorm to the rows of `x` `[rows, weight.len()]`, into `y`. Shapes have been checked.
pub(crate) fn layer_norm(
    pool: &Pool,
    x: &[f32],
    rows: usize,
    LayerNorm { weight, bias, eps }: LayerNorm<'_>,
    y: &mut [f32],
) {
    let n = weight.len();
    let y = DisjointMut::new(y);
    pool.for_each(rows, &|row| {
        let row = row * n..(row + 1) * n;
        let x = &x[row.clone()];
        let mean = sum_of(x, |v| v) / n as f32;
        let factor = 1.0 / (sum_of(x, |v| (v - mean) * (v - mean)) / n as f32 + eps).sqrt();
        // SAFETY: one call of this job writes each row.
        let y = unsafe { y.part(row) };
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = (x - mean) * factor * w;
        }
        for (y, bias) in y.iter_mut().zip(bias.unwrap_or_default()) {
            *y += bias;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvant_codec::random::Random;

    #[test]
    fn equals_the_equation_in_f64() {
        let mut random = Random::new(1);
        for (len, sigma) in [(1, 1.0), (15, 1.0), (16, 1e-3), (17, 1.0), (80, 100.0), (1536, 1.0)] {
            let (mut x, mut w) = (vec![0.0; len], vec![0.0; len]);
            random.fill_gaussian(&mut x, sigma);
            random.fill_gaussian(&mut w, 1.0);
            let mut y = vec![f32::NAN; len];
            rms_norm(&x, &w, 1e-6, &mut y);
            let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / len as f64;
            for i in 0..len {
                let want = f64::from(x[i]) / (mean + f64::from(1e-6f32)).sqrt() * f64::from(w[i]);
                // Each lane adds len / 16 squares, then 16 lanes and up to 15 more are added; the
                // square root halves the relative error. Five more roundings follow.
                let bound = ((len / LANES + 31) as f64 / 2.0 + 5.0) * f64::from(f32::EPSILON);
                let err = (f64::from(y[i]) - want).abs();
                assert!(err <= bound * want.abs(), "len {len}, value {i}: {} for {want}", y[i]);
            }
        }
    }
}
