//! The vocabulary, its special tokens and chat templates.
//!
//! Two kinds are supported in models that generate, WordPiece and unigram models in text encoders
//! (`words`, `unigram`).
//! *Byte-level BPE* encodes bytes in GPT-2's alphabet and merges by rank; GGUF stores its merges.
//! *BPE with byte fallback* marks spaces like SentencePiece; GGUF stores a score for each token and
//! joins the pair of the highest, so the score is the rank of the token's merge. For Gemma 4, GGUF
//! stores the merges as well.

use std::collections::HashMap;

use kvant_gguf::GgufWriter;
use serde_json::Value;

use crate::error::HfError;
use crate::folder::{Folder, Object, shown};
use crate::pretokenizer;

mod added;
mod normalizer;
mod templates;
mod unigram;
mod words;

pub(crate) use words::write_of_encoder;

use added::AddedTokens;
use normalizer::Normalizer;

/// Token types of GGUF.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// SentencePiece's space mark.
const MARK: char = '\u{2581}';

/// Token settings of other files.
#[derive(Clone, Copy)]
pub(crate) struct Settings<'a> {
    pub config: Object<'a>,
    /// The generation configuration.
    pub generation: Option<Object<'a>>,
    /// Whether GGUF stores the merges of a tokenizer with byte fallback: Gemma 4.
    pub keeps_merges: bool,
}

/// Structural tokens in Gemma 4's output that GGUF readers treat as text: tool calls and reasoning
/// are detected by them.
const TEXT_TOKENS: [&str; 7] = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
];

/// Writes the tokenizer of a folder with `n_vocab` tokens.
///
/// # Errors
/// An unsupported or inconsistent tokenizer.
pub(crate) fn write(
    writer: &mut GgufWriter,
    folder: &mut Folder,
    model_settings: Settings<'_>,
    n_vocab: usize,
) -> Result<(), HfError> {
    let Some(file) = folder.json("tokenizer.json")? else {
        if folder.has("tokenizer.model") {
            let why =
                "has its tokenizer in tokenizer.model alone: save it as tokenizer.json with transformers";
            return Err(HfError::Folder { path: folder.path().to_owned(), why });
        }
        writer.set("tokenizer.ggml.model", "none")?;
        return Ok(());
    };
    let file = file.object()?;
    let mut vocab = Vocab::read(file, n_vocab, "BPE")?;
    if model_settings.keeps_merges {
        let seen = TEXT_TOKENS.iter().filter_map(|text| vocab.id(text)).collect::<Vec<_>>();
        seen.into_iter().for_each(|id| vocab.kinds[id as usize] = USER_DEFINED);
    }
    let model = file.object("model")?;
    let has_fallback = model.find_bool("byte_fallback")?.unwrap_or(false);
    if has_fallback {
        write_marked(writer, file, model, &vocab, model_settings.keeps_merges)?;
    } else {
        write_bytes(writer, file, model)?;
    }
    writer.set_array("tokenizer.ggml.tokens", vocab.texts.iter().map(String::as_str))?;
    writer.set_array("tokenizer.ggml.token_type", vocab.kinds.iter().copied())?;
    let settings = folder.json("tokenizer_config.json")?;
    let settings = settings.as_ref().map(|settings| settings.object()).transpose()?;
    vocab.added.write(writer)?;
    let special = Special { vocab: &vocab, settings, model_settings };
    special.write(writer, file, has_fallback)?;
    templates::write(writer, folder, settings)
}

/// The vocabulary in GGUF's form.
struct Vocab {
    /// `[n_vocab]`; unused ids get placeholder names.
    texts: Vec<String>,
    kinds: Vec<i32>,
    ids: HashMap<String, u32>,
    added: AddedTokens,
}

impl Vocab {
    /// Reads the vocabulary of a model of this kind.
    fn read(file: Object<'_>, n_vocab: usize, expected: &str) -> Result<Self, HfError> {
        let model = file.object("model")?;
        let kind = model.find_str("type")?.unwrap_or("BPE");
        if kind != expected {
            return Err(model.bad("type", expected, kind));
        }
        let has_fallback = model.find_bool("byte_fallback")?.unwrap_or(false);
        let unknown = model.find_str("unk_token")?;
        let mut vocab = Self::empty(n_vocab);
        let tokens = model.object("vocab")?;
        for (text, id) in tokens.map {
            let place = id.as_u64().filter(|id| *id < n_vocab as u64).map(|id| id as usize);
            let expected = || format!("a number below the {n_vocab} rows of the embedding");
            let place = place.ok_or_else(|| tokens.bad(text, expected(), shown(id)))?;
            if vocab.kinds[place] != UNUSED {
                let expected = format!("a number other than that of '{}'", vocab.texts[place]);
                return Err(tokens.bad(text, expected, shown(id)));
            }
            let kind = match text {
                text if Some(text.as_str()) == unknown => UNKNOWN,
                text if has_fallback && is_byte(text) => BYTE,
                _ => NORMAL,
            };
            vocab.put(place, text, kind);
        }
        vocab.add_all(file)?;
        Ok(vocab)
    }

    /// Returns a vocabulary without tokens.
    fn empty(n_vocab: usize) -> Self {
        Self {
            texts: (0..n_vocab).map(|id| format!("[PAD{id}]")).collect(),
            kinds: vec![UNUSED; n_vocab],
            ids: HashMap::new(),
            added: AddedTokens::default(),
        }
    }

    /// Adds the tokens that are matched whole.
    fn add_all(&mut self, file: Object<'_>) -> Result<(), HfError> {
        let tokens = file.find_array("added_tokens")?.unwrap_or_default();
        tokens.iter().try_for_each(|token| self.add(file, token))
    }

    fn put(&mut self, place: usize, text: &str, kind: i32) {
        self.texts[place] = text.to_owned();
        self.kinds[place] = kind;
        self.ids.insert(text.to_owned(), place as u32);
    }

    /// Adds a token that is matched whole. Ignores ids beyond the embedding.
    fn add(&mut self, file: Object<'_>, token: &Value) -> Result<(), HfError> {
        let bad = || file.bad("added_tokens", "tokens with id and content", shown(token));
        let token = token.as_object().map(|map| Object { map, ..file }).ok_or_else(bad)?;
        let (id, text) = token.find_size("id")?.zip(token.find_str("content")?).ok_or_else(bad)?;
        let id = id as usize;
        if id >= self.texts.len() {
            return Ok(());
        }
        self.added.read(token, id as u32)?;
        match token.find_bool("special")?.unwrap_or(false) || is_structural(text) {
            // The unknown token keeps its type.
            true if self.kinds[id] == UNKNOWN && self.texts[id] == text => {}
            true => self.put(id, text, CONTROL),
            false => {
                self.put(id, text, USER_DEFINED);
                self.texts[id] = text.replace(MARK, " ");
            }
        }
        Ok(())
    }

    fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }
}

/// Whether a token is structural although its folder does not mark it so: llama.cpp's list.
fn is_structural(text: &str) -> bool {
    let within = |open: &str, close: &str| text.starts_with(open) && text.ends_with(close);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || within("<|", "|>")
        || within("<｜", "｜>")
        || within("<unused", ">")
}

/// Whether a token is a byte, `<0x00>` to `<0xFF>`.
fn is_byte(text: &str) -> bool {
    let hex = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    hex.is_some_and(|hex| hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Reads the merges as pairs, in either spelling.
fn merges<'a>(model: Object<'a>) -> Result<Vec<(&'a str, &'a str)>, HfError> {
    let list = model.find_array("merges")?.ok_or_else(|| model.bad("merges", "a list", "nothing"))?;
    let pair = |merge: &'a Value| match merge {
        Value::String(text) => text.split_once(' '),
        Value::Array(pair) => match &pair[..] {
            [left, right] => left.as_str().zip(right.as_str()),
            _ => None,
        },
        _ => None,
    };
    let read = |merge| pair(merge).ok_or_else(|| model.bad("merges", "pairs of tokens", shown(merge)));
    list.iter().map(read).collect()
}

fn write_bytes(writer: &mut GgufWriter, file: Object<'_>, model: Object<'_>) -> Result<(), HfError> {
    write_normalizer(writer, Normalizer::read(file, false)?)?;
    let whole_words = model.find_bool("ignore_merges")?.unwrap_or(false);
    writer.set("tokenizer.ggml.model", "gpt2")?;
    writer.set(
        "tokenizer.ggml.pre",
        pretokenizer::name(file.path, file.value("pre_tokenizer"), whole_words)?,
    )?;
    write_merges(writer, merges(model)?)
}

fn write_normalizer(writer: &mut GgufWriter, normalizer: Normalizer) -> Result<(), HfError> {
    if let Some(charsmap) = &normalizer.charsmap {
        writer.set_array("tokenizer.ggml.precompiled_charsmap", charsmap.iter().copied())?;
    }
    Ok(writer.set_array(normalizer::KEY, normalizer.words.iter().map(String::as_str))?)
}

fn write_merges(writer: &mut GgufWriter, merges: Vec<(&str, &str)>) -> Result<(), HfError> {
    let merges: Vec<String> = merges.into_iter().map(|(left, right)| format!("{left} {right}")).collect();
    Ok(writer.set_array("tokenizer.ggml.merges", merges.iter().map(String::as_str))?)
}

fn write_marked(
    writer: &mut GgufWriter,
    file: Object<'_>,
    model: Object<'_>,
    vocab: &Vocab,
    keeps_merges: bool,
) -> Result<(), HfError> {
    let mark = MARK.to_string();
    let normalizer = Normalizer::read(file, true)?;
    let mut is_prefixed = normalizer.is_prefixed;
    write_normalizer(writer, normalizer)?;
    for pre in parts(file.value("pre_tokenizer"), "pretokenizers") {
        match pre.get("type").and_then(Value::as_str) {
            Some("Metaspace") if pre.get("replacement").is_none_or(|text| text == &mark) => {
                let never = pre.get("prepend_scheme").is_some_and(|scheme| scheme == "never")
                    || pre.get("add_prefix_space").is_some_and(|adds| adds == false);
                is_prefixed |= !never;
            }
            // Spaces are already marked at this point, so this splits nothing.
            Some("Split") if pre.pointer("/pattern/String").is_some_and(|text| text == " ") => {}
            _ => return Err(HfError::Pre { path: file.path.to_owned(), found: pre.to_string() }),
        }
    }
    let merges = merges(model)?;
    if keeps_merges {
        if is_prefixed {
            let what = "a space prefix with merges by rank".to_owned();
            return Err(HfError::Unsupported { path: file.path.to_owned(), what });
        }
        writer.set("tokenizer.ggml.model", "gemma4")?;
        return write_merges(writer, merges);
    }
    // Scores of tokens that no merge produces are never used. Those of added tokens come after all
    // others.
    let mut scores = vec![-(merges.len() as f32) - 1.0; vocab.texts.len()];
    for (rank, (left, right)) in merges.into_iter().enumerate().rev() {
        let made = vocab.id(&format!("{left}{right}"));
        let made =
            made.ok_or_else(|| model.bad("merges", "pairs that make a token", format!("{left} {right}")))?;
        scores[made as usize] = -(rank as f32);
    }
    writer.set("tokenizer.ggml.model", "llama")?;
    writer.set("tokenizer.ggml.pre", "default")?;
    writer.set_array("tokenizer.ggml.scores", scores)?;
    writer.set("tokenizer.ggml.add_space_prefix", is_prefixed)?;
    Ok(())
}

/// Returns a pre-tokenizer or post-processor, or the steps of a sequence.
fn parts<'a>(value: Option<&'a Value>, key: &str) -> Vec<&'a Value> {
    let Some(value) = value else { return Vec::new() };
    match value.get(key).and_then(Value::as_array) {
        Some(list) if value.get("type").is_some_and(|kind| kind == "Sequence") => list.iter().collect(),
        _ => vec![value],
    }
}

/// Sources of the special tokens.
struct Special<'a> {
    vocab: &'a Vocab,
    settings: Option<Object<'a>>,
    model_settings: Settings<'a>,
}

impl Special<'_> {
    fn write(&self, writer: &mut GgufWriter, file: Object<'_>, has_fallback: bool) -> Result<(), HfError> {
        let [first, last] = edge_tokens(file.value("post_processor"));
        let [bos, eos, unk, pad] = ["bos", "eos", "unk", "pad"].map(|name| self.id(name));
        // No other file defines it.
        let bos = bos.or_else(|| first.id(self.vocab));
        let mut ends = self.ends().into_iter().filter(|id| Some(*id) != eos);
        let ids = [
            ("tokenizer.ggml.bos_token_id", bos),
            ("tokenizer.ggml.eos_token_id", eos),
            ("tokenizer.ggml.eot_token_id", ends.next()),
            ("tokenizer.ggml.eom_token_id", ends.next()),
            ("tokenizer.ggml.unknown_token_id", unk),
            ("tokenizer.ggml.padding_token_id", pad),
        ];
        for (key, id) in ids {
            if let Some(id) = id {
                writer.set(key, id)?;
            }
        }
        let flag =
            |key: &str| Ok::<_, HfError>(self.settings.map(|all| all.find_bool(key)).transpose()?.flatten());
        let add_bos = match first {
            EdgeToken::Token(_) => first.id(self.vocab) == bos,
            EdgeToken::Nothing => false,
            EdgeToken::Unsaid => flag("add_bos_token")?.unwrap_or(has_fallback),
        };
        let add_eos = match last {
            EdgeToken::Token(_) => last.id(self.vocab) == eos,
            EdgeToken::Nothing => false,
            EdgeToken::Unsaid => flag("add_eos_token")?.unwrap_or(false),
        };
        writer.set("tokenizer.ggml.add_bos_token", add_bos && bos.is_some())?;
        writer.set("tokenizer.ggml.add_eos_token", add_eos && eos.is_some())?;
        Ok(())
    }

    /// Returns a special token: from the tokenizer settings, or else from the model configuration.
    fn id(&self, name: &str) -> Option<u32> {
        let key = format!("{name}_token");
        let named = self.settings.and_then(|settings| settings.value(&key));
        let text = named.and_then(|token| token.as_str().or_else(|| token.get("content")?.as_str()));
        if let Some(id) = text.and_then(|text| self.vocab.id(text)) {
            return Some(id);
        }
        let n_vocab = self.vocab.texts.len() as u64;
        let number = self.model_settings.config.value(&format!("{name}_token_id")).and_then(first_id);
        number.filter(|id| *id < n_vocab).map(|id| id as u32)
    }

    /// Returns the end-of-generation tokens of the generation configuration.
    fn ends(&self) -> Vec<u32> {
        let ids = self.model_settings.generation.and_then(|generation| generation.value("eos_token_id"));
        let ids: &[Value] = match ids {
            Some(Value::Array(ids)) => ids,
            Some(id) => std::slice::from_ref(id),
            None => &[],
        };
        let n_vocab = self.vocab.texts.len() as u64;
        ids.iter().filter_map(Value::as_u64).filter(|id| *id < n_vocab).map(|id| id as u32).collect()
    }
}

/// Returns a number, or the first of a list.
fn first_id(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_array()?.first()?.as_u64())
}

/// A token that the tokenizer adds before or after a text.
enum EdgeToken<'a> {
    Token(&'a str),
    Nothing,
    /// Left to another file.
    Unsaid,
}

impl EdgeToken<'_> {
    fn id(&self, vocab: &Vocab) -> Option<u32> {
        match self {
            Self::Token(text) => vocab.id(text),
            Self::Nothing | Self::Unsaid => None,
        }
    }
}

/// Returns the tokens that the post-processor adds before and after a text.
fn edge_tokens(processor: Option<&Value>) -> [EdgeToken<'_>; 2] {
    let all = parts(processor, "processors");
    let is = |name: &'static str| move |part: &&&Value| part.get("type").is_some_and(|kind| kind == name);
    let template = all.iter().find(is("TemplateProcessing")).and_then(|part| part.get("single")?.as_array());
    if let Some(template) = template {
        return [template.first(), template.last()].map(|part| {
            let text = part.and_then(|part| part.pointer("/SpecialToken/id")).and_then(Value::as_str);
            text.map_or(EdgeToken::Nothing, EdgeToken::Token)
        });
    }
    match all.iter().any(|part| is("ByteLevel")(&part)) {
        true => [EdgeToken::Nothing, EdgeToken::Nothing],
        false => [EdgeToken::Unsaid, EdgeToken::Unsaid],
    }
}

#[cfg(test)]
mod tests;
