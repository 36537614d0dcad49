//! The tokenizers of text encoders, and WordPiece, that of BERT and its successors. GGUF marks the
//! first token of a word with a space, where `tokenizer.json` marks the others.

use kvant_gguf::GgufWriter;
use serde_json::Value;

use super::normalizer::Normalizer;
use super::unigram::write_unigram;
use super::{CONTROL, MARK, NORMAL, Vocab, parts, write_bytes, write_marked, write_normalizer};
use crate::error::HfError;
use crate::folder::{Folder, Object, shown};

const SUBWORD: &str = "##";
/// Characters of the longest word; GGUF has no key for it.
const MAX_WORD: u64 = 100;

/// Writes the tokenizer of an encoder with `n_vocab` tokens.
///
/// # Errors
/// None in the folder, or an unsupported or inconsistent one.
pub(crate) fn write_of_encoder(
    writer: &mut GgufWriter,
    folder: &mut Folder,
    n_vocab: usize,
) -> Result<(), HfError> {
    let Some(json) = folder.json("tokenizer.json")? else {
        let why = "has no tokenizer.json: save its tokenizer with transformers";
        return Err(HfError::Folder { path: folder.path().to_owned(), why });
    };
    let file = json.object()?;
    let model = file.object("model")?;
    let vocab = match model.find_str("type")? {
        Some("Unigram") => write_unigram(writer, file, n_vocab)?,
        Some("BPE") => write_bpe(writer, file, n_vocab)?,
        Some("WordPiece") => write_words(writer, folder, file, n_vocab)?,
        other => return Err(model.bad("type", "WordPiece, Unigram or BPE", other.unwrap_or("nothing"))),
    };
    vocab.added.write(writer)?;
    write_special(writer, folder, file, &vocab)
}

/// Writes a vocabulary of BPE, byte-level (RoBERTa, ModernBERT) or with byte fallback (Gemma), and
/// returns it.
fn write_bpe(writer: &mut GgufWriter, file: Object<'_>, n_vocab: usize) -> Result<Vocab, HfError> {
    let (model, vocab) = (file.object("model")?, Vocab::read(file, n_vocab, "BPE")?);
    match model.find_bool("byte_fallback")? {
        Some(true) => write_marked(writer, file, model, &vocab, false)?,
        _ => write_bytes(writer, file, model)?,
    }
    writer.set_array("tokenizer.ggml.tokens", vocab.texts.iter().map(String::as_str))?;
    writer.set_array("tokenizer.ggml.token_type", vocab.kinds.iter().copied())?;
    Ok(vocab)
}

/// Writes a WordPiece vocabulary and how a text is cleaned, and returns the vocabulary.
fn write_words(
    writer: &mut GgufWriter,
    folder: &mut Folder,
    file: Object<'_>,
    n_vocab: usize,
) -> Result<Vocab, HfError> {
    let vocab = Vocab::read(file, n_vocab, "WordPiece")?;
    check(file.object("model")?)?;
    writer.set("tokenizer.ggml.model", "bert")?;
    writer.set("tokenizer.ggml.pre", "default")?;
    let lowers = folder.json("sentence_bert_config.json")?;
    let lowers = lowers.as_ref().map(|json| json.object()?.find_bool("do_lower_case")).transpose()?;
    write_cleaning(writer, file, lowers.flatten().unwrap_or(false))?;
    let is_plain = |id: usize| vocab.kinds[id] == NORMAL;
    let texts = vocab.texts.iter().enumerate().map(|(id, text)| match text.strip_prefix(SUBWORD) {
        Some(rest) if is_plain(id) => rest.to_owned(),
        // As llama.cpp's converter.
        _ if !is_plain(id) || text.starts_with('[') && text.ends_with(']') => text.clone(),
        _ => format!("{MARK}{text}"),
    });
    let texts: Vec<String> = texts.collect();
    writer.set_array("tokenizer.ggml.tokens", texts.iter().map(String::as_str))?;
    writer.set_array("tokenizer.ggml.token_type", vocab.kinds.iter().copied())?;
    // The key says that those of added tokens are there too.
    write_normalizer(writer, Normalizer::default())?;
    Ok(vocab)
}

/// Checks the settings of the model.
fn check(model: Object<'_>) -> Result<(), HfError> {
    if let Some(got) = model.find_str("continuing_subword_prefix")?.filter(|got| *got != SUBWORD) {
        return Err(model.bad("continuing_subword_prefix", SUBWORD, got));
    }
    let longest = model.value("max_input_chars_per_word");
    match longest.filter(|longest| longest.as_u64() != Some(MAX_WORD)) {
        Some(got) => Err(model.bad("max_input_chars_per_word", MAX_WORD.to_string(), shown(got))),
        None => Ok(()),
    }
}

/// Writes how a text is cleaned; `lowers` lowercases it in any case.
fn write_cleaning(writer: &mut GgufWriter, file: Object<'_>, lowers: bool) -> Result<(), HfError> {
    let unsupported = |what: String| HfError::Unsupported { path: file.path.to_owned(), what };
    for pre in parts(file.value("pre_tokenizer"), "pretokenizers") {
        if pre["type"] != "BertPreTokenizer" {
            return Err(HfError::Pre { path: file.path.to_owned(), found: shown(&pre["type"]) });
        }
    }
    let missing = || unsupported("WordPiece without a BertNormalizer".to_owned());
    let normalizer = file.find_object("normalizer")?.ok_or_else(missing)?;
    if normalizer.find_str("type")? != Some("BertNormalizer") {
        return Err(missing());
    }
    for key in ["clean_text", "handle_chinese_chars"] {
        if normalizer.find_bool(key)? == Some(false) {
            return Err(normalizer.bad(key, "true", "false"));
        }
    }
    let lowercase = normalizer.find_bool("lowercase")?.unwrap_or(true);
    let strips = normalizer.find_bool("strip_accents")?.unwrap_or(lowercase);
    writer.set("tokenizer.ggml.normalizer.lowercase", lowercase || lowers)?;
    Ok(writer.set("tokenizer.ggml.normalizer.strip_accents", strips)?)
}

/// Writes the marks before and after a text, and the other special tokens.
fn write_special(
    writer: &mut GgufWriter,
    folder: &mut Folder,
    file: Object<'_>,
    vocab: &Vocab,
) -> Result<(), HfError> {
    let bad = || {
        let what = "a post-processor that puts no known marks around a text".to_owned();
        HfError::Unsupported { path: file.path.to_owned(), what }
    };
    let marks = marks(file.value("post_processor")).ok_or_else(bad)?;
    let model = file.object("model")?;
    let of_id = |id: u32| vocab.texts.get(id as usize).map(String::as_str);
    let unknown = model.find_str("unk_token")?.or(model.find_size("unk_id")?.and_then(of_id));
    let settings = folder.json("tokenizer_config.json")?;
    let settings = settings.as_ref().map(|settings| settings.object()).transpose()?;
    let named = |key: &str| {
        let token = settings?.value(key)?;
        token.as_str().or_else(|| token.get("content")?.as_str())
    };
    let keys = [
        ["bos_token_id", "cls_token_id", "add_bos_token"],
        ["eos_token_id", "seperator_token_id", "add_eos_token"],
    ];
    for (mark, [id, other_id, is_added]) in marks.into_iter().zip(keys) {
        if let Some(text) = mark {
            let is_mark = |id: &u32| vocab.kinds[*id as usize] == CONTROL;
            let mark = vocab.id(text).filter(is_mark).ok_or_else(bad)?;
            writer.set(&format!("tokenizer.ggml.{id}"), mark)?;
            writer.set(&format!("tokenizer.ggml.{other_id}"), mark)?;
        }
        writer.set(&format!("tokenizer.ggml.{is_added}"), mark.is_some())?;
    }
    let others = [
        ("tokenizer.ggml.unknown_token_id", unknown),
        ("tokenizer.ggml.padding_token_id", named("pad_token")),
        ("tokenizer.ggml.mask_token_id", named("mask_token")),
    ];
    for (key, text) in others {
        if let Some(id) = text.and_then(|text| vocab.id(text)) {
            writer.set(key, id)?;
        }
    }
    Ok(writer.set("tokenizer.ggml.add_sep_token", has_two_between(file.value("post_processor")))?)
}

/// Whether a post-processor puts two marks between the texts of a pair.
fn has_two_between(processor: Option<&Value>) -> bool {
    let Some(processor) = processor else { return false };
    let pair = processor["pair"].as_array().map(Vec::as_slice);
    let is_mark = |part: &Value| part.get("SpecialToken").is_some();
    processor["type"] == "RobertaProcessing"
        || matches!(pair, Some([_, _, first, second, ..]) if is_mark(first) && is_mark(second))
}

/// Returns the marks that a post-processor puts before and after a text; `None` for an unknown one.
fn marks(processor: Option<&Value>) -> Option<[Option<&str>; 2]> {
    let mut marks = None;
    for step in parts(processor, "processors") {
        match step["type"].as_str()? {
            // Offsets within the text alone.
            "ByteLevel" => marks = marks.or(Some([None, None])),
            "TemplateProcessing" => marks = Some(of_template(step["single"].as_array()?)?),
            "BertProcessing" | "RobertaProcessing" => {
                let [first, last] = ["cls", "sep"].map(|key| step[key].get(0)?.as_str());
                marks = Some([Some(first?), Some(last?)]);
            }
            _ => return None,
        }
    }
    marks
}

/// Returns the marks of a template, which has at most one on either side of the text.
fn of_template(template: &[Value]) -> Option<[Option<&str>; 2]> {
    let is_text = |part: &Value| part.get("Sequence").is_some();
    fn id(part: &Value) -> Option<&str> {
        part.pointer("/SpecialToken/id")?.as_str()
    }
    match template {
        [text] if is_text(text) => Some([None, None]),
        [first, text] if is_text(text) => Some([Some(id(first)?), None]),
        [text, last] if is_text(text) => Some([None, Some(id(last)?)]),
        [first, text, last] if is_text(text) => Some([Some(id(first)?), Some(id(last)?)]),
        _ => None,
    }
}
