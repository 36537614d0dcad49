//! Tokenizer: encodes text to tokens and decodes it, from a GGUF file's vocabulary.
//!
//! Six kinds of vocabulary ([`TokenizerModel`]) share one pipeline: special tokens are split from
//! the text ([`Special`]), the plain text between them is tokenized by the kind's own method
//! (modules `bpe`, `spm`, `unigram`, `wordpiece`, `rwkv`), and BOS and EOS are added on request.
//! Internally, a token is the bytes that it writes, independent of the alphabet of the file.
//!
//! Results equal llama.cpp's on its own vocabulary vectors. Where llama.cpp and a model's own
//! `tokenizer.json` differ, the latter takes precedence: text is normalized first ([`Normalizer`]),
//! and added tokens are matched as [`AddedTokens`] specifies. Plain text never becomes a control
//! token, even where merges would lead to one. Decoding is faithful to the bytes: no space before
//! punctuation is removed.
//!
//! The methods are implemented here instead of using the `tokenizers` crate. Measured before that
//! choice, with its pure-Rust regex engine: 84 crates and 70 s of compile time on two cores. Worse,
//! its splitter ends without an error when the engine reaches its step limit, so that 2 MB of
//! spaces or capitals silently turn all remaining text into one word.

mod bpe;
mod bytes;
mod charsmap;
mod encode;
mod error;
mod gguf;
mod merge;
mod model;
mod normalizer;
mod pre;
mod prefixes;
mod rwkv;
mod special;
mod split_points;
mod spm;
mod stream;
mod unigram;
mod vocab;
mod wordpiece;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::ops::Range;

pub use charsmap::Charsmap;
pub use error::{MergeFault, TokenFault, TokenizerError};
pub use model::TokenizerModel;
pub use normalizer::Normalizer;
pub use special::AddedTokens;
pub use stream::DecodeStream;
pub use vocab::{SpecialIds, TokenKind, VocabData};

use bpe::Bpe;
use pre::PreTokenizer;
use rwkv::Rwkv;
use special::Partitions;
use spm::Spm;
use unigram::Unigram;
use vocab::Vocab;
use wordpiece::{Cleaning, WordPiece};

/// Treatment of special-token text in a text to encode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special<'a> {
    /// Parses special tokens: for text that is trusted as a whole.
    Parse,
    /// Treats them as plain text: for untrusted text. User-defined tokens are still matched.
    AsText,
    /// Parses special tokens that lie wholly within one of these ascending byte ranges, and treats
    /// them as plain text elsewhere. For rendered chat templates.
    Within(&'a [Range<usize>]),
}

/// A vocabulary with its encoding method. Every method takes `&self`, so threads can share it.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    model: TokenizerModel,
    vocab: Vocab,
    method: Method,
    normalizer: Normalizer,
    partitions: Partitions,
    special: SpecialIds,
    /// Sorted.
    eog: Vec<u32>,
    add_bos: bool,
    add_eos: bool,
    add_sep: bool,
    add_space_prefix: bool,
}

/// The encoding method of plain text.
#[derive(Debug, Clone)]
enum Method {
    Bpe(Bpe),
    Spm(Spm),
    Unigram(Unigram),
    WordPiece(WordPiece),
    Rwkv(Rwkv),
}

impl Tokenizer {
    /// Validates `data` and builds the tokenizer.
    ///
    /// # Errors
    /// Any [`TokenizerError`]: an inconsistent vocabulary, an unknown pre-tokenizer, a merge of
    /// unknown tokens, ...
    pub fn new(data: VocabData) -> Result<Self, TokenizerError> {
        let model = data.model;
        let mut vocab = Vocab::new(model, data.tokens, data.token_types.as_deref())?;
        let mut special = default_ids(model, vocab.len(), data.special);
        let eog = special::end_of_generation(model, &mut vocab, &mut special);
        let missing = |key| TokenizerError::MissingKey { key, model: model.name() };
        let mut bos_by_default = matches!(model, TokenizerModel::Llama | TokenizerModel::Bert);
        let method = match model {
            TokenizerModel::Llama => {
                let scores = data.scores.ok_or_else(|| missing("tokenizer.ggml.scores"))?;
                Method::Spm(Spm::new(&vocab, scores, special.unk)?)
            }
            TokenizerModel::T5 => {
                let scores = data.scores.ok_or_else(|| missing("tokenizer.ggml.scores"))?;
                let unk = special.unk.ok_or_else(|| missing("tokenizer.ggml.unknown_token_id"))?;
                Method::Unigram(Unigram::new(&vocab, scores, unk)?)
            }
            TokenizerModel::Bert => {
                let unk = special.unk.ok_or_else(|| missing("tokenizer.ggml.unknown_token_id"))?;
                let lowercase = data.lowercase.unwrap_or(true);
                let cleaning = Cleaning { lowercase, strip_accents: data.strip_accents.unwrap_or(lowercase) };
                Method::WordPiece(WordPiece::new(&vocab, unk, cleaning)?)
            }
            TokenizerModel::Rwkv => Method::Rwkv(Rwkv::new(&vocab, special.unk)?),
            TokenizerModel::Gpt2 | TokenizerModel::Gemma4 => {
                let merges = data.merges.ok_or_else(|| missing("tokenizer.ggml.merges"))?;
                let gemma = model == TokenizerModel::Gemma4;
                let name = if gemma { "gemma4" } else { data.pre.as_deref().unwrap_or("default") };
                let pre = PreTokenizer::named(name)?;
                bos_by_default = pre.add_bos;
                Method::Bpe(Bpe::new(model, pre, &vocab, &merges)?)
            }
        };
        // Gemma 4 requires BOS, but some files disable it by mistake.
        let add_bos = data.add_bos.unwrap_or(bos_by_default) || model == TokenizerModel::Gemma4;
        let add_eos = data.add_eos.unwrap_or(matches!(model, TokenizerModel::Bert | TokenizerModel::T5));
        let ends = [
            (add_bos, special.bos, "tokenizer.ggml.bos_token_id"),
            (add_eos, special.eos, "tokenizer.ggml.eos_token_id"),
        ];
        if let Some((_, _, key)) = ends.into_iter().find(|(add, id, _)| *add && id.is_none()) {
            return Err(TokenizerError::MissingSpecial { key });
        }
        let implied = || match &method {
            Method::Bpe(bpe) => bpe.pre.normalizer(),
            _ => Normalizer::default(),
        };
        let normalizer = data.normalizer.unwrap_or_else(implied);
        let by_name =
            || if data.strip_after_special { AddedTokens::phi3(&vocab) } else { AddedTokens::default() };
        let added = data.added.unwrap_or_else(by_name);
        Ok(Tokenizer {
            partitions: Partitions::new(&vocab, added, &normalizer)?,
            normalizer,
            add_space_prefix: data.add_space_prefix.unwrap_or(true)
                && matches!(model, TokenizerModel::Llama | TokenizerModel::T5),
            model,
            vocab,
            method,
            special,
            eog,
            add_bos,
            add_eos,
            add_sep: model != TokenizerModel::Bert && data.add_sep.unwrap_or(model == TokenizerModel::T5),
        })
    }

    /// Returns a lower bound on the number of tokens of `text` without encoding it: the count if
    /// every token were as long as the longest of the vocabulary. 0 if text may be dropped.
    pub fn min_tokens(&self, text: &str) -> usize {
        let shrink = self.normalizer.max_shrink(text);
        // Any number of unknown characters may be one token.
        let fuses = matches!(self.model, TokenizerModel::Bert | TokenizerModel::T5);
        let Some(shrink) = shrink.filter(|_| !fuses && !self.partitions.strip()) else {
            return 0;
        };
        // Counts characters, since the space mark has three bytes and writes one.
        text.chars().count() / self.vocab.longest.max(1).saturating_mul(shrink)
    }

    /// Normalizes plain text as before splitting into words.
    pub fn normalize<'a>(&self, text: &'a str) -> Cow<'a, str> {
        self.normalizer.apply(text, &[]).text
    }

    /// Decodes `ids` to text. Control and unknown tokens and ids out of range write nothing, the
    /// space prefix of the vocabulary is removed, and invalid UTF-8 becomes U+FFFD.
    ///
    /// For tokens that arrive one by one, or from within a text, use [`DecodeStream`].
    pub fn decode(&self, ids: &[u32]) -> String {
        self.text_of(ids.iter().copied().filter(|&id| self.vocab.is_visible(id)))
    }

    /// Works as [`decode`](Self::decode), including the text of control and unknown tokens.
    pub fn decode_all(&self, ids: &[u32]) -> String {
        self.text_of(ids.iter().copied())
    }

    fn text_of(&self, ids: impl Iterator<Item = u32>) -> String {
        let bytes: Vec<u8> = ids.flat_map(|id| self.token_bytes(id)).copied().collect();
        let prefixed = self.add_space_prefix || self.model == TokenizerModel::Bert;
        let text = bytes.strip_prefix(b" ").filter(|_| prefixed).unwrap_or(&bytes);
        String::from_utf8_lossy(text).into_owned()
    }

    /// Returns the bytes that a token writes, which may be part of a character. For a special
    /// token, returns its text. Empty for an id out of range.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.vocab.bytes(id).unwrap_or_default()
    }

    /// Returns a token's text as in the file (`Ġthe`, `▁the`, `<0x0A>`); `None` for an id out of
    /// range.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.vocab.text(id)
    }

    /// Returns the token with exactly this text, as in the file.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.vocab.find_exact(self.model, text)
    }

    /// Returns the kind of a token; `None` for an id out of range.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.vocab.kind(id)
    }

    /// Whether this token ends a generation.
    pub fn is_eog(&self, id: u32) -> bool {
        self.eog.binary_search(&id).is_ok()
    }

    /// Returns every end-of-generation token, in ascending order.
    pub fn eog_ids(&self) -> &[u32] {
        &self.eog
    }

    /// Returns the special ids.
    pub fn special(&self) -> &SpecialIds {
        &self.special
    }

    /// Returns the beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.special.bos
    }

    /// Returns the end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.special.eos
    }

    /// Returns the end-of-turn token: the file's, or the well-known one of the vocabulary.
    pub fn eot(&self) -> Option<u32> {
        self.special.eot
    }

    /// Whether [`encode`](Self::encode) adds BOS if `add_bos_eos` is set.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// Whether [`encode`](Self::encode) adds EOS if `add_bos_eos` is set.
    pub fn adds_eos(&self) -> bool {
        self.add_eos
    }

    /// Whether the texts of a pair have two end-of-sequence tokens between them (RoBERTa).
    pub fn adds_separator(&self) -> bool {
        self.add_sep
    }

    /// Returns the number of tokens.
    pub fn n_vocab(&self) -> usize {
        self.vocab.len()
    }

    /// Returns the kind of the vocabulary.
    pub fn model(&self) -> TokenizerModel {
        self.model
    }

    /// Returns the name of the pre-tokenizer, for vocabularies that have one.
    pub fn pre(&self) -> Option<&'static str> {
        match &self.method {
            Method::Bpe(bpe) => Some(bpe.pre.name()),
            _ => None,
        }
    }
}

/// Drops ids of `given` that are out of range, and fills the conventional defaults of the kind.
/// Some files name nonexistent tokens, such as separators; llama.cpp treats them as absent too.
fn default_ids(model: TokenizerModel, n_vocab: usize, given: SpecialIds) -> SpecialIds {
    let known = |id: u32| Some(id).filter(|&id| (id as usize) < n_vocab);
    let mut ids = given;
    for (_, id) in ids.keyed() {
        *id = id.and_then(known);
    }
    match model {
        TokenizerModel::Llama => {
            ids.unk = ids.unk.or(known(0));
            ids.bos = ids.bos.or(known(1));
            ids.eos = ids.eos.or(known(2));
        }
        TokenizerModel::Bert => {
            ids.unk = ids.unk.or(known(100));
            ids.cls = ids.cls.or(known(101));
            ids.sep = ids.sep.or(known(102));
            // BERT begins a text with [CLS] and ends it with [SEP].
            ids.bos = ids.bos.or(ids.cls);
            ids.eos = ids.eos.or(ids.sep);
        }
        // Those of T5.
        TokenizerModel::T5 => {
            ids.eos = ids.eos.or(known(1));
            ids.unk = ids.unk.or(known(2));
        }
        TokenizerModel::Gpt2 | TokenizerModel::Gemma4 | TokenizerModel::Rwkv => {}
    }
    ids
}
