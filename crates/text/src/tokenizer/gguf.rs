//! The keys of a GGUF file that describe its vocabulary.

use kvant_gguf::{FromValue, Gguf, Meta, Strings, Value};

use super::Tokenizer;
use super::error::TokenizerError;
use super::model::TokenizerModel;
use super::vocab::{SpecialIds, VocabData};

impl Tokenizer {
    /// The tokenizer of a model file.
    ///
    /// # Errors
    /// Any [`TokenizerError`]: keys absent or of the wrong type, and all of [`Tokenizer::new`].
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TokenizerError> {
        Self::new(VocabData::from_meta(&gguf.meta())?)
    }
}

impl VocabData {
    /// Reads the vocabulary's keys. Nothing but their types is checked here.
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
        let name = meta.find::<&str>("general.name")?.unwrap_or_default().to_lowercase();
        Ok(VocabData {
            pre: meta.find::<&str>("tokenizer.ggml.pre")?.map(str::to_owned),
            scores: meta.find("tokenizer.ggml.scores")?,
            token_types: meta.find("tokenizer.ggml.token_type")?,
            merges: merges.map(|m| strings("tokenizer.ggml.merges", m)).transpose()?,
            special,
            add_bos: meta.find("tokenizer.ggml.add_bos_token")?,
            add_eos: meta.find("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: meta.find("tokenizer.ggml.add_space_prefix")?,
            // The files do not carry this property of the tokens; llama.cpp goes by the name too.
            strip_after_special: name.contains("phi-3") || name.contains("phi3"),
            ..VocabData::new(model, tokens)
        })
    }
}

/// A special id of any integer type. Files say -1, or the largest number that fits, for a token that there is not.
struct Id(Option<u32>);

impl FromValue<'_> for Id {
    fn expected() -> String {
        "integer".to_owned()
    }

    fn from_value(value: Value<'_>) -> Option<Self> {
        value.as_integer().map(|id| Id(id.try_into().ok()))
    }
}

/// The strings of `key`, which must be UTF-8.
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
