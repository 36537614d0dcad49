//! Byte-pair encoding by merge rank (Sennrich et al., <https://arxiv.org/abs/1508.07909>).
//!
//! A word starts as its smallest symbols (bytes for `gpt2`, characters for `gemma4`). Of all
//! neighbouring pairs with a merge rule, the one of lowest rank is joined, leftmost first among
//! equals, until no rule applies ([`super::merge`]).

use hashbrown::HashMap;

use super::bytes;
use super::error::{MergeFault, TokenizerError};
use super::merge::{Joined, Merger, NONE};
use super::model::TokenizerModel;
use super::pre::PreTokenizer;
use super::split_points::SplitPoints;
use super::vocab::Vocab;

/// Merge rules, pre-tokenizer and initial symbols.
#[derive(Debug, Clone)]
pub(super) struct Bpe {
    pub(super) pre: PreTokenizer,
    /// Rules by left and right token, in the upper and lower half of the key.
    merges: HashMap<u64, Joined>,
    start: Start,
}

/// The initial symbols of a word.
#[derive(Debug, Clone)]
enum Start {
    Bytes,
    /// Characters; words are split where no merge can cross.
    Chars(SplitPoints),
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
                bytes::decode_spelling(model, text, &mut key_bytes);
                vocab.find(&key_bytes).ok_or_else(|| fault(unknown))
            };
            let left = half(&merge[..at], MergeFault::LeftUnknown)?;
            let right = half(&merge[at + 1..], MergeFault::RightUnknown)?;
            key_bytes.clear();
            key_bytes.extend([left, right].into_iter().filter_map(|id| vocab.bytes(id)).flatten());
            let id = vocab.find(&key_bytes).ok_or_else(|| fault(MergeFault::ProductUnknown))?;
            // Text must never merge into a control token, regardless of the rules.
            if vocab.is_text(id) {
                table.entry(key(left, right)).or_insert(Joined { key: index as u32, id });
            }
        }
        let start = match model {
            TokenizerModel::Gpt2 => Start::Bytes,
            _ => Start::Chars(SplitPoints::new(vocab)),
        };
        Ok(Bpe { pre, merges: table, start })
    }

    /// Appends the tokens of `text`, which holds no special tokens, to `out`.
    pub(super) fn encode(
        &self,
        vocab: &Vocab,
        text: &str,
        merger: &mut Merger,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        for range in self.pre.words(text) {
            let at = range.start;
            let word = &text[range];
            // Gemma 4 has no merges that lead to its runs of newlines.
            let whole = match self.start {
                Start::Bytes => self.pre.whole_words,
                Start::Chars(_) => word.bytes().all(|b| b == b'\n'),
            };
            if let Some(id) = vocab.find_text(word.as_bytes()).filter(|_| whole) {
                out.push(id);
                continue;
            }
            match &self.start {
                Start::Bytes => {
                    merger.clear();
                    for b in word.bytes() {
                        merger.push(1, vocab.byte_ids[usize::from(b)].unwrap_or(NONE));
                    }
                    self.finish(vocab, word, at, merger, out)?;
                }
                Start::Chars(seams) => {
                    for (start, piece) in seams.cut(word) {
                        merger.clear();
                        for c in piece.chars() {
                            let id = vocab.find_text(c.encode_utf8(&mut [0; 4]).as_bytes());
                            merger.push(c.len_utf8(), id.unwrap_or(NONE));
                        }
                        self.finish(vocab, piece, at + start, merger, out)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Merges the symbols of `word`, which starts at byte `at` of the text, and appends its tokens.
    fn finish(
        &self,
        vocab: &Vocab,
        word: &str,
        at: usize,
        merger: &mut Merger,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        // NONE is not a token, so a symbol without a token matches no rule.
        merger.merge(|left, right| self.merges.get(&key(left.id, right.id)).copied());
        merger.emit(vocab, word, at, out)
    }
}
