//! Integer level tables for codes of up to 4 bits, and the search for their scale.

use crate::DType;
use crate::kfit::{Importance, weights};

/// The levels of a format's codes, in units of its scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LevelTable {
    levels: &'static [i8; 16],
    /// The value of level 1.
    unit: f32,
    /// Codes in ascending order of their levels; the first `n` are used.
    ascending: &'static [u8; 16],
    n: usize,
}

/// Candidate targets of the value of largest magnitude, in units of the lowest and of the highest
/// level.
const TARGETS: [f32; 10] = [0.88, 0.91, 0.94, 0.97, 1.0, 1.03, 1.06, 1.09, 1.12, 1.16];

impl LevelTable {
    /// iq4_nl and iq4_xs: denser around 0, as weights are.
    pub const IQ4: Self = Self {
        levels: &[-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
        unit: 1.0,
        ascending: &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        n: 16,
    };

    /// E2M1, a float of one sign, two exponent and one mantissa bit: mxfp4 and nvfp4. Code 8 is
    /// minus zero.
    pub const E2M1: Self = Self {
        levels: &[0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
        unit: 0.5,
        ascending: &[15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8],
        n: 15,
    };

    /// iq1: a level of -1, 0 or 1 plus (the lower codes) or minus an eighth.
    pub const IQ1: Self = Self {
        levels: &[-7, 1, 9, 0, -9, -1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        unit: 0.125,
        ascending: &[4, 0, 5, 3, 1, 6, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        n: 7,
    };

    /// iq2: three magnitudes, both signs.
    pub const IQ2: Self = Self {
        levels: &[8, 25, 43, 0, -8, -25, -43, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        unit: 0.125,
        ascending: &[6, 5, 4, 3, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        n: 7,
    };

    /// iq3: eight magnitudes, both signs.
    pub const IQ3: Self = Self {
        levels: &[1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15],
        unit: 1.0,
        ascending: &[15, 14, 13, 12, 11, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7],
        n: 16,
    };

    /// iq3x: eight other magnitudes, both signs.
    pub const IQ3X: Self = Self {
        levels: &[4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62],
        unit: 0.25,
        ascending: &[15, 14, 13, 12, 11, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7],
        n: 16,
    };

    /// Returns the levels of the codes of `dtype`, if they are indices of a table.
    pub const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::IQ4NL | DType::IQ4XS => Some(Self::IQ4),
            DType::MXFP4 | DType::NVFP4 | DType::NVFP4G256 => Some(Self::E2M1),
            DType::IQ1 => Some(Self::IQ1),
            DType::IQ2 => Some(Self::IQ2),
            DType::IQ3 => Some(Self::IQ3),
            DType::IQ3X => Some(Self::IQ3X),
            _ => None,
        }
    }

    /// Returns the levels by code.
    pub const fn levels(&self) -> &'static [i8; 16] {
        self.levels
    }

    /// Returns the value of level 1, in units of the scale.
    pub const fn unit(&self) -> f32 {
        self.unit
    }

    /// Returns the largest magnitude.
    pub const fn largest(&self) -> u8 {
        let (mut max, mut i) = (0, 0);
        while i < self.levels.len() {
            let level = self.levels[i].unsigned_abs();
            max = if level > max { level } else { max };
            i += 1;
        }
        max
    }

    /// Returns the level of `code`.
    #[inline]
    pub fn level(&self, code: u8) -> f32 {
        f32::from(self.levels[usize::from(code)])
    }

    /// Returns the decision points, each with the level above it.
    fn steps(&self) -> impl Iterator<Item = [f32; 2]> {
        self.ascending[..self.n].windows(2).map(|pair| {
            let [low, high] = [self.level(pair[0]), self.level(pair[1])];
            [(low + high) / 2.0, high]
        })
    }

    /// Returns the levels nearest to `x` times `inverse`; ties go up.
    ///
    /// All values are compared with one decision point after the other, which vectorizes; the
    /// encoder spends its time here.
    fn nearest_levels<const N: usize>(&self, x: &[f32; N], inverse: f32) -> [f32; N] {
        let mut levels = [self.level(self.ascending[0]); N];
        for [middle, high] in self.steps() {
            for (level, v) in levels.iter_mut().zip(x) {
                *level = if v * inverse >= middle { high } else { *level };
            }
        }
        levels
    }

    /// Returns 1 / scale, or 0 where that is not a normal number: every code is then the code of 0.
    fn inverse(scale: f32) -> f32 {
        if scale.is_normal() { 1.0 / scale } else { 0.0 }
    }

    /// Returns the codes of `x` under a scale.
    pub(crate) fn encode<const N: usize>(&self, x: &[f32; N], scale: f32) -> [u8; N] {
        let inverse = Self::inverse(scale);
        let below = |v: f32| self.steps().filter(|[middle, _]| v * inverse >= *middle).count();
        x.map(|v| self.ascending[below(v)])
    }

    /// Returns the sum of squared errors of `x` under a scale.
    pub(crate) fn loss<const N: usize>(&self, x: &[f32; N], scale: f32) -> f64 {
        let levels = self.nearest_levels(x, Self::inverse(scale));
        x.iter().zip(levels).map(|(&v, level)| (f64::from(v) - f64::from(scale * level)).powi(2)).sum()
    }

    /// Returns the scale, of either sign, that best fits `x`: maps the value of largest magnitude
    /// near both ends of the table, each time followed by least squares with the
    /// [weights](weights) of k-quants.
    pub(crate) fn fit<const N: usize>(&self, x: &[f32; N], importance: Importance<'_, N>) -> f64 {
        let extreme = x.iter().fold(0.0f32, |best, &v| if v.abs() > best.abs() { v } else { best });
        if !extreme.is_normal() {
            return 0.0;
        }
        let ends = [self.ascending[0], self.ascending[self.n - 1]].map(|end| self.level(end));
        let weights = weights(x, importance);
        let (mut best, mut max_gain) = (0.0, 0.0);
        for target in ends.iter().flat_map(|&end| TARGETS.map(|by| by * end)) {
            let levels = self.nearest_levels(x, target / extreme);
            let (mut xc, mut cc) = (0.0, 0.0);
            for ((&v, level), weight) in x.iter().zip(levels).zip(weights) {
                let (v, c, weight) = (f64::from(v), f64::from(level), f64::from(weight));
                xc += weight * v * c;
                cc += weight * c * c;
            }
            // The weighted error of the best scale xc / cc is a constant minus xc² / cc.
            if xc * xc > max_gain * cc {
                (best, max_gain) = (xc / cc, xc * xc / cc);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn encode_and_snap_select_the_nearest_level() {
        let mut random = Random::new(1);
        for table in [
            LevelTable::IQ4,
            LevelTable::E2M1,
            LevelTable::IQ1,
            LevelTable::IQ2,
            LevelTable::IQ3,
            LevelTable::IQ3X,
        ] {
            let span = table.levels().map(|level| level.unsigned_abs()).into_iter().max().unwrap();
            for _ in 0..2000 {
                let z = (random.gaussian() * f64::from(span)) as f32;
                let far = |level: i8| (z - f32::from(level)).abs();
                let min = table.levels().map(far).into_iter().fold(f32::MAX, f32::min);
                let [code] = table.encode(&[z], 1.0);
                assert_eq!(far(table.levels()[usize::from(code)]), min, "{z}");
                assert_eq!(table.nearest_levels(&[z], 1.0), [table.level(code)], "{z}");
            }
        }
    }

    #[test]
    fn levels_are_their_own_nearest_and_ascend() {
        for table in [
            LevelTable::IQ4,
            LevelTable::E2M1,
            LevelTable::IQ1,
            LevelTable::IQ2,
            LevelTable::IQ3,
            LevelTable::IQ3X,
        ] {
            let ascending = &table.ascending[..table.n];
            assert!(ascending.is_sorted_by(|&a, &b| table.level(a) < table.level(b)));
            for &code in ascending {
                assert_eq!(table.encode(&[table.level(code)], 1.0), [code]);
            }
        }
    }
}
