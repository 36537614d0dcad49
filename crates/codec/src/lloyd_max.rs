//! The Lloyd-Max solver: the scalar codebook of least mean squared error for a distribution.
//!
//! A minimal codebook satisfies two conditions at once (Lloyd 1982,
//! [doi](https://doi.org/10.1109/TIT.1982.1056489); Max 1960): each decision point is halfway
//! between its levels, and each level is the mean of its cell. Alternating the two converges to the
//! only such codebook when the density is log-concave, as both densities here are.

use std::sync::OnceLock;

/// A symmetric distribution of unit variance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Distribution {
    /// N(0, 1).
    Gaussian,
    /// √dim times a coordinate of a random unit vector in `dim` dimensions: density proportional to
    /// (1 - t²/dim)^((dim - 3) / 2). Nearly N(0, 1), with lighter tails. Integrated to 1e-12 for
    /// `dim` of 16 and more.
    Sphere {
        /// Dimensions, at least 3.
        dim: usize,
    },
}

impl Distribution {
    /// Returns the density up to a constant factor.
    fn density(self, t: f64) -> f64 {
        match self {
            Self::Gaussian => (-t * t / 2.0).exp(),
            Self::Sphere { dim } => {
                let d = dim as f64;
                (1.0 - t * t / d).max(0.0).powf((d - 3.0) / 2.0)
            }
        }
    }

    /// Returns the bound of integration: beyond ±12 a Gaussian has 4e-33 of its mass.
    fn end(self) -> f64 {
        match self {
            Self::Gaussian => 12.0,
            Self::Sphere { dim } => 12f64.min((dim as f64).sqrt()),
        }
    }

    /// Integrates `g` times the density from `a` to `b`, up to the density's factor.
    fn integrate<const N: usize>(self, a: f64, b: f64, g: impl Fn(f64) -> [f64; N]) -> [f64; N] {
        let panels = ((b - a) * 4.0).ceil().max(1.0);
        let half = (b - a) / panels / 2.0;
        let mut sums = [0.0; N];
        for panel in 0..panels as usize {
            let centre = a + (2 * panel + 1) as f64 * half;
            for (node, weight) in gauss_legendre() {
                let t = centre + half * node;
                let mass = half * weight * self.density(t);
                for (sum, value) in sums.iter_mut().zip(g(t)) {
                    *sum += mass * value;
                }
            }
        }
        sums
    }

    /// Returns the expectation of `g(t, c)`, where c is the level that encodes t.
    ///
    /// # Panics
    /// Unless the number of decision points is one less than that of levels.
    pub fn expect<const N: usize>(
        self,
        levels: &[f64],
        mids: &[f64],
        g: impl Fn(f64, f64) -> [f64; N],
    ) -> [f64; N] {
        assert_eq!(levels.len(), mids.len() + 1);
        let [mass] = self.integrate(-self.end(), self.end(), |_| [1.0]);
        let mut sums = [0.0; N];
        for (i, &level) in levels.iter().enumerate() {
            let (a, b) = self.cell(mids, i);
            for (sum, part) in sums.iter_mut().zip(self.integrate(a, b, |t| g(t, level))) {
                *sum += part / mass;
            }
        }
        sums
    }

    /// Returns the interval that level `i` encodes.
    fn cell(self, mids: &[f64], i: usize) -> (f64, f64) {
        let a = if i == 0 { -self.end() } else { mids[i - 1] };
        (a, mids.get(i).copied().unwrap_or(self.end()))
    }
}

/// Nodes and weights of 16-point Gauss-Legendre quadrature on [-1, 1].
fn gauss_legendre() -> &'static [(f64, f64); 16] {
    static NODES: OnceLock<[(f64, f64); 16]> = OnceLock::new();
    NODES.get_or_init(|| {
        std::array::from_fn(|i| {
            // Newton's method on the Legendre polynomial P16, from Tricomi's estimate of its root
            // i.
            let mut x = (std::f64::consts::PI * (i as f64 + 0.75) / 16.5).cos();
            let mut slope = 0.0;
            for _ in 0..8 {
                let (mut p, mut before) = (x, 1.0);
                for k in 2..=16 {
                    let k = f64::from(k);
                    (p, before) = (((2.0 * k - 1.0) * x * p - (k - 1.0) * before) / k, p);
                }
                slope = 16.0 * (x * p - before) / (x * x - 1.0);
                x -= p / slope;
            }
            (x, 2.0 / ((1.0 - x * x) * slope * slope))
        })
    })
}

/// A solved codebook for a distribution of unit variance.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    /// Ascending, `[1 << bits]`.
    pub levels: Vec<f64>,
    /// Decision points, ascending, `[(1 << bits) - 1]`.
    pub mids: Vec<f64>,
    /// The mean squared error, per unit variance.
    pub mse: f64,
}

fn midpoints(levels: &[f64]) -> Vec<f64> {
    levels.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect()
}

/// Solves for the codebook of `bits` bits, to about 1e-12.
///
/// # Panics
/// Unless `bits` is 1 to 6.
pub fn solve(law: Distribution, bits: u32) -> Solution {
    assert!((1..=6).contains(&bits), "a codebook of {bits} bits");
    let n = 1 << bits;
    let mut levels: Vec<f64> = (0..n).map(|i| (2 * i + 1 - n) as f64 * 2.5 / n as f64).collect();
    // Each iteration shrinks the error by a constant factor, 0.97 or better at 4 bits.
    for _ in 0..20_000 {
        let mids = midpoints(&levels);
        let mut change: f64 = 0.0;
        for (i, level) in levels.iter_mut().enumerate() {
            let (a, b) = law.cell(&mids, i);
            let [m0, m1] = law.integrate(a, b, |t| [1.0, t]);
            change = change.max((m1 / m0 - *level).abs());
            *level = m1 / m0;
        }
        if change < 1e-14 {
            break;
        }
    }
    let mids = midpoints(&levels);
    let [mse] = law.expect(&levels, &mids, |t, c| [(t - c).powi(2)]);
    Solution { levels, mids, mse }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Codebook;

    #[test]
    fn quadrature_gives_the_moments_of_both_distributions() {
        let all = |law: Distribution| law.integrate(-law.end(), law.end(), |t| [1.0, t, t * t]);
        let [m0, m1, m2] = all(Distribution::Gaussian);
        let total = std::f64::consts::TAU.sqrt();
        assert!((m0 - total).abs() <= 1e-13 && m1.abs() <= 1e-13 && (m2 - total).abs() <= 1e-13);
        for dim in [16, 64, 128, 256] {
            let [m0, m1, m2] = all(Distribution::Sphere { dim });
            assert!(m1.abs() <= 1e-12 && (m2 / m0 - 1.0).abs() <= 1e-12, "{dim}: {}", m2 / m0 - 1.0);
        }
    }

    /// MSE from Max 1960, table I, and to more digits from an independent solver (erfc in closed
    /// form).
    #[test]
    fn gaussian_codebooks_have_the_known_error() {
        for (bits, want) in [
            (1, 0.3633802276324186),
            (2, 0.11748184782932902),
            (3, 0.0345477607885036),
            (4, 0.00950100800819187),
        ] {
            let got = solve(Distribution::Gaussian, bits).mse;
            assert!((got - want).abs() <= 1e-13, "{bits} bits: {got}");
        }
    }

    #[test]
    fn constants_are_the_solved_codebooks() {
        for book in [Codebook::GAUSS1, Codebook::GAUSS2, Codebook::GAUSS3, Codebook::GAUSS4] {
            let solved = solve(Distribution::Gaussian, book.bits());
            // Half an f32 step at 2.73 is 1.2e-7.
            let tables = [(book.levels(), &solved.levels, 1.0), (book.mids(), &solved.mids, 1.0)];
            let centroids = (book.centroids(), &solved.levels, 1.0 / 128f64.sqrt());
            for (constants, solved, unit) in tables.into_iter().chain([centroids]) {
                assert_eq!(constants.len(), solved.len());
                for (&have, want) in constants.iter().zip(solved) {
                    assert!((f64::from(have) - want * unit).abs() <= 1.2e-7, "{have} {want}");
                }
            }
        }
    }

    #[test]
    fn levels_are_symmetric_means_of_their_cells() {
        for law in [Distribution::Gaussian, Distribution::Sphere { dim: 128 }] {
            let s = solve(law, 4);
            for i in 0..16 {
                assert!((s.levels[i] + s.levels[15 - i]).abs() <= 1e-12);
            }
            // The mean of a cell is uncorrelated with the error: E t·c = E c² = 1 - MSE.
            let [cross, energy] = law.expect(&s.levels, &s.mids, |t, c| [t * c, c * c]);
            assert!(
                (cross - energy).abs() <= 1e-12 && (1.0 - energy - s.mse).abs() <= 1e-12,
                "{cross} {energy}"
            );
        }
    }
}
