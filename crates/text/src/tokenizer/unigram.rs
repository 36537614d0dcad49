//! SentencePiece's unigram model (Kudo, <https://arxiv.org/abs/1804.10959>), as in XLM-RoBERTa.
//!
//! A text is split before each space, and each piece becomes the tokens with the largest sum of
//! scores (logarithms of probabilities). A character that is no token may be unknown, at a score
//! below all others; neighbours that are unknown become one token. Sums, and which of equal ones
//! wins, are those of Hugging Face's `tokenizers`.

use super::error::TokenizerError;
use super::prefixes::Prefixes;
use super::vocab::{TokenKind, Vocab};

/// What an unknown character scores less than the worst token.
const UNKNOWN_PENALTY: f64 = 10.0;

/// Scores and the tokens that text may become.
#[derive(Debug, Clone)]
pub(super) struct Unigram {
    /// `[n_vocab]`
    scores: Vec<f32>,
    prefixes: Prefixes,
    unk: u32,
    unk_score: f64,
}

/// The best tokens of the text up to a byte.
#[derive(Debug, Clone, Copy)]
struct Path {
    score: f64,
    /// The last token; no path leads here without one.
    last: Option<Piece>,
}

/// A token and its first byte in the text.
#[derive(Debug, Clone, Copy)]
struct Piece {
    id: u32,
    start: usize,
}

impl Unigram {
    /// Checks that there is one finite score per token, and sorts the tokens.
    ///
    /// # Errors
    /// [`TokenizerError::Length`] and [`TokenizerError::Score`].
    pub(super) fn new(vocab: &Vocab, scores: Vec<f32>, unk: u32) -> Result<Self, TokenizerError> {
        if scores.len() != vocab.len() {
            let (expected, got) = (vocab.len(), scores.len());
            return Err(TokenizerError::Length { key: "tokenizer.ggml.scores", expected, got });
        }
        if let Some(id) = scores.iter().position(|score| !score.is_finite()) {
            return Err(TokenizerError::Score { id: id as u32, got: scores[id] });
        }
        let prefixes = Prefixes::new(vocab);
        let normal = |&id: &u32| vocab.kind(id) == Some(TokenKind::Normal);
        let of_pieces =
            prefixes.ids().iter().filter(|id| normal(id)).map(|&id| f64::from(scores[id as usize]));
        let unk_score = of_pieces.fold(0.0, f64::min) - UNKNOWN_PENALTY;
        Ok(Self { scores, prefixes, unk, unk_score })
    }

    /// Appends the tokens of `text`, which holds no special tokens, to `out`.
    pub(super) fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<u32>) {
        let mut paths = Vec::new();
        let mut start = 0;
        let later_spaces = text.match_indices(' ').map(|(at, _)| at).filter(|&at| at > 0);
        for end in later_spaces.chain([text.len()]) {
            self.encode_piece(vocab, &text[start..end], &mut paths, out);
            start = end;
        }
    }

    fn encode_piece(&self, vocab: &Vocab, piece: &str, paths: &mut Vec<Path>, out: &mut Vec<u32>) {
        paths.clear();
        paths.resize(piece.len() + 1, Path { score: 0.0, last: None });
        for (start, c) in piece.char_indices() {
            let (so_far, mut covers_char) = (paths[start].score, false);
            self.prefixes.for_each(vocab, &piece.as_bytes()[start..], |id, n| {
                covers_char |= n == c.len_utf8();
                paths[start + n].reach(so_far + f64::from(self.scores[id as usize]), Piece { id, start });
            });
            if !covers_char {
                let unknown = Piece { id: self.unk, start };
                paths[start + c.len_utf8()].reach(so_far + self.unk_score, unknown);
            }
        }
        let first = out.len();
        let mut end = piece.len();
        while let Some(Piece { id, start }) = paths[end].last.filter(|_| end > 0) {
            if id != self.unk || out.len() == first || out.last() != Some(&id) {
                out.push(id);
            }
            end = start;
        }
        out[first..].reverse();
    }
}

impl Path {
    /// Takes the path with this score and last token if it is better.
    fn reach(&mut self, score: f64, last: Piece) {
        if self.last.is_none() || score > self.score {
            *self = Self { score, last: Some(last) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::{Special, Tokenizer, TokenizerModel, VocabData};

    fn tokenizer(pieces: &[(&str, f32)]) -> Tokenizer {
        let ends = [("</s>", 0.0), ("<unk>", 0.0)];
        let all = || ends.iter().chain(pieces);
        let tokens = all().map(|(text, _)| (*text).to_owned()).collect();
        let mut data = VocabData::new(TokenizerModel::T5, tokens);
        data.scores = Some(all().map(|(_, score)| *score).collect());
        data.token_types = Some([3, 2].into_iter().chain(pieces.iter().map(|_| 1)).collect());
        (data.special.eos, data.special.unk) = (Some(0), Some(1));
        Tokenizer::new(data).unwrap()
    }

    fn spelt(t: &Tokenizer, text: &str) -> Vec<String> {
        let ids = t.encode(text, Special::AsText, false).unwrap();
        ids.into_iter().map(|id| t.token_text(id).unwrap().to_owned()).collect()
    }

    #[test]
    fn the_tokens_with_the_largest_sum_are_chosen() {
        let pieces =
            [("▁", -3.0), ("▁a", -2.0), ("▁ab", -6.0), ("a", -2.0), ("b", -2.5), ("bc", -3.0), ("c", -2.0)];
        let t = tokenizer(&pieces);
        assert_eq!(spelt(&t, "abc"), ["▁a", "bc"]);
        // Of equal sums the first that is found stays.
        assert_eq!(spelt(&t, "ab"), ["▁a", "b"]);
        // Pieces begin with spaces; a mark is one.
        assert_eq!(spelt(&t, "  a▁c "), ["▁", "▁a", "▁", "c", "▁"]);
        assert_eq!(spelt(&t, ""), [""; 0]);
    }

    #[test]
    fn neighbouring_unknown_characters_are_one_token() {
        let t = tokenizer(&[("▁", -3.0), ("a", -2.0), ("xy", -2.0)]);
        assert_eq!(spelt(&t, "a北京a京 京"), ["▁", "a", "<unk>", "a", "<unk>", "▁", "<unk>"]);
        // No token begins with x alone: it may be unknown, but scores less.
        assert_eq!(spelt(&t, "xyx"), ["▁", "xy", "<unk>"]);
        // Plain text becomes no control token.
        assert!(!t.encode("</s>", Special::AsText, false).unwrap().contains(&0));
        assert_eq!(t.min_tokens(&"京".repeat(1000)), 0);
    }

    #[test]
    fn scores_that_are_not_finite_are_rejected() {
        let data = |scores: &[f32]| {
            let mut data = VocabData::new(TokenizerModel::T5, ["a", "b", "<unk>"].map(str::to_owned).into());
            data.scores = Some(scores.to_vec());
            Tokenizer::new(data)
        };
        assert!(matches!(data(&[0.0, f32::NAN, 0.0]), Err(TokenizerError::Score { id: 1, .. })));
        assert!(matches!(data(&[0.0, f32::NEG_INFINITY, 0.0]), Err(TokenizerError::Score { id: 1, .. })));
        assert!(matches!(data(&[0.0]), Err(TokenizerError::Length { expected: 3, got: 1, .. })));
    }
}
