//! The spellings of raw bytes in vocabularies.
//!
//! *Byte-level BPE* (GPT-2) writes every byte as one printable character: printable Latin-1 maps to
//! itself, the other 68 bytes map to the characters from U+0100 on, in order. A space becomes `Ġ`
//! and a newline `Ċ`. *Byte fallback* (SentencePiece) writes `<0x0A>`. *RWKV* writes the escapes of
//! Python's byte strings: `\n`, `\xff`.

use super::model::TokenizerModel;

/// Whether GPT-2's alphabet maps `b` to the character with the same code.
const fn stands_for_itself(b: u8) -> bool {
    matches!(b, 33..=126 | 161..=172 | 174..=255)
}

/// The bytes that do not map to themselves, in order: entry `i` is written as U+0100 + `i`.
const SHIFTED: [u8; 68] = {
    let mut out = [0u8; 68];
    let (mut n, mut b) = (0, 0);
    while b < 256 {
        if !stands_for_itself(b as u8) {
            out[n] = b as u8;
            n += 1;
        }
        b += 1;
    }
    out
};

/// Returns the byte that `c` encodes in GPT-2's alphabet.
fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        u @ 0..=255 => Some(u as u8).filter(|&b| stands_for_itself(b)),
        u => SHIFTED.get(u as usize - 256).copied(),
    }
}

/// The space of SentencePiece and GGUF's BERT vocabularies.
pub(super) const SPACE_MARK: char = '\u{2581}';

/// Decodes the text of a normal token into its bytes: from GPT-2's alphabet, with escapes, or with
/// space marks. Text with a character outside of the alphabet, or with an unknown escape, is taken
/// literally.
pub(super) fn decode_spelling(model: TokenizerModel, text: &str, out: &mut Vec<u8>) {
    out.clear();
    let is_spelt = match model {
        TokenizerModel::Gpt2 => text.chars().all(|c| byte_of(c).map(|b| out.push(b)).is_some()),
        TokenizerModel::Rwkv => unescape(text, out).is_some(),
        _ => {
            for (i, stretch) in text.split(SPACE_MARK).enumerate() {
                if i > 0 {
                    out.push(b' ');
                }
                out.extend_from_slice(stretch.as_bytes());
            }
            true
        }
    };
    if !is_spelt {
        out.clear();
        out.extend_from_slice(text.as_bytes());
    }
}

/// Appends the bytes of a text with the escapes of Python's `repr`; `None` for any other escape.
pub(super) fn unescape(text: &str, out: &mut Vec<u8>) -> Option<()> {
    let mut rest = text.bytes();
    while let Some(b) = rest.next() {
        out.push(match b {
            b'\\' => match rest.next()? {
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'x' => hex_digit(rest.next()?)? << 4 | hex_digit(rest.next()?)?,
                b @ (b'\\' | b'\'' | b'"') => b,
                _ => return None,
            },
            b => b,
        });
    }
    Some(())
}

fn hex_digit(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|digit| digit as u8)
}

/// Returns the byte of a fallback token, `<0x00>` to `<0xFF>`.
pub(super) fn fallback_byte(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
        .then(|| u8::from_str_radix(hex, 16).ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpt2_alphabet_maps_every_byte_once() {
        let mut seen = [0u32; 256];
        for c in (0..0x200).filter_map(char::from_u32) {
            if let Some(b) = byte_of(c) {
                seen[usize::from(b)] += 1;
            }
        }
        assert_eq!(seen, [1; 256]);
        let mut out = Vec::new();
        decode_spelling(TokenizerModel::Gpt2, "ĠhelloĊ", &mut out);
        assert_eq!(out, b" hello\n");
        decode_spelling(TokenizerModel::Gpt2, "日Ġ", &mut out);
        assert_eq!(out, "日Ġ".as_bytes());
        decode_spelling(TokenizerModel::Llama, "▁▁aĠ▁", &mut out);
        assert_eq!(out, "  aĠ ".as_bytes());
    }

    #[test]
    fn fallback_bytes_are_exactly_two_hex_digits() {
        assert_eq!(fallback_byte("<0x0A>"), Some(10));
        assert_eq!(fallback_byte("<0xff>"), Some(255));
        for bad in ["<0x>", "<0x1>", "<0x123>", "<0x+1>", "0x0A", "<0xGG>", ""] {
            assert_eq!(fallback_byte(bad), None, "{bad}");
        }
    }
}
