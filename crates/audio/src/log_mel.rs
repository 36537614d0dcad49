//! Log-mel spectrograms.
//!
//! ```text
//! X[t, k] = Σ_n w[n] x[hop t + n - before] exp(-2πi k n / n_fft)
//! Whisper (arXiv 2212.04356, section 2.2):
//!     L[t, m] = log10(max(Σ_k F[m, k] |X[t, k]|², 1e-10))
//!     y = (max(L, max L - 8) + 4) / 4
//! Gemma 3n: y = ln max(Σ_k F[m, k] |X[t, k]|, 1e-5),  of x with pre-emphasis
//! Gemma 4:  y = ln(Σ_k F[m, k] |X[t, k]| + 1e-3)
//! ```
//!
//! w is the periodic Hann window, F the triangular filters of a mel scale.

use realfft::RealFftPlanner;

use crate::clip::SAMPLE_RATE;

/// Samples between two frames (10 ms).
pub(crate) const HOP: usize = 160;

/// Dynamic range of Whisper's spectrogram, in powers of ten.
const RANGE: f32 = 8.0;

/// How a family computes its spectrogram.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spectrogram {
    /// Samples of a frame.
    pub frame: usize,
    /// Samples of its Fourier transform: frames are padded with zeros.
    n_fft: usize,
    /// Samples of the first frame before the clip.
    before: usize,
    /// Share of the preceding sample of the frame that is subtracted from each.
    preemphasis: f64,
    scale: MelScale,
    /// Lowest and highest frequency of the filters.
    hertz: [f64; 2],
    output: Output,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum MelScale {
    /// 3 mels per 200 Hz below 1 kHz, and 27 per factor of 6.4 above; filters have area 1 (Auditory
    /// Toolbox, 1998).
    Slaney,
    /// 2595 log10(1 + f / 700); filters have height 1 (HTK).
    Htk,
}

/// What becomes of the sums of filters.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Output {
    /// Of energies: the logarithm within [`RANGE`] of the largest.
    Ranged,
    /// Of magnitudes: the logarithm of at least this.
    AtLeast(f64),
    /// Of magnitudes: the logarithm after adding this.
    Above(f64),
}

/// Whisper's: the clip is reflected at both ends, and has a frame for every whole 10 ms.
pub(crate) const WHISPER: Spectrogram = Spectrogram {
    frame: 400,
    n_fft: 400,
    before: 200,
    preemphasis: 0.0,
    scale: MelScale::Slaney,
    hertz: [0.0, 8_000.0],
    output: Output::Ranged,
};
/// Gemma 3n's: frames lie within the clip.
pub(crate) const GEMMA3N: Spectrogram = Spectrogram {
    frame: 512,
    n_fft: 1024,
    before: 0,
    preemphasis: 0.97,
    scale: MelScale::Htk,
    hertz: [125.0, 7_600.0],
    output: Output::AtLeast(1e-5),
};
/// Gemma 4's: half of the first frame is silence before the clip.
pub(crate) const GEMMA4: Spectrogram = Spectrogram {
    frame: 320,
    n_fft: 512,
    before: 160,
    preemphasis: 0.0,
    scale: MelScale::Htk,
    hertz: [0.0, 8_000.0],
    output: Output::Above(1e-3),
};

/// A triangular filter: its first bin and the weights from there.
struct Filter {
    first: usize,
    weights: Vec<f64>,
}

impl Spectrogram {
    /// Returns the smallest number of samples that have a frame.
    pub fn min_samples(&self) -> usize {
        match self.output {
            // Ends are reflected.
            Output::Ranged => self.before + 1,
            // Behind a frame of Gemma is one sample more.
            Output::AtLeast(_) | Output::Above(_) => self.frame + 1 - self.before,
        }
    }

    /// Returns the number of frames of at least [`min_samples`](Self::min_samples).
    pub fn n_frames(&self, n_samples: usize) -> usize {
        match self.output {
            Output::Ranged => n_samples / HOP,
            Output::AtLeast(_) | Output::Above(_) => (n_samples - self.min_samples()) / HOP + 1,
        }
    }

    /// Computes the spectrogram `[frames, n_mels]` of samples at 16 kHz.
    ///
    /// # Panics
    /// For fewer than [`min_samples`](Self::min_samples).
    pub fn of(&self, samples: &[f32], n_mels: usize) -> Vec<f32> {
        let (n, min) = (samples.len(), self.min_samples());
        assert!(n >= min, "{n} samples, at least {min}");
        let transform = RealFftPlanner::<f64>::new().plan_fft_forward(self.n_fft);
        let (mut input, mut spectrum) = (transform.make_input_vec(), transform.make_output_vec());
        let mut scratch = transform.make_scratch_vec();
        let (window, filters) = (self.hann_window(), self.filters(n_mels));
        let mut values = Vec::with_capacity(self.n_frames(n) * n_mels);
        for frame in 0..self.n_frames(n) {
            // The first sample of a frame stands for the one before it.
            let mut last = self.sample(samples, HOP * frame);
            input.fill(0.0);
            for (at, (x, w)) in input.iter_mut().zip(&window).enumerate() {
                let sample = self.sample(samples, HOP * frame + at);
                *x = w * (sample - self.preemphasis * last);
                last = sample;
            }
            transform
                .process_with_scratch(&mut input, &mut spectrum, &mut scratch)
                .expect("buffers of the transform's own sizes");
            values.extend(filters.iter().map(|filter| {
                let bins = spectrum[filter.first..].iter().zip(&filter.weights);
                self.output
                    .of_sum(bins.map(|(bin, weight)| weight * self.output.of_bin(bin.norm_sqr())).sum())
            }));
        }
        if self.output == Output::Ranged {
            let floor = values.iter().copied().fold(f32::NEG_INFINITY, f32::max) - RANGE;
            values.iter_mut().for_each(|x| *x = (x.max(floor) + 4.0) / 4.0);
        }
        values
    }

    /// Returns a sample, counted from those before the clip.
    fn sample(&self, samples: &[f32], at: usize) -> f64 {
        let n = samples.len();
        let index = match self.output {
            Output::Ranged => {
                let at = at.abs_diff(self.before);
                Some(if at < n { at } else { 2 * (n - 1) - at })
            }
            Output::AtLeast(_) | Output::Above(_) => at.checked_sub(self.before),
        };
        index.map_or(0.0, |index| f64::from(samples[index]))
    }

    fn hann_window(&self) -> Vec<f64> {
        let turn = std::f64::consts::TAU / self.frame as f64;
        (0..self.frame).map(|n| 0.5 - 0.5 * (turn * n as f64).cos()).collect()
    }

    /// Returns filters that are equally spaced on the mel scale.
    fn filters(&self, n_mels: usize) -> Vec<Filter> {
        let [lowest, highest] = self.hertz.map(|hertz| self.scale.mel(hertz));
        let step = (highest - lowest) / (n_mels + 1) as f64;
        let edge = |m: usize| self.scale.hertz(lowest + step * m as f64);
        let n_bins = self.n_fft / 2 + 1;
        let filter = |m: usize| {
            let [low, centre, high] = [edge(m), edge(m + 1), edge(m + 2)];
            let height = match self.scale {
                MelScale::Slaney => 2.0 / (high - low),
                MelScale::Htk => 1.0,
            };
            let weight = |bin: usize| {
                let hertz = (bin * SAMPLE_RATE) as f64 / self.n_fft as f64;
                let slope = ((hertz - low) / (centre - low)).min((high - hertz) / (high - centre));
                slope.max(0.0) * height
            };
            let first = (0..n_bins).find(|&bin| weight(bin) > 0.0).unwrap_or(0);
            let weights = (first..n_bins).map(weight).take_while(|&weight| weight > 0.0).collect();
            Filter { first, weights }
        };
        (0..n_mels).map(filter).collect()
    }
}

impl Output {
    /// Returns what filters sum, of the energy of a bin.
    fn of_bin(self, energy: f64) -> f64 {
        match self {
            Self::Ranged => energy,
            Self::AtLeast(_) | Self::Above(_) => energy.sqrt(),
        }
    }

    fn of_sum(self, sum: f64) -> f32 {
        let log = match self {
            Self::Ranged => sum.max(1e-10).log10(),
            Self::AtLeast(floor) => sum.max(floor).ln(),
            Self::Above(floor) => (sum + floor).ln(),
        };
        log as f32
    }
}

impl MelScale {
    /// Returns the place of a frequency.
    fn mel(self, hertz: f64) -> f64 {
        match self {
            Self::Slaney if hertz < 1000.0 => 3.0 * hertz / 200.0,
            Self::Slaney => 15.0 + (hertz / 1000.0).ln() * 27.0 / 6.4f64.ln(),
            Self::Htk => 2595.0 * (1.0 + hertz / 700.0).log10(),
        }
    }

    /// Inverts [`mel`](Self::mel).
    fn hertz(self, mel: f64) -> f64 {
        match self {
            Self::Slaney if mel < 15.0 => 200.0 * mel / 3.0,
            Self::Slaney => 1000.0 * ((mel - 15.0) * 6.4f64.ln() / 27.0).exp(),
            Self::Htk => 700.0 * (10f64.powf(mel / 2595.0) - 1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tone_is_loudest_in_its_mel_bin() {
        let tone = |hertz: f64| {
            let step = std::f64::consts::TAU * hertz / SAMPLE_RATE as f64;
            (0..SAMPLE_RATE).map(|i| (step * i as f64).sin() as f32).collect::<Vec<_>>()
        };
        for (spectrogram, n_frames) in [(WHISPER, 100), (GEMMA3N, 97), (GEMMA4, 99)] {
            assert_eq!(spectrogram.n_frames(SAMPLE_RATE), n_frames);
            for hertz in [300.0, 1_000.0, 3_500.0] {
                let mel = spectrogram.of(&tone(hertz), 80);
                assert_eq!(mel.len(), n_frames * 80);
                let row = &mel[50 * 80..][..80];
                let loudest = (0..80).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
                let [low, high] = spectrogram.hertz.map(|hertz| spectrogram.scale.mel(hertz));
                let centre = spectrogram.scale.hertz(low + (high - low) * (loudest + 1) as f64 / 81.0);
                assert!((centre / hertz - 1.0).abs() < 0.06, "{hertz} Hz in bin {loudest}");
            }
        }
    }

    #[test]
    fn silence_is_the_floor() {
        let of_silence = |spectrogram: Spectrogram| {
            let mel = spectrogram.of(&vec![0.0; spectrogram.min_samples()], 128);
            assert!(mel.iter().all(|&x| x == mel[0]) && mel.len() == 128, "{spectrogram:?}");
            mel[0]
        };
        let floors = [WHISPER, GEMMA3N, GEMMA4].map(of_silence);
        assert_eq!(floors, [-1.5, 1e-5f64.ln() as f32, 1e-3f64.ln() as f32]);
    }
}
