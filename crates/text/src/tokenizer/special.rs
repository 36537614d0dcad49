//! Special tokens inside a text, and end-of-generation tokens.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;

use aho_corasick::{AhoCorasick, AhoCorasickKind, Input, MatchKind};
use regex_automata::meta::Regex;

use super::error::TokenizerError;
use super::model::TokenizerModel;
use super::normalizer::Normalizer;
use super::vocab::{SpecialIds, TokenKind, Vocab};

/// A piece of a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Segment {
    /// Plain text.
    Text(Range<usize>),
    /// A special token's text.
    Token(u32),
}

/// Matching properties of special tokens beyond their text: those of added tokens in
/// `tokenizer.json`. Each lists ids in any order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AddedTokens {
    /// Tokens that absorb the whitespace before them.
    pub lstrip: Vec<u32>,
    /// Tokens that absorb the whitespace after them.
    pub rstrip: Vec<u32>,
    /// Tokens that match only whole words.
    pub single_word: Vec<u32>,
    /// Tokens that are matched in normalized text.
    pub normalized: Vec<u32>,
}

impl AddedTokens {
    /// Returns the properties with their metadata keys, which are specific to Kvant: GGUF has no
    /// such keys.
    pub(super) fn keyed(&mut self) -> [(&'static str, &mut Vec<u32>); 4] {
        [
            ("kvant.tokenizer.lstrip", &mut self.lstrip),
            ("kvant.tokenizer.rstrip", &mut self.rstrip),
            ("kvant.tokenizer.single_word", &mut self.single_word),
            ("kvant.tokenizer.normalized", &mut self.normalized),
        ]
    }

    /// Returns the properties of Phi-3, which llama.cpp's files omit.
    pub(super) fn phi3(vocab: &Vocab) -> Self {
        let strips =
            |id: &u32| is_special(vocab, *id) && !NO_RSTRIP.contains(&vocab.text(*id).unwrap_or_default());
        Self { rstrip: (0..vocab.len() as u32).filter(strips).collect(), ..Self::default() }
    }

    /// Sorts the lists for binary search.
    ///
    /// # Errors
    /// [`TokenizerError::AddedToken`] for an id outside of the vocabulary.
    fn sort(&mut self, n_vocab: usize) -> Result<(), TokenizerError> {
        for (key, ids) in self.keyed() {
            ids.sort_unstable();
            if let Some(&id) = ids.last().filter(|&&id| id as usize >= n_vocab) {
                return Err(TokenizerError::AddedToken { key, id, n_vocab });
            }
        }
        Ok(())
    }
}

/// Phi-3's special tokens that do not absorb the whitespace after them.
const NO_RSTRIP: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

fn is_special(vocab: &Vocab, id: u32) -> bool {
    use TokenKind::{Control, Unknown, UserDefined};
    matches!(vocab.kind(id), Some(Control | Unknown | UserDefined))
}

/// Matches special tokens in text: the longest at each position, left to right.
#[derive(Debug, Clone)]
pub(super) struct Partition {
    /// Every special token.
    all: Finder,
    /// Tokens that also match in untrusted text.
    user_defined: Finder,
}

/// Matchers of special tokens before and after normalization.
#[derive(Debug, Clone)]
pub(super) struct Partitions {
    /// Matches in the text before normalization.
    pub(super) given: Partition,
    /// Matches in the normalized text between those, if any token requires it.
    pub(super) normalized: Option<Partition>,
}

impl Partitions {
    pub(super) fn new(
        vocab: &Vocab,
        mut added: AddedTokens,
        normalizer: &Normalizer,
    ) -> Result<Self, TokenizerError> {
        added.sort(vocab.len())?;
        let special = (0..vocab.len() as u32).filter(|&id| is_special(vocab, id));
        let is_normalized = |id: &u32| added.normalized.binary_search(id).is_ok();
        let (later, first): (Vec<u32>, Vec<u32>) = special.partition(is_normalized);
        let none = Normalizer::default();
        let partition = |ids: &[u32], normalizer| Partition::new(vocab, ids, &added, normalizer);
        let normalized = (!later.is_empty()).then(|| partition(&later, normalizer)).transpose()?;
        Ok(Partitions { given: partition(&first, &none)?, normalized })
    }

    /// Whether any token absorbs whitespace.
    pub(super) fn strip(&self) -> bool {
        let all = [Some(&self.given), self.normalized.as_ref()];
        all.into_iter()
            .flatten()
            .any(|partition| partition.all.tokens.iter().any(|token| token.lstrip || token.rstrip))
    }
}

/// A token to match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MatchRule {
    id: u32,
    lstrip: bool,
    rstrip: bool,
    single_word: bool,
}

/// An automaton over token texts, and the token of each.
#[derive(Debug, Clone)]
struct Finder {
    automaton: AhoCorasick,
    tokens: Vec<MatchRule>,
}

impl Finder {
    /// `texts` has the text of each token.
    fn new(tokens: Vec<MatchRule>, texts: &[Cow<'_, str>]) -> Result<Self, TokenizerError> {
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            // By default the crate builds a DFA for few tokens, in time quadratic in their length.
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(texts.iter().map(|text| text.as_bytes()))
            .map_err(|e| TokenizerError::Prepare { what: "special tokens", why: e.to_string() })?;
        Ok(Finder { automaton, tokens })
    }

    /// Returns the first match within `range`; `None` if `range` is not valid in `text`.
    fn find(&self, text: &str, mut range: Range<usize>) -> Option<Found> {
        loop {
            text.get(range.clone())?;
            let found = self.automaton.find(Input::new(text).range(range.clone()))?;
            let token = self.tokens[found.pattern().as_usize()];
            if !token.single_word || is_whole_word(text, found.range()) {
                return Some(Found { token, range: found.range() });
            }
            range.start = found.end();
        }
    }
}

/// Whether a range of `text` is delimited by non-word characters.
fn is_whole_word(text: &str, range: Range<usize>) -> bool {
    static WORD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\w").expect("a class of characters"));
    let is_word = |c: char| WORD.is_match(&*c.encode_utf8(&mut [0; 4]));
    !text[..range.start].ends_with(is_word) && !text[range.end..].starts_with(is_word)
}

impl Partition {
    /// Builds a matcher of `ids` for text after `normalizer`, which also applies to the token
    /// texts.
    fn new(
        vocab: &Vocab,
        ids: &[u32],
        added: &AddedTokens,
        normalizer: &Normalizer,
    ) -> Result<Self, TokenizerError> {
        let finder = |selects: &dyn Fn(u32) -> bool| {
            let text = |&id: &u32| Some((id, normalizer.apply(vocab.text(id)?, &[]).text));
            let (ids, texts): (Vec<u32>, Vec<Cow<'_, str>>) = ids
                .iter()
                .filter(|&&id| selects(id))
                .filter_map(text)
                .filter(|(_, text)| !text.is_empty())
                .unzip();
            let has = |list: &[u32], id: u32| list.binary_search(&id).is_ok();
            let token = |id| MatchRule {
                id,
                lstrip: has(&added.lstrip, id),
                rstrip: has(&added.rstrip, id),
                single_word: has(&added.single_word, id),
            };
            Finder::new(ids.into_iter().map(token).collect(), &texts)
        };
        Ok(Partition {
            all: finder(&|_| true)?,
            user_defined: finder(&|id| vocab.kind(id) == Some(TokenKind::UserDefined))?,
        })
    }

    /// Splits `text` at its special tokens: at all that lie wholly within one of the ascending
    /// ranges `own`, and at user-defined ones anywhere.
    pub(super) fn parts(&self, text: &str, own: &[Range<usize>]) -> Vec<Segment> {
        let mut parts = Vec::new();
        let (mut at, mut own) = (0, own);
        let mut anywhere = self.user_defined.find(text, 0..text.len());
        let mut within = self.next_within(text, 0, &mut own);
        while let Some(Found { token, range }) = earlier(&anywhere, &within) {
            let before = &text[at..range.start];
            let before = if token.lstrip { before.trim_end() } else { before };
            if !before.is_empty() {
                parts.push(Segment::Text(at..at + before.len()));
            }
            parts.push(Segment::Token(token.id));
            at = range.end;
            if token.rstrip {
                at = text.len() - text[at..].trim_start().len();
            }
            // A match after `at` remains the next one, so every byte is scanned about once.
            if anywhere.as_ref().is_some_and(|found| found.range.start < at) {
                anywhere = self.user_defined.find(text, at..text.len());
            }
            if within.as_ref().is_some_and(|found| found.range.start < at) {
                within = self.next_within(text, at, &mut own);
            }
        }
        if at < text.len() {
            parts.push(Segment::Text(at..text.len()));
        }
        parts
    }

    /// Returns the first special token from byte `at` on that lies within one of `own`. Drops the
    /// ranges that are exhausted.
    fn next_within(&self, text: &str, at: usize, own: &mut &[Range<usize>]) -> Option<Found> {
        while let Some(range) = own.first() {
            let start = range.start.max(at);
            if let Some(found) = self.all.find(text, start..range.end) {
                return Some(found);
            }
            *own = &own[1..];
        }
        None
    }
}

/// A token and the range of its text.
#[derive(Debug, Clone)]
struct Found {
    token: MatchRule,
    range: Range<usize>,
}

/// Returns the match that starts first, or the longer one of equals.
fn earlier(a: &Option<Found>, b: &Option<Found>) -> Option<Found> {
    let order = |found: &&Found| (found.range.start, std::cmp::Reverse(found.range.end));
    a.iter().chain(b).min_by_key(order).cloned()
}

/// Texts that end a turn or a sequence, by model family, turns first. Files do not always mark
/// them.
const EOG_TEXTS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
];

/// Texts that end a turn in some vocabularies and are plain text in others (`</s>` is an HTML tag):
/// they count only if the file marks them as special.
const EOG_TEXTS_IF_SPECIAL: &[&str] = &["<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>", "[e~["];

/// Padding tokens of fill-in-the-middle models.
const FIM_PADS: &[&str] = &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"];

/// Tokens that start another repository in fill-in-the-middle models.
const FIM_REPS: &[&str] = &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"];

/// Tokens that start another file in fill-in-the-middle models.
const FIM_SEPS: &[&str] = &["<|file_sep|>"];

/// Texts after which a model waits for other input than the user's, such as a tool result.
const PAUSES: &[&str] =
    &["<|eom_id|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>"];

/// Fills in EOT and EOM if the file does not name them, makes the well-known ending tokens control
/// tokens, and returns the sorted ids of every token that ends a generation, as llama.cpp does.
pub(super) fn end_of_generation(
    model: TokenizerModel,
    vocab: &mut Vocab,
    special: &mut SpecialIds,
) -> Vec<u32> {
    let find = |text: &&str| vocab.find_exact(model, text);
    let marked = |id: &u32| matches!(vocab.kind(*id), Some(TokenKind::Control | TokenKind::UserDefined));
    let mut eog: Vec<u32> = EOG_TEXTS.iter().filter_map(find).collect();
    eog.extend(EOG_TEXTS_IF_SPECIAL.iter().filter_map(find).filter(marked));
    special.eot = special.eot.or(eog.first().copied());
    special.eom = special.eom.or(find(&"<|eom_id|>"));
    eog.extend(PAUSES.iter().filter_map(find));
    // Ids in the file override those inferred from texts. A fill-in-the-middle model ends where it
    // would start another file.
    let of_fim = [
        (&mut special.fim_pad, FIM_PADS),
        (&mut special.fim_rep, FIM_REPS),
        (&mut special.fim_sep, FIM_SEPS),
    ];
    for (id, texts) in of_fim {
        if id.is_none() {
            *id = texts.iter().find_map(find);
            eog.extend(*id);
        }
    }
    for &id in &eog {
        vocab.set_kind(id, TokenKind::Control);
    }
    let named = [special.eos, special.eot, special.eom, special.fim_pad, special.fim_rep, special.fim_sep];
    eog.extend(named.into_iter().flatten());
    eog.sort_unstable();
    eog.dedup();
    keep_harmony_end(model, vocab, special, &mut eog);
    eog
}

/// In gpt-oss's and Solar's formats `<|end|>` closes one message of several, and generation
/// continues.
fn keep_harmony_end(model: TokenizerModel, vocab: &mut Vocab, special: &SpecialIds, eog: &mut Vec<u32>) {
    let has = |text: &str| vocab.find_exact(model, text).is_some_and(|id| eog.contains(&id));
    let goes_on = (has("<|return|>") && has("<|call|>")) || (has("<|calls|>") && has("<|flush|>"));
    let end = vocab.find_exact(model, "<|end|>").filter(|&id| special.eos != Some(id));
    if let (true, Some(end)) = (goes_on, end) {
        eog.retain(|&id| id != end);
    }
    // Channel marks are part of the output, but message text must not produce them.
    for text in ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"] {
        if let (true, Some(id)) = (goes_on, vocab.find_exact(model, text)) {
            vocab.set_kind(id, TokenKind::Control);
            vocab.show(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_letters_marks_digits_and_joiners() {
        let alone = |before: &str, behind: &str| {
            let text = format!("{before}it{behind}");
            is_whole_word(&text, before.len()..before.len() + 2)
        };
        for c in ["a", "\u{e9}", "\u{301}", "\u{344}", "\u{93f}", "1", "_", "\u{200d}", "\u{4f60}"] {
            assert!(!alone(c, "") && !alone("", c) && alone(&format!("{c}."), &format!("-{c}")), "{c:?}");
        }
        for c in ["", " ", "'", ".", "\u{bd}", "\u{a0}", "\u{1f680}"] {
            assert!(alone(c, c), "{c:?}");
        }
    }
}
