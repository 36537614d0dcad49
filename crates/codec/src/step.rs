//! The step-size search of a slice.
//!
//! A codebook fits the expected distribution, unit variance; one slice of 64 or 128 values deviates
//! from it by chance. The search tries the same levels slightly narrower and wider, and selects the
//! step whose decoded direction is nearest to the slice's. This removes a tenth of the error of
//! turbo3 and a fifth of turbo4's. Decoders are unaffected, since the stored scale restores the
//! norm of the slice for every step. (For indices that maximize the cosine, some step always
//! makes them the nearest ones, so no other search over indices is worthwhile.)
//!
//! Sums are integers, so that every device finds the same step in any order of summation.

use crate::Codebook;

/// Number of candidate steps.
pub const STEPS: usize = 9;

/// The fixed-point unit of magnitudes: |z| sums to at most `N`, so up to 128 of them fit in 31
/// bits.
pub const MAGNITUDE_SCALE: f32 = (1 << 23) as f32;

/// The fixed-point unit of levels: the largest centroid, 0.2415, is below 2^15.
pub const LEVEL_SCALE: f32 = (1 << 17) as f32;

/// Returns step `k`: 0.8 to 1.2 times the step that the norm implies.
pub const fn step(k: usize) -> f64 {
    (FIRST_NUMERATOR + k) as f64 / STEP_DENOMINATOR as f64
}

/// Returns the factor that scales values before they are coded at step `k`.
pub const fn factor(k: usize) -> f32 {
    STEP_DENOMINATOR as f32 / (FIRST_NUMERATOR + k) as f32
}

/// The first step, in units of 1 / [`STEP_DENOMINATOR`].
pub const FIRST_NUMERATOR: usize = 16;
/// Denominator of the steps: `UNIT` is the step that the norm implies.
pub const STEP_DENOMINATOR: usize = 20;

/// Returns the magnitude from which a value at step `k` takes the level above decision point `mid`,
/// in units of 1 / [`MAGNITUDE_SCALE`].
#[inline(always)]
pub fn threshold(mid: f32, k: usize) -> i32 {
    (f64::from(mid) * step(k) * f64::from(MAGNITUDE_SCALE)) as i32
}

/// Returns a centroid in units of 1 / [`LEVEL_SCALE`].
#[inline(always)]
pub fn level(centroid: f32) -> i32 {
    (centroid * LEVEL_SCALE) as i32
}

/// Returns the step at which the levels of `book`, a codebook of a symmetric distribution, have the
/// largest cosine with a slice of unit variance; the first of equals.
#[inline(always)]
pub fn best<const N: usize>(book: &Codebook, z: &[f32; N]) -> usize {
    let half = book.levels().len() / 2;
    let (mids, levels) = (&book.mids()[half..], &book.centroids()[half..]);
    let magnitudes = z.map(|z| (z.abs() * MAGNITUDE_SCALE) as i32);
    let total: i32 = magnitudes.iter().sum();
    let (mut best, mut best_along, mut best_square) = (0, 0.0, 1.0);
    for k in 0..STEPS {
        let mut below = level(levels[0]);
        let mut along = i64::from(below) * i64::from(total);
        let mut square = i64::from(below * below) * N as i64;
        for (&mid, &centroid) in mids.iter().zip(&levels[1..]) {
            let (from, above) = (threshold(mid, k), level(centroid));
            let (mut sum, mut count) = (0, 0);
            for &m in &magnitudes {
                let reaches = -i32::from(m >= from);
                sum += m & reaches;
                count -= reaches;
            }
            along += i64::from(above - below) * i64::from(sum);
            square += i64::from(above * above - below * below) * i64::from(count);
            below = above;
        }
        // The squared cosine is `along² / square`, up to a factor common to all steps.
        let (along, square) = ((along as f64) * (along as f64), square as f64);
        if along * best_square > best_along * square {
            (best, best_along, best_square) = (k, along, square);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Returns the cosine between a slice and the levels nearest to it at step `k`.
    fn cosine(book: &Codebook, z: &[f32; 64], k: usize) -> f64 {
        let values = z.map(|z| f64::from(book.levels()[usize::from(book.nearest(z * factor(k)))]));
        let along: f64 = z.iter().zip(values).map(|(&z, v)| f64::from(z) * v).sum();
        let norms = |x: f64| x.sqrt();
        along
            / norms(values.iter().map(|v| v * v).sum())
            / norms(z.iter().map(|&z| f64::from(z).powi(2)).sum())
    }

    #[test]
    fn the_step_is_the_one_with_the_largest_cosine() {
        let mut random = Random::new(1);
        let mut seen = [0; STEPS];
        for round in 0..600 {
            let book = [Codebook::GAUSS2, Codebook::GAUSS3, Codebook::GAUSS4][round % 3];
            let mut z = [0.0; 64];
            random.fill_gaussian(&mut z, 1.0);
            let norm = z.iter().map(|&z| f64::from(z).powi(2)).sum::<f64>().sqrt();
            let z = z.map(|z| (f64::from(z) * 8.0 / norm) as f32);
            let found = best(&book, &z);
            seen[found] += 1;
            let max = (0..STEPS).map(|k| cosine(&book, &z, k)).fold(0.0, f64::max);
            // Levels are rounded to one part in 2^15 of the largest, which changes a cosine to
            // second order only.
            assert!(cosine(&book, &z, found) >= max - 1e-6, "{round}: {found}");
        }
        assert!(seen.iter().all(|&n| n > 0), "{seen:?}");
    }

    #[test]
    fn the_largest_slices_do_not_overflow() {
        for z in [
            [1.0; 128],
            {
                let mut spike = [0.0; 128];
                spike[5] = -(128f32.sqrt());
                spike
            },
            [0.0; 128],
        ] {
            for book in [Codebook::GAUSS2, Codebook::GAUSS3, Codebook::GAUSS4] {
                assert!(best(&book, &z) < STEPS);
            }
        }
    }
}
