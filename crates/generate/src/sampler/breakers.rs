//! Sequence breakers of [`Dry`](super::Dry): a repetition is counted only back to the last breaker.

use std::fmt;
use std::sync::Arc;

use aho_corasick::Anchored;
use aho_corasick::automaton::Automaton;
use aho_corasick::nfa::contiguous::NFA;

use kvant_text::tokenizer::{Tokenizer, TokenizerError};

/// Sequence breakers, searched in the bytes of the tokens regardless of token boundaries. Empty by
/// default.
#[derive(Clone, Default)]
pub struct SequenceBreakers(Option<Arc<Inner>>);

struct Inner {
    texts: Vec<String>,
    /// Enters a match state wherever a breaker ends.
    finder: NFA,
    tokenizer: Arc<Tokenizer>,
}

impl SequenceBreakers {
    /// llama.cpp's default sequence breakers.
    pub const DEFAULT: [&'static str; 4] = ["\n", ":", "\"", "*"];

    /// Prepares the search for `texts` in the bytes of the tokens of `tokenizer`. Empty texts never
    /// match.
    ///
    /// # Errors
    /// [`TokenizerError::Prepare`] if the texts are too large to search for, hundreds of megabytes.
    pub fn new(texts: Vec<String>, tokenizer: Arc<Tokenizer>) -> Result<Self, TokenizerError> {
        let finder = NFA::new(texts.iter().filter(|text| !text.is_empty()))
            .map_err(|error| TokenizerError::Prepare { what: "sequence breakers", why: error.to_string() })?;
        Ok(Self(Some(Arc::new(Inner { texts, finder, tokenizer }))))
    }

    /// Returns the texts.
    pub fn texts(&self) -> &[String] {
        self.0.as_ref().map_or(&[], |inner| &inner.texts)
    }

    /// Returns the number of `tokens` after the token in which the last breaker ends.
    pub(super) fn n_after_last(&self, tokens: &[u32]) -> usize {
        let ends = self.0.as_ref().and_then(|inner| inner.last_end(tokens));
        ends.map_or(tokens.len(), |token| tokens.len() - 1 - token)
    }

    /// Whether `token` alone contains a breaker.
    pub(super) fn contains_breaker(&self, token: u32) -> bool {
        self.0.as_ref().is_some_and(|inner| inner.last_end(&[token]).is_some())
    }
}

impl Inner {
    /// Returns the index in `tokens` at which the last breaker ends.
    fn last_end(&self, tokens: &[u32]) -> Option<usize> {
        let finder = &self.finder;
        let mut state = finder.start_state(Anchored::No).ok()?;
        let mut last = None;
        for (index, &token) in tokens.iter().enumerate() {
            for &byte in self.tokenizer.token_bytes(token) {
                state = finder.next_state(Anchored::No, state, byte);
                if finder.is_match(state) {
                    last = Some(index);
                }
            }
        }
        last
    }
}

impl PartialEq for SequenceBreakers {
    /// Compares the texts alone.
    fn eq(&self, other: &Self) -> bool {
        self.texts() == other.texts()
    }
}

impl fmt::Debug for SequenceBreakers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Breakers").field(&self.texts()).finish()
    }
}
