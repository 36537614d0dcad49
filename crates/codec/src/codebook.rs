//! Scalar codebooks: the values that codes represent.
//!
//! After rotation, a coordinate of a unit vector in 128 dimensions is nearly N(0, 1/128). The
//! Gaussian tables here are the Lloyd-Max quantizers of N(0, 1) to double precision; the tests
//! solve for them again. Other tables in circulation are not minimal: one public 4-bit table has
//! twice the error of this one.

/// 1 / √128: the standard deviation of a coordinate of a random unit vector.
pub const SIGMA_128: f64 = 0.088_388_347_648_318_44;

/// An ascending scalar codebook for unit variance, with its decision points.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Codebook {
    bits: u32,
    levels: &'static [f32],
    mids: &'static [f32],
    centroids: &'static [f32],
}

/// Builds a codebook from its levels in f64; everything derived is rounded to f32 once.
macro_rules! book {
    ($levels:ident, $bits:literal) => {
        Codebook {
            bits: $bits,
            levels: &scaled(&$levels, 1.0),
            mids: &mids::<{ 1 << $bits }, { (1 << $bits) - 1 }>(&$levels),
            centroids: &scaled(&$levels, SIGMA_128),
        }
    };
}

impl Codebook {
    /// Lloyd-Max for N(0, 1), 1 bit, MSE 0.36338. For theory; no format uses it.
    pub const GAUSS1: Self = book!(GAUSS1_LEVELS, 1);
    /// Lloyd-Max for N(0, 1), 2 bits, MSE 0.11748: turbo2.
    pub const GAUSS2: Self = book!(GAUSS2_LEVELS, 2);
    /// Lloyd-Max for N(0, 1), 3 bits, MSE 0.03455: turbo3.
    pub const GAUSS3: Self = book!(GAUSS3_LEVELS, 3);
    /// Lloyd-Max for N(0, 1), 4 bits, MSE 0.00950: turbo4 and tq4_1s.
    pub const GAUSS4: Self = book!(GAUSS4_LEVELS, 4);
    /// The table of tq3_1s files, 3 bits: slightly asymmetric and not minimal (MSE 0.03545), but
    /// fixed by those files.
    pub const TQ3: Self = book!(TQ3_LEVELS, 3);

    /// Returns the bits per index.
    pub const fn bits(&self) -> u32 {
        self.bits
    }

    /// Returns the values for unit variance, ascending, `[1 << bits]`.
    pub const fn levels(&self) -> &'static [f32] {
        self.levels
    }

    /// Returns the decision points between neighbouring levels, ascending, `[(1 << bits) - 1]`.
    pub const fn mids(&self) -> &'static [f32] {
        self.mids
    }

    /// Returns the levels divided by √128, `[1 << bits]`: the value of each index of a turbo block,
    /// in units of the block's scale.
    pub const fn centroids(&self) -> &'static [f32] {
        self.centroids
    }

    /// Returns the index of the level nearest to `z`: the number of decision points `<= z`. A value
    /// on a decision point is rounded up.
    #[inline]
    pub fn nearest(&self, z: f32) -> u8 {
        self.mids.iter().map(|&m| u8::from(z >= m)).sum()
    }
}

const fn scaled<const N: usize>(levels: &[f64; N], by: f64) -> [f32; N] {
    let mut out = [0.0; N];
    let mut i = 0;
    while i < N {
        out[i] = (levels[i] * by) as f32;
        i += 1;
    }
    out
}

const fn mids<const N: usize, const M: usize>(levels: &[f64; N]) -> [f32; M] {
    let mut out = [0.0; M];
    let mut i = 0;
    while i < M {
        out[i] = ((levels[i] + levels[i + 1]) / 2.0) as f32;
        i += 1;
    }
    out
}

const GAUSS1_LEVELS: [f64; 2] = [-0.7978845608028654, 0.7978845608028654];
const GAUSS2_LEVELS: [f64; 4] =
    [-1.510417608499096, -0.4527800346364921, 0.4527800346364921, 1.510417608499096];
const GAUSS3_LEVELS: [f64; 8] = [
    -2.1519457045369874,
    -1.3439092785050006,
    -0.7560052812058781,
    -0.2450941789442218,
    0.2450941789442218,
    0.7560052812058781,
    1.3439092785050006,
    2.1519457045369874,
];
const GAUSS4_LEVELS: [f64; 16] = [
    -2.732589570995161,
    -2.069017226531386,
    -1.6180463860218823,
    -1.2562311973471783,
    -0.9423404564869629,
    -0.6567591185324646,
    -0.3880482994902917,
    -0.1283950298511473,
    0.1283950298511473,
    0.3880482994902917,
    0.6567591185324646,
    0.9423404564869629,
    1.2562311973471783,
    1.6180463860218823,
    2.069017226531386,
    2.732589570995161,
];
const TQ3_LEVELS: [f64; 8] =
    [-1.996684, -1.291398, -0.740341, -0.247508, 0.230106, 0.725222, 1.277503, 1.988943];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distortion::codebook_mse;
    use crate::lloyd_max::Distribution;

    const ALL: [Codebook; 5] =
        [Codebook::GAUSS1, Codebook::GAUSS2, Codebook::GAUSS3, Codebook::GAUSS4, Codebook::TQ3];

    #[test]
    fn tables_ascend_and_have_their_sizes() {
        for book in ALL {
            assert_eq!(book.levels().len(), 1 << book.bits());
            assert_eq!(book.mids().len() + 1, book.levels().len());
            assert!(book.levels().is_sorted() && book.mids().is_sorted() && book.centroids().is_sorted());
        }
    }

    #[test]
    fn nearest_is_nearest_and_ties_go_up() {
        for book in ALL {
            for i in -400..400 {
                let z = i as f32 / 100.0 + 0.003;
                let distance = |level: &f32| (level - z).abs();
                let best = book.levels().iter().map(distance).fold(f32::INFINITY, f32::min);
                assert_eq!(distance(&book.levels()[book.nearest(z) as usize]), best, "{z}");
            }
            for (i, &m) in book.mids().iter().enumerate() {
                assert_eq!(book.nearest(m) as usize, i + 1);
            }
            assert_eq!(book.nearest(f32::NEG_INFINITY), 0);
            assert_eq!(book.nearest(f32::INFINITY) as usize, book.levels().len() - 1);
        }
    }

    #[test]
    fn tq3_table_loses_a_little_more_than_the_minimum() {
        let mse = codebook_mse(&Codebook::TQ3, Distribution::Gaussian);
        assert!((mse - 0.03545).abs() <= 5e-6, "{mse}, minimum 0.03455");
    }

    #[test]
    fn zero_has_the_index_just_above_the_middle() {
        for book in &ALL[..4] {
            assert_eq!(book.nearest(0.0), 1 << (book.bits() - 1));
        }
    }
}
