//! Reads the vocabulary keys of a GGUF file.

use kvant_gguf::{FromValue, Gguf, Meta, Strings, Value};

use super::Tokenizer;
use super::charsmap::Charsmap;
use super::error::TokenizerError;
use super::model::TokenizerModel;
use super::normalizer::{self, Normalizer};
use super::special::AddedTokens;
use super::vocab::{SpecialIds, VocabData};

impl Tokenizer {
    /// Builds the tokenizer of a model file.
    ///
    /// # Errors
    /// Any [`TokenizerError`]: keys absent or of the wrong type, and all of [`Tokenizer::new`].
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TokenizerError> {
        Self::new(VocabData::from_meta(&gguf.meta())?)
    }
}

impl VocabData {
    /// Reads the vocabulary's keys. Checks only their types.
    ///
    /// # Errors
    /// [`TokenizerError::Metadata`] for a key that is absent or of the wrong type,
    /// [`TokenizerError::UnknownModel`], [`TokenizerError::NotUtf8`].
    pub fn from_meta(meta: &Meta<'_>) -> Result<Self, TokenizerError> {
        let model = TokenizerModel::from_name(meta.get("tokenizer.ggml.model")?)?;
        let mut special = SpecialIds::default();
        for (key, id) in special.keyed() {
            *id = meta.find::<Id>(key)?.and_then(|id| id.0);
        }
        let tokens = strings("tokenizer.ggml.tokens", meta.get("tokenizer.ggml.tokens")?)?;
        let merges: Option<Strings<'_>> = meta.find("tokenizer.ggml.merges")?;
        let name = meta.text_lossy("general.name").unwrap_or_default().to_lowercase();
        let normalizer = normalizer(meta, model)?;
        let mut added = AddedTokens::default();
        for (key, ids) in added.keyed() {
            *ids = meta.find(key)?.unwrap_or_default();
        }
        Ok(VocabData {
            pre: meta.find::<&str>("tokenizer.ggml.pre")?.map(str::to_owned),
            scores: meta
                .find::<Vec<Score>>("tokenizer.ggml.scores")?
                .map(|all| all.iter().map(|s| s.0).collect()),
            token_types: meta.find("tokenizer.ggml.token_type")?,
            merges: merges.map(|m| strings("tokenizer.ggml.merges", m)).transpose()?,
            special,
            add_bos: meta.find("tokenizer.ggml.add_bos_token")?,
            add_eos: meta.find("tokenizer.ggml.add_eos_token")?,
            add_sep: meta.find("tokenizer.ggml.add_sep_token")?,
            add_space_prefix: meta.find("tokenizer.ggml.add_space_prefix")?,
            // GGUF has no key for this token property; llama.cpp also infers it from the model
            // name.
            strip_after_special: name.contains("phi-3") || name.contains("phi3"),
            // A file with a normalizer key also carries all other Kvant tokenizer keys.
            added: meta.find::<Strings<'_>>(normalizer::KEY)?.is_some().then_some(added),
            normalizer,
            lowercase: meta.find("tokenizer.ggml.normalizer.lowercase")?,
            strip_accents: meta.find("tokenizer.ggml.normalizer.strip_accents")?,
            ..VocabData::new(model, tokens)
        })
    }
}

/// A special id of any integer type. Files write -1, or the largest number that fits, for an absent
/// token.
struct Id(Option<u32>);

impl FromValue<'_> for Id {
    fn expected() -> String {
        "integer".to_owned()
    }

    fn from_value(value: Value<'_>) -> Option<Self> {
        value.as_integer().map(|id| Id(id.try_into().ok()))
    }
}

/// A score, which some files store as an integer.
struct Score(f32);

impl FromValue<'_> for Score {
    fn expected() -> String {
        "f32".to_owned()
    }

    fn from_value(value: Value<'_>) -> Option<Self> {
        let whole = || value.as_integer().map(|score| score as f32);
        f32::from_value(value).or_else(whole).map(Score)
    }
}

/// Reads the normalizer: the key that Kvant writes, or else those of SentencePiece.
fn normalizer(meta: &Meta<'_>, model: TokenizerModel) -> Result<Option<Normalizer>, TokenizerError> {
    let charsmap = || {
        let bytes = meta.find::<Vec<u8>>("tokenizer.ggml.precompiled_charsmap")?;
        bytes.map(|bytes| Charsmap::new(&bytes)).transpose()
    };
    if let Some(words) = meta.find::<Strings<'_>>(normalizer::KEY)? {
        let words = strings(normalizer::KEY, words)?;
        return Normalizer::from_words(words.iter().map(String::as_str), charsmap()?).map(Some);
    }
    // Other models ignore the keys of SentencePiece, as in llama.cpp.
    if model != TokenizerModel::T5 {
        return Ok(None);
    }
    let removes = meta.find("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false);
    let charsmap = charsmap()?;
    let map = charsmap.is_some().then_some("charsmap");
    let removed = removes.then_some(["squeeze_whitespace", "strip_left", "strip_right"]);
    let words: Vec<&str> = map.into_iter().chain(removed.into_iter().flatten()).collect();
    Normalizer::from_words(words, charsmap).map(Some)
}

/// Reads the strings of `key`, which must be UTF-8.
fn strings(key: &'static str, list: Strings<'_>) -> Result<Vec<String>, TokenizerError> {
    list.enumerate()
        .map(|(index, bytes)| {
            std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| {
                let text = String::from_utf8_lossy(bytes).into_owned();
                TokenizerError::NotUtf8 { key, index, text }
            })
        })
        .collect()
}
