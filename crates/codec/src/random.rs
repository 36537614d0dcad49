//! Deterministic random numbers for tests, measurements and the projection of QJL; rotations do
//! not use them.

/// SplitMix64 with Gaussian output (Box-Muller). Same seed, same numbers, on every machine with the
/// same `libm`.
#[derive(Debug, Clone)]
pub struct Random {
    state: u64,
    spare_gaussian: Option<f64>,
}

impl Random {
    /// Returns a generator; every seed is equally good.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed, spare_gaussian: None }
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Returns a uniform number in (0, 1].
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Returns a standard Gaussian.
    pub fn gaussian(&mut self) -> f64 {
        if let Some(spare_gaussian) = self.spare_gaussian.take() {
            return spare_gaussian;
        }
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.uniform()).sin_cos();
        self.spare_gaussian = Some(radius * sin);
        radius * cos
    }

    /// Fills `out` with independent N(0, sigma²).
    pub fn fill_gaussian(&mut self, out: &mut [f32], sigma: f64) {
        out.iter_mut().for_each(|v| *v = (sigma * self.gaussian()) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaussian_has_the_moments_of_a_gaussian() {
        let mut random = Random::new(1);
        let n = 200_000;
        let (mut m1, mut m2, mut m4) = (0.0, 0.0, 0.0);
        for _ in 0..n {
            let x = random.gaussian();
            m1 += x / f64::from(n);
            m2 += x * x / f64::from(n);
            m4 += x.powi(4) / f64::from(n);
        }
        // Five standard errors each: 1/√n, √(2/n), √(96/n).
        assert!(
            m1.abs() <= 0.0112 && (m2 - 1.0).abs() <= 0.0158 && (m4 - 3.0).abs() <= 0.11,
            "{m1} {m2} {m4}"
        );
    }
}
