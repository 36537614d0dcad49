//! SentencePiece BPE (Kudo and Richardson, <https://arxiv.org/abs/1808.06226>), as in Llama 2.
//!
//! Symbols start as characters. Of all neighbouring pairs that together are a token, the one of
//! highest score is joined, leftmost first among equals, until no pair is a token. A character that
//! is no token falls back to its bytes, or else to the unknown token. Linked list and heap as in
//! [`super::bpe`].

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::bpe::{NONE, Symbol, emit, join, push_symbol};
use super::error::TokenizerError;
use super::vocab::Vocab;

/// A pair that may be joined; the greatest is joined first.
#[derive(Clone, Copy)]
struct Candidate {
    score: f32,
    left: u32,
    right: u32,
    /// Bytes of both; differs from the symbols' own once the candidate is stale.
    len: u32,
    id: u32,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        // Scores are checked to be ordered and without a negative zero, so this is a total order.
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate {}

/// The scores by which pairs are joined.
#[derive(Debug, Clone)]
pub(super) struct Spm {
    /// [n_vocab]
    scores: Vec<f32>,
    /// The unknown token, for vocabularies without byte tokens.
    unk: Option<u32>,
}

/// Buffers of one `encode` call, kept from stretch to stretch.
#[derive(Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Candidate>,
}

impl Spm {
    /// Checks that there is one orderable score per token.
    ///
    /// # Errors
    /// [`TokenizerError::Length`] and [`TokenizerError::Score`].
    pub(super) fn new(vocab: &Vocab, mut scores: Vec<f32>, unk: Option<u32>) -> Result<Self, TokenizerError> {
        if scores.len() != vocab.len() {
            let (expected, got) = (vocab.len(), scores.len());
            return Err(TokenizerError::Length { key: "tokenizer.ggml.scores", expected, got });
        }
        for (id, score) in scores.iter_mut().enumerate() {
            if score.is_nan() {
                return Err(TokenizerError::Score { id: id as u32, got: *score });
            }
            *score += 0.0; // -0.0 becomes 0.0
        }
        Ok(Spm { scores, unk })
    }

    /// Appends the tokens of `text`, which holds no special tokens, to `out`.
    pub(super) fn encode(
        &self,
        vocab: &Vocab,
        text: &str,
        scratch: &mut Scratch,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let Scratch { symbols, heap } = scratch;
        symbols.clear();
        heap.clear();
        for (i, c) in text.char_indices() {
            let bytes = &text.as_bytes()[i..i + c.len_utf8()];
            let id = vocab.find_text(bytes).or_else(|| {
                // Without a byte to fall back to, a character is unknown as a whole.
                self.unk.filter(|_| bytes.iter().any(|&b| vocab.byte_ids[usize::from(b)].is_none()))
            });
            push_symbol(symbols, i, bytes.len(), id.unwrap_or(NONE));
        }
        for right in 1..symbols.len() as u32 {
            self.offer(vocab, text, symbols, heap, right - 1, right);
        }
        while let Some(c) = heap.pop() {
            let (l, r) = (symbols[c.left as usize], symbols[c.right as usize]);
            if l.len == 0 || r.len == 0 || l.len + r.len != c.len {
                continue;
            }
            join(symbols, c.left, c.right, c.id);
            let Symbol { prev, next, .. } = symbols[c.left as usize];
            self.offer(vocab, text, symbols, heap, prev, c.left);
            self.offer(vocab, text, symbols, heap, c.left, next);
        }
        emit(vocab, text, 0, symbols, out)
    }

    /// Puts the pair on the heap if it is a token.
    fn offer(
        &self,
        vocab: &Vocab,
        text: &str,
        symbols: &[Symbol],
        heap: &mut BinaryHeap<Candidate>,
        left: u32,
        right: u32,
    ) {
        if left == NONE || right == NONE {
            return;
        }
        let (l, r) = (symbols[left as usize], symbols[right as usize]);
        let len = l.len + r.len;
        let joined = &text.as_bytes()[l.start as usize..(l.start + len) as usize];
        if let Some(id) = vocab.find_text(joined) {
            heap.push(Candidate { score: self.scores[id as usize], left, right, len, id });
        }
    }
}
