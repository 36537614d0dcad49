//! Envelope of OpenAI's responses: id, usage, timings and cache size.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use kvant::Tokenizer;
use kvant::generate::decoding::{Logprob, TokenLogprobs, token_text};
use serde_json::{Map, Value, json};

use super::ServedModel;
use super::fields::Fields;
use super::generation_request::GenerationRequest;
use super::response::{Accumulated, Chunk};
use crate::status::{AnswerStats, Progress};

/// Kind of a response.
pub(super) struct ResponseKind {
    /// First part of its id.
    id_prefix: &'static str,
    /// Its `object`.
    object: &'static str,
}

impl ResponseKind {
    pub const CHAT: Self = Self { id_prefix: "chatcmpl", object: "chat.completion" };
    pub const TEXT: Self = Self { id_prefix: "cmpl", object: "text_completion" };
}

/// Fields common to all choices and chunks of a response.
pub(super) struct Envelope {
    pub hosted: Arc<ServedModel>,
    pub id: String,
    object: &'static str,
    created: u64,
    model: String,
    pub request: GenerationRequest,
    /// Notes on ignored parts of the request.
    pub warnings: Vec<String>,
    /// `kv_transfer_params` for a decode worker.
    pub kv_transfer: Option<Value>,
}

impl Envelope {
    pub fn new(
        hosted: &Arc<ServedModel>,
        fields: &Fields,
        request: &GenerationRequest,
        kind: ResponseKind,
    ) -> Self {
        let ResponseKind { id_prefix, object } = kind;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let model = fields.value("model").and_then(Value::as_str).unwrap_or(&hosted.name).to_owned();
        let hosted = Arc::clone(hosted);
        let (id, request) = (super::new_id(id_prefix), request.clone());
        Self { id, hosted, object, created, model, request, warnings: Vec::new(), kv_transfer: None }
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        self.hosted.tokenizer()
    }

    /// Returns the logprobs of each token and its alternatives.
    pub fn logprobs(&self, logprobs: &[TokenLogprobs]) -> Value {
        let is_after = self.request.answer.post_sampling_probs;
        let of = |of: &Logprob| {
            let (token, bytes) = token_text(self.tokenizer(), of.token);
            let mut entry = json!({ "id": of.token, "token": token, "bytes": bytes });
            match is_after {
                true => entry["prob"] = of.logprob.exp().into(),
                false => entry["logprob"] = of.logprob.into(),
            }
            entry
        };
        let all = logprobs.iter().map(|logprob| {
            let mut token = of(&logprob.token);
            token[if is_after { "top_probs" } else { "top_logprobs" }] = logprob.top.iter().map(of).collect();
            token
        });
        all.collect()
    }

    fn object(&self, object: &str, choices: Value) -> Map<String, Value> {
        let fields = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": super::FINGERPRINT,
            "choices": choices,
        });
        match fields {
            Value::Object(fields) => fields,
            _ => Map::new(),
        }
    }

    pub fn whole(&self, choices: Vec<Value>, answers: &[Accumulated]) -> Value {
        let mut object = self.object(self.object, choices.into());
        object.extend(usage_fields(answers, self.request.n));
        self.add_warnings(&mut object);
        if let Some(params) = &self.kv_transfer {
            object.insert("kv_transfer_params".to_owned(), params.clone());
        }
        object.into()
    }

    /// Adds the field `warnings` if there are any.
    pub fn add_warnings(&self, object: &mut Map<String, Value>) {
        if !self.warnings.is_empty() {
            object.insert("warnings".to_owned(), json!(self.warnings));
        }
    }

    pub fn chunk(&self, choice: Value) -> Map<String, Value> {
        // Chunks of completions have the object type of the whole.
        let object = if self.object == "chat.completion" { "chat.completion.chunk" } else { self.object };
        self.object(object, json!([choice]))
    }

    pub fn progress(&self, progress: Progress, choice: Value, out: &mut VecDeque<Chunk>) {
        let mut chunk = self.chunk(choice);
        chunk.insert("prompt_progress".to_owned(), progress_json(progress));
        if self.request.timings_per_token {
            chunk.insert(
                "timings".to_owned(),
                timings(&AnswerStats { prompt: progress, ..AnswerStats::default() }),
            );
        }
        out.push_back(Chunk(chunk.into()));
    }

    pub fn end(&self, answers: &[Accumulated], out: &mut VecDeque<Chunk>) {
        let is_chat = self.object == "chat.completion";
        if self.request.include_usage {
            let object = if is_chat { "chat.completion.chunk" } else { self.object };
            let mut chunk = self.object(object, json!([]));
            chunk.extend(usage_fields(answers, self.request.n));
            out.push_back(Chunk(chunk.into()));
        }
    }
}

/// Returns the prefill progress.
pub(super) fn progress_json(progress: Progress) -> Value {
    let Progress { total, cached, done, took } = progress;
    json!({ "total": total, "cache": cached, "processed": done, "time_ms": took.as_millis() as u64 })
}

/// Returns usage, timings and cache size. Each prompt has `n` answers and is counted once.
pub(super) fn usage_fields(answers: &[Accumulated], n: usize) -> Map<String, Value> {
    let first = answers.first().map_or_else(AnswerStats::default, |answer| answer.times);
    let n_generated: usize = answers.iter().map(|answer| answer.times.n_generated).sum();
    let n_reasoning: usize = answers.iter().map(|answer| answer.times.n_reasoning).sum();
    let prompts = || answers.chunks(n).filter_map(|group| group.first()).map(|answer| answer.times.prompt);
    let (total, cached): (usize, usize) =
        (prompts().map(|p| p.total).sum(), prompts().map(|p| p.cached).sum());
    let fields = json!({
        "usage": {
            "prompt_tokens": total,
            "completion_tokens": n_generated,
            "total_tokens": total + n_generated,
            "prompt_tokens_details": { "cached_tokens": cached },
            "completion_tokens_details": { "reasoning_tokens": n_reasoning },
        },
        "timings": timings(&first),
        "kv": kv(&first),
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

/// Returns the size of a cache, and its size as f16.
pub(super) fn kv(times: &AnswerStats) -> Value {
    json!({ "bytes": times.kv_bytes, "bytes_f16": times.kv_bytes_f16 })
}

pub(super) fn timings(times: &AnswerStats) -> Value {
    let (read, n_generated) =
        (times.prompt.done - times.prompt.cached.min(times.prompt.done), times.n_generated);
    let [prompt, decode] = [times.prompt.took, times.decode_time].map(|time| time.as_secs_f64());
    let rate = |n: usize, seconds: f64| if seconds > 0.0 { n as f64 / seconds } else { 0.0 };
    // The first token comes from the prompt.
    let decoded = n_generated.saturating_sub(1);
    let mut timings = json!({
        "cache_n": times.prompt.cached,
        "prompt_n": read,
        "prompt_ms": prompt * 1e3,
        "prompt_per_token_ms": prompt * 1e3 / read.max(1) as f64,
        "prompt_per_second": rate(read, prompt),
        "predicted_n": n_generated,
        "predicted_ms": decode * 1e3,
        "predicted_per_token_ms": decode * 1e3 / decoded.max(1) as f64,
        "predicted_per_second": rate(decoded, decode),
    });
    if times.n_drafted > 0 {
        timings["draft_n"] = times.n_drafted.into();
        timings["draft_n_accepted"] = times.n_accepted.into();
    }
    timings
}
