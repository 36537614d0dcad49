//! Resampling to the rate of the encoders.

use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Resampler, WindowFunction};

use crate::AudioError;
use crate::clip::SAMPLE_RATE;

/// Minimum samples per block of the overlap-add convolution. The low-pass filter is as long: long
/// enough to pass 95 % of the band, and to attenuate aliases by more than 100 dB.
const BLOCK: usize = 4096;

/// Returns mono samples of `rate` Hz at [`SAMPLE_RATE`], band-limited to half of the lower rate.
pub(crate) fn resampled(samples: &[f32], rate: usize) -> Result<Vec<f32>, AudioError> {
    if rate == SAMPLE_RATE {
        return Ok(samples.to_vec());
    }
    let failed = |error: &dyn std::fmt::Display| AudioError::Audio { why: format!("resampling: {error}") };
    // Blocks are multiples of the shortest whole number of periods of both rates. An even multiple
    // has its centre on a sample, so that the delay that is trimmed is exact.
    let shortest = rate / greatest_common_divisor(rate, SAMPLE_RATE);
    let block = shortest * BLOCK.div_ceil(shortest).next_multiple_of(2);
    let window = WindowFunction::BlackmanHarris2;
    let mut resampler = Fft::<f32>::new_custom(rate, SAMPLE_RATE, block, 1, 1, window, FixedSync::Both)
        .map_err(|error| failed(&error))?;
    let input = InterleavedSlice::new(samples, 1, samples.len()).map_err(|error| failed(&error))?;
    let output = resampler.process_all(&input, samples.len(), None).map_err(|error| failed(&error))?;
    Ok(output.take_data())
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sine(hertz: f64, rate: usize, n: usize) -> Vec<f32> {
        let step = std::f64::consts::TAU * hertz / rate as f64;
        (0..n).map(|i| (0.5 * (step * i as f64).sin()) as f32).collect()
    }

    #[test]
    fn sines_keep_frequency_phase_and_amplitude() {
        for rate in [8_000, 11_025, 22_050, 44_100, 48_000, 44_101] {
            let got = resampled(&sine(1_234.5, rate, rate), rate).unwrap();
            let want = sine(1_234.5, SAMPLE_RATE, SAMPLE_RATE);
            assert_eq!(got.len(), want.len(), "{rate} Hz");
            // The sine starts and ends abruptly.
            let middle = SAMPLE_RATE / 4..SAMPLE_RATE * 3 / 4;
            let off = middle.map(|i| (got[i] - want[i]).abs()).fold(0.0, f32::max);
            assert!(off < 1e-4, "{rate} Hz: off by {off}");
        }
    }

    #[test]
    fn frequencies_above_the_band_are_removed() {
        for (hertz, rate) in [(9_000.0, 44_100), (15_000.0, 48_000), (60_000.0, 192_000)] {
            let got = resampled(&sine(hertz, rate, rate), rate).unwrap();
            let loudest =
                got[SAMPLE_RATE / 4..SAMPLE_RATE * 3 / 4].iter().fold(0f32, |max, x| max.max(x.abs()));
            assert!(loudest < 1e-4, "{hertz} Hz at {rate} Hz: {loudest}");
        }
    }
}
