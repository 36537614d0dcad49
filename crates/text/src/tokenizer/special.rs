//! Special tokens inside a text, and which tokens end a generation.

use std::ops::Range;

use aho_corasick::{AhoCorasick, AhoCorasickKind, Input, MatchKind};

use super::error::TokenizerError;
use super::model::TokenizerModel;
use super::vocab::{SpecialIds, TokenKind, Vocab};

/// A stretch of a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Plain text.
    Text(Range<usize>),
    /// A special token's text.
    Token(u32),
}

/// Finds special tokens in text: at each place the longest, left to right.
#[derive(Debug, Clone)]
pub(super) struct Partition {
    /// Every special token.
    all: Finder,
    /// Those that count in plain text as well.
    user_defined: Finder,
    /// White space behind a special token belongs to it (Phi-3).
    strip_after: bool,
}

/// An automaton over token texts, and the id of each.
#[derive(Debug, Clone)]
struct Finder {
    automaton: AhoCorasick,
    ids: Vec<u32>,
}

impl Finder {
    fn new(vocab: &Vocab, kinds: &[TokenKind]) -> Result<Self, TokenizerError> {
        let wanted = |id: &u32| vocab.kind(*id).is_some_and(|k| kinds.contains(&k));
        let ids: Vec<u32> = (0..vocab.len() as u32)
            .filter(wanted)
            .filter(|&id| vocab.text(id).is_some_and(|t| !t.is_empty()))
            .collect();
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            // Left to choose, the crate takes a DFA for few tokens, and building one takes the square of their length.
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(ids.iter().filter_map(|&id| vocab.text(id)))
            .map_err(|e| TokenizerError::Prepare { what: "special tokens", why: e.to_string() })?;
        Ok(Finder { automaton, ids })
    }

    /// The first match that lies within `range`; none in a range that is none of `text`.
    fn find(&self, text: &str, range: Range<usize>) -> Option<Found> {
        text.get(range.clone())?;
        let found = self.automaton.find(Input::new(text).range(range))?;
        Some((self.ids[found.pattern().as_usize()], found.range()))
    }
}

impl Partition {
    pub(super) fn new(vocab: &Vocab, strip_after: bool) -> Result<Self, TokenizerError> {
        use TokenKind::{Control, Unknown, UserDefined};
        Ok(Partition {
            all: Finder::new(vocab, &[Control, Unknown, UserDefined])?,
            user_defined: Finder::new(vocab, &[UserDefined])?,
            strip_after,
        })
    }

    /// Whether white space behind a token is dropped.
    pub(super) fn strips(&self) -> bool {
        self.strip_after
    }

    /// Cuts `text` at its special tokens: at those that stand wholly within one of the ranges `own`, which ascend, and
    /// at user-defined ones anywhere.
    pub(super) fn parts(&self, vocab: &Vocab, text: &str, own: &[Range<usize>]) -> Vec<Part> {
        let mut parts = Vec::new();
        let (mut at, mut own) = (0, own);
        let mut anywhere = self.user_defined.find(text, 0..text.len());
        let mut within = self.next_within(text, 0, &mut own);
        while let Some((id, range)) = earlier(&anywhere, &within) {
            if range.start > at {
                parts.push(Part::Text(at..range.start));
            }
            parts.push(Part::Token(id));
            at = range.end;
            if self.strip_after && !KEEPS_SPACE_AFTER.contains(&vocab.text(id).unwrap_or_default()) {
                let rest = &text[at..];
                at += rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_whitespace()).len();
            }
            // What was found and lies behind is still the next: every byte is looked at about once.
            if anywhere.as_ref().is_some_and(|(_, range)| range.start < at) {
                anywhere = self.user_defined.find(text, at..text.len());
            }
            if within.as_ref().is_some_and(|(_, range)| range.start < at) {
                within = self.next_within(text, at, &mut own);
            }
        }
        if at < text.len() {
            parts.push(Part::Text(at..text.len()));
        }
        parts
    }

    /// The first special token from byte `at` on that lies within one of `own`, from which ranges that are behind are
    /// dropped.
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

/// A token and where its text stands.
type Found = (u32, Range<usize>);

/// The one that begins first, or else the longer one.
fn earlier(a: &Option<Found>, b: &Option<Found>) -> Option<Found> {
    let order = |found: &&Found| (found.1.start, std::cmp::Reverse(found.1.end));
    a.iter().chain(b).min_by_key(order).cloned()
}

/// Phi-3's special tokens that do not take the white space behind them.
const KEEPS_SPACE_AFTER: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

/// Texts that end a turn or a text, by model family, turns first. The files do not always say so.
const ENDS: &[&str] = &[
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
/// they count only where the file marks them as special.
const ENDS_IF_SPECIAL: &[&str] = &["<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>", "[e~["];

/// Texts that fill up, in models that fill in files.
const FIM_PADS: &[&str] = &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"];

/// Texts with which such models begin another repository.
const FIM_REPS: &[&str] = &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"];

/// Texts with which they begin another file.
const FIM_SEPS: &[&str] = &["<|file_sep|>"];

/// Texts after which a model waits for something else than the user, such as a tool's result.
const PAUSES: &[&str] =
    &["<|eom_id|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>"];

/// Fills in EOT and EOM where the file does not name them, makes the well-known enders control
/// tokens, and returns the sorted ids of every token that ends a generation, as llama.cpp does.
pub(super) fn end_of_generation(
    model: TokenizerModel,
    vocab: &mut Vocab,
    special: &mut SpecialIds,
) -> Vec<u32> {
    let find = |text: &&str| vocab.find_spelt(model, text);
    let marked = |id: &u32| matches!(vocab.kind(*id), Some(TokenKind::Control | TokenKind::UserDefined));
    let mut eog: Vec<u32> = ENDS.iter().filter_map(find).collect();
    eog.extend(ENDS_IF_SPECIAL.iter().filter_map(find).filter(marked));
    special.eot = special.eot.or(eog.first().copied());
    special.eom = special.eom.or(find(&"<|eom_id|>"));
    eog.extend(PAUSES.iter().filter_map(find));
    // What the file names goes before what the texts tell; a model that fills in files ends where it would go on to another.
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

/// In gpt-oss's and Solar's formats `<|end|>` closes one message of several; the answer goes on.
fn keep_harmony_end(model: TokenizerModel, vocab: &mut Vocab, special: &SpecialIds, eog: &mut Vec<u32>) {
    let has = |text: &str| vocab.find_spelt(model, text).is_some_and(|id| eog.contains(&id));
    let goes_on = (has("<|return|>") && has("<|call|>")) || (has("<|calls|>") && has("<|flush|>"));
    let end = vocab.find_spelt(model, "<|end|>").filter(|&id| special.eos != Some(id));
    if let (true, Some(end)) = (goes_on, end) {
        eog.retain(|&id| id != end);
    }
    // Its channel marks are part of the answer, but still no message may write one.
    for text in ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"] {
        if let (true, Some(id)) = (goes_on, vocab.find_spelt(model, text)) {
            vocab.set_kind(id, TokenKind::Control);
            vocab.show(id);
        }
    }
}
