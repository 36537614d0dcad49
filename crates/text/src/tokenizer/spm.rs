//! SentencePiece BPE (Kudo and Richardson, <https://arxiv.org/abs/1808.06226>), as in Llama 2.
//!
//! Symbols start as characters. Of all neighbouring pairs that together are a token, the one of
//! highest score is joined, leftmost first among equals, until no pair is a token
//! ([`super::merge`]). A character without a token falls back to its bytes, or else to the unknown
//! token.

use super::error::TokenizerError;
use super::merge::{Joined, Merger, NONE};
use super::split_points::SplitPoints;
use super::vocab::{TokenKind, Vocab};

/// Merge priorities by token score.
#[derive(Debug, Clone)]
pub(super) struct Spm {
    /// Priority of each token, lower for a higher score  [n_vocab]
    keys: Vec<u32>,
    seams: SplitPoints,
    /// The unknown token, for vocabularies without byte tokens.
    unk: Option<u32>,
}

impl Spm {
    /// Checks that there is one orderable score per token.
    ///
    /// # Errors
    /// [`TokenizerError::Length`] and [`TokenizerError::Score`].
    pub(super) fn new(vocab: &Vocab, scores: Vec<f32>, unk: Option<u32>) -> Result<Self, TokenizerError> {
        if scores.len() != vocab.len() {
            let (expected, got) = (vocab.len(), scores.len());
            return Err(TokenizerError::Length { key: "tokenizer.ggml.scores", expected, got });
        }
        if let Some(id) = scores.iter().position(|score| score.is_nan()) {
            return Err(TokenizerError::Score { id: id as u32, got: scores[id] });
        }
        let keys = scores.into_iter().map(descending).collect();
        Ok(Spm { keys, seams: SplitPoints::new(vocab), unk })
    }

    /// Appends the tokens of `text`, which holds no special tokens, to `out`.
    pub(super) fn encode(
        &self,
        vocab: &Vocab,
        text: &str,
        merger: &mut Merger,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        for (at, piece) in self.seams.cut(text) {
            merger.clear();
            for c in piece.chars() {
                let mut bytes = [0; 4];
                let bytes = c.encode_utf8(&mut bytes).as_bytes();
                let id = vocab.find_text(bytes).or_else(|| {
                    // Without byte tokens to fall back to, the whole character is unknown.
                    self.unk.filter(|_| bytes.iter().any(|&b| vocab.byte_ids[usize::from(b)].is_none()))
                });
                merger.push(bytes.len(), id.unwrap_or(NONE));
            }
            merger.merge(|left, right| {
                let id = vocab.find_text(&piece.as_bytes()[left.start..right.end])?;
                // User-defined tokens have been matched already; merges must not produce them.
                if vocab.kind(id) == Some(TokenKind::UserDefined) {
                    return None;
                }
                Some(Joined { key: self.keys[id as usize], id })
            });
            merger.emit(vocab, piece, at, out)?;
        }
        Ok(())
    }
}

/// Maps a score to an integer that is lower for a higher score.
fn descending(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits(); // -0.0 becomes 0.0
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    !ascending
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_fall_as_scores_rise() {
        let scores = [f32::NEG_INFINITY, -1e9, -1.5, -1e-40, 0.0, 1e-40, 1.0, f32::INFINITY];
        assert!(scores.windows(2).all(|pair| descending(pair[0]) > descending(pair[1])));
        assert_eq!(descending(-0.0), descending(0.0));
    }
}
