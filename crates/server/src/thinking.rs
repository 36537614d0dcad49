//! Reasoning budget: after the maximum number of reasoning tokens the end mark is forced.

use std::sync::Arc;

use kvant::chat::{HAS_THOUGHT, Thoughts};
use kvant::tokenizer::TokenizerError;
use kvant::{Special, Tokenizer};

/// State of the reasoning and its remaining budget.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Thinking {
    thoughts: Thoughts,
    /// Remaining tokens, if the budget is limited.
    left: Option<usize>,
    /// Tokens of the end mark, and how many of them have been generated.
    end: Arc<[u32]>,
    n_ended: usize,
    /// Reasoning tokens, including the marks.
    n_said: usize,
}

impl Thinking {
    /// Creates the budget of an answer whose reasoning `thoughts` detects, of at most `budget`
    /// tokens.
    ///
    /// # Errors
    /// A tokenizer that cannot encode the mark.
    pub fn new(
        thoughts: Thoughts,
        budget: Option<usize>,
        tokenizer: &Tokenizer,
    ) -> Result<Self, TokenizerError> {
        let end = tokenizer.encode(HAS_THOUGHT, Special::Parse, false)?.into();
        Ok(Self { thoughts, left: budget, end, n_ended: 0, n_said: 0 })
    }

    /// Reports whether reasoning has started and not ended.
    pub fn is_going_on(&self) -> bool {
        self.thoughts.is_thinking()
    }

    /// Returns the number of reasoning tokens so far.
    pub fn n_said(&self) -> usize {
        self.n_said
    }

    /// Returns the token that is forced next, if any.
    pub fn must_say(&self) -> Option<u32> {
        let is_over = self.is_going_on() && self.left == Some(0);
        self.end.get(self.n_ended).copied().filter(|_| is_over)
    }

    /// Records a token, by the text that became final with it.
    pub fn said(&mut self, text: &str) {
        if self.must_say().is_some() {
            self.n_ended += 1;
        } else if self.is_going_on() {
            // A constraint may exclude the mark.
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
    fn reasoning_is_counted_from_its_opening_mark() {
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
        // Reasoning that ends within the budget is unaffected.
        let mut short = of(3);
        ["<think>", "Hm", "</think>", "a", "b", "c"].iter().for_each(|text| short.said(text));
        assert_eq!((short.must_say(), short.left), (None, Some(1)));
    }
}
