//! Byte-pair encoding by merge rank (Sennrich et al., <https://arxiv.org/abs/1508.07909>).
//!
//! A word starts as its smallest symbols (bytes for `gpt2`, characters for `gemma4`). Of all
//! neighbouring pairs with a merge rule, the one of lowest rank is joined, leftmost first among
//! equals, until no rule applies. Symbols form a linked list and candidate pairs a heap, so a word
//! of n symbols costs O(n log n): 200 kB of one letter is a word like any other.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hashbrown::HashMap;

use super::bytes;
use super::error::{MergeFault, TokenizerError};
use super::model::TokenizerModel;
use super::pre::PreTokenizer;
use super::vocab::Vocab;

/// "No symbol" in a list of symbols, and "no token" in a symbol.
pub(super) const NONE: u32 = u32::MAX;

/// One link of a word being merged.
#[derive(Clone, Copy)]
pub(super) struct Symbol {
    /// First byte within the word.
    pub(super) start: u32,
    /// Bytes; 0 once its left neighbour has swallowed it.
    pub(super) len: u32,
    /// The symbol to the left, or [`NONE`].
    pub(super) prev: u32,
    /// The symbol to the right, or [`NONE`].
    pub(super) next: u32,
    /// Its token, or [`NONE`].
    pub(super) id: u32,
}

/// Appends the symbol `[start, start + len)` behind the last one of `symbols`.
pub(super) fn push_symbol(symbols: &mut Vec<Symbol>, start: usize, len: usize, id: u32) {
    let at = symbols.len() as u32;
    if let Some(last) = symbols.last_mut() {
        last.next = at;
    }
    let prev = at.wrapping_sub(1); // the first one's is NONE
    symbols.push(Symbol { start: start as u32, len: len as u32, prev, next: NONE, id });
}

/// Joins `right` into `left`, which becomes token `id`.
pub(super) fn join(symbols: &mut [Symbol], left: u32, right: u32, id: u32) {
    let Symbol { len, next, .. } = symbols[right as usize];
    symbols[right as usize].len = 0;
    let l = &mut symbols[left as usize];
    l.len += len;
    l.next = next;
    l.id = id;
    if next != NONE {
        symbols[next as usize].prev = left;
    }
}

/// A pair that may be joined. The order of the fields is the order of joining.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: u32,
    right: u32,
    /// Bytes of both; differs from the symbols' own once the candidate is stale.
    len: u32,
    /// The token that the pair becomes.
    id: u32,
}

/// The product and the rank of a merge rule.
#[derive(Debug, Clone, Copy)]
struct Merge {
    rank: u32,
    id: u32,
}

/// Merge rules, the pre-tokeniser, and how to start.
#[derive(Debug, Clone)]
pub(super) struct Bpe {
    pub(super) pre: PreTokenizer,
    /// By left and right token, in the upper and lower half of the key.
    merges: HashMap<u64, Merge>,
    start: Start,
}

/// The symbols that a word starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    Bytes,
    Chars,
}

/// Buffers of one `encode` call, kept from word to word.
#[derive(Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<Candidate>>,
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Bpe {
    /// Resolves `merges` ("left right", best first) against `vocab`.
    ///
    /// # Errors
    /// [`TokenizerError::Merge`] for a rule whose halves or product are not tokens.
    pub(super) fn new(
        model: TokenizerModel,
        pre: PreTokenizer,
        vocab: &Vocab,
        merges: &[String],
    ) -> Result<Self, TokenizerError> {
        let mut table = HashMap::with_capacity(merges.len());
        let mut key_bytes = Vec::new();
        for (index, merge) in merges.iter().enumerate() {
            let fault = |fault| TokenizerError::Merge { index, merge: merge.clone(), fault };
            // The first character may itself be a space.
            let skip = merge.chars().next().map_or(0, char::len_utf8);
            let at = merge[skip..].find(' ').ok_or_else(|| fault(MergeFault::NoSpace))? + skip;
            let mut half = |text: &str, unknown| {
                bytes::spelt(model, text, &mut key_bytes);
                vocab.find(&key_bytes).ok_or_else(|| fault(unknown))
            };
            let left = half(&merge[..at], MergeFault::LeftUnknown)?;
            let right = half(&merge[at + 1..], MergeFault::RightUnknown)?;
            key_bytes.clear();
            key_bytes.extend([left, right].into_iter().filter_map(|id| vocab.bytes(id)).flatten());
            let id = vocab.find(&key_bytes).ok_or_else(|| fault(MergeFault::ProductUnknown))?;
            // Text must not grow into a control token, whatever the rules say.
            if vocab.is_text(id) {
                let rank = index as u32;
                table.entry(key(left, right)).or_insert(Merge { rank, id });
            }
        }
        let start = if model == TokenizerModel::Gpt2 { Start::Bytes } else { Start::Chars };
        Ok(Bpe { pre, merges: table, start })
    }

    /// Appends the tokens of `text`, which holds no special tokens, to `out`.
    pub(super) fn encode(
        &self,
        vocab: &Vocab,
        text: &str,
        scratch: &mut Scratch,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        for word in self.pre.words(text) {
            let at = word.start;
            let word = &text[word];
            // Gemma 4 has no merges that lead to its runs of newlines.
            let whole =
                self.pre.whole_words || (self.start == Start::Chars && word.bytes().all(|b| b == b'\n'));
            match vocab.find_text(word.as_bytes()).filter(|_| whole) {
                Some(id) => out.push(id),
                None => self.encode_word(vocab, word, at, scratch, out)?,
            }
        }
        Ok(())
    }

    /// Appends the tokens of one word, which stands at byte `at` of the text.
    fn encode_word(
        &self,
        vocab: &Vocab,
        word: &str,
        at: usize,
        scratch: &mut Scratch,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let Scratch { symbols, heap } = scratch;
        symbols.clear();
        heap.clear();
        match self.start {
            Start::Bytes => {
                for (i, b) in word.bytes().enumerate() {
                    push_symbol(symbols, i, 1, vocab.byte_ids[usize::from(b)].unwrap_or(NONE));
                }
            }
            Start::Chars => {
                for (i, c) in word.char_indices() {
                    let bytes = &word.as_bytes()[i..i + c.len_utf8()];
                    push_symbol(symbols, i, bytes.len(), vocab.find_text(bytes).unwrap_or(NONE));
                }
            }
        }
        for right in 1..symbols.len() as u32 {
            self.offer(symbols, heap, right - 1, right);
        }
        while let Some(Reverse(c)) = heap.pop() {
            let (l, r) = (symbols[c.left as usize], symbols[c.right as usize]);
            // A swallowed symbol has no bytes; one that has grown no longer adds up.
            if l.len == 0 || r.len == 0 || l.len + r.len != c.len {
                continue;
            }
            join(symbols, c.left, c.right, c.id);
            let Symbol { prev, next, .. } = symbols[c.left as usize];
            self.offer(symbols, heap, prev, c.left);
            self.offer(symbols, heap, c.left, next);
        }
        emit(vocab, word, at, symbols, out)
    }

    /// Puts the pair on the heap if a rule joins it.
    fn offer(&self, symbols: &[Symbol], heap: &mut BinaryHeap<Reverse<Candidate>>, left: u32, right: u32) {
        if left == NONE || right == NONE {
            return;
        }
        let (l, r) = (symbols[left as usize], symbols[right as usize]);
        // NONE is no token, so a symbol without one finds no rule.
        if let Some(&Merge { rank, id }) = self.merges.get(&key(l.id, r.id)) {
            heap.push(Reverse(Candidate { rank, left, right, len: l.len + r.len, id }));
        }
    }
}

/// Appends the tokens of the merged `symbols` of `word`, which stands at byte `at` of the text: its
/// own token, or those of its bytes, or the unknown token, which `vocab` may not have.
pub(super) fn emit(
    vocab: &Vocab,
    word: &str,
    at: usize,
    symbols: &[Symbol],
    out: &mut Vec<u32>,
) -> Result<(), TokenizerError> {
    for s in symbols.iter().filter(|s| s.len > 0) {
        if s.id != NONE {
            out.push(s.id);
            continue;
        }
        let start = s.start as usize;
        for (i, b) in word.as_bytes()[start..start + s.len as usize].iter().enumerate() {
            let id = vocab.byte_ids[usize::from(*b)].ok_or_else(|| TokenizerError::NoToken {
                what: format!("the byte 0x{b:02X}"),
                at: at + start + i,
            })?;
            out.push(id);
        }
    }
    Ok(())
}
