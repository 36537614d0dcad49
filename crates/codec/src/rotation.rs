//! The signed Hadamard rotation.
//!
//! Quantization with one scale per slice and a Gaussian codebook requires coordinates distributed
//! like independent Gaussians of equal variance. Real K and V vectors are not: a few channels carry
//! most of the energy. A random rotation gives any vector this distribution (TurboQuant, [arXiv
//! 2504.19874](https://arxiv.org/abs/2504.19874)); a Hadamard matrix between two diagonal sign
//! matrices is as good in practice and costs n log n additions (QuIP#, [arXiv
//! 2402.04396](https://arxiv.org/abs/2402.04396)):
//!
//! ```text
//! forward   y = D(after)  · H/√n · D(before) · x
//! inverse   x = D(before) · H/√n · D(after)  · y
//! ```
//!
//! H is the unnormalized Sylvester matrix in natural order, symmetric with H·H = n·I, so both maps
//! are orthogonal: they preserve inner products and norms, and attention may use rotated keys with
//! a rotated query.

/// A signed Hadamard rotation of slices of `len` values. The masks are data, so no rotation is
/// global.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rotation {
    len: usize,
    before: u128,
    after: u128,
}

impl Rotation {
    /// Builds a rotation of slices of `len` values; bit i of a mask flips the sign of value i
    /// before or after the butterfly.
    ///
    /// # Panics
    /// Unless `len` is a power of two up to 128.
    pub const fn new(len: usize, before: u128, after: u128) -> Self {
        assert!(len.is_power_of_two() && len <= 128, "a rotation takes a power of two up to 128");
        Self { len, before, after }
    }

    /// Returns the rotation of KV-cache slices of `len` values: fixed sign masks, the same for
    /// every layer, head, K and V.
    ///
    /// The masks are those of the public turbo caches (numpy `default_rng(42)`), so dumps can be
    /// compared; a shorter slice uses their lowest bits.
    ///
    /// # Panics
    /// Unless `len` is a power of two up to 128.
    pub const fn kv(len: usize) -> Self {
        const BEFORE: u128 = 0x49f250a9a4c63bbb_42f85949e46a0359;
        const AFTER: u128 = 0xbea56562b7a5357a_3f628fdc16acee90;
        assert!(0 < len && len <= 128, "a rotation takes a power of two up to 128");
        let mask = u128::MAX >> (128 - len);
        Self::new(len, BEFORE & mask, AFTER & mask)
    }

    /// Returns the rotation of the TQ weight formats: 32 values, signs before the butterfly only.
    pub const fn tq() -> Self {
        Self::new(32, 0x696b4b4a, 0)
    }

    /// Returns the values per slice.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns false: a rotation has at least one value. Accompanies `len` by convention.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Returns the sign mask applied before the butterfly, bit i for value i.
    pub const fn before(&self) -> u128 {
        self.before
    }

    /// Returns the sign mask applied after the butterfly, bit i for value i.
    pub const fn after(&self) -> u128 {
        self.after
    }

    /// Rotates each slice of [`Rotation::len`] values of `x` in place.
    ///
    /// # Panics
    /// Unless the length of `x` is a multiple of [`Rotation::len`].
    pub fn forward(&self, x: &mut [f32]) {
        self.apply(x, self.before, self.after);
    }

    /// Inverse of [`Rotation::forward`], up to rounding.
    ///
    /// # Panics
    /// Unless the length of `y` is a multiple of [`Rotation::len`].
    pub fn inverse(&self, y: &mut [f32]) {
        self.apply(y, self.after, self.before);
    }

    fn apply(&self, x: &mut [f32], first: u128, last: u128) {
        assert!(x.len().is_multiple_of(self.len), "{} values, slices of {}", x.len(), self.len);
        let norm = (1.0 / (self.len as f64).sqrt()) as f32;
        for slice in x.chunks_exact_mut(self.len) {
            flip(slice, first);
            wht(slice);
            slice.iter_mut().for_each(|v| *v *= norm);
            flip(slice, last);
        }
    }
}

/// Flips the sign of value i where bit i of `mask` is set.
fn flip(x: &mut [f32], mask: u128) {
    for (i, v) in x.iter_mut().enumerate() {
        let sign = ((mask >> i) as u32 & 1) << 31;
        *v = f32::from_bits(v.to_bits() ^ sign);
    }
}

/// Applies the unnormalized Walsh-Hadamard transform in natural (Sylvester) order, in place:
/// strides 1, 2, 4, ..., each pair (a, b) becoming (a + b, a - b).
///
/// # Panics
/// Unless the length is a power of two.
pub fn wht(x: &mut [f32]) {
    assert!(x.len().is_power_of_two(), "a Hadamard transform takes a power of two, not {}", x.len());
    let mut h = 1;
    while h < x.len() {
        for pair in x.chunks_exact_mut(2 * h) {
            let (a, b) = pair.split_at_mut(h);
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        h *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Multiplies by the dense matrix: `H[i][j]` = (-1)^popcount(i & j).
    fn dense(r: &Rotation, x: &[f32]) -> Vec<f64> {
        let n = r.len();
        let sign = |mask: u128, i: usize| if mask >> i & 1 == 1 { -1.0 } else { 1.0 };
        (0..n)
            .map(|i| {
                let sum: f64 = (0..n)
                    .map(|j| {
                        let h = if (i & j).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
                        h * sign(r.before(), j) * f64::from(x[j])
                    })
                    .sum();
                sign(r.after(), i) * sum / (n as f64).sqrt()
            })
            .collect()
    }

    #[test]
    fn butterfly_equals_the_dense_matrix_and_inverts() {
        for r in [
            Rotation::kv(128),
            Rotation::kv(64),
            Rotation::kv(32),
            Rotation::tq(),
            Rotation::new(1, 1, 1),
            Rotation::new(64, 5, 9),
        ] {
            let x: Vec<f32> = (0..r.len()).map(|i| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0).collect();
            let mut y = x.clone();
            r.forward(&mut y);
            for (got, want) in y.iter().zip(dense(&r, &x)) {
                // 8 additions deep on values below 2: 8 * 2^-24 * 2 * sqrt(128) is 1.1e-5.
                assert!((f64::from(*got) - want).abs() <= 1.1e-5, "{got} {want}");
            }
            r.inverse(&mut y);
            for (got, want) in y.iter().zip(&x) {
                assert!((got - want).abs() <= 1e-5, "{got} {want}");
            }
        }
    }

    #[test]
    fn masks_are_the_published_ones() {
        assert_eq!(
            (Rotation::kv(128).before().count_ones(), Rotation::kv(128).after().count_ones()),
            (60, 70)
        );
        let tq: u128 = (0..32u32).map(|i| u128::from(i.wrapping_mul(0x9e3779b9) >> 31) << i).sum();
        assert_eq!((Rotation::tq().before(), Rotation::tq().after()), (tq, 0));
    }

    #[test]
    fn slices_rotate_independently() {
        let r = Rotation::kv(128);
        let mut x: Vec<f32> = (0..256).map(|i| (i as f32).sin()).collect();
        let (mut a, mut b) = (x[..128].to_vec(), x[128..].to_vec());
        r.forward(&mut x);
        r.forward(&mut a);
        r.forward(&mut b);
        assert_eq!(x, [a, b].concat());
    }
}
