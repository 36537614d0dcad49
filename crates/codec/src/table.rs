//! Tables of sixteen whole numbers that codes of 4 bits stand for, and the search for a scale in front of them.

/// What the sixteen codes of a format stand for, in units of its scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Table {
    levels: &'static [i8; 16],
    /// Codes in the order of what they stand for.
    ascending: &'static [u8],
}

/// Where the value of largest magnitude may fall, in units of the lowest and of the highest level.
const TARGETS: [f64; 10] = [0.88, 0.91, 0.94, 0.97, 1.0, 1.03, 1.06, 1.09, 1.12, 1.16];

impl Table {
    /// iq4_nl and iq4_xs: closer together around 0, as weights are.
    pub const IQ4: Self = Self {
        levels: &[-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
        ascending: &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    };

    /// E2M1, a float of a sign, two bits of exponent and one of mantissa, times 2: mxfp4 and nvfp4. Code 8, minus zero, is the
    /// other zero.
    pub const E2M1: Self = Self {
        levels: &[0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
        ascending: &[15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7],
    };

    /// By code.
    pub const fn levels(&self) -> &'static [i8; 16] {
        self.levels
    }

    /// What `code` stands for.
    #[inline]
    pub fn level(&self, code: u8) -> f32 {
        f32::from(self.levels[usize::from(code)])
    }

    /// The code of the level nearest to `z`, the higher one of two.
    pub fn nearest(&self, z: f32) -> u8 {
        let is_above = |pair: &[u8]| 2.0 * z >= self.level(pair[0]) + self.level(pair[1]);
        let above = self.ascending.windows(2).map(|pair| usize::from(is_above(pair))).sum::<usize>();
        self.ascending[above]
    }

    /// The codes of `x` under a scale. All of zero where the scale is nearly 0.
    pub(crate) fn encode<const N: usize>(&self, x: &[f32; N], scale: f32) -> [u8; N] {
        let inverse = if scale.is_normal() { 1.0 / scale } else { 0.0 };
        x.map(|v| self.nearest(v * inverse))
    }

    /// Sum of squared errors of `x` under a scale.
    pub(crate) fn loss<const N: usize>(&self, x: &[f32; N], scale: f32) -> f64 {
        let codes = self.encode(x, scale);
        x.iter()
            .zip(codes)
            .map(|(&v, code)| (f64::from(v) - f64::from(scale * self.level(code))).powi(2))
            .sum()
    }

    /// The scale, of either sign, that best fits `x`: the value of largest magnitude is tried around both ends of the table,
    /// each time followed by weighted least squares. Larger values weigh more, as in k-quants.
    pub(crate) fn fit<const N: usize>(&self, x: &[f32; N]) -> f64 {
        let extreme = x.iter().fold(0.0f32, |best, &v| if v.abs() > best.abs() { v } else { best });
        if extreme == 0.0 {
            return 0.0;
        }
        let ends = [self.ascending[0], self.ascending[self.ascending.len() - 1]].map(|end| self.level(end));
        let rms = (x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / N as f64).sqrt();
        let (mut best, mut most) = (0.0, 0.0);
        for target in ends.iter().flat_map(|&end| TARGETS.map(|by| by * f64::from(end))) {
            let inverse = target / f64::from(extreme);
            let (mut xc, mut cc) = (0.0, 0.0);
            for &v in x {
                let v = f64::from(v);
                let c = f64::from(self.level(self.nearest((v * inverse) as f32)));
                let weight = rms + v.abs();
                xc += weight * v * c;
                cc += weight * c * c;
            }
            // The weighted error of the best scale xc / cc is a constant minus xc² / cc.
            if xc * xc > most * cc {
                (best, most) = (xc / cc, xc * xc / cc);
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
    fn the_nearest_level_is_no_further_than_any_other() {
        let mut random = Random::new(1);
        for table in [Table::IQ4, Table::E2M1] {
            let span = table.levels().map(|level| level.unsigned_abs()).into_iter().max().unwrap();
            for _ in 0..2000 {
                let z = (random.gaussian() * f64::from(span)) as f32;
                let far = |level: i8| (z - f32::from(level)).abs();
                let least = table.levels().map(far).into_iter().fold(f32::MAX, f32::min);
                assert_eq!(far(table.levels()[usize::from(table.nearest(z))]), least, "{z}");
            }
        }
    }

    #[test]
    fn levels_are_their_own_nearest_and_ascend() {
        for table in [Table::IQ4, Table::E2M1] {
            let ascending: Vec<f32> = table.ascending.iter().map(|&code| table.level(code)).collect();
            assert!(ascending.is_sorted_by(|a, b| a < b));
            for &code in table.ascending {
                assert_eq!(table.nearest(table.level(code)), code);
            }
        }
    }
}
