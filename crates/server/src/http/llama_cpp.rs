//! `/completion` and `/infill` of llama.cpp's API.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use kvant::generate::decoding::{Finish, token_text};
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::Fields;
use super::fim;
use super::generation_request::GenerationRequest;
use super::openai_envelope::{Envelope, ResponseKind, kv, progress_json, timings};
use super::prompt::{Prompt, prompts};
use super::response::{Accumulated, ApiFormat, Chunk, Delta, Framing};
use super::{Caller, Server, sampling};
use crate::status::{AnswerStats, Progress};

/// Continues a text.
pub(super) async fn completion(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Fields,
) -> Result<Response, ApiError> {
    let hosted = server.hosted(&fields).await?;
    let request = GenerationRequest::read(&fields, &server.sampling_defaults(&hosted), &hosted)?;
    let prompts = prompts(&hosted, &fields).await?;
    let head = Envelope::new(&hosted, &fields, &request, ResponseKind::TEXT);
    answer(head, prompts, &fields, &caller).await
}

/// Fills in the middle between two texts.
pub(super) async fn infill(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Fields,
) -> Result<Response, ApiError> {
    let hosted = server.hosted(&fields).await?;
    let request = GenerationRequest::read(&fields, &server.sampling_defaults(&hosted), &hosted)?;
    let gap = fim::read(&fields)?;
    let known = hosted.model.fim_tokens().ok_or_else(|| {
        ApiError::invalid("this model does not support fill-in-the-middle: its vocabulary has no tokens for prefix and suffix")
    })?;
    let n_ctx = hosted.n_ctx;
    let tokens = hosted
        .tokenize(gap.n_bytes(), move |model, _| {
            let tokens = gap.prompt(&known, model.tokenizer()?, n_ctx);
            tokens.map_err(|error| ApiError::invalid(error.to_string()))
        })
        .await?;
    let prompt = Prompt { text: hosted.tokenizer().decode(&tokens), tokens };
    let head = Envelope::new(&hosted, &fields, &request, ResponseKind::TEXT);
    answer(head, vec![prompt], &fields, &caller).await
}

async fn answer(
    head: Envelope,
    prompts: Vec<Prompt>,
    fields: &Fields,
    caller: &Caller,
) -> Result<Response, ApiError> {
    let response_fields: Vec<String> = fields.get("response_fields", "a list of names")?.unwrap_or_default();
    let (hosted, request) = (Arc::clone(&head.hosted), head.request.clone());
    let tokens: Vec<_> = prompts.into_iter().map(|prompt| prompt.tokens).collect();
    let format = Native { head, prompts: tokens.clone(), response_fields };
    hosted.answer(tokens, &request, caller, format).await
}

struct Native {
    head: Envelope,
    prompts: Vec<Vec<u32>>,
    /// Paths of the fields to return; empty for all.
    response_fields: Vec<String>,
}

impl Native {
    /// Returns the settings of the answer at this index, with unsupported samplers at their neutral
    /// values.
    fn settings(&self, index: usize) -> Value {
        let request = &self.head.request;
        let answer = &request.answer;
        let bias = |&(token, bias): &(u32, f32)| json!({ "token": token, "bias": bias });
        let mut settings = json!({
            "n_predict": request.max_tokens.map_or(-1, |n| n as i64),
            "seed": request.seed_of(index),
            "presence_penalty": answer.presence_penalty,
            "frequency_penalty": answer.frequency_penalty,
            "logit_bias": answer.bias.iter().map(bias).collect::<Vec<_>>(),
            "stop": answer.stop,
            "ignore_eos": answer.ignore_eos,
            "n_probs": answer.logprobs.unwrap_or(0),
            "post_sampling_probs": answer.post_sampling_probs,
            "stream": request.stream,
            // Decay of the adaptive target, which is never set.
            "adaptive_decay": 0.0,
        });
        if answer.sampler.dry.is_on() {
            settings["dry_sequence_breakers"] = json!(answer.breakers.texts());
        }
        for (name, off) in super::unsupported::SAMPLERS {
            settings[name] = off.into();
        }
        for (name, value) in sampling::param_fields(&answer.sampler) {
            settings[name] = value;
        }
        settings
    }

    /// Returns all fields of a finished answer.
    fn ended(&self, index: usize, answer: &Accumulated) -> Map<String, Value> {
        let (request, times) = (&self.head.request, &answer.times);
        let text = |token: &u32| token_text(self.head.tokenizer(), *token).0;
        let prompt: String = self.prompts[index / request.n].iter().map(text).collect();
        let (kind, word) = match answer.finish {
            Some(Finish::Stop) => ("eos", ""),
            Some(Finish::Word(index)) => ("word", request.answer.stop.get(index).map_or("", String::as_str)),
            Some(Finish::Length) => ("limit", ""),
            None => ("none", ""),
        };
        // The last generated token is never fed.
        let held = times.prompt.total + times.n_generated.saturating_sub(1);
        object(json!({
            "index": index,
            "content": answer.text,
            "tokens": if request.return_tokens { answer.tokens.as_slice() } else { &[] },
            "id_slot": -1,
            "stop": true,
            "model": self.head.hosted.name,
            "tokens_predicted": times.n_generated,
            "tokens_evaluated": times.prompt.total,
            "generation_settings": self.settings(index),
            "prompt": prompt,
            "has_new_line": answer.text.contains('\n'),
            "truncated": answer.finish == Some(Finish::Length) && held >= self.head.hosted.n_ctx,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": held,
            "timings": timings(times),
            "kv": kv(times),
        }))
    }

    /// Returns the requested fields, each under its path.
    fn chosen(&self, all: Map<String, Value>) -> Value {
        let all = Value::Object(all);
        if self.response_fields.is_empty() {
            return all;
        }
        let field = |path: &String| Some((path.clone(), all.pointer(&format!("/{path}"))?.clone()));
        Value::Object(self.response_fields.iter().filter_map(field).collect())
    }
}

fn object(fields: Value) -> Map<String, Value> {
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

impl ApiFormat for Native {
    const FRAMING: Framing = Framing::Bare;

    fn progress(&mut self, progress: Progress, out: &mut VecDeque<Chunk>) {
        let mut piece = json!({
            "index": 0, "content": "", "tokens": [], "stop": false, "prompt_progress": progress_json(progress),
        });
        if self.head.request.timings_per_token {
            piece["timings"] = timings(&AnswerStats { prompt: progress, ..AnswerStats::default() });
        }
        out.push_back(Chunk(piece));
    }

    fn delta(&mut self, piece: &Delta<'_>, out: &mut VecDeque<Chunk>) {
        if piece.finish.is_some() {
            let mut ended = self.ended(piece.index, piece.answer);
            // Only the rest of the text: the earlier text has been sent.
            ended.extend(object(json!({ "content": piece.text, "tokens": [] })));
            out.push_back(Chunk(self.chosen(ended)));
            return;
        }
        let times = &piece.answer.times;
        let mut chunk = json!({
            "index": piece.index,
            "content": piece.text,
            "tokens": piece.token.as_slice(),
            "stop": false,
            "id_slot": -1,
            "tokens_predicted": piece.answer.tokens.len(),
            "tokens_evaluated": self.prompts[piece.index / self.head.request.n].len(),
        });
        if !piece.logprobs.is_empty() {
            chunk["completion_probabilities"] = self.head.logprobs(piece.logprobs);
        }
        if self.head.request.timings_per_token {
            chunk["timings"] = timings(times);
        }
        out.push_back(Chunk(chunk));
    }

    fn end(&mut self, _answers: &[Accumulated], _out: &mut VecDeque<Chunk>) {}

    fn whole(&mut self, answers: &[Accumulated]) -> Value {
        let bodies = answers.iter().enumerate().map(|(index, answer)| {
            let mut ended = self.ended(index, answer);
            if self.head.request.answer.logprobs.is_some() {
                let probabilities = self.head.logprobs(&answer.logprobs);
                ended.insert("completion_probabilities".to_owned(), probabilities);
            }
            self.chosen(ended)
        });
        let mut bodies: Vec<Value> = bodies.collect();
        if bodies.len() == 1 { bodies.remove(0) } else { bodies.into() }
    }
}
