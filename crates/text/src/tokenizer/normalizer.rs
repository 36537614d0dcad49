//! Normalizers: transform plain text before pre-tokenization.
//!
//! Qwen's tokenizers compose characters (NFC), others lowercase them or strip their accents. The
//! steps are those of Hugging Face's `tokenizers`, with the same behaviour. GGUF has no key for
//! them: [`KEY`] lists them in files that Kvant writes, and in others the name of the pre-tokenizer
//! implies NFC.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use unicode_normalization::char::is_combining_mark;
use unicode_normalization::{IsNormalized, UnicodeNormalization};
use unicode_normalization::{is_nfc_quick, is_nfd_quick, is_nfkc_quick, is_nfkd_quick};

use super::charsmap::Charsmap;
use super::error::TokenizerError;

/// The metadata key: the step names in order, `replace` followed by the pattern and its
/// replacement, `prepend` by a text.
pub(super) const KEY: &str = "kvant.tokenizer.normalizer";

/// The step names.
const WORDS: &str = "nfc, nfd, nfkc, nfkd, lowercase, strip_accents, strip_left, strip_right, charsmap, squeeze_spaces, \
     squeeze_whitespace, replace or prepend";

/// Maximum number of characters that compose to one: no character decomposes into more.
const MAX_COMPOSED: usize = 4;

/// One normalization step.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    /// Canonical composition.
    Nfc,
    /// Canonical decomposition.
    Nfd,
    /// Compatibility composition: a ligature becomes its letters.
    Nfkc,
    /// Compatibility decomposition.
    Nfkd,
    Lowercase,
    /// Removes combining marks.
    StripAccents,
    /// Removes leading whitespace.
    StripLeft,
    /// Removes trailing whitespace.
    StripRight,
    Replace {
        from: String,
        to: String,
    },
    /// Prepends a text to a non-empty one.
    Prepend(String),
    /// The map of the vocabulary.
    Charsmap(Arc<Charsmap>),
    /// Each run of two or more spaces becomes one.
    SqueezeSpaces,
    /// Each run of whitespace becomes a space.
    SqueezeWhitespace,
}

/// A sequence of normalization steps, possibly empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Normalizer {
    steps: Vec<Step>,
}

/// A text after all steps.
pub(super) struct Normalized<'a> {
    pub(super) text: Cow<'a, str>,
    /// The tracked ranges, mapped to the new text.
    pub(super) ranges: Vec<Range<usize>>,
}

impl Normalizer {
    /// Creates the normalizer for canonical composition (NFC).
    pub fn nfc() -> Self {
        Self { steps: vec![Step::Nfc] }
    }

    /// Parses the step names of a file; `charsmap` is the map of its vocabulary.
    ///
    /// # Errors
    /// [`TokenizerError::Normalizer`] for an unknown step, or one without its text argument or map.
    pub fn from_words<'a>(
        words: impl IntoIterator<Item = &'a str>,
        charsmap: Option<Charsmap>,
    ) -> Result<Self, TokenizerError> {
        let fault = |expected: &str, got: &str| TokenizerError::Normalizer {
            expected: expected.to_owned(),
            got: got.to_owned(),
        };
        let charsmap = charsmap.map(Arc::new);
        let mut words = words.into_iter();
        let mut steps = Vec::new();
        while let Some(word) = words.next() {
            let mut text = |what| words.next().map(str::to_owned).ok_or_else(|| fault(what, "nothing"));
            steps.push(match word {
                "nfc" => Step::Nfc,
                "nfd" => Step::Nfd,
                "nfkc" => Step::Nfkc,
                "nfkd" => Step::Nfkd,
                "lowercase" => Step::Lowercase,
                "strip_accents" => Step::StripAccents,
                "strip_left" => Step::StripLeft,
                "strip_right" => Step::StripRight,
                "squeeze_spaces" => Step::SqueezeSpaces,
                "squeeze_whitespace" => Step::SqueezeWhitespace,
                "charsmap" => {
                    let map = charsmap.as_ref().ok_or_else(|| fault("a charsmap", "none"))?;
                    Step::Charsmap(Arc::clone(map))
                }
                "replace" => {
                    let from = text("a text to replace")?;
                    if from.is_empty() {
                        return Err(fault("a text to replace", "an empty one"));
                    }
                    Step::Replace { from, to: text("a text to put in its place")? }
                }
                "prepend" => Step::Prepend(text("a text to begin with")?),
                other => return Err(fault(WORDS, &format!("'{other}'"))),
            });
        }
        Ok(Self { steps })
    }

    /// Applies all steps to `text`, and maps the ascending `ranges` to the result. No composition
    /// or replacement crosses the ends of a range.
    pub(super) fn apply<'a>(&self, text: &'a str, ranges: &[Range<usize>]) -> Normalized<'a> {
        let mut normalized = Normalized { text: Cow::Borrowed(text), ranges: ranges.to_vec() };
        for step in self.steps.iter().filter(|_| !text.is_empty()) {
            if !step.keeps(&normalized.text) {
                normalized = step.apply(&normalized);
            }
        }
        normalized
    }

    /// Returns the largest number of characters of `text` that can become one; `None` if characters
    /// may vanish.
    pub(super) fn max_shrink(&self, text: &str) -> Option<usize> {
        let shrink = |(index, step): (usize, &Step)| match step {
            Step::Nfc | Step::Nfkc if index == 0 && step.keeps(text) => Some(1),
            Step::Nfc | Step::Nfkc => Some(MAX_COMPOSED),
            Step::Nfd | Step::Nfkd | Step::Lowercase | Step::Prepend(_) => Some(1),
            Step::Replace { from, to } => (from.chars().count() <= to.chars().count()).then_some(1),
            Step::StripAccents | Step::StripLeft | Step::StripRight => None,
            Step::Charsmap(_) | Step::SqueezeSpaces | Step::SqueezeWhitespace => None,
        };
        self.steps.iter().enumerate().map(shrink).try_fold(1_usize, |n, by| n.checked_mul(by?))
    }
}

impl Step {
    /// Whether a quick check proves that the step leaves `text` unchanged, in a fraction of the
    /// time.
    fn keeps(&self, text: &str) -> bool {
        let is_normal = |quick: IsNormalized| quick == IsNormalized::Yes;
        match self {
            Self::Nfc | Self::Nfd | Self::Nfkc | Self::Nfkd if text.is_ascii() => true,
            Self::Nfc => is_normal(is_nfc_quick(text.chars())),
            Self::Nfd => is_normal(is_nfd_quick(text.chars())),
            Self::Nfkc => is_normal(is_nfkc_quick(text.chars())),
            Self::Nfkd => is_normal(is_nfkd_quick(text.chars())),
            Self::Lowercase => text.chars().all(|c| c.to_lowercase().eq([c])),
            Self::StripAccents => text.is_ascii() || !text.contains(is_combining_mark),
            Self::StripLeft => !text.starts_with(char::is_whitespace),
            Self::StripRight => !text.ends_with(char::is_whitespace),
            Self::Replace { from, .. } => !text.contains(from.as_str()),
            Self::Prepend(_) => text.is_empty(),
            Self::Charsmap(_) => false,
            Self::SqueezeSpaces => !text.contains("  "),
            Self::SqueezeWhitespace => !text.contains(|c: char| c.is_whitespace()),
        }
    }

    fn apply<'a>(&self, of: &Normalized<'a>) -> Normalized<'a> {
        let (text, mut ranges) = (&*of.text, of.ranges.clone());
        let mut changed = String::with_capacity(text.len());
        match self {
            Self::StripLeft => {
                changed.push_str(text.trim_start());
                let n = text.len() - changed.len();
                let moved = |at: usize| at.saturating_sub(n);
                ranges.iter_mut().for_each(|range| *range = moved(range.start)..moved(range.end));
            }
            Self::StripRight => {
                changed.push_str(text.trim_end());
                let moved = |at: usize| at.min(changed.len());
                ranges.iter_mut().for_each(|range| *range = moved(range.start)..moved(range.end));
            }
            Self::Prepend(first) => {
                changed.extend([first, text]);
                // Prepended text belongs to a range at the start.
                let start = |at: usize| if at == 0 { 0 } else { at + first.len() };
                ranges.iter_mut().for_each(|range| *range = start(range.start)..range.end + first.len());
            }
            _ => {
                let mut at = 0;
                for range in &mut ranges {
                    self.change(&text[at..range.start], &mut changed);
                    let start = changed.len();
                    self.change(&text[range.clone()], &mut changed);
                    at = range.end;
                    *range = start..changed.len();
                }
                self.change(&text[at..], &mut changed);
            }
        }
        Normalized { text: Cow::Owned(changed), ranges }
    }

    /// Appends the transformed piece of text, independent of its context.
    fn change(&self, text: &str, out: &mut String) {
        match self {
            Self::Nfc => out.extend(text.nfc()),
            Self::Nfd => out.extend(text.nfd()),
            Self::Nfkc => out.extend(text.nfkc()),
            Self::Nfkd => out.extend(text.nfkd()),
            Self::Lowercase => out.extend(text.chars().flat_map(char::to_lowercase)),
            Self::StripAccents => out.extend(text.chars().filter(|&c| !is_combining_mark(c))),
            Self::Replace { from, to } => out.push_str(&text.replace(from.as_str(), to)),
            Self::Charsmap(map) => map.map(text, out),
            Self::SqueezeSpaces => squeeze(text, |c| c == ' ', out),
            Self::SqueezeWhitespace => squeeze(text, char::is_whitespace, out),
            Self::StripLeft | Self::StripRight | Self::Prepend(_) => out.push_str(text),
        }
    }
}

/// Appends the text with a space for each run of `blank` characters.
fn squeeze(text: &str, blank: fn(char) -> bool, out: &mut String) {
    let mut after_blank = false;
    for c in text.chars() {
        let is_blank = blank(c);
        if !is_blank {
            out.push(c);
        } else if !after_blank {
            out.push(' ');
        }
        after_blank = is_blank;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normalizer(words: &[&str]) -> Normalizer {
        Normalizer::from_words(words.iter().copied(), None).unwrap()
    }

    fn of(words: &[&str], text: &str) -> String {
        normalizer(words).apply(text, &[]).text.into_owned()
    }

    #[test]
    fn each_step_transforms_text_as_its_name_states() {
        // A and a ring, the Kelvin sign, a ligature, jamo of one syllable.
        let text = "A\u{30a}\u{212a}\u{fb01} \u{1112}\u{1161}\u{11ab}";
        assert_eq!(of(&["nfc"], text), "\u{c5}K\u{fb01} \u{d55c}");
        assert_eq!(of(&["nfkc"], text), "\u{c5}Kfi \u{d55c}");
        assert_eq!(of(&["nfd"], "\u{c5}\u{fb01}\u{d55c}"), "A\u{30a}\u{fb01}\u{1112}\u{1161}\u{11ab}");
        assert_eq!(of(&["nfkd"], "\u{c5}\u{fb01}\u{d55c}"), "A\u{30a}fi\u{1112}\u{1161}\u{11ab}");
        // A capital dotted I becomes two characters; no final sigma at the end of a word.
        assert_eq!(of(&["lowercase"], "\u{130}\u{1c5} ΟΔΟΣ"), "i\u{307}\u{1c6} οδοσ");
        assert_eq!(of(&["strip_accents"], "e\u{301}\u{e9}\u{93f}"), "e\u{e9}");
        assert_eq!(of(&["strip_left"], "\u{2003} a "), "a ");
        assert_eq!(of(&["strip_right"], " a \u{a0}"), " a");
        assert_eq!(of(&["replace", "``", "\""], "```a``"), "\"`a\"");
        assert_eq!((of(&["prepend", "x"], "a"), of(&["prepend", "x"], "")), ("xa".into(), "".into()));
        // Steps apply in order.
        assert_eq!(of(&["nfd", "strip_accents", "lowercase"], "\u{c9}A"), "ea");
        assert_eq!(of(&["strip_accents", "nfd", "lowercase"], "\u{c9}A"), "e\u{301}a");
    }

    #[test]
    fn the_quick_check_never_skips_a_step_with_effect() {
        let steps = ["nfc", "nfd", "nfkc", "nfkd", "lowercase", "strip_accents"];
        let texts = (0..0x3_0000).filter_map(char::from_u32).map(|c| format!("e{c}\u{301}"));
        for text in texts.chain(["\u{301}".into(), "a\u{323}\u{302}".into(), "a\u{302}\u{323}".into()]) {
            for word in steps {
                let step = &normalizer(&[word]).steps[0];
                let mut changed = String::new();
                step.change(&text, &mut changed);
                assert!(!step.keeps(&text) || changed == text, "{word}: {text:?}");
            }
        }
    }

    #[test]
    fn ranges_follow_their_text_without_composing_across_ends() {
        let text = " e\u{301}>\u{338}E\u{301} ";
        let at = |part: &str| text.find(part).map(|start| start..start + part.len()).unwrap();
        let own = [at("e\u{301}>"), at("E\u{301}")];
        let parts = |words: &[&str]| {
            let Normalized { text, ranges } = normalizer(words).apply(text, &own);
            let parts: Vec<String> = ranges.into_iter().map(|range| text[range].to_owned()).collect();
            (parts, text.into_owned())
        };
        let (own, text) = parts(&["nfc"]);
        assert_eq!(own, ["\u{e9}>", "\u{c9}"]);
        assert_eq!(text, " \u{e9}>\u{338}\u{c9} ");
        let words = ["prepend", "xy", "nfc", "replace", "\u{e9}", "abc", "strip_right", "lowercase"];
        let (own, text) = parts(&words);
        assert_eq!((own, text.as_str()), (vec!["abc>".into(), "\u{e9}".into()], "xy abc>\u{338}\u{e9}"));
        assert_eq!(parts(&["strip_left"]).0, ["e\u{301}>", "E\u{301}"]);
    }

    #[test]
    fn text_never_shrinks_by_more_than_max_shrink() {
        // Greek with three marks, jamo, a long compatibility character.
        let texts =
            ["\u{3b1}\u{314}\u{301}\u{345}", "\u{1112}\u{1161}\u{11ab}", "\u{fdfa}", "ABC", "i\u{307}"];
        for words in [&["nfc"][..], &["nfkc"], &["nfd"], &["lowercase", "nfc"], &["replace", "A", "BB"]] {
            for text in texts.map(|text| text.repeat(5)) {
                let n = |text: &str| text.chars().count();
                let shrink = normalizer(words).max_shrink(&text).unwrap();
                assert!(n(&text) <= n(&of(words, &text)) * shrink, "{words:?}: {text:?}");
            }
        }
        assert_eq!(normalizer(&["nfc"]).max_shrink("plain"), Some(1));
        assert_eq!(normalizer(&["nfc"]).max_shrink("e\u{301}"), Some(4));
        for words in [&["strip_left"][..], &["strip_accents"], &["replace", "ab", "c"]] {
            assert_eq!(normalizer(words).max_shrink("x"), None, "{words:?}");
        }
    }

    #[test]
    fn unknown_steps_are_errors() {
        for (words, expected) in [
            (&["nfc", "nfq"][..], "expected nfc, nfd"),
            (&["replace", "a"], "expected a text to put in its place, got nothing"),
            (&["replace", "", "a"], "expected a text to replace, got an empty one"),
            (&["prepend"], "expected a text to begin with, got nothing"),
        ] {
            let error = Normalizer::from_words(words.iter().copied(), None).unwrap_err().to_string();
            assert!(error.contains(KEY) && error.contains(expected), "{error}");
        }
    }
}
