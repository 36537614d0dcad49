//! The inner-product codec of the TurboQuant paper: TurboQuant-prod with a QJL residual. Research
//! only.
//!
//! A codebook that minimizes the squared error shrinks: ⟨q, x̂⟩ is slightly too small on average.
//! TurboQuant ([arXiv 2504.19874](https://arxiv.org/abs/2504.19874), algorithm 2) spends one of its
//! b bits to remove this bias: it codes x with b - 1 bits and stores, of the residual r = x - x̂,
//! its norm and one sign for each of 128 Gaussian projections (QJL, [arXiv
//! 2406.03482](https://arxiv.org/abs/2406.03482)):
//!
//! ```text
//! estimate(q) = ⟨q, x̂⟩ + √(π/2) / d · |r| · ⟨S q, sign(S r)⟩      S [d × d], independent N(0, 1)
//! ```
//!
//! Over random S the estimate is unbiased, with variance (π/2 · |q|²|r|² - ⟨q, r⟩²) / d, on average
//! D(b - 1) · (π/2 - 1/d) · |q|² |x|² / d where D is the codebook's error.
//!
//! No cache format uses it: at equal bits the plain codebook has less than half the squared error
//! (tests below), and after softmax the extra variance hurts more than the bias. This module keeps
//! that claim measurable. Bits per value: b + 0.25 (two f16: norm and residual norm).

use half::f16;

use crate::finite::{F16_MAX, clamp, to_f16};
use crate::random::Random;
use crate::turbo::LEN;
use crate::{Codebook, Rotation};

/// The codec: a rotation, a codebook of one bit less, and a Gaussian matrix.
#[derive(Debug, Clone)]
pub struct Qjl {
    book: Codebook,
    rotation: Rotation,
    /// S `[128][128]`, row major.
    projection: Vec<f32>,
}

/// An encoded vector of 128 values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QjlCode {
    /// |x|.
    pub norm: f16,
    /// Codebook indices of the rotated direction `[128]`.
    pub indices: [u8; LEN],
    /// |r|, the norm of the codebook's residual.
    pub residual: f16,
    /// Bit i set when ⟨S_i, r⟩ >= 0.
    pub signs: u128,
}

/// A query prepared for [`Qjl::inner_product`], once for many keys.
#[derive(Debug, Clone)]
pub struct QjlQuery {
    rotated: [f32; LEN],
    projected: [f32; LEN],
}

impl Qjl {
    /// Builds a codec of `bits` bits (2 to 5, one of them for the residual) with the matrix S
    /// sampled from `seed`. `None` for other numbers of bits.
    pub fn new(bits: u32, seed: u64) -> Option<Self> {
        let book = match bits {
            2 => Codebook::GAUSS1,
            3 => Codebook::GAUSS2,
            4 => Codebook::GAUSS3,
            5 => Codebook::GAUSS4,
            _ => return None,
        };
        let mut projection = vec![0.0; LEN * LEN];
        Random::new(seed).fill_gaussian(&mut projection, 1.0);
        Some(Self { book, rotation: Rotation::kv(LEN), projection })
    }

    /// Returns the codebook of the first b - 1 bits.
    pub const fn book(&self) -> &Codebook {
        &self.book
    }

    /// Encodes one vector. NaN counts as 0, values are clamped to ±65,504, norms saturate.
    pub fn encode(&self, x: &[f32; LEN]) -> QjlCode {
        let mut y = x.map(|v| clamp(v, F16_MAX));
        self.rotation.forward(&mut y);
        let norm = to_f16(length(&y) as f32);
        let n = norm.to_f32();
        let inverse = if n > 0.0 { (LEN as f32).sqrt() / n } else { 0.0 };
        let indices = y.map(|v| self.book.nearest(v * inverse));
        let coded = self.decode_rotated(n, &indices);
        let r: [f32; LEN] = std::array::from_fn(|j| y[j] - coded[j]);
        let mut signs = 0;
        for (i, projected) in self.project(&r).into_iter().enumerate() {
            signs |= u128::from(projected >= 0.0) << i;
        }
        QjlCode { norm, indices, residual: to_f16(length(&r) as f32), signs }
    }

    /// Rotates and projects a query.
    pub fn query(&self, q: &[f32; LEN]) -> QjlQuery {
        let mut rotated = q.map(|v| clamp(v, F16_MAX));
        self.rotation.forward(&mut rotated);
        QjlQuery { projected: self.project(&rotated), rotated }
    }

    /// Returns the unbiased estimate of ⟨q, x⟩.
    pub fn inner_product(&self, q: &QjlQuery, code: &QjlCode) -> f64 {
        let coded = self.decode_rotated(code.norm.to_f32(), &code.indices);
        let plain: f64 = q.rotated.iter().zip(coded).map(|(&q, c)| f64::from(q) * f64::from(c)).sum();
        let signed = |(i, &p): (usize, &f32)| f64::from(if code.signs >> i & 1 == 1 { p } else { -p });
        let residual: f64 = q.projected.iter().enumerate().map(signed).sum();
        let factor = std::f64::consts::FRAC_PI_2.sqrt() / LEN as f64;
        plain + factor * code.residual.to_f64() * residual
    }

    /// Decodes the codebook indices, still rotated, without norm correction.
    fn decode_rotated(&self, norm: f32, indices: &[u8; LEN]) -> [f32; LEN] {
        indices.map(|i| self.book.centroids()[usize::from(i)] * norm)
    }

    /// Returns S v.
    fn project(&self, v: &[f32; LEN]) -> [f32; LEN] {
        std::array::from_fn(|i| self.projection[i * LEN..][..LEN].iter().zip(v).map(|(&s, &v)| s * v).sum())
    }
}

fn length(v: &[f32]) -> f64 {
    v.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distortion::codebook_mse;
    use crate::lloyd_max::Distribution;

    fn unit(random: &mut Random) -> [f32; LEN] {
        let mut x = [0.0; LEN];
        random.fill_gaussian(&mut x, 1.0);
        let n = length(&x) as f32;
        x.map(|v| v / n)
    }

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    }

    /// q = x is the worst case of the bias: the plain codebook's inner product is short by its
    /// whole error.
    #[test]
    fn estimate_is_unbiased_and_the_plain_codebook_is_biased() {
        let draws = 300;
        for bits in 2..=4 {
            let mut random = Random::new(u64::from(bits));
            let x = unit(&mut random);
            let (mut mean, mut square, mut plain) = (0.0, 0.0, 0.0);
            for seed in 0..draws {
                let codec = Qjl::new(bits, seed).unwrap();
                let code = codec.encode(&x);
                let q = codec.query(&x);
                let error = codec.inner_product(&q, &code) - 1.0;
                mean += error / draws as f64;
                square += error * error / draws as f64;
                plain = dot(&q.rotated, &codec.decode_rotated(code.norm.to_f32(), &code.indices)) - 1.0;
            }
            let standard_error = (square / draws as f64).sqrt();
            assert!(mean.abs() <= 4.0 * standard_error, "{bits} bits: bias {mean} ± {standard_error}");
            assert!(plain <= -8.0 * standard_error, "{bits} bits: {plain} is no clear bias");
        }
    }

    /// The paper bounds the squared error by 0.56, 0.18 and 0.047 over d for 2, 3 and 4 bits, with
    /// its rounded codebook errors; exactly, it is D(b - 1)·(π/2 - 1/d) / d.
    #[test]
    fn squared_error_of_inner_products_matches_the_paper() {
        let d = LEN as f64;
        for (bits, rounded) in [(2, 0.56), (3, 0.18), (4, 0.047)] {
            let codec = Qjl::new(bits, 77).unwrap();
            let mut random = Random::new(1);
            let n = 4_000;
            let mut square = 0.0;
            for _ in 0..n {
                let (x, q) = (unit(&mut random), unit(&mut random));
                let error = codec.inner_product(&codec.query(&q), &codec.encode(&x)) - dot(&q, &x);
                square += error * error / f64::from(n);
            }
            let lost = codebook_mse(codec.book(), Distribution::Sphere { dim: LEN });
            let want = lost * (std::f64::consts::FRAC_PI_2 - 1.0 / d) / d;
            // The mean of 4,000 squares: relative standard error √(2/4,000) = 2.2 %; one matrix
            // adds its own.
            assert!((square / want - 1.0).abs() <= 0.1, "{bits} bits: {square}, theory {want}");
            assert!((want * d / rounded - 1.0).abs() <= 0.15, "{bits} bits: {}", want * d);
            let bound = 3f64.sqrt() * std::f64::consts::PI.powi(2) / d / 4f64.powi(bits as i32);
            assert!(square <= bound, "{bits} bits: {square}, bound {bound}");
            // Why no cache uses it: a plain codebook of as many bits has a smaller squared error.
            let plain = match bits {
                2 => Codebook::GAUSS2,
                3 => Codebook::GAUSS3,
                _ => Codebook::GAUSS4,
            };
            assert!(codebook_mse(&plain, Distribution::Sphere { dim: LEN }) / d <= 0.4 * square);
        }
    }

    #[test]
    fn non_finite_numbers_and_zero_give_finite_estimates() {
        let codec = Qjl::new(3, 1).unwrap();
        let q = codec.query(&[0.1; LEN]);
        for x in [0.0, f32::NAN, f32::INFINITY, f32::from_bits(1), 1e30] {
            let estimate = codec.inner_product(&q, &codec.encode(&[x; LEN]));
            assert!(estimate.is_finite(), "{x}: {estimate}");
        }
        assert_eq!(codec.inner_product(&q, &codec.encode(&[0.0; LEN])), 0.0);
        assert!(Qjl::new(1, 0).is_none() && Qjl::new(6, 0).is_none());
    }
}
