//! Marks that open, separate and close tool calls, as text and as special tokens of a vocabulary.

use kvant_text::tokenizer::TokenKind;
use kvant_text::tokenizer::{Special, Tokenizer};

use super::tool_calls::quoted;

/// Part of a text.
#[derive(Debug, PartialEq)]
enum Piece<'t> {
    Text(&'t str),
    /// Special token.
    Token(u32),
}

/// Returns a text as Lark, with special tokens where the vocabulary has them: a model that spells
/// them in letters produces text it was not trained on, and the next prompt, which contains the
/// tokens, shares no more of the prefix.
pub(super) fn lark(text: &str, tokenizer: &Tokenizer) -> String {
    let piece = |piece: &Piece<'_>| match piece {
        Piece::Text(text) => quoted(text),
        Piece::Token(id) => format!("<[{id}]>"),
    };
    pieces(text, tokenizer).iter().map(piece).collect::<Vec<_>>().join(" ")
}

/// Returns the control tokens in texts; their text is part of an answer that may contain such
/// texts.
pub(super) fn control_tokens(texts: &[&str], tokenizer: &Tokenizer) -> Vec<u32> {
    let pieces = texts.iter().flat_map(|text| pieces(text, tokenizer));
    let mut tokens: Vec<u32> = pieces
        .filter_map(|piece| match piece {
            Piece::Token(id) if tokenizer.kind(id) == Some(TokenKind::Control) => Some(id),
            _ => None,
        })
        .collect();
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

/// Splits a text at special tokens, which are in angle or square brackets.
fn pieces<'t>(text: &'t str, tokenizer: &Tokenizer) -> Vec<Piece<'t>> {
    let (mut pieces, mut from, mut at) = (Vec::new(), 0, 0);
    while let Some(start) = text[at..].find(['<', '[']).map(|start| at + start) {
        let closing = if text[start..].starts_with('<') { '>' } else { ']' };
        let end = text[start..].find(closing).map(|end| start + end + 1);
        let Some((end, id)) = end.and_then(|end| Some((end, token(&text[start..end], tokenizer)?))) else {
            at = start + 1;
            continue;
        };
        if from < start {
            pieces.push(Piece::Text(&text[from..start]));
        }
        pieces.push(Piece::Token(id));
        (from, at) = (end, end);
    }
    if from < text.len() {
        pieces.push(Piece::Text(&text[from..]));
    }
    pieces
}

/// Returns the special token with this text.
fn token(text: &str, tokenizer: &Tokenizer) -> Option<u32> {
    let [id] = tokenizer.encode(text, Special::Parse, false).ok()?[..] else { return None };
    matches!(tokenizer.kind(id), Some(TokenKind::Control | TokenKind::UserDefined)).then_some(id)
}

#[cfg(test)]
mod tests {
    use kvant_text::tokenizer::{TokenizerModel, VocabData};

    use super::*;

    /// Letters of marks, and two marks: one user-defined token and one control token.
    fn tokenizer() -> Tokenizer {
        let letters = "<>[]/_abcdeghlnorstuwTOLCARGS{".chars().map(String::from);
        let marks = ["<tool_call>", "[TOOL_CALLS]"].map(str::to_owned);
        let n_letters = letters.clone().count();
        let mut data = VocabData::new(TokenizerModel::Gpt2, letters.chain(marks).collect());
        data.merges = Some(vec![]);
        data.token_types = Some([vec![1; n_letters], vec![4, 3]].concat());
        Tokenizer::new(data).unwrap()
    }

    #[test]
    fn marks_are_the_tokens_that_write_them() {
        let tokenizer = tokenizer();
        let [user, control] = ["<tool_call>", "[TOOL_CALLS]"].map(|text| token(text, &tokenizer).unwrap());
        assert!(user < control);
        for (text, want) in [
            ("<tool_call>", format!("<[{user}]>")),
            ("a<tool_call>[", format!("\"a\" <[{user}]> \"[\"")),
            ("[TOOL_CALLS][", format!("<[{control}]> \"[\"")),
            ("[[TOOL_CALLS]<", format!("\"[\" <[{control}]> \"<\"")),
            ("</tool_call>", "\"</tool_call>\"".to_owned()),
            ("", String::new()),
        ] {
            assert_eq!(lark(text, &tokenizer), want, "{text}");
        }
        let texts = ["[TOOL_CALLS]", "<tool_call>", "", "[TOOL_CALLS]a"];
        assert_eq!(control_tokens(&texts, &tokenizer), [control]);
    }
}
