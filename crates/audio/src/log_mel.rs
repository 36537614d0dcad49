//! Log-mel spectrogram of Whisper (arXiv 2212.04356, section 2.2).
//!
//! ```text
//! P[t, k] = |Σ_n w[n] x[hop t + n - n_fft / 2] exp(-2πi k n / n_fft)|²
//! L[t, m] = log10(max(Σ_k F[m, k] P[t, k], 1e-10))
//! y = (max(L, max L - 8) + 4) / 4
//! ```
//!
//! w is the periodic Hann window, x the clip reflected at both ends, F the triangular filters of
//! Slaney's mel scale, each with area 1 (Auditory Toolbox, 1998).

use realfft::RealFftPlanner;

use crate::clip::SAMPLE_RATE;

/// Samples of a Fourier transform (25 ms) and between two of them (10 ms).
const N_FFT: usize = 400;
pub(crate) const HOP: usize = 160;

/// Minimum samples of a clip: its ends are reflected over half a transform.
const MIN_SAMPLES: usize = N_FFT / 2 + 1;

/// Dynamic range, in powers of ten.
const RANGE: f32 = 8.0;

/// A log-mel spectrogram.
#[derive(Debug, Clone, PartialEq)]
pub struct LogMel {
    n_mels: usize,
    /// `[frames, n_mels]`
    values: Vec<f32>,
}

/// A triangular filter: its first bin and the weights from there.
struct Filter {
    first: usize,
    weights: Vec<f64>,
}

impl LogMel {
    /// Computes the spectrogram of samples at 16 kHz, with a frame for every whole 10 ms.
    ///
    /// # Panics
    /// For less than 201 samples, which cannot be reflected.
    pub fn new(samples: &[f32], n_mels: usize) -> Self {
        assert!(samples.len() >= MIN_SAMPLES, "{} samples, at least {MIN_SAMPLES}", samples.len());
        let transform = RealFftPlanner::<f64>::new().plan_fft_forward(N_FFT);
        let (mut input, mut spectrum) = (transform.make_input_vec(), transform.make_output_vec());
        let mut scratch = transform.make_scratch_vec();
        let (window, filters) = (hann_window(), filters(n_mels));
        let n_frames = samples.len() / HOP;
        let mut values = Vec::with_capacity(n_frames * n_mels);
        for frame in 0..n_frames {
            for (n, (x, w)) in input.iter_mut().zip(&window).enumerate() {
                *x = w * f64::from(samples[reflected(HOP * frame + n, samples.len())]);
            }
            transform
                .process_with_scratch(&mut input, &mut spectrum, &mut scratch)
                .expect("buffers of the transform's own sizes");
            values.extend(filters.iter().map(|filter| {
                let bins = spectrum[filter.first..].iter().zip(&filter.weights);
                let energy: f64 = bins.map(|(bin, weight)| weight * bin.norm_sqr()).sum();
                energy.max(1e-10).log10() as f32
            }));
        }
        let floor = values.iter().copied().fold(f32::NEG_INFINITY, f32::max) - RANGE;
        values.iter_mut().for_each(|x| *x = (x.max(floor) + 4.0) / 4.0);
        Self { n_mels, values }
    }

    /// Returns the number of mel bins.
    pub fn n_mels(&self) -> usize {
        self.n_mels
    }

    /// Returns the number of frames.
    pub fn n_frames(&self) -> usize {
        self.values.len() / self.n_mels
    }

    /// Returns the values, `[frames, n_mels]`.
    pub fn values(&self) -> &[f32] {
        &self.values
    }
}

/// Returns the index of a sample, counted from half a transform before the first.
fn reflected(at: usize, n: usize) -> usize {
    let at = at.abs_diff(N_FFT / 2);
    if at < n { at } else { 2 * (n - 1) - at }
}

fn hann_window() -> Vec<f64> {
    (0..N_FFT).map(|n| 0.5 - 0.5 * (std::f64::consts::TAU * n as f64 / N_FFT as f64).cos()).collect()
}

/// Returns the filters from 0 Hz to half the sampling rate, equally spaced on the mel scale.
fn filters(n_mels: usize) -> Vec<Filter> {
    let highest = hertz_to_mel(SAMPLE_RATE as f64 / 2.0);
    let edge = |m: usize| mel_to_hertz(highest * m as f64 / (n_mels + 1) as f64);
    let filter = |m: usize| {
        let [low, centre, high] = [edge(m), edge(m + 1), edge(m + 2)];
        let weight = |bin: usize| {
            let hertz = (bin * SAMPLE_RATE) as f64 / N_FFT as f64;
            let slope = ((hertz - low) / (centre - low)).min((high - hertz) / (high - centre));
            slope.max(0.0) * 2.0 / (high - low)
        };
        let first = (0..=N_FFT / 2).find(|&bin| weight(bin) > 0.0).unwrap_or(0);
        let weights = (first..=N_FFT / 2).map(weight).take_while(|&weight| weight > 0.0).collect();
        Filter { first, weights }
    };
    (0..n_mels).map(filter).collect()
}

/// Slaney's mel scale: 3 mels per 200 Hz below 1 kHz, and 27 per factor of 6.4 above.
fn hertz_to_mel(hertz: f64) -> f64 {
    let linear = 3.0 * hertz / 200.0;
    if hertz < 1000.0 { linear } else { 15.0 + (hertz / 1000.0).ln() * 27.0 / 6.4f64.ln() }
}

/// Inverts [`hertz_to_mel`].
fn mel_to_hertz(mel: f64) -> f64 {
    if mel < 15.0 { 200.0 * mel / 3.0 } else { 1000.0 * ((mel - 15.0) * 6.4f64.ln() / 27.0).exp() }
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
        for hertz in [300.0, 1_000.0, 3_500.0] {
            let mel = LogMel::new(&tone(hertz), 80);
            assert_eq!((mel.n_frames(), mel.values().len()), (100, 8_000));
            let row = &mel.values()[50 * 80..][..80];
            let loudest = (0..80).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
            let centre = hertz_to_mel(SAMPLE_RATE as f64 / 2.0) * (loudest + 1) as f64 / 81.0;
            assert!((mel_to_hertz(centre) / hertz - 1.0).abs() < 0.06, "{hertz} Hz in bin {loudest}");
        }
    }

    #[test]
    fn silence_is_the_floor() {
        let mel = LogMel::new(&[0.0; MIN_SAMPLES], 128);
        assert!(mel.n_frames() == 1 && mel.values().iter().all(|&x| x == -1.5));
    }
}
