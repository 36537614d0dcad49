//! Pre-tokenizers: from the definition in `tokenizer.json` to GGUF's name.

use std::path::Path;

use serde_json::Value;

use crate::error::HfError;

/// GPT-2's pattern, which `ByteLevel` implies.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// `Digits`, individually.
const DIGIT: &str = r"\p{N}";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Carriage returns and line feeds, literal in the pattern.
const DEEPSEEK_LINES: &str = "[\r\n]";
const DEEPSEEK_CJK: &str = "[一-龥ࠀ-一가-퟿]+";
const DEEPSEEK: &[&str] = &[
    DEEPSEEK_LINES,
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    DEEPSEEK_CJK,
    DIGIT,
];
const DEEPSEEK_CODER: &[&str] = &[DEEPSEEK_LINES, r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, DIGIT];
const DEEPSEEK3: &[&str] = &[
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

/// A GGUF name: its splitting patterns in order, and whether whole-word tokens bypass merges, if
/// that distinguishes names.
type Known = (&'static str, &'static [&'static str], Option<bool>);

const KNOWN: &[Known] = &[
    ("gpt-2", &[GPT2], None),
    ("smollm", &[DIGIT, GPT2], None),
    ("llama-bpe", &[LLAMA3], Some(true)),
    ("dbrx", &[LLAMA3], Some(false)),
    ("qwen2", &[QWEN2], None),
    ("qwen35", &[QWEN35], None),
    ("tekken", &[TEKKEN], None),
    ("gpt-4o", &[GPT4O], None),
    ("seed-coder", &[SEED], None),
    // GGUF's version keeps runs of digits together, but no token of that vocabulary contains one.
    ("deepseek-llm", DEEPSEEK, None),
    ("deepseek-coder", DEEPSEEK_CODER, None),
    ("deepseek-v3", DEEPSEEK3, None),
];

/// Returns the GGUF name of a pre-tokenizer. `whole_words` states whether whole-word tokens bypass
/// merges.
///
/// # Errors
/// [`HfError::Pre`] with the unknown pre-tokenizer.
pub(crate) fn name(file: &Path, pre: Option<&Value>, whole_words: bool) -> Result<&'static str, HfError> {
    let fail = |found: String| HfError::Pre { path: file.to_owned(), found };
    let mut cuts = Vec::new();
    let mut is_bytes = false;
    if let Some(pre) = pre {
        read(pre, &mut cuts, &mut is_bytes).ok_or_else(|| fail(pre.to_string()))?;
    }
    if !is_bytes {
        return Err(fail("none with ByteLevel encoding".to_owned()));
    }
    let is_it = |known: &&Known| known.1 == cuts && known.2.is_none_or(|whole| whole == whole_words);
    KNOWN.iter().find(is_it).map(|known| known.0).ok_or_else(|| fail(cuts.join("  ")))
}

/// Appends the splitting patterns of `pre` in order; `None` for an unsupported step.
fn read<'a>(pre: &'a Value, cuts: &mut Vec<&'a str>, is_bytes: &mut bool) -> Option<()> {
    let flag = |key: &str| pre.get(key).and_then(Value::as_bool);
    match pre.get("type")?.as_str()? {
        "Sequence" => {
            let parts = pre.get("pretokenizers")?.as_array()?;
            // Nested sequences would recurse as deep as the JSON; no known tokenizer has them.
            parts
                .iter()
                .try_for_each(|part| (part.get("type")? != "Sequence").then(|| read(part, cuts, is_bytes))?)
        }
        "Split" => {
            let pattern = pre.get("pattern")?.get("Regex")?.as_str()?;
            // Text between matches must be preserved, or the pattern must leave none.
            let keeps = match (pre.get("behavior")?.as_str()?, flag("invert")) {
                ("Isolated", Some(false) | None) => true,
                ("Removed", invert) => invert == Some(true) && pattern.ends_with(r"|\s+"),
                _ => false,
            };
            cuts.push(keeps.then_some(pattern)?);
            Some(())
        }
        "Digits" if flag("individual_digits") == Some(true) => {
            cuts.push(DIGIT);
            Some(())
        }
        "ByteLevel" if flag("add_prefix_space") != Some(true) => {
            if flag("use_regex") != Some(false) {
                cuts.push(GPT2);
            }
            *is_bytes = true;
            Some(())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn named(pre: &Value, whole_words: bool) -> Result<&'static str, String> {
        name(Path::new("tokenizer.json"), Some(pre), whole_words).map_err(|error| error.to_string())
    }

    fn split(pattern: &str) -> Value {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
    }

    fn sequence(parts: &[Value]) -> Value {
        json!({"type": "Sequence", "pretokenizers": parts})
    }

    #[test]
    fn pre_tokenizers_are_identified_by_their_steps() {
        let bytes =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let gpt2 =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let digits = json!({"type": "Digits", "individual_digits": true});
        let removed =
            json!({"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Removed", "invert": true});
        assert_eq!(named(&gpt2, false), Ok("gpt-2"));
        assert_eq!(named(&sequence(&[digits.clone(), gpt2.clone()]), false), Ok("smollm"));
        assert_eq!(named(&sequence(&[split(LLAMA3), bytes.clone()]), true), Ok("llama-bpe"));
        assert_eq!(named(&sequence(&[removed, bytes.clone()]), false), Ok("dbrx"));
        assert_eq!(named(&sequence(&[split(QWEN2), bytes.clone()]), false), Ok("qwen2"));
        assert_eq!(named(&sequence(&[split(QWEN35), bytes.clone()]), false), Ok("qwen35"));
        let of = |patterns: &[&str], rest: &[Value]| {
            sequence(&[&patterns.iter().map(|pattern| split(pattern)).collect::<Vec<_>>(), rest].concat())
        };
        assert_eq!(named(&of(DEEPSEEK3, std::slice::from_ref(&bytes)), false), Ok("deepseek-v3"));
        // These express digits as a `Digits` step.
        let rest = [digits, bytes.clone()];
        assert_eq!(named(&of(&DEEPSEEK[..5], &rest), false), Ok("deepseek-llm"));
        assert_eq!(named(&of(&DEEPSEEK_CODER[..4], &rest), false), Ok("deepseek-coder"));
        // Text between words would be lost.
        let words = json!({"type": "Split", "pattern": {"Regex": DEEPSEEK[1]}, "behavior": "Removed", "invert": true});
        assert!(named(&sequence(&[words, bytes.clone()]), false).is_err());
        for (pre, want) in [
            (sequence(&[split(r"\w+"), bytes.clone()]), r"an unknown pre-tokenizer: \w+"),
            (split(QWEN2), "none with ByteLevel"),
            (json!({"type": "Whitespace"}), r#"unknown pre-tokenizer: {"type":"Whitespace"}"#),
            (json!({"type": "ByteLevel", "add_prefix_space": true}), "add_prefix_space"),
            (sequence(&[sequence(&[]), bytes]), "unknown"),
        ] {
            let error = named(&pre, false).unwrap_err();
            assert!(error.starts_with("tokenizer.json: ") && error.contains(want), "{error}");
        }
    }
}
