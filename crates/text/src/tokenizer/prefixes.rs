//! The tokens that a text begins with.

use super::vocab::{TokenKind, Vocab};

/// The tokens that text may become, ordered for search.
#[derive(Debug, Clone)]
pub(super) struct Prefixes {
    /// Tokens in the order of their bytes.
    sorted: Vec<u32>,
    /// Where those begin in `sorted` whose first byte is this or a higher one, `[257]`.
    first_bytes: Vec<u32>,
}

impl Prefixes {
    /// Sorts the normal and user-defined tokens of `vocab`.
    pub(super) fn new(vocab: &Vocab) -> Self {
        let bytes = |id: u32| vocab.bytes(id).unwrap_or_default();
        let is_piece = |&id: &u32| {
            let kind = vocab.kind(id);
            matches!(kind, Some(TokenKind::Normal | TokenKind::UserDefined)) && !bytes(id).is_empty()
        };
        let mut sorted: Vec<u32> = (0..vocab.len() as u32).filter(is_piece).collect();
        // The first of equal texts is the one that is found.
        sorted.sort_by(|&a, &b| bytes(a).cmp(bytes(b)));
        sorted.dedup_by(|a, b| bytes(*a) == bytes(*b));
        let first = |byte: usize| sorted.partition_point(|&id| usize::from(bytes(id)[0]) < byte) as u32;
        let first_bytes = (0..=256).map(first).collect();
        Self { sorted, first_bytes }
    }

    /// Returns the tokens in the order of their bytes.
    pub(super) fn ids(&self) -> &[u32] {
        &self.sorted
    }

    /// Calls `found` with the tokens that `text` begins with, and their bytes, shortest first.
    pub(super) fn for_each(&self, vocab: &Vocab, text: &[u8], mut found: impl FnMut(u32, usize)) {
        let Some(&byte) = text.first() else { return };
        let bytes = |id: u32| vocab.bytes(id).unwrap_or_default();
        let [from, to] = [0, 1].map(|next| self.first_bytes[usize::from(byte) + next] as usize);
        let mut range = &self.sorted[from..to];
        for n in 1..=text.len() {
            // The shortest of those that begin with these bytes is the first.
            match range.split_first() {
                Some((&id, longer)) if bytes(id).len() == n => {
                    found(id, n);
                    range = longer;
                }
                Some(_) => {}
                None => return,
            }
            let Some(&next) = text.get(n) else { return };
            let from = range.partition_point(|&id| bytes(id)[n] < next);
            let to = from + range[from..].partition_point(|&id| bytes(id)[n] == next);
            range = &range[from..to];
        }
    }
}
