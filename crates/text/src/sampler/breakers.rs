//! Texts that break a repetition for [`Dry`](super::Dry): one that reaches across such a text does not count beyond it.

use std::fmt;
use std::sync::Arc;

use aho_corasick::Anchored;
use aho_corasick::automaton::Automaton;
use aho_corasick::nfa::contiguous::NFA;

use crate::tokenizer::{Tokenizer, TokenizerError};

/// Texts, looked for in what tokens write, however they are cut into tokens. By default there are none.
#[derive(Clone, Default)]
pub struct Breakers(Option<Arc<Inner>>);

struct Inner {
    texts: Vec<String>,
    /// Is in a state of its own wherever a text ends.
    finder: NFA,
    tokenizer: Arc<Tokenizer>,
}

impl Breakers {
    /// What breaks repetitions where nothing is said, as in llama.cpp.
    pub const USUAL: [&'static str; 4] = ["\n", ":", "\"", "*"];

    /// These texts, in what the tokens of `tokenizer` write; empty ones are nowhere.
    ///
    /// # Errors
    /// [`TokenizerError::Prepare`] for more text than can be looked for, hundreds of megabytes.
    pub fn new(texts: Vec<String>, tokenizer: Arc<Tokenizer>) -> Result<Self, TokenizerError> {
        let finder = NFA::new(texts.iter().filter(|text| !text.is_empty()))
            .map_err(|error| TokenizerError::Prepare { what: "sequence breakers", why: error.to_string() })?;
        Ok(Self(Some(Arc::new(Inner { texts, finder, tokenizer }))))
    }

    /// The texts.
    pub fn texts(&self) -> &[String] {
        self.0.as_ref().map_or(&[], |inner| &inner.texts)
    }

    /// How many of `tokens` there are behind the last text: behind the token that it ends in.
    pub(super) fn n_after_last(&self, tokens: &[u32]) -> usize {
        let ends = self.0.as_ref().and_then(|inner| inner.last_end(tokens));
        ends.map_or(tokens.len(), |token| tokens.len() - 1 - token)
    }

    /// Whether `token` alone writes one of the texts.
    pub(super) fn is_within(&self, token: u32) -> bool {
        self.0.as_ref().is_some_and(|inner| inner.last_end(&[token]).is_some())
    }
}

impl Inner {
    /// Which of `tokens` the last text ends in.
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

impl PartialEq for Breakers {
    /// The same texts.
    fn eq(&self, other: &Self) -> bool {
        self.texts() == other.texts()
    }
}

impl fmt::Debug for Breakers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Breakers").field(&self.texts()).finish()
    }
}
