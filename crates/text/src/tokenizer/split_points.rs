//! Split points: positions at which a text can be split without changing its tokens.
//!
//! SentencePiece has no words: it merges a whole text at once. But merges never join two characters
//! that are adjacent in no token, so a text can be split between them, mostly before the space of
//! each word.

use super::vocab::Vocab;

/// log2 of the table size in bits: a vocabulary of 256,000 tokens has some hundred thousand pairs.
const BITS: u32 = 22;

/// The pairs of characters that are adjacent in some token. False positives only make splits rarer.
#[derive(Debug, Clone)]
pub(super) struct SplitPoints {
    /// One bit for the hash of each pair.
    pairs: Vec<u64>,
}

impl SplitPoints {
    pub(super) fn new(vocab: &Vocab) -> Self {
        let mut seams = SplitPoints { pairs: vec![0; 1 << (BITS - 6)] };
        for id in (0..vocab.len() as u32).filter(|&id| vocab.is_text(id)) {
            // Encoding starts from characters, so tokens that are not UTF-8 never result from it.
            let text = vocab.bytes(id).and_then(|bytes| std::str::from_utf8(bytes).ok()).unwrap_or_default();
            for (a, b) in text.chars().zip(text.chars().skip(1)) {
                let at = place(a, b);
                seams.pairs[at >> 6] |= 1 << (at & 63);
            }
        }
        seams
    }

    /// Returns the pieces of `text` that no merge crosses, each with its start in bytes.
    pub(super) fn cut<'a>(&self, text: &'a str) -> impl Iterator<Item = (usize, &'a str)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let rest = text.get(at..).filter(|rest| !rest.is_empty())?;
            let mut chars = rest.char_indices();
            let mut last = chars.next()?.1;
            let end = chars.find_map(|(i, c)| {
                let holds = self.holds(last, c);
                last = c;
                (!holds).then_some(i)
            });
            let start = at;
            at += end.unwrap_or(rest.len());
            Some((start, &text[start..at]))
        })
    }

    fn holds(&self, a: char, b: char) -> bool {
        let at = place(a, b);
        self.pairs[at >> 6] >> (at & 63) & 1 == 1
    }
}

fn place(a: char, b: char) -> usize {
    let pair = u64::from(a) << 32 | u64::from(b);
    (pair.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - BITS)) as usize
}
