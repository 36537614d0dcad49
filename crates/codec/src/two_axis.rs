//! Scales along both axes of a tile of tokens, then plain rounding: KVarN's codec. Research only.
//!
//! KVarN ([arXiv 2606.03458](https://arxiv.org/abs/2606.03458)) takes [`TOKENS`] rows of one head,
//! rotates each, and divides columns and rows by their standard deviations, alternately and
//! [`ROUNDS`] times, until all are 1. The result is rounded to evenly spaced steps between the
//! least and the largest value of each channel (keys) or token (values):
//!
//! ```text
//! x[t, i] ≈ token[t] · channel[i] · (least[l] + step[l] · code[t, i])     l = i (keys), t (values)
//! ```
//!
//! The scale of the stepped axis is folded into least and step. A tile thus stores two f16 for each
//! of its channels (keys) or tokens (values), and one for each line of the other axis: 0.375 bits
//! per value at 128 tokens of 128 dims.
//!
//! No cache format uses it: it serves to compare our formats with KVarN on the same vectors.

use crate::Side;
use crate::finite::to_f16;
use crate::tile::{prepare_row, restore_row};

/// Tokens per tile; the last tile of a sequence may have fewer.
pub const TOKENS: usize = 128;

/// Number of alternating normalizations of both axes.
pub const ROUNDS: usize = 16;

/// KVarN codes of `bits` bits for rows of one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TwoAxis {
    bits: u32,
    side: Side,
}

impl TwoAxis {
    /// Uses codes of 1 to 8 bits. `None` for other numbers.
    pub fn new(bits: u32, side: Side) -> Option<Self> {
        (1..=8).contains(&bits).then_some(Self { bits, side })
    }

    /// Returns the stored bits per value of a tile of `n` rows of `dim` values, scales included.
    pub fn bits_per_value(self, n: usize, dim: usize) -> f64 {
        let (stepped, other) = match self.side {
            Side::K => (dim, n),
            Side::V => (n, dim),
        };
        f64::from(self.bits) + (32 * stepped + 16 * other) as f64 / (n * dim) as f64
    }

    /// Encodes and decodes the rows of a tile, `[n, dim]`, in place.
    ///
    /// # Panics
    /// When `dim` is not a multiple of 32: rows are not padded.
    pub fn apply(self, rows: &mut [f32], dim: usize) {
        let mut tile = Tile::rotated(rows, dim);
        let mut scales = [vec![1.0; rows.len() / dim], vec![1.0; dim]];
        for _ in 0..ROUNDS {
            for axis in [Axis::Channel, Axis::Token] {
                tile.normalize(axis, &mut scales[axis as usize]);
            }
        }
        let stepped = if self.side == Side::K { Axis::Channel } else { Axis::Token };
        tile.round(stepped, self.bits, &scales);
        tile.restore(rows);
    }
}

/// The axis that scales run along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Axis {
    /// One scale per row.
    Token,
    /// One scale per column.
    Channel,
}

/// Rotated rows, `[n, dim]`.
struct Tile {
    values: Vec<f32>,
    dim: usize,
}

impl Tile {
    fn rotated(rows: &[f32], dim: usize) -> Self {
        let mut values = vec![0.0; rows.len()];
        values
            .chunks_exact_mut(dim)
            .zip(rows.chunks_exact(dim))
            .for_each(|(to, row)| prepare_row(true, row, to));
        Self { values, dim }
    }

    /// Returns the value indices of line `index` along `axis`.
    fn line(&self, axis: Axis, index: usize) -> impl Iterator<Item = usize> + use<> {
        let (first, by, end) = match axis {
            Axis::Token => (index * self.dim, 1, (index + 1) * self.dim),
            Axis::Channel => (index, self.dim, self.values.len()),
        };
        (first..end).step_by(by)
    }

    /// Divides each line along `axis` by its standard deviation and multiplies its scale by it.
    /// Constant lines are left unchanged.
    fn normalize(&mut self, axis: Axis, scales: &mut [f32]) {
        for (index, scale) in scales.iter_mut().enumerate() {
            let line = self.line(axis, index);
            let values = || self.line(axis, index).map(|at| f64::from(self.values[at]));
            let n = values().count() as f64;
            let mean = values().sum::<f64>() / n;
            let sd = (values().map(|x| (x - mean).powi(2)).sum::<f64>() / n).sqrt() as f32;
            if sd > f32::MIN_POSITIVE {
                line.for_each(|at| self.values[at] /= sd);
                *scale *= sd;
            }
        }
    }

    /// Rounds each line along `stepped` to steps from its least value to its largest, and
    /// multiplies by the scales, all rounded to f16.
    fn round(&mut self, stepped: Axis, bits: u32, [tokens, channels]: &[Vec<f32>; 2]) {
        let (of_lines, of_others) = match stepped {
            Axis::Token => (tokens, channels),
            Axis::Channel => (channels, tokens),
        };
        let half = |x: f32| to_f16(x).to_f32();
        let max_code = ((1u32 << bits) - 1) as f32;
        for (index, scale) in of_lines.iter().enumerate() {
            let values = self.line(stepped, index).map(|at| self.values[at]);
            let (min, largest) =
                values.fold((f32::INFINITY, f32::NEG_INFINITY), |(a, b), x| (a.min(x), b.max(x)));
            let step = (largest - min) / max_code;
            let (stored_min, stored_step) = (half(min * scale), half(step * scale));
            for (at, other) in self.line(stepped, index).zip(of_others) {
                let code = if step > 0.0 { ((self.values[at] - min) / step).round() } else { 0.0 };
                self.values[at] = (stored_min + stored_step * code) * half(*other);
            }
        }
    }

    fn restore(mut self, rows: &mut [f32]) {
        let stored = self.values.chunks_exact_mut(self.dim);
        rows.chunks_exact_mut(self.dim).zip(stored).for_each(|(row, from)| restore_row(true, from, row));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn relative_error(two_axis: TwoAxis, rows: &[f32], dim: usize) -> f64 {
        let mut back = rows.to_vec();
        back.chunks_mut(TOKENS * dim).for_each(|tile| two_axis.apply(tile, dim));
        let square = |x: f64| x * x;
        let error: f64 = rows.iter().zip(&back).map(|(a, b)| square(f64::from(a - b))).sum();
        error / rows.iter().map(|&x| square(f64::from(x))).sum::<f64>()
    }

    /// Steps between the least and largest of n Gaussians lose step² / 12: the mean range of 128
    /// Gaussians is 5.2.
    #[test]
    fn error_on_gaussians_follows_their_range() {
        let mut rows = vec![0.0; 1024 * 128];
        Random::new(3).fill_gaussian(&mut rows, 0.3);
        for side in [Side::K, Side::V] {
            for (bits, max_off) in [(8, 0.1), (4, 0.1), (3, 0.1)] {
                let two_axis = TwoAxis::new(bits, side).unwrap();
                assert_eq!(two_axis.bits_per_value(128, 128), f64::from(bits) + 0.375);
                let steps = f64::from((1u32 << bits) - 1);
                let want = (5.2 / steps).powi(2) / 12.0;
                let got = relative_error(two_axis, &rows, 128);
                assert!((got / want - 1.0).abs() < max_off, "{bits} bits of {side:?}: {got} {want}");
            }
        }
    }

    /// Channels and tokens that are always large cost no more: the purpose of two axes.
    #[test]
    fn scales_of_channels_and_tokens_are_normalized_away() {
        let mut rows = vec![0.0; 128 * 64];
        Random::new(4).fill_gaussian(&mut rows, 1.0);
        let mut rotated = Tile::rotated(&rows, 64);
        for (i, x) in rotated.values.iter_mut().enumerate() {
            *x *= [1.0, 30.0][usize::from(i % 64 == 5)] * [1.0, 10.0][usize::from(i / 64 % 9 == 2)];
        }
        let mut scaled = rows.clone();
        rotated.restore(&mut scaled);
        let two_axis = TwoAxis::new(4, Side::K).unwrap();
        let (plain, uneven) = (relative_error(two_axis, &rows, 64), relative_error(two_axis, &scaled, 64));
        // Nearly all energy is now in the 15 values of large channel and token: their mean varies.
        assert!(uneven < 2.0 * plain, "{uneven} {plain}");
    }

    #[test]
    fn constant_tiles_round_trip() {
        for rows in [vec![0.0; 128 * 32], vec![2.0; 128 * 32], vec![2.0; 32]] {
            let mut back = rows.clone();
            TwoAxis::new(8, Side::V).unwrap().apply(&mut back, 32);
            assert!(rows.iter().zip(&back).all(|(a, b)| (a - b).abs() < 0.05), "{back:?}");
        }
        assert_eq!(TwoAxis::new(0, Side::K), None);
        assert_eq!(TwoAxis::new(9, Side::K), None);
    }
}
