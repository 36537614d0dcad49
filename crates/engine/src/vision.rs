//! Images in prompts.
//!
//! An image becomes soft tokens: rows that the vision encoder computes in place of token
//! embeddings, with [ids](kvant_model::SoftTokens) beyond the vocabulary. Equal images have equal
//! ids for as long as the model is loaded, so a repeated conversation finds its prefix in the KV
//! cache, and the vision encoder runs once per image.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvant_cpu::{CpuDevice, PrefillPrecision};
use kvant_gguf::Gguf;
use kvant_model::{Config, EmbeddingInput, EmbeddingRows, SoftTokens};
use kvant_text::chat::{Message, RenderOptions, Rendered};
use kvant_text::tokenizer::{Special, Tokenizer};
use kvant_vision::{ImageLayout, ImageToken, VisionEncoder};

use crate::devices;
use crate::error::Error;
use crate::model::Model;

/// Bytes of the cache of encoded images.
const MAX_CACHED: usize = 256 << 20;

/// An image as tokens of a model, which can be fed like any others.
#[derive(Debug, Clone)]
pub struct EncodedImage {
    tokens: Arc<[u32]>,
    rows: Arc<EmbeddingRows>,
}

/// Images are equal when they have the same tokens of one model.
impl PartialEq for EncodedImage {
    fn eq(&self, other: &Self) -> bool {
        self.tokens == other.tokens
    }
}

impl EncodedImage {
    /// Returns the tokens that stand for the image in a prompt: vocabulary tokens of its markers,
    /// and the ids of its rows. A session that has been fed them holds the rows; before that, this
    /// does.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}

/// The vision encoder of a model, with a cache of encoded images.
pub(crate) struct VisionModel {
    encoder: VisionEncoder<CpuDevice>,
    /// Bytes of its weights, in the file's types.
    n_bytes: usize,
    hashes: [RandomState; 2],
    cache: Mutex<ImageCache>,
    /// Held while the encoder runs.
    encoding: Mutex<()>,
}

/// Keyed hash of an image file; callers cannot construct collisions.
type Hash = [u64; 2];

#[derive(Default)]
struct ImageCache {
    /// First row id of every image encoded so far.
    numbers: HashMap<Hash, u32>,
    /// The most recently used images, the latest last.
    recent: VecDeque<(Hash, EncodedImage)>,
}

impl ImageCache {
    /// Returns a cached image and marks it as used.
    fn find(&mut self, hash: Hash) -> Option<EncodedImage> {
        let at = self.recent.iter().position(|(known, _)| *known == hash)?;
        let found = self.recent.remove(at)?;
        let image = found.1.clone();
        self.recent.push_back(found);
        Some(image)
    }

    /// Caches an image and evicts the oldest ones beyond [`KEPT`] bytes, but never the image
    /// itself: it must outlive the encoding until its tokens are fed.
    fn keep(&mut self, hash: Hash, image: &EncodedImage) {
        self.numbers.insert(hash, image.rows.tokens().start);
        self.recent.push_back((hash, image.clone()));
        let mut n_bytes: usize = self.recent.iter().map(|(_, image)| image.rows.n_bytes()).sum();
        while n_bytes > MAX_CACHED
            && self.recent.len() > 1
            && let Some((_, oldest)) = self.recent.pop_front()
        {
            n_bytes -= oldest.rows.n_bytes();
        }
    }
}

impl VisionModel {
    /// Loads the vision encoder in a file, for a model of this configuration.
    pub fn load(gguf: &Gguf, n_threads: Option<usize>, config: &Config) -> Result<Self, Error> {
        let encoder =
            VisionEncoder::load(gguf, Arc::new(devices::open_cpu(n_threads, PrefillPrecision::Exact)?))?;
        check_width(encoder.config().n_embd_text, config.n_embd)?;
        let hashes = [RandomState::new(), RandomState::new()];
        let n_bytes = gguf.tensors().iter().map(|info| info.n_bytes).sum();
        Ok(Self { encoder, n_bytes, hashes, cache: Mutex::default(), encoding: Mutex::default() })
    }

    /// Returns the bytes of its weights, in the file's types.
    pub fn weight_bytes(&self) -> usize {
        self.n_bytes
    }

    fn cache(&self) -> MutexGuard<'_, ImageCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decodes and encodes an image file.
    fn encode(
        &self,
        owner: Option<&str>,
        file: &[u8],
        tokenizer: &Tokenizer,
        extra: &SoftTokens,
    ) -> Result<EncodedImage, Error> {
        let hash = self.hashes.each_ref().map(|state| state.hash_one((owner, file)));
        if let Some(known) = self.cache().find(hash) {
            return Ok(known);
        }
        // Encodings run one at a time: they share the threads.
        let _encoding = self.encoding.lock().unwrap_or_else(PoisonError::into_inner);
        // A concurrent request may have encoded the same image meanwhile.
        if let Some(known) = self.cache().find(hash) {
            return Ok(known);
        }
        let image = kvant_vision::Image::decode(file)?;
        let layout = ImageLayout::new(self.encoder.config(), &image)?;
        let tiles = layout.tiles.iter().map(|tile| self.encoder.rows(tile)).collect::<Result<Vec<_>, _>>()?;
        let mut seen = self.cache();
        let again = seen.numbers.get(&hash).copied();
        let image = self.tokens(&layout, &tiles, tokenizer, |given| extra.add(given, again))?;
        seen.keep(hash, &image);
        Ok(image)
    }

    /// Returns the tokens of an image with these tiles.
    fn tokens(
        &self,
        layout: &ImageLayout,
        tiles: &[Vec<Vec<f32>>],
        tokenizer: &Tokenizer,
        add: impl FnOnce(EmbeddingInput) -> Option<Arc<EmbeddingRows>>,
    ) -> Result<EncodedImage, Error> {
        let width = self.encoder.config().n_embd_text;
        let firsts: Vec<u32> = tiles
            .iter()
            .scan(0, |next, tile| Some(std::mem::replace(next, *next + (tile[0].len() / width) as u32)))
            .collect();
        let depth = 1 + self.encoder.config().deep.len();
        let part = |part: usize| tiles.iter().flat_map(|tile| &tile[part]).copied().collect();
        let given = EmbeddingInput { rows: (0..depth).map(part).collect(), columns: layout.columns };
        let rows = add(given).ok_or_else(|| Error::Setting {
            name: "image",
            expected: "at most 4 billion image tokens per loaded model".to_owned(),
            got: "more".to_owned(),
        })?;
        let mut tokens = Vec::with_capacity(layout.n_rows() + 4 * layout.pieces.len());
        for piece in &layout.pieces {
            match piece {
                ImageToken::Mark(text) => tokens.extend(tokenizer.encode(text, Special::Parse, false)?),
                ImageToken::Rows { tile, rows: of_tile } => {
                    let first = rows.tokens().start + firsts[*tile];
                    tokens.extend(first + of_tile.start as u32..first + of_tile.end as u32);
                }
            }
        }
        Ok(EncodedImage { tokens: tokens.into(), rows })
    }
}

/// Checks from the two files that a vision encoder fits a model: see
/// [`OpenOptions::mmproj`](crate::OpenOptions::mmproj).
///
/// # Errors
/// A file of another kind, an unsupported vision encoder, or one of another model.
pub fn check_mmproj(mmproj: &Gguf, model: &Gguf) -> Result<(), Error> {
    check_width(kvant_vision::Config::from_gguf(mmproj)?.n_embd_text, Config::from_gguf(model)?.n_embd)
}

fn check_width(got: usize, n_embd: usize) -> Result<(), Error> {
    if got == n_embd {
        return Ok(());
    }
    let expected = format!("the vision encoder of this model, with rows of {n_embd} values");
    Err(Error::Setting { name: "mmproj", expected, got: format!("rows of {got}") })
}

impl Model {
    /// Returns whether the model accepts images: see
    /// [`OpenOptions::mmproj`](crate::OpenOptions::mmproj).
    pub fn supports_images(&self) -> bool {
        self.vision().is_some()
    }

    /// Encodes a PNG, JPEG, WebP, GIF or BMP file. Recently encoded images come from a cache;
    /// others take the time of the vision encoder.
    ///
    /// # Errors
    /// A model without a vision encoder, bytes that are not an image, or an image that is too
    /// large.
    pub fn encode_image(&self, file: &[u8]) -> Result<EncodedImage, Error> {
        self.encode_image_for(None, file)
    }

    /// Works as [`encode_image`](Self::encode_image) for an
    /// [owner](crate::Session::with_cache_salt): the time it takes does not reveal the images of
    /// other owners.
    ///
    /// # Errors
    /// As there.
    pub fn encode_image_for(&self, owner: Option<&str>, file: &[u8]) -> Result<EncodedImage, Error> {
        let vision = self.vision().ok_or_else(|| Error::Setting {
            name: "image",
            expected: "a model with a vision encoder (opened with its file, mmproj-*.gguf)".to_owned(),
            got: "a text-only model".to_owned(),
        })?;
        vision.encode(owner, file, self.tokenizer()?, &self.loaded().properties().soft_tokens)
    }

    /// Returns the text and the tokens of a conversation with images in the model's own chat
    /// format. Messages have the form that chat templates read: an image is a content part
    /// `{"type": "image"}`, and `images` holds the images in conversation order.
    ///
    /// # Errors
    /// When there is no template, the template rejects the conversation or drops images, or the
    /// number of images differs.
    pub fn image_prompt(
        &self,
        messages: &[serde_json::Value],
        options: &RenderOptions,
        images: &[EncodedImage],
    ) -> Result<(Rendered, Vec<u32>), Error> {
        let mark = self.vision().map_or("", |vision| vision.encoder.config().projector.mark());
        let (text, parts) = self.chat_template()?.render_images(messages, options, mark)?;
        if parts.len() != images.len() + 1 {
            let (expected, got) = (format!("{} images", parts.len() - 1), images.len().to_string());
            return Err(Error::Setting { name: "images", expected, got });
        }
        let mut tokens = Vec::new();
        for (index, part) in parts.iter().enumerate() {
            let tokenizer = self.tokenizer()?;
            tokens.extend(match index {
                0 => tokenizer.encode_prompt(part.as_str(), part.special())?,
                _ => tokenizer.encode(part.as_str(), part.special(), false)?,
            });
            tokens.extend(images.get(index).into_iter().flat_map(EncodedImage::tokens));
        }
        Ok((text, tokens))
    }

    /// Works as [`chat_prompt`](Self::chat_prompt) for messages [with
    /// images](Message::with_images).
    ///
    /// # Errors
    /// As [`image_prompt`](Self::image_prompt).
    pub fn chat_prompt_with_images(
        &self,
        messages: &[Message],
        images: &[EncodedImage],
    ) -> Result<Vec<u32>, Error> {
        let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
        let messages: Vec<_> = messages.iter().map(|message| serde_json::json!(message)).collect();
        Ok(self.image_prompt(&messages, &options, images)?.1)
    }
}
