//! Thoughts that end after so many tokens: the mark that ends one is said for the model where it does not come to an end.

use std::sync::Arc;

use kvant::chat::{HAS_THOUGHT, Thoughts};
use kvant::tokenizer::TokenizerError;
use kvant::{Special, Tokenizer};

/// How far a thought is, and how far it may go.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Thinking {
    thoughts: Thoughts,
    /// Tokens that it may still have, where it has a bound.
    left: Option<usize>,
    /// The tokens that end it, and how many of them have been said.
    end: Arc<[u32]>,
    n_ended: usize,
    /// Tokens of the thought, its marks among them.
    n_said: usize,
}

impl Thinking {
    /// Of an answer that `thoughts` takes apart, with at most `budget` tokens of a thought where there is one.
    ///
    /// # Errors
    /// A tokenizer that cannot write the mark.
    pub fn new(
        thoughts: Thoughts,
        budget: Option<usize>,
        tokenizer: &Tokenizer,
    ) -> Result<Self, TokenizerError> {
        let end = tokenizer.encode(HAS_THOUGHT, Special::Parse, false)?.into();
        Ok(Self { thoughts, left: budget, end, n_ended: 0, n_said: 0 })
    }

    /// Whether a thought has begun and not ended.
    pub fn is_going_on(&self) -> bool {
        self.thoughts.is_thinking()
    }

    /// Tokens of the thought so far.
    pub fn n_said(&self) -> usize {
        self.n_said
    }

    /// What is to be said next whatever the model would say.
    pub fn must_say(&self) -> Option<u32> {
        let is_over = self.is_going_on() && self.left == Some(0);
        self.end.get(self.n_ended).copied().filter(|_| is_over)
    }

    /// Takes note of a token, by the text that has become certain with it.
    pub fn said(&mut self, text: &str) {
        if self.must_say().is_some() {
            self.n_ended += 1;
        } else if self.is_going_on() {
            // A form that is held to may keep the mark from being said.
            self.left = self.left.map(|left| left.saturating_sub(1));
        }
        let was_going_on = self.is_going_on();
        self.thoughts.push(text);
        self.n_said += usize::from(was_going_on || self.is_going_on());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thought_that_the_model_begins_is_counted_from_its_mark() {
        let model = kvant::Model::bundled(kvant::OpenOptions::default()).unwrap();
        let tokenizer = model.tokenizer().unwrap();
        let mark = tokenizer.encode(HAS_THOUGHT, Special::Parse, false).unwrap();
        let of = |budget| Thinking::new(Thoughts::of(HAS_THOUGHT, ""), Some(budget), tokenizer).unwrap();
        let mut plain = of(0);
        ["Hello", ", you"].iter().for_each(|text| plain.said(text));
        assert_eq!(plain.must_say(), None);
        let mut thinking = of(2);
        for text in ["\n", "<thi", "nk>", "Hm", ","] {
            assert_eq!(thinking.must_say(), None, "{text}");
            thinking.said(text);
        }
        for &token in &mark {
            assert_eq!(thinking.must_say(), Some(token));
            thinking.said(&String::from_utf8_lossy(tokenizer.token_bytes(token)));
        }
        assert_eq!(thinking.must_say(), None);
        // One that ends by itself is let alone.
        let mut short = of(3);
        ["<think>", "Hm", "</think>", "a", "b", "c"].iter().for_each(|text| short.said(text));
        assert_eq!((short.must_say(), short.left), (None, Some(1)));
    }
}
