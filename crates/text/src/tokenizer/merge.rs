//! Merges neighbouring symbols, best pair first: shared by byte-pair encoding by rank and
//! SentencePiece by score.
//!
//! A word starts as its smallest symbols. Of all neighbouring pairs that a rule joins, the one of
//! lowest key is joined, leftmost first among equals, until no rule applies. Symbols form a linked
//! list and pairs a priority queue. Long words are repetitive (10 MB of spaces), so their pairs
//! have few keys. They wait in one bucket per key, ordered by position, and a word of n symbols
//! costs about n. Short words use a heap.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hashbrown::HashMap;

use super::error::TokenizerError;
use super::vocab::Vocab;

/// "No symbol" in a list of symbols, and "no token" in a symbol.
pub(super) const NONE: u32 = u32::MAX;

/// Number of symbols from which a word uses buckets.
const LONG: usize = 256;

/// One link of a word being merged.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    /// First byte within the word.
    start: u32,
    /// Length in bytes; 0 after merging into the left neighbour.
    len: u32,
    /// The symbol to the left, or [`NONE`].
    prev: u32,
    /// The symbol to the right, or [`NONE`].
    next: u32,
    /// Its token, or [`NONE`].
    id: u32,
}

/// A neighbour, as passed to a rule.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    /// Its token, or [`NONE`].
    pub(super) id: u32,
    /// First byte within the word, and the byte after its last.
    pub(super) start: usize,
    pub(super) end: usize,
}

/// Result of a rule for two neighbours.
#[derive(Debug, Clone, Copy)]
pub(super) struct Joined {
    /// Priority; lower keys are joined first.
    pub(super) key: u32,
    /// The merged token.
    pub(super) id: u32,
}

/// A pair that may be joined. The order of the fields is the order of joining.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    left: u32,
    /// Bytes of both; differs from the symbols' own once the pair is stale.
    len: u32,
    id: u32,
}

/// A word being merged, and the buffers of one `encode` call.
#[derive(Debug, Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<(u32, Pair)>>,
    buckets: Buckets,
}

impl Merger {
    /// Starts a new word.
    pub(super) fn clear(&mut self) {
        self.symbols.clear();
    }

    /// Appends the next symbol of the word: `len` bytes with the token `id`, or [`NONE`].
    pub(super) fn push(&mut self, len: usize, id: u32) {
        let at = self.symbols.len() as u32;
        let start = self.symbols.last_mut().map_or(0, |last| {
            last.next = at;
            last.start + last.len
        });
        // The left neighbour of the first symbol is NONE.
        self.symbols.push(Symbol { start, len: len as u32, prev: at.wrapping_sub(1), next: NONE, id });
    }

    /// Joins neighbours until `rule` applies to none.
    pub(super) fn merge(&mut self, rule: impl Fn(Piece, Piece) -> Option<Joined>) {
        if self.symbols.len() < LONG {
            self.heap.clear();
            let Merger { symbols, heap, .. } = self;
            run(symbols, heap, rule);
        } else {
            self.buckets.clear();
            let Merger { symbols, buckets, .. } = self;
            run(symbols, buckets, rule);
        }
    }

    /// Appends the tokens of the merged symbols of `word`, which starts at byte `at` of the text:
    /// the symbol's own token, or the tokens of its bytes, which `vocab` may lack.
    pub(super) fn emit(
        &self,
        vocab: &Vocab,
        word: &str,
        at: usize,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        for s in self.symbols.iter().filter(|s| s.len > 0) {
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
}

/// A priority queue of pairs.
trait Queue {
    fn push(&mut self, key: u32, pair: Pair);
    /// Removes the pair of lowest key, the leftmost among equals.
    fn pop(&mut self) -> Option<Pair>;
}

impl Queue for BinaryHeap<Reverse<(u32, Pair)>> {
    fn push(&mut self, key: u32, pair: Pair) {
        self.push(Reverse((key, pair)));
    }

    fn pop(&mut self) -> Option<Pair> {
        self.pop().map(|Reverse((_, pair))| pair)
    }
}

fn run(symbols: &mut [Symbol], queue: &mut impl Queue, rule: impl Fn(Piece, Piece) -> Option<Joined>) {
    let offer = |symbols: &[Symbol], queue: &mut _, left: u32| {
        let Some(l) = symbols.get(left as usize) else { return };
        let Some(r) = symbols.get(l.next as usize) else { return };
        let piece = |s: &Symbol| Piece { id: s.id, start: s.start as usize, end: (s.start + s.len) as usize };
        if let Some(Joined { key, id }) = rule(piece(l), piece(r)) {
            Queue::push(queue, key, Pair { left, len: l.len + r.len, id });
        }
    };
    for left in 0..symbols.len() as u32 {
        offer(symbols, queue, left);
    }
    while let Some(Pair { left, len, id }) = queue.pop() {
        let l = symbols[left as usize];
        let Some(&r) = symbols.get(l.next as usize) else { continue };
        // A merged symbol has no bytes. The lengths of a stale pair no longer add up.
        if l.len == 0 || l.len + r.len != len {
            continue;
        }
        symbols[l.next as usize].len = 0;
        symbols[left as usize] = Symbol { len, next: r.next, id, ..l };
        if let Some(next) = symbols.get_mut(r.next as usize) {
            next.prev = left;
        }
        offer(symbols, queue, l.prev);
        offer(symbols, queue, left);
    }
}

/// A queue with one bucket per key.
#[derive(Debug, Default)]
struct Buckets {
    /// Keys whose bucket may be non-empty, lowest first.
    keys: BinaryHeap<Reverse<u32>>,
    /// The bucket of each key.
    by_key: HashMap<u32, usize>,
    buckets: Vec<Bucket>,
}

/// The pairs of one key.
#[derive(Debug, Default)]
struct Bucket {
    pairs: Vec<Pair>,
    /// Number of `pairs` already taken; the remainder is sorted.
    taken: usize,
    is_sorted: bool,
    /// Pairs that arrived after sorting.
    late: BinaryHeap<Reverse<Pair>>,
    /// Whether the key is listed in `keys`.
    is_listed: bool,
}

impl Bucket {
    fn pop(&mut self) -> Option<Pair> {
        if !self.is_sorted {
            // Pairs arrive nearly in order, which the adaptive sort exploits.
            self.pairs.sort();
            self.is_sorted = true;
        }
        match (self.pairs.get(self.taken), self.late.peek()) {
            (Some(first), Some(Reverse(late))) if late < first => self.late.pop().map(|Reverse(pair)| pair),
            (Some(&first), _) => {
                self.taken += 1;
                Some(first)
            }
            (None, _) => self.late.pop().map(|Reverse(pair)| pair),
        }
    }
}

impl Buckets {
    fn clear(&mut self) {
        self.keys.clear();
        self.by_key.clear();
        self.buckets.clear();
    }
}

impl Queue for Buckets {
    fn push(&mut self, key: u32, pair: Pair) {
        let n = self.buckets.len();
        let at = *self.by_key.entry(key).or_insert(n);
        if at == n {
            self.buckets.push(Bucket::default());
        }
        let bucket = &mut self.buckets[at];
        if bucket.is_sorted {
            bucket.late.push(Reverse(pair));
        } else {
            bucket.pairs.push(pair);
        }
        if !bucket.is_listed {
            bucket.is_listed = true;
            self.keys.push(Reverse(key));
        }
    }

    fn pop(&mut self) -> Option<Pair> {
        while let Some(&Reverse(key)) = self.keys.peek() {
            let bucket = &mut self.buckets[self.by_key[&key]];
            if let Some(pair) = bucket.pop() {
                return Some(pair);
            }
            // Empty: later pairs start it anew.
            (bucket.is_listed, bucket.is_sorted, bucket.taken) = (false, false, 0);
            bucket.pairs.clear();
            self.keys.pop();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use kvant_codec::random::Random;

    use super::*;

    /// Reference merging: searches for the best pair before each join. Returns the end and token of
    /// each symbol.
    fn slowly(
        lens: &[usize],
        ids: &[u32],
        rule: &dyn Fn(Piece, Piece) -> Option<Joined>,
    ) -> Vec<(usize, u32)> {
        let mut at = 0;
        let mut pieces: Vec<Piece> = lens
            .iter()
            .zip(ids)
            .map(|(len, &id)| {
                at += len;
                Piece { id, start: at - len, end: at }
            })
            .collect();
        while let Some((joined, left)) = (1..pieces.len())
            .filter_map(|i| rule(pieces[i - 1], pieces[i]).map(|joined| (joined, i - 1)))
            .min_by_key(|(joined, left)| (joined.key, *left))
        {
            let right = pieces.remove(left + 1);
            pieces[left] = Piece { id: joined.id, start: pieces[left].start, end: right.end };
        }
        pieces.into_iter().map(|piece| (piece.end, piece.id)).collect()
    }

    fn quickly(
        lens: &[usize],
        ids: &[u32],
        rule: &dyn Fn(Piece, Piece) -> Option<Joined>,
    ) -> Vec<(usize, u32)> {
        let mut merger = Merger::default();
        for (&len, &id) in lens.iter().zip(ids) {
            merger.push(len, id);
        }
        merger.merge(rule);
        let left = merger.symbols.iter().filter(|s| s.len > 0);
        left.map(|s| ((s.start + s.len) as usize, s.id)).collect()
    }

    #[test]
    fn heap_and_buckets_match_the_reference_merging() {
        let mut random = Random::new(7);
        for round in 0..300 {
            let mut below = |n: u64| random.bits() % n;
            // Few tokens and keys, so that rules apply often and keys tie; ranks rise and fall
            // along a chain.
            let (n_start, n_keys) = (1 + below(4) as u32, 1 + below(30));
            let n_rules = 1 + below(24);
            let rules: Vec<(u32, u32, Joined)> = (0..n_rules)
                .map(|i| {
                    let id = n_start + i as u32;
                    let key = below(n_keys) as u32;
                    (below(id.into()) as u32, below(id.into()) as u32, Joined { key, id })
                })
                .collect();
            let rule = |l: Piece, r: Piece| {
                rules.iter().find(|(a, b, _)| (*a, *b) == (l.id, r.id)).map(|(_, _, joined)| *joined)
            };
            let len = [below(40), LONG as u64 - 1 + below(3), 300 + below(400)][round % 3] as usize;
            let lens: Vec<usize> = (0..len).map(|_| 1 + below(3) as usize).collect();
            // Random symbols, a single repeated one, and three in rotation.
            let period = [usize::MAX, 1, 3][round / 3 % 3];
            let mut ids: Vec<u32> = (0..len).map(|_| below(n_start.into()) as u32).collect();
            for i in 0..len {
                ids[i] = ids[i % period];
            }
            assert_eq!(quickly(&lens, &ids, &rule), slowly(&lens, &ids, &rule), "round {round}: {rules:?}");
        }
    }
}
