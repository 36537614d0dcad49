//! Splits of a text for plan search.

use kvant::{Model, Special};

use crate::chunks::{Chunks, begin_of_text};
use crate::error::EvalError;
use crate::progress::Progress;

/// Tokens of a usual piece, and the maximum number of pieces for statistics.
const SHORT_TOKENS: usize = 512;
const MAX_SHORT: usize = 8;
/// Maximum number of longer pieces, in plans for longer contexts.
const MAX_LONG: usize = 2;

/// Independent runs of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CalibrationPieces(Vec<Vec<u32>>);

impl CalibrationPieces {
    /// Selects pieces for statistics, spread over `tokens`: short ones, and longer ones for a
    /// longer `n_ctx`. Each begins with `bos` if the model adds one, as [chunks](Chunks::input) do:
    /// without it, a model's queries and keys differ.
    pub fn spread(tokens: &[u32], n_ctx: usize, bos: Option<u32>) -> Self {
        let long = if n_ctx > SHORT_TOKENS { MAX_LONG } else { 0 };
        let of = |len: usize, max_pieces: usize| {
            let n = (tokens.len() / len.max(1)).min(max_pieces);
            (0..n).map(move |i| {
                let mut piece = tokens[i * (tokens.len() - len) / (n - 1).max(1)..][..len].to_vec();
                piece[0] = bos.unwrap_or(piece[0]);
                piece
            })
        };
        Self(of(n_ctx, long).chain(of(SHORT_TOKENS.min(n_ctx), MAX_SHORT)).collect())
    }

    pub fn iter(&self) -> impl Iterator<Item = &[u32]> {
        self.0.iter().map(Vec::as_slice)
    }

    /// Returns the tokens of the longest piece.
    pub fn longest(&self) -> usize {
        self.0.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Returns the tokens of all pieces together.
    pub fn n_tokens(&self) -> usize {
        self.0.iter().map(Vec::len).sum()
    }

    /// Returns the progress after the first `n` pieces, in tokens.
    pub fn done(&self, n: usize) -> Progress {
        let done = self.0[..n].iter().map(Vec::len).sum();
        Progress { done, total: self.n_tokens(), resumed: 0, note: "statistics".to_owned() }
    }
}

/// A text split in two: calibration for the statistics, and evaluation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TextHalves {
    calibration: Vec<u32>,
    evaluation: Vec<u32>,
    bos: Option<u32>,
}

impl TextHalves {
    /// Tokenizes `text`, which must fill a piece of `n_ctx` tokens in either half.
    pub fn new(model: &Model, text: &str, n_ctx: usize) -> Result<Self, EvalError> {
        let n_train = model.config().n_ctx_train;
        if !(64..=n_train).contains(&n_ctx) {
            let expected = format!("64 to {n_train} tokens, the training context");
            return Err(EvalError::Setting { name: "context", expected, got: n_ctx.to_string() });
        }
        let tokens = model.tokenizer()?.encode(text, Special::AsText, false).map_err(kvant::Error::from)?;
        if tokens.len() < 2 * n_ctx {
            return Err(EvalError::ShortText { tokens: tokens.len(), n_ctx: 2 * n_ctx });
        }
        let (calibration, evaluation) = tokens.split_at(tokens.len() / 2);
        Ok(Self {
            calibration: calibration.to_vec(),
            evaluation: evaluation.to_vec(),
            bos: begin_of_text(model)?,
        })
    }

    /// Returns the pieces for statistics.
    pub fn pieces(&self, n_ctx: usize) -> CalibrationPieces {
        CalibrationPieces::spread(&self.calibration, n_ctx, self.bos)
    }

    /// Returns up to `n` chunks of `n_ctx` tokens, spread over the evaluation half.
    pub fn chunks(&self, model: &Model, n_ctx: usize, n: usize) -> Result<Chunks, EvalError> {
        let n = (self.evaluation.len() / n_ctx).min(n).max(1);
        let first = |i: usize| i * (self.evaluation.len() - n_ctx) / (n - 1).max(1);
        let tokens = (0..n).flat_map(|i| self.evaluation[first(i)..][..n_ctx].iter().copied());
        Chunks::from_tokens(model, tokens.collect(), n_ctx, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_spread_and_long_contexts_get_longer_ones() {
        let tokens: Vec<u32> = (0..10_000).collect();
        let lens = |n_ctx| {
            CalibrationPieces::spread(&tokens, n_ctx, None).iter().map(<[u32]>::len).collect::<Vec<_>>()
        };
        assert_eq!(lens(256), [256; 8]);
        assert_eq!(lens(2048), [vec![2048; 2], vec![512; 8]].concat());
        let pieces = CalibrationPieces::spread(&tokens, 512, None);
        let ends = (pieces.iter().next().unwrap()[0], pieces.iter().last().unwrap()[511]);
        assert_eq!(ends, (0, 9_999));
        assert_eq!(
            CalibrationPieces::spread(&tokens[..600], 600, None).iter().map(<[u32]>::len).collect::<Vec<_>>(),
            [600, 512]
        );
    }

    #[test]
    fn every_piece_begins_with_bos_if_the_model_adds_it() {
        let tokens: Vec<u32> = (0..10_000).collect();
        let (with, without) = (
            CalibrationPieces::spread(&tokens, 2048, Some(7)),
            CalibrationPieces::spread(&tokens, 2048, None),
        );
        assert!(with.iter().zip(without.iter()).all(|(a, b)| a[0] == 7 && a[1..] == b[1..]));
    }
}
