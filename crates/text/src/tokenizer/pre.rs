//! Pre-tokenizers: split a text into words before the merges of byte-level BPE.
//!
//! `tokenizer.ggml.pre` names one of a fixed set. Each is a list of regular expressions applied in
//! order: an expression splits every piece of the previous one, and both its matches and the gaps
//! between them become pieces. Patterns are those of each model's own `tokenizer.json`, with names
//! and flags as in llama.cpp.
//!
//! Nearly every list ends in `\s+(?!\S)|\s+`: a run of whitespace before a word leaves its last
//! character to that word. It is the only look-ahead in use, so it is implemented by hand
//! ([`Tail`]). The rest runs on `regex-automata`, whose time is linear for every text, while a
//! backtracking engine reaches its step limit on a megabyte of spaces or capitals.

use std::ops::Range;

use regex_automata::meta::Regex;

use super::error::TokenizerError;
use super::normalizer::Normalizer;

/// Alternatives after a pattern's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tail {
    /// None: text that the pattern does not match stays a gap.
    Gap,
    /// `|\s+(?!\S)|\s+`
    Space,
    /// `|\s{512}(?!\S)|\s{256}(?!\S)|..|\s{4}(?!\S)|\s{1,2}(?!\S)|\s`
    SpacePowers,
    /// None, and a match, which is digits, is cut into groups of three from its end:
    /// `\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))`.
    Thousands,
}
use Tail::{Gap, Space, SpacePowers, Thousands};

/// One splitting step: a pattern and its tail.
type SplitPattern = (&'static str, Tail);

/// A family of pre-tokenizers: its names, splitting steps and implied settings.
struct Family {
    names: &'static [&'static str],
    cuts: &'static [SplitPattern],
    /// A word that is a token is taken whole, even if no chain of merges leads to it.
    whole_words: bool,
    /// Text starts with BOS unless the file specifies otherwise.
    add_bos: bool,
}

/// Names of tokenizers that apply NFC: `tokenizer.json` of Qwen 1.5 to 3.5, of Command R, of
/// GPT-NeoX's, which OLMo, MPT and ModernBERT reuse, and of DeepSeek-R1's distillations of Qwen
/// names NFC as normalizer; the code of Stable LM 2 and Hunyuan calls it.
const NFC: &[&str] = &[
    "qwen2",
    "qwen35",
    "deepseek-r1-qwen",
    "command-r",
    "olmo",
    "mpt",
    "modern-bert",
    "stablelm2",
    "hunyuan",
];

/// Creates a family without implied settings.
const fn plain(names: &'static [&'static str], cuts: &'static [SplitPattern]) -> Family {
    Family { names, cuts, whole_words: false, add_bos: false }
}

const GPT2: SplitPattern = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+", Space);
const DIGIT: SplitPattern = (r"\p{N}", Gap);
const DIGITS_3: SplitPattern = (r"\p{N}{1,3}", Gap);
const LINES: SplitPattern = (r"[^\n]+|\n+", Gap);
const LLAMA3: SplitPattern = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
    Space,
);
const QWEN2: SplitPattern = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
    Space,
);
const QWEN35: SplitPattern = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+",
    Space,
);
const DEEPSEEK3: SplitPattern = (
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"##,
    Space,
);
const TEKKEN: SplitPattern = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
    Space,
);
const GPT4O: SplitPattern = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
    Space,
);
const KIMI_K2: SplitPattern = (
    r"\p{Han}+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
    Space,
);
const BLOOM: SplitPattern = (r" ?[^(\s|.,!?…。，、।۔،)]+", Gap);
/// The scripts that DeepSeek's first models count as letters, verbatim.
const DEEPSEEK_LETTERS: SplitPattern = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    Gap,
);
const DEEPSEEK_PUNCTUATION: SplitPattern = (r"\s?[!-/:-~！-／：-～‘-‟　-。]+", Gap);
/// Scripts without spaces between words.
const UNSPACED: SplitPattern = (
    r"[\u{4E00}-\u{9FFF}\u{3400}-\u{4DBF}\u{F900}-\u{FAFF}\u{3040}-\u{30FF}\u{FF65}-\u{FF9F}\u{2F00}-\u{2FDF}\u{E40}-\u{EFF}\u{1780}-\u{17FF}\u{1000}-\u{109F}\u{AA60}-\u{AA7F}\u{A9E0}-\u{A9FF}\u{AC00}-\u{D7AF}\u{1100}-\u{11FF}]+",
    Gap,
);
const DEEPSEEK_CJK: SplitPattern = (r"[一-龥ࠀ-一가-퟿]+", Gap);

/// All families. The first, `default`, applies to a file without a name, as in llama.cpp.
const FAMILIES: &[Family] = &[
    plain(&["default"], &[(r"[\p{P}$+<=>^~|]+", Gap), GPT2, (r"\p{N}+", Gap), (r"[0-9][0-9][0-9]", Gap)]),
    plain(
        &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "gigachat",
            "exaone4",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
        ],
        &[GPT2],
    ),
    plain(
        &["starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[DIGIT, GPT2],
    ),
    plain(&["falcon"], &[(r"[\p{P}$+<=>^~|`]+", Gap), GPT2, (r"[0-9][0-9][0-9]", Gap)]),
    Family {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        cuts: &[LLAMA3],
        whole_words: true,
        add_bos: true,
    },
    plain(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[LLAMA3]),
    Family { names: &["glm4", "glm5"], cuts: &[LLAMA3], whole_words: true, add_bos: false },
    plain(
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "megrez",
            "grok-2",
            "kormo",
            "f2llmv2",
        ],
        &[QWEN2],
    ),
    plain(&["laguna"], &[LINES, QWEN2]),
    plain(&["qwen35"], &[QWEN35]),
    plain(
        &["deepseek-llm"],
        &[
            (r"[\r\n]", Gap),
            DEEPSEEK_LETTERS,
            DEEPSEEK_PUNCTUATION,
            (r"\s+$", Gap),
            DEEPSEEK_CJK,
            (r"\p{N}+", Gap),
        ],
    ),
    plain(
        &["deepseek-coder"],
        &[(r"[\r\n]", Gap), (r"\s?\p{L}+", Gap), (r"\s?\p{P}+", Gap), DEEPSEEK_CJK, DIGIT],
    ),
    plain(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        &[DIGITS_3, (r"[一-龥぀-ゟ゠-ヿ]+", Gap), DEEPSEEK3],
    ),
    Family { names: &["tekken"], cuts: &[TEKKEN], whole_words: true, add_bos: true },
    plain(&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], &[GPT4O]),
    plain(&["kimi-k2"], &[KIMI_K2]),
    plain(&["bloom", "poro-chat", "gpt3-finnish"], &[BLOOM]),
    plain(&["viking"], &[BLOOM, DIGIT]),
    plain(
        &["bailingmoe", "bailingmoe2", "llada-moe"],
        &[(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]",
            Space,
        )],
    ),
    plain(
        &["seed-coder"],
        &[(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+",
            Space,
        )],
    ),
    plain(
        &["exaone-moe"],
        &[(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]",
            Space,
        )],
    ),
    plain(&["gemma4"], &[LINES]),
    plain(&["afmoe"], &[(r"\p{N}+", Thousands), UNSPACED, DEEPSEEK3]),
    plain(&["jais-2"], &[(LLAMA3.0, SpacePowers)]),
];

/// A compiled pre-tokenizer.
#[derive(Debug, Clone)]
pub(super) struct PreTokenizer {
    name: &'static str,
    cuts: Vec<(Regex, Tail)>,
    pub(super) whole_words: bool,
    pub(super) add_bos: bool,
}

/// Index of the whitespace tail among the patterns of a splitting [`Regex`].
const TAIL: usize = 1;

impl PreTokenizer {
    /// Compiles the pre-tokenizer `name`.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownPre`], with the known names, for any other.
    pub(super) fn named(name: &str) -> Result<Self, TokenizerError> {
        let found = FAMILIES.iter().find_map(|f| f.names.iter().find(|n| **n == name).map(|n| (f, *n)));
        let Some((family, name)) = found else {
            let known = FAMILIES.iter().flat_map(|f| f.names).copied().collect();
            return Err(TokenizerError::UnknownPre { got: name.to_owned(), known });
        };
        let compile = |&(pattern, tail): &SplitPattern| {
            let patterns: &[&str] = match tail {
                Gap | Thousands => &[pattern],
                Space | SpacePowers => &[pattern, r"\s+"],
            };
            Regex::new_many(patterns)
                .map(|cut| (cut, tail))
                .map_err(|e| TokenizerError::Prepare { what: "pre-tokenizer", why: e.to_string() })
        };
        let cuts = family.cuts.iter().map(compile).collect::<Result<_, _>>()?;
        Ok(PreTokenizer { name, cuts, whole_words: family.whole_words, add_bos: family.add_bos })
    }

    /// Returns the normalizer that the name implies, for files that specify none.
    pub(super) fn normalizer(&self) -> Normalizer {
        if NFC.contains(&self.name) { Normalizer::nfc() } else { Normalizer::default() }
    }

    /// Returns the name as in the file.
    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// Splits `text` into words: byte ranges that cover it without overlap, in order.
    pub(super) fn words(&self, text: &str) -> Vec<Range<usize>> {
        let mut pieces = Vec::new();
        if !text.is_empty() {
            pieces.push(0..text.len());
        }
        for (cut, tail) in &self.cuts {
            let mut finer = Vec::with_capacity(pieces.len());
            for piece in pieces {
                split(cut, *tail, text, piece, &mut finer);
            }
            pieces = finer;
        }
        pieces
    }
}

/// Splits `text[piece]` at the matches of `cut`, appending matches and gaps to `out`.
fn split(cut: &Regex, tail: Tail, text: &str, piece: Range<usize>, out: &mut Vec<Range<usize>>) {
    let base = piece.start;
    // Sliced, not spanned: `$` and the tail's look-ahead must see the end of the piece.
    let hay = &text[piece];
    let mut at = 0;
    while at < hay.len() {
        let Some(m) = cut.find(regex_automata::Input::new(hay).range(at..)) else { break };
        let matched = &hay[m.range()];
        let is_tail = m.pattern().as_usize() == TAIL;
        let n = match tail {
            Thousands => Some((matched.chars().count() - 1) % 3 + 1),
            Space if is_tail => Some(before_word(matched.chars().count(), m.end() == hay.len())),
            SpacePowers if is_tail => {
                let most = before_word(matched.chars().count(), m.end() == hay.len());
                Some(if most < 4 { most.min(2) } else { 1 << most.ilog2().min(9) })
            }
            _ => None,
        };
        let n_bytes = n.map(|n| matched.chars().take(n).map(char::len_utf8).sum());
        let end = m.start() + n_bytes.unwrap_or(matched.len());
        if m.start() > at {
            out.push(base + at..base + m.start());
        }
        // No pattern matches the empty string, so this always advances.
        out.push(base + m.start()..base + end);
        at = end;
    }
    if at < hay.len() {
        out.push(base + at..base + hay.len());
    }
}

/// Returns how many of `n` spaces `\s+(?!\S)|\s+` takes: it leaves the last one to a word behind
/// them, unless it is the only one.
fn before_word(n: usize, is_end: bool) -> usize {
    if is_end { n } else { (n - 1).max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(name: &str, text: &str) -> Vec<String> {
        let pre = PreTokenizer::named(name).unwrap();
        pre.words(text).into_iter().map(|r| text[r].to_owned()).collect()
    }

    #[test]
    fn every_family_compiles_and_covers_its_text_without_overlap() {
        let text = "I'll  buy\n\n 1234 naïve  cafés, 你好 ÄBC's (x)\t\r\n  \u{a0}🚀🚀 end   ";
        for name in FAMILIES.iter().flat_map(|f| f.names) {
            let pre = PreTokenizer::named(name).unwrap();
            let mut at = 0;
            for w in pre.words(text) {
                assert_eq!(w.start, at, "{name}");
                assert!(w.end > w.start, "{name}");
                at = w.end;
            }
            assert_eq!(at, text.len(), "{name}");
            assert!(pre.words("").is_empty());
        }
    }

    #[test]
    fn words_are_those_of_the_models_own_tokenizers() {
        let golden = include_str!("../../tests/fixtures/pretokenizers.json");
        let golden: serde_json::Value = serde_json::from_str(golden).unwrap();
        let texts = golden["texts"].as_array().unwrap();
        for (name, all) in golden["words"].as_object().unwrap() {
            let pre = PreTokenizer::named(name).unwrap();
            for (text, want) in texts.iter().zip(all.as_array().unwrap()) {
                let text = text.as_str().unwrap();
                let words: Vec<&str> = pre.words(text).into_iter().map(|r| &text[r]).collect();
                let got: Vec<usize> = words.iter().map(|w| w.chars().count()).collect();
                assert_eq!(serde_json::json!(got), *want, "{name}: {text:?}: {words:?}");
            }
        }
    }

    #[test]
    fn no_name_is_listed_twice() {
        let mut names: Vec<_> = FAMILIES.iter().flat_map(|f| f.names).collect();
        let n = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), n);
        assert!(NFC.iter().all(|name| names.contains(&name)));
    }

    #[test]
    fn white_space_leaves_its_last_character_to_the_next_word() {
        assert_eq!(words("gpt-2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(words("gpt-2", "a \n b"), ["a", " \n", " b"]);
        assert_eq!(words("gpt-2", "a\n\nb"), ["a", "\n", "\n", "b"]);
        assert_eq!(words("gpt-2", "a  "), ["a", "  "]);
        assert_eq!(words("llama-bpe", "a\n\n  b"), ["a", "\n\n", " ", " b"]);
        assert_eq!(words("gpt-2", "x\u{2003}\u{2003}y"), ["x", "\u{2003}", "\u{2003}", "y"]);
    }

    #[test]
    fn digits_and_contractions_split_per_family() {
        assert_eq!(words("llama-bpe", "12345 I'LL"), ["123", "45", " I", "'LL"]);
        assert_eq!(words("qwen2", "123"), ["1", "2", "3"]);
        assert_eq!(words("gpt-2", "I'LL"), ["I", "'", "LL"]);
        assert_eq!(words("tekken", "HelloWorld ABCdef"), ["Hello", "World", " ABCdef"]);
        assert_eq!(words("gpt-4o", "don't"), ["don't"]);
        assert_eq!(words("kimi-k2", "ab你好cd"), ["ab", "你好", "cd"]);
    }

    #[test]
    fn an_unknown_name_is_rejected_with_the_known_ones() {
        let err = PreTokenizer::named("nonesuch").unwrap_err().to_string();
        assert!(err.contains("'nonesuch'") && err.contains("llama-bpe") && err.contains("qwen2"), "{err}");
    }
}
