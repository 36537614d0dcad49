//! Options common to all generation requests: sampling, stop conditions, constraints and output
//! fields.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvant::generate::constraint::OutputFormat;
use kvant::generate::conversation::AnswerFormat;
use kvant::generate::decoding::{self, DecodingOptions};
use kvant::generate::gbnf;
use kvant::generate::output_parser::constraint::ToolConstraint;
use kvant::{Answers, EncodedMedia, SamplerParams, Tokenizer};
use serde::Deserialize;
use serde_json::Value;

use super::ServedModel;
use super::error::ApiError;
use super::fields::Fields;
use super::loras::ModelOptions;
use super::{sampling, unsupported};
use crate::options::ServerSampling;
use crate::owner_limits::Owner;
use crate::transfer::KvTransfer;

/// Names of the token limit in the APIs of OpenAI, llama.cpp and ollama.
const MAX_TOKENS: [&str; 5] =
    ["max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict", "num_predict"];
/// Maximum top logprobs per token.
pub(crate) const MAX_LOGPROBS: usize = 100;
/// Maximum stop strings.
const MAX_STOPS: usize = 64;
/// Maximum `bad_words`.
const MAX_BAD_WORDS: usize = 256;

/// Options of a generation request. See the [module](self).
#[derive(Debug, Clone)]
pub(crate) struct GenerationRequest {
    pub n: usize,
    /// Maximum tokens, if given.
    pub max_tokens: Option<usize>,
    /// Options of each answer except `max_tokens`, which depends on the prompt.
    pub answer: DecodingOptions,
    /// Images and audio of the prompt.
    pub media: Vec<EncodedMedia>,
    /// Whether the request sets the seed.
    pub has_seed: bool,
    /// Output constraint.
    pub form: Option<OutputFormat>,
    /// Tools that the model may call.
    pub tools: Option<ToolConstraint>,
    /// Number of top logprobs per prompt token, if prompt logprobs are requested.
    pub prompt_logprobs: Option<usize>,
    /// Separates the prefix cache from that of requests with other salts.
    pub cache_salt: Option<String>,
    /// Whether every token of the prompt is computed, as if none were cached.
    pub bypasses_prefix_cache: bool,
    /// Transfer of the prompt's KV cache.
    pub kv_transfer: Option<KvTransfer>,
    /// LoRA scales and KV cache type.
    pub model_options: ModelOptions,
    pub stream: bool,
    pub include_usage: bool,
    pub return_progress: bool,
    pub return_tokens: bool,
    /// Whether the answer starts with its prompt.
    pub echo: bool,
    pub timings_per_token: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Bias {
    /// OpenAI: maps a token id to its bias.
    Map(BTreeMap<String, f64>),
    /// llama.cpp: pairs of a token id, or a text to tokenize, and a bias or `false`.
    Pairs(Vec<(Value, Value)>),
}

impl GenerationRequest {
    pub fn read(fields: &Fields, defaults: &ServerSampling, hosted: &ServedModel) -> Result<Self, ApiError> {
        hosted.model.check_generates()?;
        let n = fields.get::<usize>("n", "a whole number")?.unwrap_or(1);
        if !(1..=Answers::MAX).contains(&n) {
            return Err(ApiError::field("n", "a number from 1 to 128", n));
        }
        let limit: Option<i64> = fields.any(&MAX_TOKENS, "a whole number")?;
        let max_tokens = match limit {
            None | Some(-2..=-1) => None,
            Some(n) => Some(usize::try_from(n).map_err(|_| ApiError::field("max_tokens", "0 or more", n))?),
        };
        let stream_options = fields.object("stream_options")?;
        let (answer, echo) = (answer(fields, defaults, hosted)?, fields.flag("echo")?);
        Ok(Self {
            n,
            max_tokens,
            prompt_logprobs: answer.logprobs.filter(|_| echo),
            answer,
            media: Vec::new(),
            has_seed: sampling::seed(fields)?.is_some(),
            form: form(fields, hosted.tokenizer())?,
            tools: None,
            cache_salt: None,
            bypasses_prefix_cache: false,
            kv_transfer: None,
            model_options: ModelOptions::read(fields)?,
            stream: fields.flag("stream")?,
            include_usage: stream_options.flag("include_usage")?,
            return_progress: fields.flag("return_progress")?,
            return_tokens: fields.flag("return_tokens")? || fields.flag("return_token_ids")?,
            echo,
            timings_per_token: fields.flag("timings_per_token")?,
        })
    }

    /// Applies the answer format of a turn.
    pub fn apply(&mut self, format: &mut AnswerFormat) {
        self.answer.call_marks = std::mem::take(&mut format.call_marks);
        self.answer.reasoning_budget = format.reasoning_budget.take();
        self.tools = format.tools.take();
        self.tools.iter_mut().for_each(|tools| tools.set_format(self.form.as_ref()));
    }

    /// Returns the seed of the answer at this index. With an explicit seed equal prompts have equal
    /// answers; otherwise each answer of a request has its own seed.
    pub fn seed_of(&self, index: usize) -> u64 {
        let later = if self.has_seed { index % self.n } else { index };
        self.answer.sampler.seed.wrapping_add(later as u64)
    }

    /// Returns the owner of the caches that a request of `owner` shares: those of its API key and
    /// its salt, which a control character separates, as no key has one.
    pub fn cache_owner(&self, owner: &Owner) -> Owner {
        match &self.cache_salt {
            None => owner.clone(),
            Some(salt) => Some(format!("{}\0{salt}", owner.as_deref().unwrap_or_default()).into()),
        }
    }

    /// Returns the options of the answers from index `first` on, for a prompt of `n_prompt` tokens
    /// in a context of `n_ctx`.
    pub fn answer_to(&self, n_prompt: usize, n_ctx: usize, first: usize) -> Arc<DecodingOptions> {
        // The last generated token is never fed.
        let room = n_ctx - n_prompt + 1;
        let max_tokens = self.max_tokens.map_or(room, |max| max.min(room));
        let sampler = SamplerParams { seed: self.seed_of(first), ..self.answer.sampler };
        Arc::new(DecodingOptions { max_tokens, sampler, ..self.answer.clone() })
    }
}

fn answer(
    fields: &Fields,
    defaults: &ServerSampling,
    hosted: &ServedModel,
) -> Result<DecodingOptions, ApiError> {
    unsupported::check(fields)?;
    let tokenizer = hosted.tokenizer();
    let sampler = sampling::sampler(fields, defaults)?;
    let stop = match fields.any(&["stop", "stop_sequences"], "a text or a list of texts")? {
        None => Vec::new(),
        Some(OneOrMany::One(text)) => vec![text],
        Some(OneOrMany::Many(texts)) if texts.len() > MAX_STOPS => {
            return Err(ApiError::field("stop", "at most 64 texts", texts.len()));
        }
        Some(OneOrMany::Many(texts)) => texts,
    };
    let penalty = |name| match fields.get::<f32>(name, "a number")?.unwrap_or(0.0) {
        penalty if (-100.0..=100.0).contains(&penalty) => Ok(penalty),
        other => Err(ApiError::field(name, "a number from -100 to 100", other)),
    };
    Ok(DecodingOptions {
        breakers: sampling::breakers(fields, sampler.dry, hosted)?,
        sampler,
        max_tokens: 0,
        stop,
        include_stop: fields.flag("include_stop_str_in_output")?,
        stop_tokens: fields.get("stop_token_ids", "a list of token numbers")?.unwrap_or_default(),
        min_tokens: fields.get("min_tokens", "a whole number")?.unwrap_or(0),
        bad_words: bad_words(fields, tokenizer)?,
        logprobs: logprobs(fields)?,
        post_sampling_probs: fields.flag("post_sampling_probs")?,
        bias: bias(fields, tokenizer)?,
        presence_penalty: penalty("presence_penalty")?,
        frequency_penalty: penalty("frequency_penalty")?,
        ignore_eos: fields.flag("ignore_eos")?,
        reasoning_budget: None,
        call_marks: Vec::new(),
    })
}

fn bad_words(fields: &Fields, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>, ApiError> {
    let words: Vec<String> = fields.get("bad_words", "a list of texts")?.unwrap_or_default();
    if words.len() > MAX_BAD_WORDS {
        return Err(ApiError::field("bad_words", "at most 256 texts", words.len()));
    }
    decoding::bad_words(tokenizer, &words).map_err(|error| ApiError::invalid(error.to_string()))
}

/// Reads the number of top logprobs. Chat has a flag and a number, completions have a number,
/// llama.cpp has `n_probs`.
fn logprobs(fields: &Fields) -> Result<Option<usize>, ApiError> {
    let limited = |name, n: usize| {
        if n > MAX_LOGPROBS { Err(ApiError::field(name, "at most 100", n)) } else { Ok(Some(n)) }
    };
    if let Some(n) = fields.get::<usize>("n_probs", "a whole number")?.filter(|&n| n > 0) {
        return limited("n_probs", n);
    }
    match fields.value("logprobs") {
        None | Some(Value::Bool(false)) => match fields.value("top_logprobs") {
            Some(Value::Number(n)) if n.as_u64() != Some(0) => {
                Err(ApiError::field("logprobs", "true where top_logprobs is given", "nothing"))
            }
            _ => Ok(None),
        },
        Some(Value::Bool(true)) => {
            limited("top_logprobs", fields.get("top_logprobs", "a whole number")?.unwrap_or(0))
        }
        Some(_) => limited("logprobs", fields.need("logprobs", "true, false or a whole number")?),
    }
}

fn bias(fields: &Fields, tokenizer: &Tokenizer) -> Result<Vec<(u32, f32)>, ApiError> {
    let expected = "token numbers with what is added to their logits";
    let Some(given) = fields.get::<Bias>("logit_bias", expected)? else { return Ok(Vec::new()) };
    // Larger values would make the logits infinite; any value beyond this bound excludes a token as
    // surely.
    let bounded = |bias: f32| if bias == f32::NEG_INFINITY { bias } else { bias.clamp(-1e6, 1e6) };
    let error = |got: &dyn std::fmt::Display| ApiError::field("logit_bias", expected, got);
    let known = |token: u64| match u32::try_from(token) {
        Ok(id) if (id as usize) < tokenizer.n_vocab() => Ok(id),
        _ => Err(ApiError::field("logit_bias", "numbers of tokens in the vocabulary", token)),
    };
    let pairs = match given {
        Bias::Map(map) => map.into_iter().map(|(token, bias)| (token.into(), bias.into())).collect(),
        Bias::Pairs(pairs) => pairs,
    };
    let mut biases = Vec::new();
    for (token, bias) in pairs {
        let bias = match &bias {
            Value::Bool(false) => f32::NEG_INFINITY,
            other => bounded(other.as_f64().ok_or_else(|| error(other))? as f32),
        };
        let number = token.as_u64().or_else(|| token.as_str()?.parse().ok());
        match (number, token.as_str()) {
            (Some(number), _) => biases.push((known(number)?, bias)),
            (None, Some(text)) => {
                let tokens = tokenizer.encode(text, kvant::Special::Parse, false);
                let tokens = tokens.map_err(|error| ApiError::invalid(error.to_string()))?;
                biases.extend(tokens.into_iter().map(|token| (token, bias)));
            }
            _ => return Err(error(&token)),
        }
    }
    Ok(biases)
}

/// Reads the output constraint under any of its names.
fn form(fields: &Fields, tokenizer: &Tokenizer) -> Result<Option<OutputFormat>, ApiError> {
    let format = fields.object("response_format")?;
    let form = match format.get::<String>("type", "text, json_object or json_schema")?.as_deref() {
        None | Some("text") => None,
        Some("json_object") => {
            Some(format.schema("schema")?.map_or_else(OutputFormat::object, OutputFormat::schema))
        }
        Some("json_schema") => {
            let schema = format.object("json_schema")?.schema("schema")?.or(format.schema("schema")?);
            Some(OutputFormat::schema(
                schema.ok_or_else(|| ApiError::field("schema", "a JSON schema", "nothing"))?,
            ))
        }
        Some(other) => {
            return Err(ApiError::field("response_format", "type text, json_object or json_schema", other));
        }
    };
    let gbnf: Option<String> = fields.get("grammar", "a GBNF grammar")?;
    // vLLM's current names.
    let structured = fields.object("structured_outputs")?;
    let gbnf = gbnf.or(structured.get("grammar", "a GBNF grammar")?);
    let gbnf = gbnf.filter(|gbnf| !gbnf.is_empty()).map(|gbnf| {
        let token = |text: &str| match tokenizer.encode(text, kvant::Special::Parse, false).ok()?[..] {
            [token] => Some(token),
            _ => None,
        };
        gbnf::lark(&gbnf, &token)
            .map(OutputFormat::Lark)
            .map_err(|error| ApiError::invalid(format!("grammar: {error}")))
    });
    let json = fields.schema("json_schema")?.or(fields.schema("guided_json")?).or(structured.schema("json")?);
    let regex: Option<String> = fields.get("guided_regex", "a regular expression")?;
    let lark: Option<String> = fields.get("guided_grammar", "a Lark grammar")?;
    let choice: Option<Vec<String>> = fields.get("guided_choice", "a list of texts")?;
    if let Some(tags) = structured.value("structural_tag") {
        return Err(ApiError::field("structural_tag", "json, regex, choice, grammar or json_object", tags));
    }
    let json = json.or(structured.flag("json_object")?.then(|| serde_json::json!({ "type": "object" })));
    let regex = regex.or(structured.get("regex", "a regular expression")?);
    let choice = choice.or(structured.get("choice", "a list of texts")?);
    let others = [
        json.map(OutputFormat::schema),
        regex.map(OutputFormat::Regex),
        lark.map(OutputFormat::Lark),
        choice.map(OutputFormat::Choice),
        gbnf.transpose()?,
    ];
    let mut all = others.into_iter().flatten().chain(form);
    match (all.next(), all.next()) {
        (Some(_), Some(_)) => Err(ApiError::invalid("two output constraints: expected one of them")),
        (form, _) => Ok(form),
    }
}
