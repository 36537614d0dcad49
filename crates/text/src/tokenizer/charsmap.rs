//! SentencePiece's precompiled character map: what each character, or short sequence of them,
//! becomes before a text is split (full-width letters, ligatures, kinds of space).
//!
//! The file holds a double-array trie (Aoe, 1989, as in Darts-clone) of the sequences and the texts
//! that they become, each ended by a zero byte. Sequences are looked up as Hugging Face's
//! `tokenizers` does: a grapheme below six bytes becomes the text of its shortest prefix in the
//! trie, or else each character of it its own.

use unicode_segmentation::UnicodeSegmentation;

use super::error::TokenizerError;

/// Graphemes of this many bytes are only looked up by character.
const LONG_GRAPHEME: usize = 6;

/// A character map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Charsmap {
    units: Vec<u32>,
    texts: String,
}

/// A unit of a double array.
#[derive(Clone, Copy)]
struct Unit(u32);

impl Unit {
    /// Whether a sequence ends here: the value is that of the unit at the offset.
    fn ends(self) -> bool {
        (self.0 >> 8) & 1 == 1
    }

    fn value(self) -> u32 {
        self.0 & 0x7fff_ffff
    }

    /// The byte that leads here; of a unit with a value, none.
    fn label(self) -> u32 {
        self.0 & 0x8000_00ff
    }

    fn offset(self) -> u32 {
        (self.0 >> 10) << ((self.0 & (1 << 9)) >> 6)
    }
}

impl Charsmap {
    /// Reads the bytes of `tokenizer.ggml.precompiled_charsmap`.
    ///
    /// # Errors
    /// [`TokenizerError::Charsmap`] if the trie exceeds the bytes, or the texts are not UTF-8.
    pub fn new(bytes: &[u8]) -> Result<Self, TokenizerError> {
        let fault =
            |expected: &str, got: String| TokenizerError::Charsmap { expected: expected.to_owned(), got };
        let (size, rest) = bytes
            .split_first_chunk::<4>()
            .ok_or_else(|| fault("the size of a trie in 4 bytes", format!("{} bytes", bytes.len())))?;
        let size = u32::from_le_bytes(*size) as usize;
        let (trie, texts) = rest
            .split_at_checked(size)
            .filter(|(trie, _)| !trie.is_empty() && trie.len().is_multiple_of(4))
            .ok_or_else(|| {
                fault(&format!("a trie of {size} bytes, in units of 4"), format!("{}", rest.len()))
            })?;
        let texts = std::str::from_utf8(texts).map_err(|error| fault("texts in UTF-8", error.to_string()))?;
        let units = trie.as_chunks::<4>().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
        Ok(Self { units, texts: texts.to_owned() })
    }

    /// Appends the mapped text to `out`.
    pub(super) fn map(&self, text: &str, out: &mut String) {
        for grapheme in text.graphemes(true) {
            let whole = if grapheme.len() < LONG_GRAPHEME { self.find(grapheme) } else { None };
            match whole {
                Some(mapped) => out.push_str(mapped),
                None => grapheme.chars().for_each(|c| match self.find(c.encode_utf8(&mut [0; 4])) {
                    Some(mapped) => out.push_str(mapped),
                    None => out.push(c),
                }),
            }
        }
    }

    /// Returns the text of the shortest prefix of `key` in the trie.
    fn find(&self, key: &str) -> Option<&str> {
        let unit = |at: u32| self.units.get(at as usize).copied().map(Unit);
        let mut at = unit(0)?.offset();
        for &byte in key.as_bytes() {
            at ^= u32::from(byte);
            let next = unit(at).filter(|next| byte != 0 && next.label() == u32::from(byte))?;
            at ^= next.offset();
            if next.ends() {
                let rest = self.texts.get(unit(at)?.value() as usize..)?;
                return rest.split('\0').next();
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map by SentencePiece: `Ａ` to `A`, `ｘ` to `x`, `ﬁ` to `fi`, `…` to `...`, a decomposed é,
    /// tab, line ends, no-break and ideographic spaces, and nothing for a zero-width joiner.
    const MAP: &[u8] = include_bytes!("tests/charsmap.bin");

    fn mapped(map: &Charsmap, text: &str) -> String {
        let mut out = String::new();
        map.map(text, &mut out);
        out
    }

    #[test]
    fn characters_and_sequences_are_mapped() {
        let map = Charsmap::new(MAP).unwrap();
        assert_eq!(mapped(&map, "Ａｘ ﬁn… b"), "Ax fin... b");
        assert_eq!(mapped(&map, "cafe\u{301} e\u{302}"), "café e\u{302}");
        // A grapheme becomes what its shortest mapped prefix does: no second space.
        assert_eq!(mapped(&map, "a\r\nb\t\u{a0}\u{3000}"), "a b   ");
        // Graphemes of six bytes and more are mapped by character.
        assert_eq!(mapped(&map, "👩\u{200d}🚀"), "👩🚀");
        assert_eq!(mapped(&map, "\0 ABC"), "\0 ABC");
    }

    #[test]
    fn damaged_maps_are_errors_or_map_nothing_outside() {
        for bytes in [&[][..], &MAP[..3], &[5, 0, 0, 0, 1, 2, 3, 4, 5], &[0, 0, 0, 0], &MAP[..400]] {
            assert!(matches!(Charsmap::new(bytes), Err(TokenizerError::Charsmap { .. })), "{bytes:?}");
        }
        let mut not_utf8 = MAP.to_vec();
        *not_utf8.last_mut().unwrap() = 0xff;
        assert!(matches!(Charsmap::new(&not_utf8), Err(TokenizerError::Charsmap { .. })));
        // Every unit leads somewhere else.
        for at in (4..MAP.len() - 64).step_by(4) {
            let mut bytes = MAP.to_vec();
            bytes[at..at + 4].copy_from_slice(&[0xff, 0xff, 0xff, 0x7f]);
            let Ok(map) = Charsmap::new(&bytes) else { continue };
            mapped(&map, "Ａｘ ﬁn… e\u{301}\t\u{200d}");
        }
    }
}
