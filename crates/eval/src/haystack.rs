//! The text that needles are hidden in, cut into pieces that they may stand between.

use kvant::{Model, Special};
use xxhash_rust::xxh3::xxh3_64;

use crate::EvalError;

/// A text in pieces, each with its number of tokens.
#[derive(Debug, Clone)]
pub(crate) struct Haystack {
    pieces: Vec<(String, usize)>,
    n_tokens: usize,
    /// Tells texts apart.
    pub fingerprint: String,
}

impl Haystack {
    /// A text in sentences and lines.
    pub fn new(model: &Model, text: &str) -> Result<Self, EvalError> {
        let count = |piece: &str| Ok((piece.to_owned(), count(model, piece)?));
        let pieces = sentences(text).map(count).collect::<Result<_, EvalError>>()?;
        Ok(Self::of(pieces, format!("{:016x}", xxh3_64(text.as_bytes()))))
    }

    fn of(pieces: Vec<(String, usize)>, fingerprint: String) -> Self {
        let n_tokens = pieces.iter().map(|(_, n)| n).sum();
        Self { pieces, n_tokens, fingerprint }
    }

    /// The same with pieces of more than `most` tokens cut further, between words where there are some: a piece that is too long
    /// for the room that there is would leave it empty.
    pub fn cut(&self, model: &Model, most: usize) -> Result<Self, EvalError> {
        let mut pieces = Vec::new();
        for (piece, n) in &self.pieces {
            cut_piece(model, piece, *n, most, &mut pieces)?;
        }
        Ok(Self::of(pieces, self.fingerprint.clone()))
    }

    /// Number of pieces.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Tokens of all pieces.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Piece `index` and its number of tokens, from the start again after the last.
    pub fn at(&self, index: usize) -> (&str, usize) {
        let (piece, n) = &self.pieces[index % self.pieces.len()];
        (piece, *n)
    }
}

/// Tokens of a piece.
fn count(model: &Model, piece: &str) -> Result<usize, EvalError> {
    Ok(model.tokenizer()?.encode(piece, Special::AsText, false).map_err(kvant::Error::from)?.len())
}

/// Halves a piece of `n` tokens until no part has more than `most`.
fn cut_piece(
    model: &Model,
    piece: &str,
    n: usize,
    most: usize,
    parts: &mut Vec<(String, usize)>,
) -> Result<(), EvalError> {
    match halves(piece).filter(|_| n > most) {
        None => parts.push((piece.to_owned(), n)),
        Some((left, right)) => {
            cut_piece(model, left, count(model, left)?, most, parts)?;
            cut_piece(model, right, count(model, right)?, most, parts)?;
        }
    }
    Ok(())
}

/// Cuts near the middle, before white space where there is some; `None` for a single character.
fn halves(text: &str) -> Option<(&str, &str)> {
    let distance = |at: &usize| at.abs_diff(text.len() / 2);
    let inner = || text.char_indices().skip(1);
    let words = inner().filter(|(_, c)| c.is_whitespace()).map(|(at, _)| at).min_by_key(distance);
    let at = words.or_else(|| inner().map(|(at, _)| at).min_by_key(distance))?;
    Some(text.split_at(at))
}

/// Cuts before line ends, after `.`, `!` or `?` where white space follows, and after the full stops of scripts that put none behind
/// them. White space goes with the next piece.
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

/// Whether a piece ends between these two.
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
    fn pieces_join_to_the_text_they_were_cut_from() {
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
    fn a_piece_is_halved_between_words_and_between_characters_where_there_are_none() {
        assert_eq!(halves("one two three"), Some(("one two", " three")));
        assert_eq!(halves("無空白"), Some(("無", "空白")));
        assert_eq!(halves(" x"), Some((" ", "x")));
        assert_eq!((halves("x"), halves("")), (None, None));
    }
}
