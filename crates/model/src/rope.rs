//! Rotary position embeddings (RoFormer, arXiv 2104.09864) and their context extensions.
//!
//! Pair `i` of a head is rotated by `position * frequency[i]`, `frequency[i] = theta^(-2i /
//! n_rot)`. Scaling methods change the frequencies, and YaRN also the magnitude; both are folded in
//! here once, so that a device only receives cosines and sines.

use std::f64::consts::PI;

use kvant_backend::{Pairing, RopeParams};

/// Context extension of a model beyond its training.
#[derive(Debug, Clone, PartialEq)]
pub enum Scaling {
    /// None. (llama3 scaling is stored as frequency divisors in the file.)
    None,
    /// Positions divided by `factor` (arXiv 2306.15595).
    Linear {
        /// Extension factor.
        factor: f32,
    },
    /// YaRN (arXiv 2309.00071): low frequencies interpolated, high ones unchanged, scores scaled.
    Yarn {
        /// Extension factor.
        factor: f32,
        /// Context length before the extension.
        n_ctx_orig: usize,
        /// Rotations within the original context above which a frequency is unchanged.
        beta_fast: f32,
        /// Rotations below which it is interpolated.
        beta_slow: f32,
        /// Share of the magnitude's growth with the factor that is undone: none at 0, all at 1.
        log_multiplier: f32,
        /// Whether the bounds of the interpolation range are rounded to whole pairs.
        whole_pairs: bool,
    },
}

/// Attention temperature: beyond the training context, scores grow with the position of the query
/// by `1 + scale ln(1 + floor(position / length))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Temperature {
    /// Rate of growth.
    pub scale: f32,
    /// Position at which scores first grow.
    pub length: usize,
}

impl Temperature {
    fn at(self, position: usize) -> f64 {
        1.0 + f64::from(self.scale) * ((position / self.length) as f64).ln_1p()
    }
}

/// Frequencies of a model's rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Pair order and number of rotated values.
    pub params: RopeParams,
    /// Angle per position, `[n_rot / 2]`.
    frequency: Vec<f64>,
    /// Frequencies of contexts up to the original length, if they differ.
    short: Option<ShortFrequencies>,
    magnitude: f64,
    temperature: Option<Temperature>,
    /// Tokens per rotated row, which has the position of the first of them.
    stride: usize,
    /// Component of a [`Place`] that rotates each pair, if the model has M-RoPE: `[n_rot / 2]`.
    axes: Vec<usize>,
}

/// Position of a token: three times its position or, for a row of an image, its time, height and
/// width (M-RoPE, arXiv 2409.12191).
pub type Position = [u32; 3];

/// Frequencies of contexts up to this many tokens.
#[derive(Debug, Clone, PartialEq)]
struct ShortFrequencies {
    frequency: Vec<f64>,
    n_ctx: usize,
}

impl Rope {
    /// Computes the frequencies for `n_rot` values, with `divisors` `[n_rot / 2]` (llama3 scaling)
    /// if the file has them. `None` when a number is invalid.
    pub fn new(
        pairing: Pairing,
        n_rot: usize,
        theta: f32,
        scaling: &Scaling,
        divisors: Option<&[f32]>,
    ) -> Option<Self> {
        let base = f64::from(theta);
        let mut frequency: Vec<f64> =
            (0..n_rot / 2).map(|i| base.powf(-2.0 * i as f64 / n_rot as f64)).collect();
        if let Some(divisors) = divisors {
            frequency.iter_mut().zip(divisors).for_each(|(f, &divisor)| *f /= f64::from(divisor));
        }
        let mut magnitude = 1.0;
        match *scaling {
            Scaling::None => {}
            Scaling::Linear { factor } => frequency.iter_mut().for_each(|f| *f /= f64::from(factor)),
            Scaling::Yarn { factor, n_ctx_orig, beta_fast, beta_slow, log_multiplier, whole_pairs } => {
                let factor = f64::from(factor);
                // Returns the pair with `turns` rotations within the original context.
                let pair = |turns: f32| {
                    n_rot as f64 * (n_ctx_orig as f64 / (f64::from(turns) * 2.0 * PI)).ln()
                        / (2.0 * base.ln())
                };
                let (low, high) = (pair(beta_fast), pair(beta_slow));
                let (low, high) = if whole_pairs { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(n_rot as f64 - 1.0));
                for (i, f) in frequency.iter_mut().enumerate() {
                    let interpolated = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    *f = *f / factor * interpolated + *f * (1.0 - interpolated);
                }
                let growth = 0.1 * factor.ln();
                magnitude = (1.0 + growth) / (1.0 + f64::from(log_multiplier) * growth);
            }
        }
        let sound = frequency.iter().all(|f| f.is_finite()) && f64::is_finite(magnitude);
        let params = RopeParams { pairing, n_rot };
        sound.then_some(Self {
            params,
            frequency,
            short: None,
            magnitude,
            temperature: None,
            stride: 1,
            axes: Vec::new(),
        })
    }

    /// Returns an embedding that rotates none of `n` values, but multiplies them by its magnitude.
    pub fn without_rotation(pairing: Pairing, n: usize) -> Self {
        Self {
            params: RopeParams { pairing, n_rot: n },
            frequency: vec![0.0; n / 2],
            short: None,
            magnitude: 1.0,
            temperature: None,
            stride: 1,
            axes: Vec::new(),
        }
    }

    /// Rotates the last values of heads of `dim` instead of the first: leaves the pairs before them
    /// as they are.
    pub fn of_last(mut self, dim: usize) -> Self {
        let n_before = dim.saturating_sub(self.params.n_rot) / 2;
        self.frequency.splice(0..0, std::iter::repeat_n(0.0, n_before));
        self.params.n_rot = 2 * self.frequency.len();
        self
    }

    /// Rotates by the opposite angles.
    pub fn backwards(mut self) -> Self {
        self.frequency.iter_mut().for_each(|frequency| *frequency = -*frequency);
        self
    }

    /// Rotates rows that stand for `stride` tokens each, the first of which gives the position: of
    /// any tokens those that they complete.
    pub fn pooled(self, stride: usize) -> Self {
        Self { stride, ..self }
    }

    /// Adds the frequencies `short` for contexts of up to `n_ctx` tokens (LongRoPE, arXiv
    /// 2402.13753).
    pub fn beyond(self, n_ctx: usize, short: Self) -> Self {
        Self { short: Some(ShortFrequencies { frequency: short.frequency, n_ctx }), ..self }
    }

    /// Multiplies cosines and sines by `factor`.
    pub fn scaled(self, factor: f32) -> Self {
        Self { magnitude: self.magnitude * f64::from(factor), ..self }
    }

    /// Applies an attention temperature to queries; requires heads that are rotated whole.
    pub fn growing(self, temperature: Temperature) -> Self {
        Self { temperature: Some(temperature), ..self }
    }

    /// Rotates pairs by time, height and width (M-RoPE): `sections` gives the number of pairs for
    /// each, consecutively or `interleaved`.
    pub fn with_axes(self, sections: [usize; 3], interleaved: bool) -> Self {
        let [times, lines, columns] = sections;
        let axis = |pair: usize| match (interleaved, pair % 3) {
            (true, 1) if pair < 3 * lines => 1,
            (true, 2) if pair < 3 * columns => 2,
            (true, _) => 0,
            (false, _) if (times..times + lines).contains(&pair) => 1,
            (false, _) if (times + lines..times + lines + columns).contains(&pair) => 2,
            (false, _) => 0,
        };
        Self { axes: (0..self.params.n_rot / 2).map(axis).collect(), ..self }
    }

    /// Returns the tokens per rotated row.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Returns whether the pairs rotate by several components of a position.
    pub fn has_axes(&self) -> bool {
        !self.axes.is_empty()
    }

    /// Returns the angle per position of each pair in contexts of `n_ctx` tokens, `[n_rot / 2]`,
    /// scaling included.
    pub fn frequencies(&self, n_ctx: usize) -> &[f64] {
        match &self.short {
            Some(short) if n_ctx <= short.n_ctx => &short.frequency,
            _ => &self.frequency,
        }
    }

    /// Returns the longest context with the short frequencies; `None` if all contexts have the
    /// same.
    pub fn n_ctx_short(&self) -> Option<usize> {
        self.short.as_ref().map(|short| short.n_ctx)
    }

    /// Returns the factor on cosines and sines, without the attention temperature; 1 except for
    /// YaRN and LongRoPE.
    pub fn magnitude(&self) -> f64 {
        self.magnitude
    }

    /// Appends cosines and sines for positions `start .. start + rows` of a context of `n_ctx`
    /// tokens, `[rows, n_rot / 2, 2]`, to `out`; of [pooled rows](Self::pooled) for those that
    /// these tokens complete.
    pub fn angles(&self, n_ctx: usize, start: usize, rows: usize, out: &mut Vec<f32>) {
        for row in start / self.stride..(start + rows) / self.stride {
            let position = row * self.stride;
            let magnitude = self.magnitude * self.temperature.map_or(1.0, |grows| grows.at(position));
            for frequency in self.frequencies(n_ctx) {
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                out.extend([(cos * magnitude) as f32, (sin * magnitude) as f32]);
            }
        }
    }

    /// Appends the same for tokens at these positions: those of the last ones up to the tokens
    /// `start .. start + rows`, and for [pooled rows](Self::pooled) at least `stride - 1` before
    /// these.
    pub fn angles_at(
        &self,
        n_ctx: usize,
        start: usize,
        rows: usize,
        places: &[Position],
        out: &mut Vec<f32>,
    ) {
        let first = start + rows - places.len();
        for row in start / self.stride..(start + rows) / self.stride {
            let place = places[row * self.stride - first];
            let magnitude =
                self.magnitude * self.temperature.map_or(1.0, |grows| grows.at(place[0] as usize));
            for (pair, frequency) in self.frequencies(n_ctx).iter().enumerate() {
                let position = place[self.axes.get(pair).copied().unwrap_or(0)];
                let (sin, cos) = (f64::from(position) * frequency).sin_cos();
                out.extend([(cos * magnitude) as f32, (sin * magnitude) as f32]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_angles_are_position_times_frequency() {
        let rope = Rope::new(Pairing::Halves, 4, 100.0, &Scaling::None, None).unwrap();
        let mut out = Vec::new();
        rope.angles(64, 3, 1, &mut out);
        let want = [3f32.cos(), 3f32.sin(), 0.3f32.cos(), 0.3f32.sin()];
        assert!(out.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6), "{out:?}");
    }

    #[test]
    fn the_last_values_rotate_and_back() {
        let rope = Rope::new(Pairing::Interleaved, 4, 100.0, &Scaling::None, None).unwrap();
        let (mut plain, mut last, mut back) = (Vec::new(), Vec::new(), Vec::new());
        rope.angles(64, 7, 2, &mut plain);
        let of_last = rope.of_last(8);
        assert_eq!(of_last.params.n_rot, 8);
        of_last.angles(64, 7, 2, &mut last);
        of_last.backwards().angles(64, 7, 2, &mut back);
        for (row, plain) in plain.chunks_exact(4).enumerate() {
            assert_eq!(last[8 * row..][..8], [&[1.0, 0.0, 1.0, 0.0], plain].concat());
            let want: Vec<f32> = last[8 * row..][..8].chunks_exact(2).flat_map(|x| [x[0], -x[1]]).collect();
            assert_eq!(back[8 * row..][..8], want);
        }
    }

    #[test]
    fn pooled_rows_have_the_positions_of_their_first_tokens() {
        let rope = Rope::new(Pairing::Halves, 2, 100.0, &Scaling::None, None).unwrap();
        for (start, rows, positions) in [(0, 3, &[][..]), (3, 1, &[0]), (5, 8, &[4, 8]), (8, 4, &[8])] {
            let (mut pooled, mut plain) = (Vec::new(), Vec::new());
            rope.clone().pooled(4).angles(64, start, rows, &mut pooled);
            positions.iter().for_each(|&position| rope.angles(64, position, 1, &mut plain));
            assert_eq!(pooled, plain, "{start}, {rows}");
            pooled.clear();
            let end = (start + rows) as u32;
            let places: Vec<_> = (end.saturating_sub(rows as u32 + 3)..end).map(|i| [i; 3]).collect();
            rope.clone().pooled(4).angles_at(64, start, rows, &places, &mut pooled);
            assert_eq!(pooled, plain, "{start}, {rows}, at places");
        }
    }

    #[test]
    fn without_rotation_only_the_magnitude_grows() {
        let grows = Temperature { scale: 0.5, length: 2 };
        let mut out = Vec::new();
        Rope::without_rotation(Pairing::Halves, 4).growing(grows).angles(64, 1, 2, &mut out);
        let grown = 1.0 + 0.5 * std::f32::consts::LN_2;
        assert_eq!(out, [1.0, 0.0, 1.0, 0.0, grown, 0.0, grown, 0.0]);
    }

    #[test]
    fn mrope_pairs_rotate_by_their_section() {
        let rope = Rope::new(Pairing::Halves, 16, 100.0, &Scaling::None, None).unwrap();
        let apart = rope.clone().with_axes([2, 3, 3], false);
        assert_eq!(apart.axes, [0, 0, 1, 1, 1, 2, 2, 2]);
        let in_turns = rope.clone().with_axes([4, 2, 2], true);
        assert_eq!(in_turns.axes, [0, 1, 2, 0, 1, 2, 0, 0]);
        let (mut plain, mut placed) = (Vec::new(), Vec::new());
        rope.angles(64, 5, 2, &mut plain);
        in_turns.angles_at(64, 5, 2, &[[5; 3], [6; 3]], &mut placed);
        assert_eq!(plain, placed);
        placed.clear();
        apart.angles_at(64, 7, 1, &[[1, 5, 2]], &mut placed);
        assert_eq!(placed[4..10], plain[4..10]);
    }

    #[test]
    fn yarn_preserves_fast_pairs_and_interpolates_slow_ones() {
        let scaling = |log_multiplier, whole_pairs| Scaling::Yarn {
            factor: 4.0,
            n_ctx_orig: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            log_multiplier,
            whole_pairs,
        };
        let plain = Rope::new(Pairing::Halves, 64, 10_000.0, &Scaling::None, None).unwrap();
        let yarn = |by, whole| Rope::new(Pairing::Halves, 64, 10_000.0, &scaling(by, whole), None).unwrap();
        assert_eq!(yarn(1.0, true).magnitude, 1.0);
        // The interpolation ends at pair 32 ln(64 / 2π) / ln(10000) = 8.0639, or at the next whole
        // one.
        let [yarn, exact] = [true, false].map(|whole| yarn(0.0, whole));
        for (rope, end) in [(&yarn, 9.0), (&exact, 8.0639)] {
            let want = 1.0 - 0.75 * 5.0 / end;
            assert!((rope.frequency[5] / plain.frequency[5] - want).abs() < 1e-5, "{end}");
        }
        assert_eq!(yarn.frequency[0], plain.frequency[0]);
        assert!((yarn.frequency[31] * 4.0 / plain.frequency[31] - 1.0).abs() < 1e-12);
        assert!((yarn.magnitude - (1.0 + 0.1 * 4f64.ln())).abs() < 1e-12);
    }

    #[test]
    fn scores_grow_at_multiples_of_the_length() {
        let grows = Temperature { scale: 0.5, length: 10 };
        let rope = Rope::new(Pairing::Halves, 2, 100.0, &Scaling::None, None).unwrap().growing(grows);
        for (position, by) in [(0, 1.0), (9, 1.0), (10, 1.0 + 0.5 * 2f64.ln()), (39, 1.0 + 0.5 * 4f64.ln())] {
            let mut out = Vec::new();
            rope.angles(64, position, 1, &mut out);
            let length = f64::from(out[0]).hypot(f64::from(out[1]));
            assert!((length - by).abs() <= 4.0 * f64::from(f32::EPSILON), "{position}: {length} for {by}");
        }
    }

    #[test]
    fn longrope_frequencies_follow_the_context_length() {
        let divided = |by| Rope::new(Pairing::Halves, 4, 100.0, &Scaling::None, Some(&[by; 2])).unwrap();
        let (long, short) = (divided(8.0), divided(2.0));
        let rope = long.clone().beyond(32, short.clone()).scaled(1.5);
        assert_eq!((rope.magnitude(), rope.n_ctx_short()), (1.5, Some(32)));
        for (n_ctx, want) in [(1, &short), (32, &short), (33, &long), (1000, &long)] {
            assert_eq!(rope.frequencies(n_ctx), want.frequencies(n_ctx));
            let (mut got, mut plain) = (Vec::new(), Vec::new());
            // The position is valid in both, so that the context length alone decides.
            rope.angles(n_ctx, 5, 1, &mut got);
            want.angles(n_ctx, 5, 1, &mut plain);
            assert!(got.iter().zip(plain).all(|(got, plain)| (got - 1.5 * plain).abs() < 1e-6), "{n_ctx}");
        }
    }

    #[test]
    fn invalid_rope_parameters_are_rejected() {
        assert!(Rope::new(Pairing::Halves, 4, 0.0, &Scaling::None, None).is_none());
        assert!(Rope::new(Pairing::Halves, 4, 1e4, &Scaling::Linear { factor: 0.0 }, None).is_none());
        assert!(Rope::new(Pairing::Halves, 4, 1e4, &Scaling::None, Some(&[1.0, 0.0])).is_none());
    }
}
