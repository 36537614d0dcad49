//! Hyper-parameters of an audio encoder, read from its file.

use kvant_gguf::Gguf;
use kvant_model::ModelError;

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
    /// Gemma 3n: a conformer (arXiv 2303.01037), of whose outputs every fourth becomes a row. A
    /// window has as many rows as 30 s have.
    Gemma3n,
    /// Gemma 4: a conformer, and one matrix.
    Gemma4,
    /// Gemma 4 unified: one matrix, of frames of samples.
    Gemma4Unified,
}

impl Projector {
    /// Returns the audio placeholder of the family's chat templates.
    pub fn mark(self) -> &'static str {
        match self {
            Self::Voxtral => "[BEGIN_AUDIO][AUDIO]",
            Self::Qwen2 => "<|audio_bos|><|AUDIO|><|audio_eos|>",
            Self::Qwen3 => "<|audio_start|><|audio_pad|><|audio_end|>",
            Self::Gemma3n => "<audio_soft_token>",
            Self::Gemma4 | Self::Gemma4Unified => "<|audio|>",
        }
    }

    /// Returns the marker tokens before and after the rows of a clip.
    pub fn enclosing_marks(self) -> [&'static str; 2] {
        match self {
            Self::Voxtral => ["[BEGIN_AUDIO]", ""],
            Self::Qwen2 => ["<|audio_bos|>", "<|audio_eos|>"],
            Self::Qwen3 => ["<|audio_start|>", "<|audio_end|>"],
            // Its last row is the token that ends audio, whose embedding is the encoder's.
            Self::Gemma3n => ["<start_of_audio>", ""],
            Self::Gemma4 | Self::Gemma4Unified => ["<|audio>", "<audio|>"],
        }
    }

    /// Returns whether this is an encoder of a Gemma.
    pub(crate) fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma3n | Self::Gemma4 | Self::Gemma4Unified)
    }

    /// Returns the text before and after a clip, which is tokenized with the text around it.
    pub fn surrounding_text(self) -> &'static str {
        match self {
            Self::Gemma3n => "\n\n",
            _ => "",
        }
    }
}

/// Names in `clip.projector_type`.
const PROJECTORS: [(&str, Projector); 6] = [
    ("voxtral", Projector::Voxtral),
    ("qwen2a", Projector::Qwen2),
    ("qwen3a", Projector::Qwen3),
    ("gemma3na", Projector::Gemma3n),
    ("gemma4a", Projector::Gemma4),
    ("gemma4ua", Projector::Gemma4Unified),
];

/// Frames of a chunk that Qwen3's convolutions read by itself (1 s), which files lack.
pub(crate) const CHUNK_FRAMES: usize = 100;
/// Epsilon of Gemma's norms. Files have that of another model.
const GEMMA_EPS: f32 = 1e-6;

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
    /// Number of position embeddings: those of a window (Whisper), at least those of a chunk
    /// (Qwen3), or none (Gemma, with relative positions).
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
        let is_gemma = projector.is_gemma();
        let config = Self {
            projector,
            n_mels: size("num_mel_bins")?,
            n_embd: size("embedding_length")?,
            n_ff: size("feed_forward_length")?,
            n_layers: size("block_count")?,
            n_heads: size("attention.head_count")?,
            eps: if is_gemma { GEMMA_EPS } else { meta.get("clip.audio.attention.layer_norm_epsilon")? },
            n_embd_text: size("projection_dim")?,
            n_positions: if is_gemma { 0 } else { gguf.tensor("a.position_embd.weight")?.info.rows() },
            n_stacked: if projector == Projector::Voxtral { size("projector.stack_factor")? } else { 1 },
        };
        config.check()?;
        Ok(config)
    }

    /// Returns the head dimension.
    pub(crate) fn head_dim(&self) -> usize {
        self.n_embd / self.n_heads
    }

    fn check(&self) -> Result<(), ModelError> {
        const MAX_VALUE: usize = 1 << 16;
        // Files of encoders without layers have zeros.
        let least = usize::from(self.projector != Projector::Gemma4Unified);
        let sizes = [
            ("num_mel_bins", self.n_mels, least..=512),
            ("embedding_length", self.n_embd, 1..=MAX_VALUE),
            ("feed_forward_length", self.n_ff, least..=MAX_VALUE),
            ("block_count", self.n_layers, least..=MAX_VALUE),
            ("attention.head_count", self.n_heads, least..=MAX_VALUE),
            ("projection_dim", self.n_embd_text, 1..=MAX_VALUE),
            ("projector.stack_factor", self.n_stacked, 1..=self.n_positions.max(1)),
        ];
        for (name, got, supported) in sizes {
            if !supported.contains(&got) {
                let expected = format!("a number from {} to {}", supported.start(), supported.end());
                return Err(value(&format!("clip.audio.{name}"), &expected, &got.to_string()));
            }
        }
        let fits = |name: &str, whole: usize, part: usize| match whole.is_multiple_of(part) {
            true => Ok(()),
            false => Err(value(name, &format!("a multiple of {part}"), &whole.to_string())),
        };
        if self.n_layers > 0 {
            fits("clip.audio.embedding_length", self.n_embd, self.n_heads)?;
        }
        if self.projector.is_gemma() {
            // Relative positions are pairs of a sine and a cosine.
            return fits("clip.audio.embedding_length", self.n_embd, 2);
        }
        fits("rows of a.position_embd.weight", self.n_positions, self.n_stacked)?;
        let least = if self.projector == Projector::Qwen3 { CHUNK_FRAMES.div_ceil(8) } else { 2 };
        let positions = least..=8192;
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
