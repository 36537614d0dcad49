//! The encoder of iq3_s.
//!
//! Scales are searched as those of k-quants: for 32 values, step sizes around the one that spans
//! them, each followed by weighted least squares. The magnitudes of four values are a row of the
//! grid, which has 512 of the 4,096 combinations of levels. Of a combination that is none of them,
//! the nearest rows are listed once, and the one of least weighted error is taken.

use std::sync::OnceLock;

use half::f16;
use kvant_codec::finite::{F16_MAX, clamp, to_f16};
use kvant_codec::{CodecError, DType, Importance, error_weights};

use super::unpack::iq3_s_row;
use super::{BLOCK, LoadOnlyType};

/// Values with one scale.
const SUB: usize = 32;
const SUBS: usize = BLOCK / SUB;
/// Values of a row of the grid.
const ROW: usize = 4;
const ROWS: usize = 512;
/// Combinations of four levels.
const COMBINATIONS: usize = 1 << (3 * ROW);
/// Distinct distances of the rows that are compared.
const DISTANCES: usize = 3;
/// The largest level, and the largest factor of a scale, 2s + 1.
const MAX_LEVEL: f32 = 15.0;
const MAX_FACTOR: f32 = 31.0;
/// Targets of the largest value, in levels: [`MAX_LEVEL`] plus these fifths.
const OFFSETS: std::ops::RangeInclusive<i8> = -9..=9;
const BYTES: usize = LoadOnlyType::Iq3S.block_bytes();

/// Encodes `values` as iq3_s: minimizes squared errors, each times its `importance`, if given (see
/// [`kvant_codec::encode_weighted`]). NaN counts as 0; values are clamped to ±65,504.
///
/// # Errors
/// [`CodecError::NotWholeBlocks`] unless `values` is a multiple of 256, [`CodecError::BufferSize`]
/// unless `bytes` has 110 for each 256, [`CodecError::Importance`] for another length of
/// `importance`.
pub fn encode_iq3_s(values: &[f32], importance: Option<&[f32]>, bytes: &mut [u8]) -> Result<(), CodecError> {
    let (dtype, n) = (DType::IQ3, values.len());
    let ((blocks, []), expected) = (values.as_chunks::<BLOCK>(), n / BLOCK * BYTES) else {
        return Err(CodecError::NotWholeBlocks { dtype, block: BLOCK, got: n });
    };
    if bytes.len() != expected {
        return Err(CodecError::BufferSize { dtype, values: n, expected, got: bytes.len() });
    }
    if let Some(importance) = importance.filter(|importance| importance.len() != n) {
        return Err(CodecError::Importance { values: n, got: importance.len() });
    }
    let grid = Grid::get();
    for (i, (x, out)) in blocks.iter().zip(bytes.as_chunks_mut::<BYTES>().0).enumerate() {
        let x = x.map(|v| clamp(v, F16_MAX));
        Block::fit(grid, &x, importance.map(|of| &of.as_chunks().0[i])).write(&x, out);
    }
    Ok(())
}

/// The rows of the grid, and those near each combination of levels.
struct Grid {
    /// Levels of each row: 1, 3 ... 15.
    rows: [[f32; ROW]; ROWS],
    /// Rows near each combination, all of them in sequence; the combination alone if it is a row.
    near: Vec<u16>,
    /// Where those of each combination end.
    ends: Vec<u32>,
}

impl Grid {
    fn get() -> &'static Self {
        static GRID: OnceLock<Grid> = OnceLock::new();
        GRID.get_or_init(Self::new)
    }

    fn new() -> Self {
        let level = |code: u16, i: usize| f32::from(code >> (3 * i) & 7).mul_add(2.0, 1.0);
        let rows = std::array::from_fn(|row| iq3_s_row(row).map(|code| f32::from(2 * code + 1)));
        let (mut near, mut ends) = (Vec::new(), Vec::new());
        for combination in 0..COMBINATIONS as u16 {
            let levels: [f32; ROW] = std::array::from_fn(|i| level(combination, i));
            let distance =
                |row: &[f32; ROW]| -> f32 { row.iter().zip(levels).map(|(a, b)| (a - b).powi(2)).sum() };
            let mut distances = rows.each_ref().map(distance);
            let of_rows = distances;
            distances.sort_by(f32::total_cmp);
            let mut distinct = distances.to_vec();
            distinct.dedup();
            let max = if distinct[0] == 0.0 { 0.0 } else { distinct[DISTANCES - 1] };
            near.extend((0..ROWS as u16).filter(|&row| of_rows[usize::from(row)] <= max));
            ends.push(near.len() as u32);
        }
        Self { rows, near, ends }
    }

    /// Returns the row of least weighted error for magnitudes in units of their scale.
    fn nearest(&self, x: [f32; ROW], weights: [f32; ROW]) -> u16 {
        let code = |v: f32| ((v - 1.0) * 0.5).round().clamp(0.0, 7.0) as usize;
        let combination = (0..ROW).fold(0, |codes, i| codes | code(x[i]) << (3 * i));
        let start = combination.checked_sub(1).map_or(0, |before| self.ends[before]);
        let near = &self.near[start as usize..self.ends[combination] as usize];
        let error = |row: u16| -> f32 {
            let levels = self.rows[usize::from(row)];
            (0..ROW).map(|i| weights[i] * (x[i] - levels[i]).powi(2)).sum()
        };
        let mut best = (near[0], f32::INFINITY);
        for &row in near {
            let error = error(row);
            best = if error < best.1 { (row, error) } else { best };
        }
        best.0
    }

    /// Returns the rows of 32 magnitudes under the inverse of a scale.
    fn encode(&self, x: &[f32; SUB], weights: &[f32; SUB], inverse: f32) -> [u16; SUB / ROW] {
        let (x, weights) = (x.as_chunks::<ROW>().0, weights.as_chunks::<ROW>().0);
        std::array::from_fn(|i| self.nearest(x[i].map(|v| v * inverse), weights[i]))
    }

    /// Returns the sums of weighted products of magnitudes and levels, and of squared levels.
    fn sums(&self, x: &[f32; SUB], weights: &[f32; SUB], rows: [u16; SUB / ROW]) -> [f64; 2] {
        let (mut xc, mut cc) = (0.0, 0.0);
        for (i, (x, weight)) in x.iter().zip(weights).enumerate() {
            let level = self.rows[usize::from(rows[i / ROW])][i % ROW];
            xc += weight * x * level;
            cc += weight * level * level;
        }
        [xc.into(), cc.into()]
    }

    /// Returns the scale that best fits 32 magnitudes.
    fn fit(&self, x: &[f32; SUB], weights: &[f32; SUB]) -> f32 {
        let max = x.iter().copied().fold(0.0, f32::max);
        if !max.is_normal() {
            return 0.0;
        }
        let (mut best, mut max_gain) = (0.0, 0.0);
        for offset in OFFSETS {
            let inverse = (MAX_LEVEL + 0.2 * f32::from(offset)) / max;
            let [xc, cc] = self.sums(x, weights, self.encode(x, weights, inverse));
            // The weighted error of the best scale xc / cc is a constant minus xc^2 / cc.
            if xc * xc > max_gain * cc {
                (best, max_gain) = (xc / cc, xc * xc / cc);
            }
        }
        best as f32
    }
}

/// A block of iq3_s, without signs.
struct Block {
    d: f16,
    /// s of the factor 2s + 1.
    scales: [u8; SUBS],
    rows: [[u16; SUB / ROW]; SUBS],
}

impl Block {
    fn fit(grid: &Grid, x: &[f32; BLOCK], importance: Importance<'_, BLOCK>) -> Self {
        let magnitudes = x.map(f32::abs);
        let subs = magnitudes.as_chunks::<SUB>().0;
        let weights: [[f32; SUB]; SUBS] = std::array::from_fn(|j| {
            error_weights(&subs[j], importance.map(|of| &of.as_chunks::<SUB>().0[j]))
        });
        let fitted: [f32; SUBS] = std::array::from_fn(|j| grid.fit(&subs[j], &weights[j]));
        let d = fitted.iter().copied().fold(0.0, f32::max) / MAX_FACTOR;
        let mut block = Self { d: to_f16(d), scales: [0; SUBS], rows: [[0; SUB / ROW]; SUBS] };
        if block.d == f16::ZERO {
            return block;
        }
        let d = block.d.to_f32();
        block.scales = fitted.map(|scale| ((scale / d - 1.0) * 0.5).round().clamp(0.0, 15.0) as u8);
        // The rounded scales change rows, and those the best d.
        let all_weights = error_weights(x, importance);
        let (mut xc, mut cc) = (0.0, 0.0);
        for j in 0..SUBS {
            let factor = f32::from(2 * block.scales[j] + 1);
            block.rows[j] = grid.encode(&subs[j], &weights[j], 1.0 / (d * factor));
            let [of_x, of_levels] = grid.sums(&subs[j], &all_weights.as_chunks::<SUB>().0[j], block.rows[j]);
            xc += of_x * f64::from(factor);
            cc += of_levels * f64::from(factor).powi(2);
        }
        if cc > 0.0 {
            block.d = to_f16((xc / cc) as f32);
        }
        block
    }

    /// Writes the block with the signs of `x`.
    fn write(&self, x: &[f32; BLOCK], out: &mut [u8; BYTES]) {
        out.fill(0);
        let (d, rest) = out.split_at_mut(2);
        d.copy_from_slice(&self.d.to_le_bytes());
        for (at, &row) in self.rows.as_flattened().iter().enumerate() {
            rest[at] = row as u8;
            rest[64 + at / 8] |= ((row >> 8) as u8) << (at % 8);
        }
        for (i, v) in x.iter().enumerate() {
            rest[72 + i / 8] |= u8::from(v.is_sign_negative()) << (i % 8);
        }
        for (j, scale) in self.scales.iter().enumerate() {
            rest[104 + j / 2] |= scale << (4 * (j % 2));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvant_codec::random::Random;

    fn round_trip(x: &[f32], importance: Option<&[f32]>) -> Vec<f32> {
        let mut bytes = vec![0; x.len() / BLOCK * BYTES];
        encode_iq3_s(x, importance, &mut bytes).unwrap();
        let mut back = vec![f32::NAN; x.len()];
        kvant_codec::decode(DType::IQ3, &LoadOnlyType::Iq3S.unpack(&bytes), &mut back).unwrap();
        back
    }

    fn gaussian(n: usize, sigma: f64) -> Vec<f32> {
        let mut x = vec![0.0; n];
        Random::new(0x5eed).fill_gaussian(&mut x, sigma);
        x
    }

    fn error(x: &[f32], back: &[f32], weight: impl Fn(usize) -> f64) -> f64 {
        let of = |i: usize| weight(i) * f64::from(x[i] - back[i]).powi(2);
        (0..x.len()).map(of).sum::<f64>()
    }

    #[test]
    fn error_on_gaussian_weights_is_as_measured() {
        let x = gaussian(256 * 256, 0.02);
        let square = error(&x, &vec![0.0; x.len()], |_| 1.0);
        let rmse = (error(&x, &round_trip(&x, None), |_| 1.0) / square).sqrt();
        assert!((rmse / 0.1329 - 1.0).abs() < 0.02, "{rmse}");
        let mut importance = gaussian(x.len(), 1.0);
        importance.iter_mut().for_each(|v| *v = (2.0 * *v).exp());
        let weight = |i: usize| f64::from(importance[i]);
        let plain = error(&x, &round_trip(&x, None), weight);
        let ratio = error(&x, &round_trip(&x, Some(&importance)), weight) / plain;
        assert!(ratio < 0.5, "{ratio}");
    }

    #[test]
    fn rows_of_the_grid_times_a_scale_stay() {
        let grid = Grid::get();
        let mut random = Random::new(7);
        let mut x = [0.0; BLOCK];
        for (i, sub) in x.as_chunks_mut::<SUB>().0.iter_mut().enumerate() {
            let factor = if i == 0 { 31.0 } else { f32::from(2 * (random.bits() % 16) as u8 + 1) };
            for row in sub.as_chunks_mut::<ROW>().0 {
                *row = grid.rows[random.bits() as usize % ROWS].map(|v| v * factor * 0.25);
                row.iter_mut().for_each(|v| *v = if random.bits() & 1 == 1 { -*v } else { *v });
            }
            // The largest level determines the scale.
            let top = grid.rows.iter().find(|row| row.contains(&MAX_LEVEL)).unwrap();
            sub[..ROW].copy_from_slice(&top.map(|v| v * factor * 0.25));
        }
        assert_eq!(round_trip(&x, None), x);
    }

    #[test]
    fn extreme_values_decode_to_finite_ones() {
        for value in [0.0, f32::NAN, f32::INFINITY, f32::MIN, 1e-30, 1e-8, 65_504.0] {
            let mut x = gaussian(BLOCK, 1.0);
            x[77] = value;
            for x in [x, vec![value; BLOCK]] {
                assert!(round_trip(&x, None).iter().all(|v| v.is_finite()), "{value}");
            }
        }
        assert!(round_trip(&[0.0; BLOCK], None).iter().all(|&v| v == 0.0));
    }

    #[test]
    fn sizes_that_are_no_blocks_are_refused() {
        let refused = |n: usize, importance: usize, n_bytes: usize| {
            let error = encode_iq3_s(&vec![0.0; n], Some(&vec![1.0; importance]), &mut vec![0; n_bytes]);
            error.unwrap_err().to_string()
        };
        assert_eq!(refused(255, 255, 110), "iq3: 255 values are not a multiple of the block of 256");
        assert_eq!(refused(512, 512, 219), "iq3: 512 values take 220 bytes, the buffer has 219");
        assert_eq!(refused(256, 255, 110), "expected the importance of 256 values, got that of 255");
    }
}
