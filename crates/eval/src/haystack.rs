//! The haystack of the needle test: a text split at possible needle positions.

use kvant::{Model, Special};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::EvalError;

/// A text in pieces, each with its number of tokens.
#[derive(Debug, Clone)]
pub(crate) struct Haystack {
    pieces: Vec<(String, usize)>,
    n_tokens: usize,
    /// Identifies the text.
    pub fingerprint: String,
}

impl Haystack {
    /// Splits a text into sentences and lines.
    pub fn new(model: &Model, text: &str) -> Result<Self, EvalError> {
        let count = |piece: &str| Ok((piece.to_owned(), count(model, piece)?));
        let pieces = sentences(text).map(count).collect::<Result<_, EvalError>>()?;
        Ok(Self::of(pieces, format!("{:016x}", xxh3_64(text.as_bytes()))))
    }

    fn of(pieces: Vec<(String, usize)>, fingerprint: String) -> Self {
        let n_tokens = pieces.iter().map(|(_, n)| n).sum();
        Self { pieces, n_tokens, fingerprint }
    }

    /// Splits pieces of more than `max_tokens` further, between words if possible: a piece that
    /// exceeds the remaining room would leave it empty.
    pub fn cut(&self, model: &Model, max_tokens: usize) -> Result<Self, EvalError> {
        let mut pieces = Vec::new();
        for (piece, n) in &self.pieces {
            cut_piece(model, piece, *n, max_tokens, &mut pieces)?;
        }
        Ok(Self::of(pieces, self.fingerprint.clone()))
    }

    /// Returns the number of pieces.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Returns the tokens of all pieces.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Returns piece `index`, modulo the number of pieces, and its number of tokens.
    pub fn at(&self, index: usize) -> (&str, usize) {
        let (piece, n) = &self.pieces[index % self.pieces.len()];
        (piece, *n)
    }
}

/// Counts the tokens of a piece.
fn count(model: &Model, piece: &str) -> Result<usize, EvalError> {
    Ok(model.tokenizer()?.encode(piece, Special::AsText, false).map_err(kvant::Error::from)?.len())
}

/// Halves a piece of `n` tokens until no part has more than `max_tokens`.
fn cut_piece(
    model: &Model,
    piece: &str,
    n: usize,
    max_tokens: usize,
    parts: &mut Vec<(String, usize)>,
) -> Result<(), EvalError> {
    match halves(piece).filter(|_| n > max_tokens) {
        None => parts.push((piece.to_owned(), n)),
        Some((left, right)) => {
            cut_piece(model, left, count(model, left)?, max_tokens, parts)?;
            cut_piece(model, right, count(model, right)?, max_tokens, parts)?;
        }
    }
    Ok(())
}

/// Splits near the middle, before white space if possible; `None` for a single character.
fn halves(text: &str) -> Option<(&str, &str)> {
    let distance = |at: &usize| at.abs_diff(text.len() / 2);
    let inner = || text.char_indices().skip(1);
    let words = inner().filter(|(_, c)| c.is_whitespace()).map(|(at, _)| at).min_by_key(distance);
    let at = words.or_else(|| inner().map(|(at, _)| at).min_by_key(distance))?;
    Some(text.split_at(at))
}

/// Splits before line ends, after `.`, `!` or `?` followed by white space, and after the full stops
/// of scripts that use no white space. White space belongs to the next piece.
fn sentences(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let mut is_blank = true;
        let mut chars = rest.char_indices().peekable();
        let end = std::iter::from_fn(|| {
            let (at, c) = chars.next()?;
            is_blank &= c.is_whitespace();
            let next = chars.peek().map(|(_, next)| *next);
            Some((at + c.len_utf8(), !is_blank && next.is_some_and(|next| ends(c, next))))
        })
        .find_map(|(end, is_end)| is_end.then_some(end));
        let (sentence, after) = rest.split_at(end.unwrap_or(rest.len()));
        rest = after;
        Some(sentence).filter(|sentence| !sentence.is_empty())
    })
}

/// Returns whether a piece ends between these characters.
fn ends(last: char, next: char) -> bool {
    match last {
        '.' | '!' | '?' => next.is_whitespace(),
        '。' | '！' | '？' => !matches!(next, '。' | '！' | '？'),
        _ => matches!(next, '\r' | '\n'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_join_to_the_original_text() {
        for (text, pieces) in [
            (
                "One. Two? It was 3.5 miles!\n\nThe end",
                &["One.", " Two?", " It was 3.5 miles!", "\n\nThe end"][..],
            ),
            ("a line\nanother\r\n\n  ", &["a line", "\nanother", "\r\n\n  "]),
            ("これは本です。何？！はい！\n終", &["これは本です。", "何？！", "はい！", "\n終"]),
            ("", &[]),
        ] {
            assert_eq!(sentences(text).collect::<Vec<_>>(), pieces);
            assert_eq!(pieces.concat(), text);
        }
    }

    #[test]
    fn pieces_are_halved_between_words_or_characters() {
        assert_eq!(halves("one two three"), Some(("one two", " three")));
        assert_eq!(halves("無空白"), Some(("無", "空白")));
        assert_eq!(halves(" x"), Some((" ", "x")));
        assert_eq!((halves("x"), halves("")), (None, None));
    }
}
