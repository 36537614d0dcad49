//! WordPiece (Schuster and Nakajima, 2012), as in BERT's uncased models.
//!
//! The text is cleaned, stripped of accents and lowercased unless the file specifies otherwise, and
//! split at whitespace and around every punctuation mark and Chinese character. Each word then is
//! covered by the longest tokens that fit from left to right, or becomes the unknown token. In a
//! GGUF file the first token of a word starts with a space mark and continuations have no mark.
//! Dropped characters and word boundaries follow Hugging Face's `BertNormalizer` and
//! `BertPreTokenizer`; llama.cpp drops spacing marks as well.

use std::borrow::Cow;

use regex_automata::meta::Regex;
use unicode_normalization::UnicodeNormalization;

use super::error::TokenizerError;
use super::vocab::Vocab;

/// Chinese characters, in BERT's sense: each is a word of its own.
const CHINESE: &str = r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}\x{2B920}-\x{2CEAF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}";

/// Characters of the longest word that is covered by tokens, as in BERT's own tokenizer: longer
/// ones are unknown.
const MAX_WORD: usize = 100;

/// Normalization of a text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cleaning {
    pub(super) lowercase: bool,
    pub(super) strip_accents: bool,
}

/// Patterns and limits of a WordPiece vocabulary.
#[derive(Debug, Clone)]
pub(super) struct WordPiece {
    words: Regex,
    dropped: Regex,
    /// Bytes of the longest token.
    longest: usize,
    unk: u32,
    cleaning: Cleaning,
}

impl WordPiece {
    /// Compiles the patterns.
    pub(super) fn new(vocab: &Vocab, unk: u32, cleaning: Cleaning) -> Result<Self, TokenizerError> {
        let prepare = |what, pattern: &str| {
            Regex::new(pattern).map_err(|e| TokenizerError::Prepare { what, why: e.to_string() })
        };
        let accents = if cleaning.strip_accents { r"\p{Mn}" } else { "" };
        let single = format!(r"\p{{P}}$+<=>^`|~{CHINESE}");
        Ok(WordPiece {
            words: prepare("word pattern", &format!(r"[{single}]|[^\s{single}]+"))?,
            dropped: prepare(
                "character filter",
                &format!(r"[{accents}\x{{FFFD}}\p{{Cc}}\p{{Cf}}\p{{Co}}--[\t\n\r]]"),
            )?,
            longest: vocab.longest,
            unk,
            cleaning,
        })
    }

    /// Appends the tokens of `text`, which holds no special tokens, to `out`.
    pub(super) fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<u32>) {
        let decomposed: Cow<'_, str> =
            if self.cleaning.strip_accents { text.nfd().collect::<String>().into() } else { text.into() };
        let mut clean = String::with_capacity(decomposed.len());
        let mut keep = |kept: &str| match self.cleaning.lowercase {
            true => clean.extend(kept.chars().flat_map(char::to_lowercase)),
            false => clean.push_str(kept),
        };
        let mut at = 0;
        for m in self.dropped.find_iter(&*decomposed) {
            keep(&decomposed[at..m.start()]);
            at = m.end();
        }
        keep(&decomposed[at..]);
        let mut word = String::new();
        for m in self.words.find_iter(&clean) {
            word.clear();
            word.push(' ');
            word.push_str(&clean[m.range()]);
            self.encode_word(vocab, &word, out);
        }
    }

    /// Appends the tokens of one word, given with its leading space.
    fn encode_word(&self, vocab: &Vocab, word: &str, out: &mut Vec<u32>) {
        let start = out.len();
        // One more for the leading space.
        if word.chars().nth(MAX_WORD + 1).is_some() {
            out.push(self.unk);
            return;
        }
        let mut rest = word.as_bytes();
        while !rest.is_empty() {
            let fit = (1..=rest.len().min(self.longest))
                .rev()
                .find_map(|n| vocab.find_text(&rest[..n]).map(|id| (n, id)));
            let Some((n, id)) = fit else {
                out.truncate(start);
                out.push(self.unk);
                return;
            };
            out.push(id);
            rest = &rest[n..];
        }
    }
}
