//! Images and audio in prompts.
//!
//! An image or an audio clip becomes soft tokens: rows that an encoder computes in place of token
//! embeddings, with [ids](kvant_model::SoftTokens) beyond the vocabulary. Equal files have equal
//! ids for as long as the model is loaded, so a repeated conversation finds its prefix in the KV
//! cache, and the encoder runs once per file.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvant_audio::{AudioClip, AudioError};
use kvant_gguf::Gguf;
use kvant_model::{Config, EmbeddingInput, EmbeddingRows, ModelError, SoftTokens};
use kvant_text::chat::{MediaKind, MediaMarks, Message, RenderOptions, Rendered};
use kvant_text::tokenizer::{Special, Tokenizer};
use kvant_vision::{Image, ImageLayout, ImageToken};

use crate::devices::encoders::{EncoderDevice, EncodesAudio, EncodesImages};
use crate::error::Error;
use crate::model::Model;

/// Bytes of the cache of encoded media.
const MAX_CACHED: usize = 256 << 20;

/// An image or an audio clip as tokens of a model, which can be fed like any others.
#[derive(Debug, Clone)]
pub struct EncodedMedia {
    kind: MediaKind,
    /// Text of the prompt before and after the tokens.
    surrounding_text: &'static str,
    tokens: Arc<[u32]>,
    rows: Arc<EmbeddingRows>,
}

/// Options of encoding a file.
#[derive(Clone, Copy)]
pub struct EncodeOptions<'a> {
    /// The [owner](crate::Session::with_cache_salt): the time an encoding takes does not reveal the
    /// files of other owners.
    pub owner: Option<&'a str>,
    /// Maximum tokens. A file that takes more is rejected before it is encoded.
    pub max_tokens: usize,
    /// Called between tiles of an image and windows of audio, which take seconds each; `false`
    /// cancels the encoding.
    pub go_on: &'a dyn Fn() -> bool,
}

impl Default for EncodeOptions<'_> {
    /// No owner and no limits.
    fn default() -> Self {
        Self { owner: None, max_tokens: usize::MAX, go_on: &|| true }
    }
}

impl EncodeOptions<'_> {
    /// Rejects a file of more rows than the maximum number of tokens.
    fn check(&self, n_rows: usize) -> Result<(), Error> {
        match n_rows <= self.max_tokens {
            true => Ok(()),
            false => Err(Error::PromptTooLong { tokens: n_rows, n_ctx: self.max_tokens }),
        }
    }
}

/// Media are equal when they have the same tokens of one model.
impl PartialEq for EncodedMedia {
    fn eq(&self, other: &Self) -> bool {
        self.tokens == other.tokens
    }
}

impl EncodedMedia {
    /// Returns the kind.
    pub fn kind(&self) -> MediaKind {
        self.kind
    }

    /// Returns the tokens that stand for the medium in a prompt: vocabulary tokens of its markers,
    /// and the ids of its rows. A session that has been fed them holds the rows; before that, this
    /// does.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}

/// The encoder of one kind in a model's file.
enum Encoder<E> {
    /// The file has none.
    Absent,
    /// Its projector is unknown, for this reason.
    Unknown(Error),
    /// It can be used.
    Loaded(E),
}

impl<E> Encoder<E> {
    /// Loads an encoder, if the file has one of this modality. Other faults than an unknown
    /// projector are errors.
    fn load<F: Into<Error>>(
        gguf: &Gguf,
        modality: &str,
        load: impl FnOnce() -> Result<E, F>,
    ) -> Result<Self, Error> {
        let key = format!("clip.has_{modality}_encoder");
        if !gguf.meta().find(&key)?.unwrap_or(false) {
            return Ok(Self::Absent);
        }
        match load().map_err(Into::into) {
            Ok(encoder) => Ok(Self::Loaded(encoder)),
            Err(error) if is_unknown_projector(&error) => Ok(Self::Unknown(error)),
            Err(error) => Err(error),
        }
    }

    fn loaded(&self) -> Option<&E> {
        match self {
            Self::Loaded(encoder) => Some(encoder),
            Self::Absent | Self::Unknown(_) => None,
        }
    }
}

/// Returns whether a file names a projector that is not supported.
fn is_unknown_projector(error: &Error) -> bool {
    use kvant_vision::VisionError;
    let (Error::Model(error)
    | Error::Vision(VisionError::Model(error))
    | Error::Audio(AudioError::Model(error))) = error
    else {
        return false;
    };
    matches!(error, ModelError::Value { key, .. } if key.ends_with("projector_type"))
}

/// The encoders of a model's file: at least one is loaded.
struct Encoders<V, A> {
    vision: Encoder<V>,
    audio: Encoder<A>,
}

impl<V, A> Encoders<V, A> {
    /// Loads the encoders of a file. A file may have one that is known beside one that is not.
    ///
    /// # Errors
    /// A file without a known encoder, or with a damaged one.
    fn load<E: Into<Error>, F: Into<Error>>(
        gguf: &Gguf,
        vision: impl Fn() -> Result<V, E>,
        audio: impl FnOnce() -> Result<A, F>,
    ) -> Result<Self, Error> {
        let encoders = Self {
            vision: Encoder::load(gguf, "vision", &vision)?,
            audio: Encoder::load(gguf, "audio", audio)?,
        };
        match encoders {
            Self { vision: Encoder::Unknown(error), audio: Encoder::Absent | Encoder::Unknown(_) }
            | Self { vision: Encoder::Absent, audio: Encoder::Unknown(error) } => Err(error),
            // The error names what the file is.
            Self { vision: Encoder::Absent, audio: Encoder::Absent } => vision()
                .map_err(Into::into)
                .map(|vision| Self { vision: Encoder::Loaded(vision), audio: Encoder::Absent }),
            encoders => Ok(encoders),
        }
    }
}

/// The encoders of a model, with a cache of encoded media.
pub(crate) struct MediaModel {
    encoders: Encoders<Box<dyn EncodesImages>, Box<dyn EncodesAudio>>,
    /// Bytes of their weights, in the file's types.
    n_bytes: usize,
    hashes: [RandomState; 2],
    cache: Mutex<MediaCache>,
    /// Held while an encoder runs.
    encoding: Mutex<()>,
}

/// Keyed hash of a file; callers cannot construct collisions.
type Hash = [u64; 2];

#[derive(Default)]
struct MediaCache {
    /// First row id of everything encoded so far.
    numbers: HashMap<Hash, u32>,
    /// The most recently used media, the latest last.
    recent: VecDeque<(Hash, EncodedMedia)>,
}

impl MediaCache {
    /// Returns a cached medium and marks it as used.
    fn find(&mut self, hash: Hash) -> Option<EncodedMedia> {
        let at = self.recent.iter().position(|(known, _)| *known == hash)?;
        let found = self.recent.remove(at)?;
        let media = found.1.clone();
        self.recent.push_back(found);
        Some(media)
    }

    /// Caches a medium and evicts the oldest ones beyond [`MAX_CACHED`] bytes, but never the medium
    /// itself: it must outlive the encoding until its tokens are fed.
    fn keep(&mut self, hash: Hash, media: &EncodedMedia) {
        self.numbers.insert(hash, media.rows.tokens().start);
        self.recent.push_back((hash, media.clone()));
        let mut n_bytes: usize = self.recent.iter().map(|(_, media)| media.rows.n_bytes()).sum();
        while n_bytes > MAX_CACHED
            && self.recent.len() > 1
            && let Some((_, oldest)) = self.recent.pop_front()
        {
            n_bytes -= oldest.rows.n_bytes();
        }
    }
}

/// The output of an encoder, before its rows have ids.
struct Encoding {
    rows: EmbeddingInput,
    /// The prompt text in place of the file.
    pieces: Vec<Piece>,
    /// Text before and after it, which is tokenized with the text around it.
    surrounding_text: &'static str,
}

/// A piece of prompt text.
enum Piece {
    /// Text that is tokenized with the model's vocabulary, special tokens included.
    Mark(String),
    /// A range of the rows.
    Rows(Range<u32>),
}

impl MediaModel {
    /// Loads the encoders in a file onto a device, for a model of this configuration.
    pub fn load(gguf: &Gguf, device: &dyn EncoderDevice, config: &Config) -> Result<Self, Error> {
        let encoders = Encoders::load(gguf, || device.load_images(gguf), || device.load_audio(gguf))?;
        check_fit(
            encoders.vision.loaded().map(|vision| vision.config()),
            encoders.audio.loaded().map(|audio| audio.config()),
            config,
        )?;
        let hashes = [RandomState::new(), RandomState::new()];
        let n_bytes = gguf.tensors().iter().map(|info| info.n_bytes).sum();
        Ok(Self { encoders, n_bytes, hashes, cache: Mutex::default(), encoding: Mutex::default() })
    }

    /// Returns the bytes of the weights, in the file's types.
    pub fn weight_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Returns the placeholders of the family's chat templates.
    fn marks(&self) -> MediaMarks<'static> {
        MediaMarks {
            image: self.encoders.vision.loaded().map(|vision| vision.config().projector.mark()),
            audio: self.encoders.audio.loaded().map(|audio| audio.config().projector.mark()),
        }
    }

    fn cache(&self) -> MutexGuard<'_, MediaCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decodes and encodes a file.
    fn encode(
        &self,
        kind: MediaKind,
        file: &[u8],
        options: &EncodeOptions<'_>,
        tokenizer: &Tokenizer,
        soft_tokens: &SoftTokens,
    ) -> Result<EncodedMedia, Error> {
        let hash = self.hashes.each_ref().map(|state| state.hash_one((kind, options.owner, file)));
        if let Some(known) = self.cache().find(hash) {
            return Ok(known);
        }
        // Encodings run one at a time: they share the threads.
        let _encoding = self.encoding.lock().unwrap_or_else(PoisonError::into_inner);
        // A concurrent request may have encoded the same file meanwhile.
        if let Some(known) = self.cache().find(hash) {
            return Ok(known);
        }
        let encoding = match kind {
            MediaKind::Image => encode_image(&**supported(&self.encoders.vision, kind)?, file, options)?,
            MediaKind::Audio => encode_audio(&**supported(&self.encoders.audio, kind)?, file, options)?,
        };
        let mut cache = self.cache();
        let again = cache.numbers.get(&hash).copied();
        let rows = soft_tokens.add(encoding.rows, again).ok_or_else(|| Error::Setting {
            name: kind.name(),
            expected: "at most 4 billion soft tokens per loaded model".to_owned(),
            got: "more".to_owned(),
        })?;
        let first = rows.tokens().start;
        let mut tokens = Vec::new();
        for piece in &encoding.pieces {
            match piece {
                Piece::Mark(text) => tokens.extend(tokenizer.encode(text, Special::Parse, false)?),
                Piece::Rows(rows) => tokens.extend(first + rows.start..first + rows.end),
            }
        }
        let surrounding_text = encoding.surrounding_text;
        let media = EncodedMedia { kind, surrounding_text, tokens: tokens.into(), rows };
        cache.keep(hash, &media);
        Ok(media)
    }
}

/// Encodes an image file.
fn encode_image(
    encoder: &dyn EncodesImages,
    file: &[u8],
    options: &EncodeOptions<'_>,
) -> Result<Encoding, Error> {
    let config = encoder.config();
    let layout = ImageLayout::new(config, &Image::decode(file)?)?;
    options.check(layout.n_rows())?;
    let rows_of = |tile: &Image| match (options.go_on)() {
        true => Ok(encoder.rows(tile)?),
        false => Err(Error::Cancelled),
    };
    let tiles = layout.tiles.iter().map(rows_of).collect::<Result<Vec<_>, _>>()?;
    let n_rows = |tile: &Vec<Vec<f32>>| (tile[0].len() / config.n_embd_text) as u32;
    let firsts: Vec<u32> =
        tiles.iter().scan(0, |next, tile| Some(std::mem::replace(next, *next + n_rows(tile)))).collect();
    let part = |part: usize| tiles.iter().flat_map(|tile| &tile[part]).copied().collect();
    let rows = (0..1 + config.deep.len()).map(part).collect();
    let pieces = layout.pieces.into_iter().map(|piece| match piece {
        ImageToken::Mark(text) => Piece::Mark(text),
        ImageToken::Rows { tile, rows } => {
            Piece::Rows(firsts[tile] + rows.start as u32..firsts[tile] + rows.end as u32)
        }
    });
    let rows = EmbeddingInput { rows, columns: layout.columns };
    Ok(Encoding { rows, pieces: pieces.collect(), surrounding_text: "" })
}

/// Encodes an audio file. Its rows have positions as text has: M-RoPE models count them in time.
fn encode_audio(
    encoder: &dyn EncodesAudio,
    file: &[u8],
    options: &EncodeOptions<'_>,
) -> Result<Encoding, Error> {
    let (config, clip) = (encoder.config(), AudioClip::decode(file)?);
    options.check(config.n_rows(&clip))?;
    let rows = encoder.rows(&clip, options.go_on).map_err(|error| match error {
        AudioError::Cancelled => Error::Cancelled,
        error => error.into(),
    })?;
    let n_rows = (rows.len() / config.n_embd_text) as u32;
    let [before, after] = config.projector.enclosing_marks().map(|mark| Piece::Mark(mark.to_owned()));
    let pieces = vec![before, Piece::Rows(0..n_rows), after];
    let rows = EmbeddingInput { rows: vec![rows], columns: None };
    Ok(Encoding { rows, pieces, surrounding_text: config.projector.surrounding_text() })
}

/// Returns an encoder that can be used.
fn supported<E>(encoder: &Encoder<E>, kind: MediaKind) -> Result<&E, Error> {
    match encoder {
        Encoder::Loaded(encoder) => Ok(encoder),
        Encoder::Absent => Err(unsupported(kind, "a model without one")),
        Encoder::Unknown(error) => Err(unsupported(kind, &error.to_string())),
    }
}

/// Returns the error of a model that does not accept media of a kind.
fn unsupported(kind: MediaKind, got: &str) -> Error {
    let encoder = match kind {
        MediaKind::Image => "a vision encoder",
        MediaKind::Audio => "an audio encoder",
    };
    Error::Setting {
        name: kind.name(),
        expected: format!("a model with {encoder} (opened with its file, mmproj-*.gguf)"),
        got: got.to_owned(),
    }
}

/// Checks from the two files that encoders fit a model: see
/// [`OpenOptions::mmproj`](crate::OpenOptions::mmproj).
///
/// # Errors
/// A file of another kind, without a supported encoder, or of another model.
pub fn check_mmproj(mmproj: &Gguf, model: &Gguf) -> Result<(), Error> {
    let encoders = Encoders::load(
        mmproj,
        || kvant_vision::Config::from_gguf(mmproj),
        || kvant_audio::Config::from_gguf(mmproj),
    )?;
    check_fit(encoders.vision.loaded(), encoders.audio.loaded(), &Config::from_gguf(model)?)
}

/// Checks that encoders write rows that a text model reads: of its width, and those of images in a
/// plane if it has positions there.
fn check_fit(
    vision: Option<&kvant_vision::Config>,
    audio: Option<&kvant_audio::Config>,
    text: &Config,
) -> Result<(), Error> {
    let misfit = |expected: String, got: String| {
        let expected = format!("the encoder of this model, with {expected}");
        Err(Error::Setting { name: "mmproj", expected, got })
    };
    let widths = [vision.map(|vision| vision.n_embd_text), audio.map(|audio| audio.n_embd_text)];
    if let Some(got) = widths.into_iter().flatten().find(|&width| width != text.n_embd) {
        return misfit(format!("rows of {} values", text.n_embd), format!("rows of {got}"));
    }
    let Some(vision) = vision else { return Ok(()) };
    let reads_planes = text.ropes.iter().any(|rope| rope.has_axes());
    let named = |is_plane| if is_plane { "positions in a plane" } else { "one position per row" };
    match vision.projector.is_of_any_size() {
        is_plane if is_plane == reads_planes => Ok(()),
        is_plane => misfit(named(reads_planes).to_owned(), named(is_plane).to_owned()),
    }
}

impl Model {
    /// Returns whether the model accepts images: see
    /// [`OpenOptions::mmproj`](crate::OpenOptions::mmproj).
    pub fn supports_images(&self) -> bool {
        self.supports_media(MediaKind::Image)
    }

    /// Returns whether the model accepts audio: see
    /// [`OpenOptions::mmproj`](crate::OpenOptions::mmproj).
    pub fn supports_audio(&self) -> bool {
        self.supports_media(MediaKind::Audio)
    }

    /// Returns whether the model accepts media of a kind.
    pub fn supports_media(&self, kind: MediaKind) -> bool {
        self.media().is_some_and(|media| match kind {
            MediaKind::Image => media.encoders.vision.loaded().is_some(),
            MediaKind::Audio => media.encoders.audio.loaded().is_some(),
        })
    }

    /// Encodes a PNG, JPEG, WebP, GIF or BMP file. Recently encoded images come from a cache;
    /// others take the time of the vision encoder.
    ///
    /// # Errors
    /// A model without a vision encoder, bytes that are not an image, or an image that is too
    /// large.
    pub fn encode_image(&self, file: &[u8]) -> Result<EncodedMedia, Error> {
        self.encode_media(MediaKind::Image, file, &EncodeOptions::default())
    }

    /// Encodes a WAV, MP3, FLAC or Ogg Vorbis file. Recently encoded clips come from a cache;
    /// others take the time of the audio encoder.
    ///
    /// # Errors
    /// A model without an audio encoder, bytes that are not audio, or a clip that is too short or
    /// too long.
    pub fn encode_audio(&self, file: &[u8]) -> Result<EncodedMedia, Error> {
        self.encode_media(MediaKind::Audio, file, &EncodeOptions::default())
    }

    /// Encodes an image or an audio file with these options.
    ///
    /// # Errors
    /// As [`encode_image`](Self::encode_image) and [`encode_audio`](Self::encode_audio), and
    /// [`Error::PromptTooLong`] or [`Error::Cancelled`] by the options.
    pub fn encode_media(
        &self,
        kind: MediaKind,
        file: &[u8],
        options: &EncodeOptions<'_>,
    ) -> Result<EncodedMedia, Error> {
        let media = self.media().ok_or_else(|| unsupported(kind, "a text-only model"))?;
        media.encode(kind, file, options, self.tokenizer()?, &self.loaded().properties().soft_tokens)
    }

    /// Returns the text and the tokens of a conversation with media in the model's own chat format.
    /// Messages have the form that chat templates read: an image is a content part `{"type":
    /// "image"}`, audio `{"type": "audio"}`, and `media` holds them in conversation order.
    ///
    /// # Errors
    /// When there is no template, the template rejects the conversation or drops media, or the
    /// media differ from those of the messages.
    pub fn media_prompt(
        &self,
        messages: &[serde_json::Value],
        options: &RenderOptions,
        media: &[EncodedMedia],
    ) -> Result<(Rendered, Vec<u32>), Error> {
        let marks = self.media().map(MediaModel::marks).unwrap_or_default();
        let rendered = self.chat_template()?.render_media(messages, options, marks)?;
        if !rendered.kinds.iter().eq(media.iter().map(|media| &media.kind)) {
            let named = |kinds: &mut dyn Iterator<Item = MediaKind>| {
                let names: Vec<_> = kinds.map(MediaKind::name).collect();
                if names.is_empty() { "none".to_owned() } else { names.join(", ") }
            };
            let expected = named(&mut rendered.kinds.iter().copied());
            let got = named(&mut media.iter().map(|media| media.kind));
            return Err(Error::Setting { name: "media", expected, got });
        }
        let (tokenizer, mut tokens) = (self.tokenizer()?, Vec::new());
        let around = |index: Option<usize>| {
            index.and_then(|index| media.get(index)).map_or("", |media| media.surrounding_text)
        };
        for (index, text) in rendered.texts.iter().enumerate() {
            let text = text.surrounded(around(index.checked_sub(1)), around(Some(index)));
            tokens.extend(match index {
                0 => tokenizer.encode_prompt(text.as_str(), text.special())?,
                _ => tokenizer.encode(text.as_str(), text.special(), false)?,
            });
            tokens.extend(media.get(index).into_iter().flat_map(EncodedMedia::tokens));
        }
        Ok((rendered.whole, tokens))
    }

    /// Works as [`chat_prompt`](Self::chat_prompt) for messages [with
    /// media](Message::with_media).
    ///
    /// # Errors
    /// As [`media_prompt`](Self::media_prompt).
    pub fn chat_prompt_with_media(
        &self,
        messages: &[Message],
        media: &[EncodedMedia],
    ) -> Result<Vec<u32>, Error> {
        let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
        let messages: Vec<_> = messages.iter().map(|message| serde_json::json!(message)).collect();
        Ok(self.media_prompt(&messages, &options, media)?.1)
    }
}
