//! From the samples of a clip to the features that an encoder reads, and the number of its rows.

use std::ops::RangeInclusive;

use crate::clip::{AudioClip, SAMPLE_RATE};
use crate::config::{CHUNK_FRAMES, Config, Projector};
use crate::error::AudioError;
use crate::log_mel::{GEMMA3N, GEMMA4, HOP, Spectrogram, WHISPER};

/// Frames of an attention window of Qwen3 (8 s), which files lack.
const QWEN3_WINDOW_FRAMES: usize = 800;
/// Minimum samples of a clip for Qwen2: a row needs two positions, of two frames each.
const QWEN2_MIN_SAMPLES: usize = 2 * HOP + 1;
/// Minimum samples of a clip for Qwen3 (0.5 s): Qwen3-ASR's processor pads shorter ones with zeros.
const QWEN3_MIN_SAMPLES: usize = 8_000;
/// Samples of a window of Gemma (30 s), the longest clips in training.
const GEMMA_WINDOW: usize = 30 * SAMPLE_RATE;
/// Gemma 3n's processor pads clips with zeros to whole groups of samples.
const GEMMA3N_GROUP: usize = 128;
/// Rows of a window of Gemma 3n, however short its clip is.
pub(crate) const GEMMA3N_ROWS: usize = 188;

impl Config {
    /// Returns the width of the features: mel bins, or the samples of a frame (Gemma 4 unified).
    pub fn n_features(&self) -> usize {
        match self.projector {
            Projector::Gemma4Unified => self.n_embd,
            _ => self.n_mels,
        }
    }

    /// Returns the features of a clip `[frames, n_features]`, padded with silence as in training:
    /// to whole windows (Whisper), groups or frames (Gemma), or to the minimum duration (Qwen3).
    ///
    /// # Errors
    /// A clip that is too short for a row, or longer than the only window (Qwen2-Audio).
    pub fn features(&self, clip: &AudioClip) -> Result<Vec<f32>, AudioError> {
        let n = clip.samples().len();
        let supported = self.n_samples();
        if !supported.contains(&n) {
            let [min, max] = [supported.start(), supported.end()].map(|&n| n as f64 / SAMPLE_RATE as f64);
            let expected = match *supported.end() {
                usize::MAX => format!("at least {min:.3} s for this model"),
                _ => format!("{min:.2} to {max} s for this model"),
            };
            let got = format!("{} s", clip.seconds());
            return Err(AudioError::Range { what: "duration", expected, got });
        }
        let padded = |samples: &[f32], n: usize| {
            let mut samples = samples.to_vec();
            samples.resize(n, 0.0);
            samples
        };
        let of_windows = |spectrogram: Spectrogram, group: usize| {
            self.windows(clip)
                .map(|window| padded(window, window.len().next_multiple_of(group)))
                .flat_map(|window| spectrogram.of(&window, self.n_mels))
                .collect()
        };
        let whisper = |n: usize| WHISPER.of(&padded(clip.samples(), n), self.n_mels);
        Ok(match self.projector {
            Projector::Voxtral => whisper(n.next_multiple_of(self.window_frames() * HOP)),
            Projector::Qwen2 => whisper(self.window_frames() * HOP),
            Projector::Qwen3 => whisper(n.max(QWEN3_MIN_SAMPLES)),
            Projector::Gemma3n => of_windows(GEMMA3N, GEMMA3N_GROUP),
            Projector::Gemma4 => of_windows(GEMMA4, 1),
            Projector::Gemma4Unified => padded(clip.samples(), n.next_multiple_of(self.n_embd)),
        })
    }

    /// Returns the number of rows of a clip that can be encoded.
    pub fn n_rows(&self, clip: &AudioClip) -> usize {
        let n = clip.samples().len();
        match self.projector {
            Projector::Voxtral => {
                n.div_ceil(self.window_frames() * HOP) * (self.n_positions / self.n_stacked)
            }
            Projector::Qwen2 => self.n_positions_of(n) / 2,
            Projector::Qwen3 => {
                let n_frames = n.max(QWEN3_MIN_SAMPLES) / HOP;
                let per_chunk = CHUNK_FRAMES.div_ceil(8);
                n_frames / CHUNK_FRAMES * per_chunk + (n_frames % CHUNK_FRAMES).div_ceil(8)
            }
            // The last row ends the clip.
            Projector::Gemma3n => self.windows(clip).count() * GEMMA3N_ROWS + 1,
            Projector::Gemma4 => {
                self.windows(clip).map(|window| GEMMA4.n_frames(window.len()).div_ceil(4)).sum()
            }
            Projector::Gemma4Unified => n.div_ceil(self.n_embd),
        }
    }

    /// Returns the positions of a clip of `n_samples` within its window: all of them, or those that
    /// the clip reaches (Qwen2-Audio, which masks the others).
    pub(crate) fn n_positions_of(&self, n_samples: usize) -> usize {
        match self.projector {
            Projector::Qwen2 => n_samples.div_ceil(HOP).div_ceil(2).min(self.n_positions),
            _ => self.n_positions,
        }
    }

    /// Returns the frames of a window, the outputs of which attend to each other.
    pub(crate) fn window_frames(&self) -> usize {
        match self.projector {
            Projector::Voxtral | Projector::Qwen2 => 2 * self.n_positions,
            Projector::Qwen3 => QWEN3_WINDOW_FRAMES,
            Projector::Gemma3n => GEMMA3N.n_frames(GEMMA_WINDOW),
            Projector::Gemma4 => GEMMA4.n_frames(GEMMA_WINDOW),
            Projector::Gemma4Unified => GEMMA_WINDOW.div_ceil(self.n_embd),
        }
    }

    /// Returns the numbers of samples that can be encoded.
    fn n_samples(&self) -> RangeInclusive<usize> {
        match self.projector {
            Projector::Qwen2 => QWEN2_MIN_SAMPLES..=self.window_frames() * HOP,
            Projector::Gemma3n => GEMMA3N.min_samples()..=usize::MAX,
            Projector::Gemma4 => GEMMA4.min_samples()..=usize::MAX,
            Projector::Voxtral | Projector::Qwen3 | Projector::Gemma4Unified => 1..=usize::MAX,
        }
    }

    /// Returns the samples of each window of Gemma. A last one without a whole frame is left out.
    fn windows<'a>(&self, clip: &'a AudioClip) -> impl Iterator<Item = &'a [f32]> {
        let min = *self.n_samples().start();
        clip.samples().chunks(GEMMA_WINDOW).filter(move |window| window.len() >= min)
    }
}
