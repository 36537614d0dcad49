//! Reasoning budget: after the maximum number of reasoning tokens the end mark is forced.

use std::sync::Arc;

use kvant_text::chat::{ReasoningParser, THINK_CLOSE};
use kvant_text::tokenizer::TokenizerError;
use kvant_text::tokenizer::{Special, Tokenizer};

/// State of the reasoning and its remaining budget.
#[derive(Debug, Clone, PartialEq)]
pub struct ReasoningBudget {
    parser: ReasoningParser,
    /// Remaining tokens, if the budget is limited.
    left: Option<usize>,
    /// Tokens of the end mark, and how many of them have been generated.
    end: Arc<[u32]>,
    n_ended: usize,
    /// Reasoning tokens, including the marks.
    n_tokens: usize,
}

impl ReasoningBudget {
    /// Creates the budget of an answer whose reasoning `parser` detects, of at most `budget`
    /// tokens.
    ///
    /// # Errors
    /// A tokenizer that cannot encode the mark.
    pub fn new(
        parser: ReasoningParser,
        budget: Option<usize>,
        tokenizer: &Tokenizer,
    ) -> Result<Self, TokenizerError> {
        let end = tokenizer.encode(THINK_CLOSE, Special::Parse, false)?.into();
        Ok(Self { parser, left: budget, end, n_ended: 0, n_tokens: 0 })
    }

    /// Reports whether reasoning has started and not ended.
    pub fn is_open(&self) -> bool {
        self.parser.is_reasoning()
    }

    /// Returns the number of reasoning tokens so far.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Returns the token that is forced next, if any.
    pub fn forced_token(&self) -> Option<u32> {
        let is_over = self.is_open() && self.left == Some(0);
        self.end.get(self.n_ended).copied().filter(|_| is_over)
    }

    /// Records a token, by the text that became final with it.
    pub fn push(&mut self, text: &str) {
        if self.forced_token().is_some() {
            self.n_ended += 1;
        } else if self.is_open() {
            // A constraint may exclude the mark.
            self.left = self.left.map(|left| left.saturating_sub(1));
        }
        let was_going_on = self.is_open();
        self.parser.push(text);
        self.n_tokens += usize::from(was_going_on || self.is_open());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_is_counted_from_its_opening_mark() {
        let tokenizer = &crate::test_tokenizer::bundled_tokenizer();
        let mark = tokenizer.encode(THINK_CLOSE, Special::Parse, false).unwrap();
        let of = |budget| {
            ReasoningBudget::new(ReasoningParser::of(THINK_CLOSE, ""), Some(budget), tokenizer).unwrap()
        };
        let mut plain = of(0);
        ["Hello", ", you"].iter().for_each(|text| plain.push(text));
        assert_eq!(plain.forced_token(), None);
        let mut thinking = of(2);
        for text in ["\n", "<thi", "nk>", "Hm", ","] {
            assert_eq!(thinking.forced_token(), None, "{text}");
            thinking.push(text);
        }
        for &token in &mark {
            assert_eq!(thinking.forced_token(), Some(token));
            thinking.push(&String::from_utf8_lossy(tokenizer.token_bytes(token)));
        }
        assert_eq!(thinking.forced_token(), None);
        // Reasoning that ends within the budget is unaffected.
        let mut short = of(3);
        ["<think>", "Hm", "</think>", "a", "b", "c"].iter().for_each(|text| short.push(text));
        assert_eq!((short.forced_token(), short.left), (None, Some(1)));
    }
}
