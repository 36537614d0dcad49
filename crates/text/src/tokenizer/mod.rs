//! Text to tokens and back, from a GGUF file's vocabulary.
//!
//! Four kinds of vocabulary ([`TokenizerModel`]) share one way: special tokens are cut out of the
//! text ([`Special`]), the plain text between them is tokenised by the kind's own method (modules
//! `bpe`, `spm`, `wordpiece`), and BOS and EOS are added if asked for. Inside, a token is the bytes that
//! it writes, whatever alphabet the file spells them in.
//!
//! Results equal llama.cpp's on its own vocabulary vectors. Where it and a model's own
//! `tokenizer.json` part, the model's own holds: text is normalized first ([`Normalizer`]), and tokens that are
//! taken whole are found as [`AddedTokens`] says. Plain text never becomes a control token, even where merges would lead to one. Decoding
//! is faithful to the bytes: no space before punctuation is removed.
//!
//! Methods are ours rather than the `tokenizers` crate's. Measured before that choice, with its
//! pure-Rust regex engine: 84 crates and 70 s of compile time on two cores, and, worse, its splitter
//! ends without an error when the engine meets its step limit, so that 2 MB of spaces or capitals
//! silently make one word of all the rest.

mod bpe;
mod bytes;
mod encode;
mod error;
mod gguf;
mod merge;
mod model;
mod normalizer;
mod pre;
mod seams;
mod special;
mod spm;
mod stream;
mod vocab;
mod wordpiece;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::ops::Range;

pub use error::{MergeFault, TokenizerError};
pub use model::TokenizerModel;
pub use normalizer::Normalizer;
pub use special::AddedTokens;
pub use stream::DecodeStream;
pub use vocab::{SpecialIds, TokenKind, VocabData};

use bpe::Bpe;
use pre::PreTokenizer;
use special::Partitions;
use spm::Spm;
use vocab::Vocab;
use wordpiece::{Cleaning, WordPiece};

/// What the text of a special token means inside a text to encode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special<'a> {
    /// The token: for text that is trusted as a whole.
    Parse,
    /// Just text: for what a person or a document says. User-defined tokens are still found.
    AsText,
    /// The token where it stands wholly within one of these ranges of bytes, which ascend; elsewhere just text. For what
    /// a chat template has rendered.
    Within(&'a [Range<usize>]),
}

/// A vocabulary and its method. Shared between threads freely; every method takes `&self`.
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
    add_space_prefix: bool,
}

/// How plain text becomes tokens.
#[derive(Debug, Clone)]
enum Method {
    Bpe(Bpe),
    Spm(Spm),
    WordPiece(WordPiece),
}

impl Tokenizer {
    /// Checks `data` and prepares it for use.
    ///
    /// # Errors
    /// Any [`TokenizerError`]: an inconsistent vocabulary, an unknown pre-tokeniser, a merge of unknown tokens, ...
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
            TokenizerModel::Bert => {
                let unk = special.unk.ok_or_else(|| missing("tokenizer.ggml.unknown_token_id"))?;
                let lowercase = data.lowercase.unwrap_or(true);
                let cleaning = Cleaning { lowercase, strip_accents: data.strip_accents.unwrap_or(lowercase) };
                Method::WordPiece(WordPiece::new(&vocab, unk, cleaning)?)
            }
            TokenizerModel::Gpt2 | TokenizerModel::Gemma4 => {
                let merges = data.merges.ok_or_else(|| missing("tokenizer.ggml.merges"))?;
                let gemma = model == TokenizerModel::Gemma4;
                let name = if gemma { "gemma4" } else { data.pre.as_deref().unwrap_or("default") };
                let pre = PreTokenizer::named(name)?;
                bos_by_default = pre.add_bos;
                Method::Bpe(Bpe::new(model, pre, &vocab, &merges)?)
            }
        };
        // Gemma 4 needs one, and there are files that deny it by mistake.
        let add_bos = data.add_bos.unwrap_or(bos_by_default) || model == TokenizerModel::Gemma4;
        let add_eos = data.add_eos.unwrap_or(model == TokenizerModel::Bert);
        let ends = [
            (add_bos, special.bos, "tokenizer.ggml.bos_token_id"),
            (add_eos, special.eos, "tokenizer.ggml.eos_token_id"),
        ];
        if let Some((_, _, key)) = ends.into_iter().find(|(add, id, _)| *add && id.is_none()) {
            return Err(TokenizerError::MissingSpecial { key });
        }
        let implied = || match &method {
            Method::Bpe(bpe) => bpe.pre.normalizer(),
            Method::Spm(_) | Method::WordPiece(_) => Normalizer::default(),
        };
        let normalizer = data.normalizer.unwrap_or_else(implied);
        let by_name =
            || if data.strip_after_special { AddedTokens::phi3(&vocab) } else { AddedTokens::default() };
        let added = data.added.unwrap_or_else(by_name);
        Ok(Tokenizer {
            partitions: Partitions::new(&vocab, added, &normalizer)?,
            normalizer,
            add_space_prefix: data.add_space_prefix.unwrap_or(true) && model == TokenizerModel::Llama,
            model,
            vocab,
            method,
            special,
            eog,
            add_bos,
            add_eos,
        })
    }

    /// A number of tokens that `text` takes at least, without a look at what they are: as many as if the longest token
    /// of the vocabulary stood again and again. 0 where text may be dropped.
    pub fn fewest_tokens(&self, text: &str) -> usize {
        let shrink = self.normalizer.max_shrink(text);
        let Some(shrink) = shrink.filter(|_| self.model != TokenizerModel::Bert && !self.partitions.strip())
        else {
            return 0;
        };
        // Characters, as the mark of a space has three bytes and writes one.
        text.chars().count() / self.vocab.longest.max(1).saturating_mul(shrink)
    }

    /// What becomes of plain text before it is cut into words.
    pub fn normalize<'a>(&self, text: &'a str) -> Cow<'a, str> {
        self.normalizer.apply(text, &[]).text
    }

    /// The text of `ids`: control and unknown tokens and ids out of range write nothing, the space
    /// that the vocabulary puts before a text is removed, invalid UTF-8 reads as U+FFFD.
    ///
    /// For tokens as they come, or from within a text, use [`DecodeStream`].
    pub fn decode(&self, ids: &[u32]) -> String {
        self.text_of(ids.iter().copied().filter(|&id| self.vocab.is_shown(id)))
    }

    /// As [`decode`](Self::decode), with the text of control and unknown tokens.
    pub fn decode_all(&self, ids: &[u32]) -> String {
        self.text_of(ids.iter().copied())
    }

    fn text_of(&self, ids: impl Iterator<Item = u32>) -> String {
        let bytes: Vec<u8> = ids.flat_map(|id| self.token_bytes(id)).copied().collect();
        let prefixed = self.add_space_prefix || self.model == TokenizerModel::Bert;
        let text = bytes.strip_prefix(b" ").filter(|_| prefixed).unwrap_or(&bytes);
        String::from_utf8_lossy(text).into_owned()
    }

    /// The bytes that a token writes, which may be part of a character; of a special token, its text.
    /// Empty for an id out of range.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.vocab.bytes(id).unwrap_or_default()
    }

    /// A token's text as the file spells it (`Ġthe`, `▁the`, `<0x0A>`); `None` for an id out of range.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.vocab.text(id)
    }

    /// The token with exactly this text, as the file spells it.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.vocab.find_spelt(self.model, text)
    }

    /// What a token is; `None` for an id out of range.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.vocab.kind(id)
    }

    /// Whether the model ends its answer with this token.
    pub fn is_eog(&self, id: u32) -> bool {
        self.eog.binary_search(&id).is_ok()
    }

    /// Every token that ends an answer, in ascending order.
    pub fn eog_ids(&self) -> &[u32] {
        &self.eog
    }

    /// The ids with a meaning of their own.
    pub fn special(&self) -> &SpecialIds {
        &self.special
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.special.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.special.eos
    }

    /// The token that ends a turn: the file's, or the well-known one of the vocabulary.
    pub fn eot(&self) -> Option<u32> {
        self.special.eot
    }

    /// Whether [`encode`](Self::encode) begins a text with BOS when asked to add it.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// Whether [`encode`](Self::encode) ends a text with EOS when asked to add it.
    pub fn adds_eos(&self) -> bool {
        self.add_eos
    }

    /// Number of tokens.
    pub fn n_vocab(&self) -> usize {
        self.vocab.len()
    }

    /// The kind of the vocabulary.
    pub fn model(&self) -> TokenizerModel {
        self.model
    }

    /// The name of the pre-tokeniser at work, for vocabularies that have one.
    pub fn pre(&self) -> Option<&'static str> {
        match &self.method {
            Method::Bpe(bpe) => Some(bpe.pre.name()),
            Method::Spm(_) | Method::WordPiece(_) => None,
        }
    }
}

/// The ids of `given` that are tokens, and where it has none, those that every vocabulary of the kind has had. Files name
/// tokens that there are not, as those without a separator do; llama.cpp reads them as if they named none.
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
        TokenizerModel::Gpt2 | TokenizerModel::Gemma4 => {}
    }
    ids
}
