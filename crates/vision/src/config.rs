//! Hyper-parameters of a vision encoder, read from its file.

use kvant_backend::host_ops::Pointwise;
use kvant_gguf::{Array, FromValue, Gguf, GgufError};
use kvant_model::ModelError;

/// The projector: maps encoder outputs to soft tokens of the text model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Projector {
    /// SmolVLM and Idefics 3 (arXiv 2504.05299): pixel shuffle and one matrix.
    Idefics3,
    /// InternVL 2.5 and 3 (arXiv 2504.10479): pixel shuffle, a norm and a two-layer MLP.
    InternVl,
    /// Pixtral (arXiv 2410.07073) and Mistral Small 3: a two-layer MLP, after a patch merger in the
    /// latter.
    Pixtral,
    /// LFM2-VL: pixel shuffle and a two-layer MLP.
    Lfm2,
    /// Qwen2.5-VL (arXiv 2502.13923): the same, with an encoder of mostly window attention.
    Qwen25,
    /// Qwen3-VL (arXiv 2511.21631): the same without windows, and DeepStack: the outputs of some
    /// encoder layers are projected too, and added behind the first layers of the text model.
    Qwen3,
    /// PaddleOCR-VL (arXiv 2510.14528): a norm of each patch and a two-layer MLP, after an encoder
    /// with learned and rotary positions.
    PaddleOcr,
}

impl Projector {
    /// Returns the image placeholder of the family's chat templates.
    pub fn mark(self) -> &'static str {
        match self {
            Self::Idefics3 | Self::Lfm2 => "<image>",
            Self::InternVl => "<IMG_CONTEXT>",
            Self::Pixtral => "[IMG]",
            Self::Qwen25 | Self::Qwen3 => "<|vision_start|><|image_pad|><|vision_end|>",
            Self::PaddleOcr => "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        }
    }

    /// Returns whether tiles are of any size in whole rows, as large as the image's pixels allow:
    /// the rows have positions in a plane, which the text model reads (M-RoPE).
    pub fn is_of_any_size(self) -> bool {
        matches!(self, Self::Qwen25 | Self::Qwen3 | Self::PaddleOcr)
    }
}

/// Names in `clip.projector_type`.
const PROJECTORS: [(&str, Projector); 7] = [
    ("idefics3", Projector::Idefics3),
    ("internvl", Projector::InternVl),
    ("pixtral", Projector::Pixtral),
    ("lfm2", Projector::Lfm2),
    ("qwen2.5vl_merger", Projector::Qwen25),
    ("qwen3vl_merger", Projector::Qwen3),
    ("paddleocr", Projector::PaddleOcr),
];

/// Hyper-parameters of a vision encoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The projector.
    pub projector: Projector,
    /// Side of a tile in pixels; where images are not tiled, the maximum of the longer side.
    pub image_size: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
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
    /// Side, in patches, of the square that becomes one row.
    pub n_merge: usize,
    /// Mean of each colour channel, for values from 0 to 1.
    pub mean: [f32; 3],
    /// Standard deviation of each colour channel.
    pub std: [f32; 3],
    /// Longer side in pixels to which an image is scaled before tiling; for LFM2-VL, the side of a
    /// tile.
    pub longest_edge: usize,
    /// Minimum and maximum number of tiles.
    pub tiles: [usize; 2],
    /// Minimum and maximum pixels of an image that is not tiled (LFM2-VL, Qwen, PaddleOCR-VL).
    pub pixels: [usize; 2],
    /// Interval of layers with full attention, and the side in pixels of the attention windows of
    /// the other layers (Qwen2.5-VL).
    pub full_attention_and_window: Option<[usize; 2]>,
    /// Layers with DeepStack outputs, besides the last layer (Qwen3-VL).
    pub deep: Vec<usize>,
    pub(crate) activation: Pointwise,
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
        if !meta.find("clip.has_vision_encoder")?.unwrap_or(false) {
            let what = "an encoder of another modality than vision (clip.has_vision_encoder)".to_owned();
            return Err(ModelError::Unsupported { what });
        }
        let names = ["clip.projector_type", "clip.vision.projector_type"];
        let named = names.iter().find_map(|name| meta.find::<&str>(name).transpose());
        let named = named.transpose()?.unwrap_or("");
        let projector = PROJECTORS.iter().find(|(name, _)| *name == named).map(|(_, projector)| *projector);
        let projector = projector.ok_or_else(|| {
            let known = PROJECTORS.map(|(name, _)| name).join(", ");
            value(names[0], &format!("one of {known}"), named)
        })?;
        let size = |name: &str| meta.get::<usize>(&format!("clip.vision.{name}"));
        let found = |name: &str| meta.find::<usize>(&format!("clip.vision.{name}"));
        let is_silu = meta.find("clip.use_silu")?.unwrap_or(false);
        let activation = match projector {
            _ if is_silu => Pointwise::Silu,
            Projector::InternVl | Projector::Pixtral | Projector::Qwen25 => Pointwise::Gelu,
            Projector::Idefics3 | Projector::Lfm2 | Projector::Qwen3 | Projector::PaddleOcr => {
                Pointwise::GeluTanh
            }
        };
        let image_size = size("image_size")?;
        let n_merge = match projector {
            Projector::Pixtral => found("spatial_merge_size")?.unwrap_or(1),
            projector if projector.is_of_any_size() => found("spatial_merge_size")?.unwrap_or(2),
            _ => found("projector.scale_factor")?.unwrap_or(2),
        };
        let patch_size = size("patch_size")?;
        let row = patch_size.saturating_mul(n_merge).saturating_pow(2);
        // Defaults of the published processors, for keys that files lack.
        let (longest_edge, tiles) = match projector {
            Projector::Lfm2 => (32usize.saturating_mul(patch_size), [2, 10]),
            _ => (image_size.saturating_mul(4), [1, 12]),
        };
        // Minimum and maximum rows of an image for files that may lack the pixels.
        let rows = match projector {
            // A quarter of the processors' maximum, which would take the encoder minutes.
            Projector::Qwen25 => Some([4, 4096]),
            Projector::Qwen3 => Some([64, 4096]),
            Projector::PaddleOcr => None,
            _ => Some([64, 256]),
        };
        let windows = match projector {
            Projector::Qwen25 => Some([size("n_wa_pattern")?, found("window_size")?.unwrap_or(112)]),
            _ => None,
        };
        let found_or = |name: &str, usual: usize| Ok::<_, GgufError>(found(name)?.unwrap_or(usual));
        let pixels = |name: &str, rows: Option<usize>| match rows {
            Some(rows) => found_or(name, row.saturating_mul(rows)),
            None => size(name),
        };
        let config = Self {
            projector,
            image_size,
            patch_size,
            n_embd: size("embedding_length")?,
            n_ff: size("feed_forward_length")?,
            n_layers: size("block_count")?,
            n_heads: size("attention.head_count")?,
            eps: meta.get("clip.vision.attention.layer_norm_epsilon")?,
            n_embd_text: size("projection_dim")?,
            n_merge,
            mean: colours(gguf, "clip.vision.image_mean")?,
            std: colours(gguf, "clip.vision.image_std")?,
            longest_edge: found_or("preproc_image_size", longest_edge)?,
            tiles: [found_or("preproc_min_tiles", tiles[0])?, found_or("preproc_max_tiles", tiles[1])?],
            pixels: [
                pixels("image_min_pixels", rows.map(|[min, _]| min))?,
                pixels("image_max_pixels", rows.map(|[_, max]| max))?,
            ],
            full_attention_and_window: windows,
            deep: match projector {
                Projector::Qwen3 => deep(gguf)?,
                _ => Vec::new(),
            },
            activation,
        };
        config.check()?;
        Ok(config)
    }

    /// Returns the side in pixels of the square that becomes one row.
    pub fn row_pixels(&self) -> usize {
        self.patch_size * self.n_merge
    }

    /// Returns the head dimension.
    pub(crate) fn head_dim(&self) -> usize {
        self.n_embd / self.n_heads
    }

    fn check(&self) -> Result<(), ModelError> {
        const MAX_VALUE: usize = 1 << 16;
        // Of all tiles of an image.
        const MAX_PIXELS: usize = 1 << 26;
        let sizes = [
            ("image_size", self.image_size),
            ("patch_size", self.patch_size),
            ("embedding_length", self.n_embd),
            ("feed_forward_length", self.n_ff),
            ("block_count", self.n_layers),
            ("attention.head_count", self.n_heads),
            ("projection_dim", self.n_embd_text),
            ("projector.scale_factor", self.n_merge),
            ("preproc_image_size", self.longest_edge),
            ("preproc_min_tiles", self.tiles[0]),
            ("preproc_max_tiles", self.tiles[1]),
        ];
        for (name, got) in sizes {
            if !(1..=MAX_VALUE).contains(&got) {
                let key = format!("clip.vision.{name}");
                return Err(value(&key, &format!("a number from 1 to {MAX_VALUE}"), &got.to_string()));
            }
        }
        let fits = |name: &str, whole: usize, part: usize| match whole.is_multiple_of(part) {
            true => Ok(()),
            false => Err(value(
                &format!("clip.vision.{name}"),
                &format!("a multiple of {part}"),
                &whole.to_string(),
            )),
        };
        fits("embedding_length", self.n_embd, self.n_heads)?;
        if !self.projector.is_of_any_size() {
            fits("image_size", self.image_size, self.row_pixels())?;
        }
        if let Some([every, side]) = self.full_attention_and_window
            && (every == 0 || side < self.row_pixels() || side > MAX_VALUE)
        {
            let expected =
                format!("a positive interval of layers, and sides of {} to {MAX_VALUE}", self.row_pixels());
            return Err(value("clip.vision.window_size", &expected, &format!("{every}, and {side}")));
        }
        match self.projector {
            Projector::Pixtral | Projector::Qwen25 | Projector::Qwen3 | Projector::PaddleOcr => {
                fits("embedding_length", self.n_embd, 4 * self.n_heads)?
            }
            Projector::Lfm2 => fits("preproc_image_size", self.longest_edge, self.row_pixels())?,
            Projector::Idefics3 | Projector::InternVl => {}
        }
        if self.pixels[0] > self.pixels[1] || self.pixels[1] > 1 << 26 {
            let got = format!("{:?}", self.pixels);
            return Err(value(
                "clip.vision.image_max_pixels",
                "at least the minimum, up to 64 million",
                &got,
            ));
        }
        if !(self.eps > 0.0 && self.eps < 1.0) {
            let key = "clip.vision.attention.layer_norm_epsilon";
            return Err(value(key, "a number between 0 and 1", &self.eps.to_string()));
        }
        let (side, of_tiles) = match self.projector {
            Projector::Idefics3 => (self.longest_edge.max(self.image_size), 1),
            Projector::InternVl => (self.image_size, self.tiles[1]),
            Projector::Pixtral => (self.image_size, 1),
            Projector::Qwen25 | Projector::Qwen3 | Projector::PaddleOcr => (self.row_pixels(), 1),
            Projector::Lfm2 => (self.longest_edge, self.tiles[1]),
        };
        if side.saturating_mul(side).saturating_mul(of_tiles) > MAX_PIXELS {
            let expected = format!("sides with which all tiles have {MAX_PIXELS} pixels at most");
            return Err(value(
                "clip.vision.image_size",
                &expected,
                &format!("{of_tiles} of {side} x {side}"),
            ));
        }
        if self.deep.last().is_some_and(|&layer| layer >= self.n_layers) {
            let expected = format!("layers of {}", self.n_layers);
            return Err(value("clip.vision.is_deepstack_layers", &expected, &format!("{:?}", self.deep)));
        }
        if self.tiles[0] > self.tiles[1] || self.tiles[1] > 256 {
            let got = format!("{:?}", self.tiles);
            return Err(value("clip.vision.preproc_max_tiles", "at least the minimum, up to 256", &got));
        }
        Ok(())
    }
}

/// Returns the DeepStack layers of a file.
fn deep(gguf: &Gguf) -> Result<Vec<usize>, ModelError> {
    let flags: Option<Array<'_>> = gguf.meta().find("clip.vision.is_deepstack_layers")?;
    let flags = flags.into_iter().flatten().map(|flag| bool::from_value(flag).unwrap_or(false));
    Ok(flags.enumerate().filter_map(|(layer, is_deep)| is_deep.then_some(layer)).collect())
}

/// Reads one number per colour channel.
fn colours(gguf: &Gguf, key: &str) -> Result<[f32; 3], ModelError> {
    let numbers: Array<'_> = gguf.meta().get(key)?;
    let numbers: Vec<f32> = numbers.iter().filter_map(f32::from_value).collect();
    let is_sound = |x: &f32| x.is_finite() && (key.ends_with("mean") || *x > 0.0);
    match <[f32; 3]>::try_from(&numbers[..]) {
        Ok(numbers) if numbers.iter().all(is_sound) => Ok(numbers),
        _ => Err(value(key, "three numbers, one for each colour", &format!("{numbers:?}"))),
    }
}

pub(crate) fn value(key: &str, expected: &str, got: &str) -> ModelError {
    let (key, expected, got) = (key.to_owned(), expected.to_owned(), got.to_owned());
    ModelError::Value { key, expected, got }
}
