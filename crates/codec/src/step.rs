//! The step that a slice is coded at.
//!
//! A codebook is made for what slices have in common, unit variance; one slice of 64 or 128 values differs from that by
//! chance. So the same levels are tried a little narrower and a little wider, and the slice takes those whose direction is
//! nearest to its own: of turbo3 this takes a tenth of the error, of turbo4 a fifth, and readers know nothing of it, since the
//! stored scale gives the slice its norm whatever the levels were. (For indices that maximise the cosine there is always a
//! step at which they are the nearest ones, so nothing else about the indices is worth trying.)
//!
//! Sums are whole numbers, so that every device finds the same step, in whatever order it sums.

use crate::Codebook;

/// How many steps there are to choose from.
pub const STEPS: usize = 9;

/// What one stands for in the sums over magnitudes: |z| sums to `N` at most, so up to 128 of them fit in 31 bits.
pub const ONE: f32 = (1 << 23) as f32;

/// What one stands for in levels as the search takes them: the largest centroid, 0.2415, is below 2^15.
pub const LEVEL_ONE: f32 = (1 << 17) as f32;

/// Step `k`: 0.8 to 1.2 of the one that the norm asks for.
pub const fn step(k: usize) -> f64 {
    (FIRST + k) as f64 / UNIT as f64
}

/// What values are multiplied by to be coded at step `k`.
pub const fn factor(k: usize) -> f32 {
    UNIT as f32 / (FIRST + k) as f32
}

/// The first step, in parts of [`UNIT`].
pub const FIRST: usize = 16;
/// Parts of the step that the norm asks for.
pub const UNIT: usize = 20;

/// The magnitude from which a value of step `k` has the level above the decision point `mid`, in units of 1 / [`ONE`].
#[inline(always)]
pub fn threshold(mid: f32, k: usize) -> i32 {
    (f64::from(mid) * step(k) * f64::from(ONE)) as i32
}

/// A centroid in units of 1 / [`LEVEL_ONE`].
#[inline(always)]
pub fn level(centroid: f32) -> i32 {
    (centroid * LEVEL_ONE) as i32
}

/// Which of the steps makes the levels of `book`, which are those of a symmetric law, lie best along a slice of unit variance. The
/// first of equals.
#[inline(always)]
pub fn best<const N: usize>(book: &Codebook, z: &[f32; N]) -> usize {
    let half = book.levels().len() / 2;
    let (mids, levels) = (&book.mids()[half..], &book.centroids()[half..]);
    let magnitudes = z.map(|z| (z.abs() * ONE) as i32);
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
        // The square of the cosine is `along² / square`, but for what all steps share.
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

    /// The cosine between a slice and the levels nearest to it at step `k`.
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
            let most = (0..STEPS).map(|k| cosine(&book, &z, k)).fold(0.0, f64::max);
            // Levels are rounded to one part in 2^15 of the largest, and what that does to a cosine is of second order.
            assert!(cosine(&book, &z, found) >= most - 1e-6, "{round}: {found}");
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
