//! RWKV's tokenizer "World": text becomes the longest token at each place, from left to right.
//!
//! Its vocabulary has every single byte, so that any text can be written. As in llama.cpp, a byte
//! that begins no token of a smaller vocabulary is unknown.

use super::bytes;
use super::error::{TokenFault, TokenizerError};
use super::prefixes::Prefixes;
use super::vocab::{TokenKind, Vocab};

/// Bytes of the longest token that is accepted, twice those of RWKV's own. Each place of a text is
/// read that far at most, so time stays linear.
const MAX_TOKEN: usize = 256;

/// The tokens that text may become.
#[derive(Debug, Clone)]
pub(super) struct Rwkv {
    prefixes: Prefixes,
    unk: Option<u32>,
}

impl Rwkv {
    /// Checks the texts and lengths of the tokens, and sorts them.
    ///
    /// # Errors
    /// [`TokenizerError::Token`].
    pub(super) fn new(vocab: &Vocab, unk: Option<u32>) -> Result<Self, TokenizerError> {
        for id in 0..vocab.len() as u32 {
            let fault = match vocab.kind(id) {
                Some(TokenKind::Normal) => fault(vocab, id),
                Some(TokenKind::UserDefined) => fault_of_length(vocab, id),
                _ => None,
            };
            if let Some(fault) = fault {
                return Err(TokenizerError::Token { id, fault });
            }
        }
        Ok(Self { prefixes: Prefixes::new(vocab), unk })
    }

    /// Appends the tokens of `text`, which holds no special tokens, to `out`.
    pub(super) fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let text = text.as_bytes();
        let mut at = 0;
        while at < text.len() {
            let mut longest = self.unk.map(|unk| (unk, 1));
            self.prefixes.for_each(vocab, &text[at..], |id, n| longest = Some((id, n)));
            let (id, n) = longest.ok_or_else(|| TokenizerError::NoToken {
                what: format!("the byte 0x{:02X}", text[at]),
                at,
            })?;
            out.push(id);
            at += n;
        }
        Ok(())
    }
}

/// Returns what is wrong with a normal token, whose text has escapes.
fn fault(vocab: &Vocab, id: u32) -> Option<TokenFault> {
    let written = vocab.bytes(id)?;
    if bytes::unescape(vocab.text(id)?, &mut Vec::new()).is_none() {
        return Some(TokenFault::Escape);
    }
    if written.is_empty() {
        return Some(TokenFault::Empty);
    }
    // The first of equal tokens is the one that is found.
    let duplicate = || Some(TokenFault::Duplicate { of: vocab.find(written).filter(|&of| of != id)? });
    fault_of_length(vocab, id).or_else(duplicate)
}

fn fault_of_length(vocab: &Vocab, id: u32) -> Option<TokenFault> {
    let got = vocab.bytes(id)?.len();
    (got > MAX_TOKEN).then_some(TokenFault::Length { max: MAX_TOKEN, got })
}

#[cfg(test)]
mod tests {
    use kvant_codec::random::Random;
    use serde_json::Value;

    use super::*;
    use crate::tokenizer::{DecodeStream, Special, Tokenizer, TokenizerModel, VocabData};

    /// Some tokens of RWKV's vocabulary and all of its bytes, and texts with their tokens
    /// (`tools/reference/rwkv_world.py`).
    const GOLDEN: &str = include_str!("../../tests/fixtures/rwkv.json");

    /// Tokens as in a file: the end of text, and normal ones.
    fn data<'a>(tokens: impl IntoIterator<Item = &'a str>) -> VocabData {
        let all: Vec<String> = ["<s>"].into_iter().chain(tokens).map(str::to_owned).collect();
        let types = (0..all.len()).map(|id| if id == 0 { 3 } else { 1 }).collect();
        let mut data = VocabData::new(TokenizerModel::Rwkv, all);
        (data.token_types, data.special.bos, data.special.eos) = (Some(types), Some(0), Some(0));
        data
    }

    fn golden() -> (Value, Tokenizer) {
        let golden: Value = serde_json::from_str(GOLDEN).unwrap();
        let tokens = golden["tokens"].as_array().unwrap();
        let mut data = data(tokens.iter().map(|token| token.as_str().unwrap()));
        data.special.eot = data.tokens.iter().position(|text| text == r"\n\n").map(|id| id as u32);
        (golden, Tokenizer::new(data).unwrap())
    }

    fn encode(t: &Tokenizer, text: &str) -> Vec<u32> {
        t.encode(text, Special::AsText, false).unwrap()
    }

    #[test]
    fn tokens_equal_those_of_the_reference() {
        let (golden, t) = golden();
        let numbers = |json: &Value| -> Vec<u64> {
            json.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
        };
        let real = numbers(&golden["ids"]);
        let cases = golden["cases"].as_array().unwrap();
        assert!(cases.len() > 60 && real.len() + 1 == t.n_vocab());
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let ids = encode(&t, text);
            // Token 0 is the end of text.
            let got: Vec<u64> = ids.iter().map(|&id| real[id as usize - 1]).collect();
            assert_eq!(got, numbers(&case["ids"]), "{text:?}");
            assert_eq!(t.decode(&ids), text);
        }
    }

    #[test]
    fn random_text_is_the_longest_tokens_and_decodes_to_itself() {
        let (_, t) = golden();
        let mut random = Random::new(3);
        for round in 0..200 {
            let mut below = |n: u64| random.bits() % n;
            // Any bytes, and parts of tokens one after another.
            let mut bytes: Vec<u8> = (0..below(40)).map(|_| below(256) as u8).collect();
            for _ in 0..below(30) {
                let token = t.token_bytes(below(t.n_vocab() as u64) as u32);
                bytes.extend(&token[below(token.len() as u64) as usize..]);
            }
            let text = String::from_utf8_lossy(&bytes);
            let ids = encode(&t, &text);
            let mut rest = text.as_bytes();
            for &id in &ids {
                let fits = (1..t.n_vocab() as u32).map(|id| t.token_bytes(id));
                let longest = fits.filter(|token| rest.starts_with(token)).map(<[u8]>::len).max();
                assert!(rest.starts_with(t.token_bytes(id)), "round {round}");
                assert_eq!(Some(t.token_bytes(id).len()), longest, "round {round}");
                rest = &rest[t.token_bytes(id).len()..];
            }
            assert_eq!(rest, b"");
            // Tokens end within characters.
            let mut stream = DecodeStream::default();
            let mut streamed: String = ids.iter().map(|&id| stream.push(&t, id)).collect();
            streamed += &stream.flush();
            assert_eq!((t.decode(&ids), &streamed[..]), (text.to_string(), &*text));
            assert!(t.min_tokens(&text) <= ids.len());
        }
    }

    #[test]
    fn special_tokens_are_only_those_of_the_file() {
        let (_, t) = golden();
        assert!(t.encode("<s>", Special::Parse, false).unwrap() == [0] && !encode(&t, "<s>").contains(&0));
        let blank = encode(&t, "\n\n")[0];
        assert!(t.eog_ids() == [0, blank] && t.eot() == Some(blank) && !t.adds_bos() && !t.adds_eos());
        // The end of a turn is text as well.
        assert_eq!(t.decode(&[0, blank]), "\n\n");
        assert_eq!((t.token_text(blank), t.token_id(r"\n\n")), (Some(r"\n\n"), Some(blank)));
        // Fillers after the vocabulary are no text.
        let mut data = data(["[", "P", "[P]", "]"]);
        data.token_types.as_mut().unwrap()[3] = 5;
        assert_eq!(encode(&Tokenizer::new(data).unwrap(), "[P]"), [1, 2, 4]);
    }

    #[test]
    fn escapes_are_those_of_byte_strings() {
        let tokens = [r"\x00\xfF", r"\n\t\r", r"\\", r"\'", "\"", r"\\n", "é"];
        let t = Tokenizer::new(data(tokens)).unwrap();
        let written: [&[u8]; 7] = [&[0, 255], b"\n\t\r", b"\\", b"'", b"\"", b"\\n", "é".as_bytes()];
        for (id, bytes) in (1..).zip(written) {
            assert_eq!(t.token_bytes(id), bytes);
        }
        assert_eq!(encode(&t, "\\n\\é"), [6, 3, 7]);
    }

    #[test]
    fn a_byte_of_no_token_is_unknown_or_an_error() {
        let t = Tokenizer::new(data(["ab", "abcd", "c"])).unwrap();
        assert_eq!(encode(&t, "abcab"), [1, 3, 1]);
        let error = t.encode("abcda", Special::AsText, false).unwrap_err().to_string();
        assert!(error.contains("0x61 at byte 4"), "{error}");
        let mut data = data(["ab", "c"]);
        data.special.unk = Some(0);
        assert_eq!(encode(&Tokenizer::new(data).unwrap(), "aéabac"), [0, 0, 0, 1, 0, 2]);
    }

    #[test]
    fn time_is_linear_where_long_tokens_nearly_match() {
        let long = "a".repeat(MAX_TOKEN - 1) + "b";
        let t = Tokenizer::new(data(["a", &long])).unwrap();
        let n = 300_000;
        let ids = encode(&t, &("a".repeat(n) + "b"));
        assert_eq!((ids.len(), ids.last()), (n - MAX_TOKEN + 2, Some(&2)));
    }

    #[test]
    fn unusable_tokens_are_rejected_with_one_line() {
        let long = "a".repeat(MAX_TOKEN + 1);
        for (token, expected) in [
            ("", "token 2: it writes no bytes"),
            ("a", "token 2: it writes the same bytes as token 1"),
            (r"\x61", "token 2: it writes the same bytes as token 1"),
            (&long, "token 2: it writes 257 bytes (up to 256 are possible)"),
        ] {
            let error = Tokenizer::new(data(["a", token])).unwrap_err().to_string();
            assert_eq!(error, expected);
        }
        for token in [r"\", r"\x", r"\xf", r"\x+1", r"\xgg", r"\u00e9", r"\0", r"\q", "\\é"] {
            let error = Tokenizer::new(data(["a", token])).unwrap_err();
            let fault = TokenFault::Escape;
            assert!(matches!(error, TokenizerError::Token { id: 2, fault: f } if f == fault), "{token}");
            assert_eq!(error.to_string().lines().count(), 1);
        }
        // Of a user-defined token too, whose text has no escapes.
        for (token, is_usable) in [(r"\q", true), (&long, false)] {
            let mut data = data(["a", token]);
            data.token_types.as_mut().unwrap()[2] = 4;
            assert_eq!(Tokenizer::new(data).is_ok(), is_usable);
        }
    }
}
