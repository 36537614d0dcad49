//! Hyper-parameters of an audio encoder, read from its file.

use kvant_gguf::Gguf;
use kvant_model::ModelError;

use crate::clip::{AudioClip, SAMPLE_RATE};
use crate::error::AudioError;
use crate::log_mel::{HOP, LogMel};

/// The projector: maps encoder outputs to soft tokens of the text model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Projector {
    /// Voxtral (arXiv 2507.13264): groups of consecutive outputs and a two-layer MLP.
    Voxtral,
    /// Qwen2-Audio (arXiv 2407.10759): pairs of outputs are averaged before the last norm, and one
    /// matrix.
    Qwen2,
    /// Qwen3-Omni's thinker (arXiv 2509.17765) and Qwen3-ASR: two-dimensional convolutions, window
    /// attention, and a two-layer MLP.
    Qwen3,
}

impl Projector {
    /// Returns the audio placeholder of the family's chat templates.
    pub fn mark(self) -> &'static str {
        match self {
            Self::Voxtral => "[BEGIN_AUDIO][AUDIO]",
            Self::Qwen2 => "<|audio_bos|><|AUDIO|><|audio_eos|>",
            Self::Qwen3 => "<|audio_start|><|audio_pad|><|audio_end|>",
        }
    }

    /// Returns the marker tokens before and after the rows of a clip.
    pub fn enclosing_marks(self) -> [&'static str; 2] {
        match self {
            Self::Voxtral => ["[BEGIN_AUDIO]", ""],
            Self::Qwen2 => ["<|audio_bos|>", "<|audio_eos|>"],
            Self::Qwen3 => ["<|audio_start|>", "<|audio_end|>"],
        }
    }
}

/// Names in `clip.projector_type`.
const PROJECTORS: [(&str, Projector); 3] =
    [("voxtral", Projector::Voxtral), ("qwen2a", Projector::Qwen2), ("qwen3a", Projector::Qwen3)];

/// Frames of a chunk that Qwen3's convolutions read by itself (1 s), which files lack.
pub(crate) const CHUNK_FRAMES: usize = 100;
/// Frames of an attention window of Qwen3 (8 s), which files lack.
const QWEN3_WINDOW_FRAMES: usize = 800;
/// Minimum samples of a clip for Qwen2: a row needs two positions, of two frames each.
const QWEN2_MIN_SAMPLES: usize = 2 * HOP + 1;
/// Minimum samples of a clip for Qwen3 (0.5 s): Qwen3-ASR's processor pads shorter ones with zeros.
const QWEN3_MIN_SAMPLES: usize = 8_000;

/// Hyper-parameters of an audio encoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The projector.
    pub projector: Projector,
    /// Bins of the spectrogram.
    pub n_mels: usize,
    /// Hidden size of the encoder.
    pub n_embd: usize,
    /// Hidden size of its feed-forward layers.
    pub n_ff: usize,
    /// Number of layers.
    pub n_layers: usize,
    /// Attention heads per layer.
    pub n_heads: usize,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Width of the output rows: the hidden size of the text model.
    pub n_embd_text: usize,
    /// Number of positions: those of a window (Whisper), or at least those of a chunk (Qwen3).
    pub n_positions: usize,
    /// Consecutive outputs of the encoder that become one row (Voxtral).
    pub n_stacked: usize,
}

impl Config {
    /// Reads the hyper-parameters of a file as `convert_hf_to_gguf.py --mmproj` writes it.
    ///
    /// # Errors
    /// A file of another kind, an unknown projector, invalid numbers.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let meta = gguf.meta();
        let architecture: &str = meta.get("general.architecture")?;
        if architecture != "clip" {
            return Err(value("general.architecture", "clip, that of a file mmproj-*.gguf", architecture));
        }
        if !meta.find("clip.has_audio_encoder")?.unwrap_or(false) {
            let what = "an encoder of another modality than audio (clip.has_audio_encoder)".to_owned();
            return Err(ModelError::Unsupported { what });
        }
        // Files with a vision encoder name the projectors of both.
        let names = ["clip.audio.projector_type", "clip.projector_type"];
        let found = names.iter().find_map(|&key| Some((key, meta.find::<&str>(key).transpose()?)));
        let (key, named) = found.unwrap_or((names[1], Ok("")));
        let named = named?;
        let projector = PROJECTORS.iter().find(|(name, _)| *name == named).map(|(_, projector)| *projector);
        let projector = projector.ok_or_else(|| {
            let known = PROJECTORS.map(|(name, _)| name).join(", ");
            value(key, &format!("one of {known}, for audio"), named)
        })?;
        let size = |name: &str| meta.get::<usize>(&format!("clip.audio.{name}"));
        let config = Self {
            projector,
            n_mels: size("num_mel_bins")?,
            n_embd: size("embedding_length")?,
            n_ff: size("feed_forward_length")?,
            n_layers: size("block_count")?,
            n_heads: size("attention.head_count")?,
            eps: meta.get("clip.audio.attention.layer_norm_epsilon")?,
            n_embd_text: size("projection_dim")?,
            n_positions: gguf.tensor("a.position_embd.weight")?.info.rows(),
            n_stacked: match projector {
                Projector::Voxtral => size("projector.stack_factor")?,
                Projector::Qwen2 | Projector::Qwen3 => 1,
            },
        };
        config.check()?;
        Ok(config)
    }

    /// Returns the spectrogram of a clip, padded with silence as in training: to whole windows
    /// (Whisper) or to the minimum duration (Qwen3).
    ///
    /// # Errors
    /// A clip that is too short for a row, or longer than the only window (Qwen2-Audio).
    pub fn log_mel(&self, clip: &AudioClip) -> Result<LogMel, AudioError> {
        let (n, window) = (clip.samples().len(), self.window_frames() * HOP);
        let padded = match self.projector {
            Projector::Voxtral => n.next_multiple_of(window),
            Projector::Qwen2 if !(QWEN2_MIN_SAMPLES..=window).contains(&n) => {
                let [min, max] = [QWEN2_MIN_SAMPLES, window].map(|n| n as f64 / SAMPLE_RATE as f64);
                let expected = format!("{min:.2} to {max} s for this model");
                return Err(AudioError::Range {
                    what: "duration",
                    expected,
                    got: format!("{} s", clip.seconds()),
                });
            }
            Projector::Qwen2 => window,
            Projector::Qwen3 => n.max(QWEN3_MIN_SAMPLES),
        };
        let mut samples = clip.samples().to_vec();
        samples.resize(padded, 0.0);
        Ok(LogMel::new(&samples, self.n_mels))
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
        }
    }

    /// Returns the positions of a clip of `n_samples` within its window: all of them, or those that
    /// the clip reaches (Qwen2-Audio, which masks the others).
    pub(crate) fn n_positions_of(&self, n_samples: usize) -> usize {
        match self.projector {
            Projector::Qwen2 => n_samples.div_ceil(HOP).div_ceil(2).min(self.n_positions),
            Projector::Voxtral | Projector::Qwen3 => self.n_positions,
        }
    }

    /// Returns the frames of a window, the outputs of which attend to each other.
    pub(crate) fn window_frames(&self) -> usize {
        match self.projector {
            Projector::Voxtral | Projector::Qwen2 => 2 * self.n_positions,
            Projector::Qwen3 => QWEN3_WINDOW_FRAMES,
        }
    }

    /// Returns the head dimension.
    pub(crate) fn head_dim(&self) -> usize {
        self.n_embd / self.n_heads
    }

    fn check(&self) -> Result<(), ModelError> {
        const MAX_VALUE: usize = 1 << 16;
        let sizes = [
            ("num_mel_bins", self.n_mels, 512),
            ("embedding_length", self.n_embd, MAX_VALUE),
            ("feed_forward_length", self.n_ff, MAX_VALUE),
            ("block_count", self.n_layers, MAX_VALUE),
            ("attention.head_count", self.n_heads, MAX_VALUE),
            ("projection_dim", self.n_embd_text, MAX_VALUE),
            ("projector.stack_factor", self.n_stacked, self.n_positions),
        ];
        for (name, got, max) in sizes {
            if !(1..=max).contains(&got) {
                let expected = format!("a number from 1 to {max}");
                return Err(value(&format!("clip.audio.{name}"), &expected, &got.to_string()));
            }
        }
        let fits = |name: &str, whole: usize, part: usize| match whole.is_multiple_of(part) {
            true => Ok(()),
            false => Err(value(name, &format!("a multiple of {part}"), &whole.to_string())),
        };
        fits("clip.audio.embedding_length", self.n_embd, self.n_heads)?;
        fits("rows of a.position_embd.weight", self.n_positions, self.n_stacked)?;
        let positions = match self.projector {
            Projector::Voxtral | Projector::Qwen2 => 2..=8192,
            Projector::Qwen3 => CHUNK_FRAMES.div_ceil(8)..=8192,
        };
        if !positions.contains(&self.n_positions) {
            let expected = format!("{} to {}", positions.start(), positions.end());
            return Err(value("rows of a.position_embd.weight", &expected, &self.n_positions.to_string()));
        }
        if !(self.eps > 0.0 && self.eps < 1.0) {
            let key = "clip.audio.attention.layer_norm_epsilon";
            return Err(value(key, "a number between 0 and 1", &self.eps.to_string()));
        }
        Ok(())
    }
}

fn value(key: &str, expected: &str, got: &str) -> ModelError {
    let (key, expected, got) = (key.to_owned(), expected.to_owned(), got.to_owned());
    ModelError::Value { key, expected, got }
}
