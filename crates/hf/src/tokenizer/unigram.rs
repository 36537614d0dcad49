//! SentencePiece's unigram model, the tokenizer of XLM-RoBERTa: tokens with scores, in the order of
//! their ids.

use kvant_gguf::GgufWriter;
use serde_json::Value;

use super::normalizer::Normalizer;
use super::{MARK, NORMAL, UNKNOWN, Vocab, parts, write_normalizer};
use crate::error::HfError;
use crate::folder::{Object, shown};

/// Score of ids without a token, which no text becomes.
const UNUSED_SCORE: f32 = -10_000.0;

/// Writes the vocabulary and how a text is prepared, and returns the vocabulary.
///
/// # Errors
/// An unsupported or inconsistent tokenizer.
pub(super) fn write_unigram(
    writer: &mut GgufWriter,
    file: Object<'_>,
    n_vocab: usize,
) -> Result<Vocab, HfError> {
    let model = file.object("model")?;
    if model.find_bool("byte_fallback")? == Some(true) {
        return Err(model.bad("byte_fallback", "false in a unigram model", "true"));
    }
    let mut vocab = Vocab::empty(n_vocab);
    let scores = read_tokens(model, &mut vocab)?;
    vocab.add_all(file)?;
    writer.set("tokenizer.ggml.model", "t5")?;
    writer.set("tokenizer.ggml.pre", "default")?;
    writer.set_array("tokenizer.ggml.tokens", vocab.texts.iter().map(String::as_str))?;
    writer.set_array("tokenizer.ggml.scores", scores)?;
    writer.set_array("tokenizer.ggml.token_type", vocab.kinds.iter().copied())?;
    let mut normalizer = Normalizer::read(file, false)?;
    let splits_words = read_pre_tokenizer(file)?;
    if splits_words {
        let words = ["squeeze_whitespace", "strip_left", "strip_right"];
        normalizer.words.extend(words.map(str::to_owned));
    }
    writer.set("tokenizer.ggml.add_space_prefix", true)?;
    writer.set("tokenizer.ggml.remove_extra_whitespaces", splits_words)?;
    write_normalizer(writer, normalizer)?;
    Ok(vocab)
}

/// Reads the tokens; returns their scores.
fn read_tokens(model: Object<'_>, vocab: &mut Vocab) -> Result<Vec<f32>, HfError> {
    let n_vocab = vocab.texts.len();
    let tokens = model.find_array("vocab")?.ok_or_else(|| model.bad("vocab", "a list", "nothing"))?;
    if tokens.len() > n_vocab {
        let expected = format!("at most the {n_vocab} rows of the embedding");
        return Err(model.bad("vocab", expected, tokens.len().to_string()));
    }
    let unknown = model.find_size("unk_id")?.filter(|&id| (id as usize) < tokens.len());
    let unknown = unknown.ok_or_else(|| model.bad("unk_id", "the id of a token", "another"))? as usize;
    let mut scores = vec![UNUSED_SCORE; n_vocab];
    for (id, token) in tokens.iter().enumerate() {
        let pair = token.as_array().and_then(|pair| match &pair[..] {
            [text, score] => text.as_str().zip(score.as_f64()),
            _ => None,
        });
        let (text, score) =
            pair.ok_or_else(|| model.bad("vocab", "pairs of a token and its score", shown(token)))?;
        vocab.put(id, text, if id == unknown { UNKNOWN } else { NORMAL });
        scores[id] = score as f32;
    }
    Ok(scores)
}

/// Checks that words begin with a space mark; returns whether whitespace between them is dropped.
fn read_pre_tokenizer(file: Object<'_>) -> Result<bool, HfError> {
    let unknown = |pre: &Value| HfError::Pre { path: file.path.to_owned(), found: shown(pre) };
    let (mut splits_words, mut marks) = (false, false);
    for pre in parts(file.value("pre_tokenizer"), "pretokenizers") {
        let is_mark = |text: &Value| text.as_str().is_some_and(|text| text.chars().eq([MARK]));
        let or_absent = |key: &str, expected: &dyn Fn(&Value) -> bool| pre.get(key).is_none_or(expected);
        match pre["type"].as_str() {
            Some("WhitespaceSplit") if !marks => splits_words = true,
            Some("Metaspace")
                if or_absent("replacement", &is_mark)
                    && or_absent("prepend_scheme", &|scheme| scheme == "always")
                    && or_absent("add_prefix_space", &|adds| adds == true)
                    && or_absent("split", &|splits| splits == true) =>
            {
                marks = true;
            }
            _ => return Err(unknown(pre)),
        }
    }
    match marks {
        true => Ok(splits_words),
        false => Err(unknown(file.value("pre_tokenizer").unwrap_or(&Value::Null))),
    }
}
