//! `/v1/chat/completions` of OpenAI's API.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};

use kvant::Turn;
use kvant::generate::conversation::AnswerFormat;
use kvant::generate::decoding::{Finish, TokenLogprobs};
use kvant::generate::output_parser::{Call, OutputParser, ParsedAnswer, Part};

use super::error::ApiError;
use super::fields::Fields;
use super::openai_envelope::{Envelope, ResponseKind, timings, usage_fields};
use super::response::{Accumulated, ApiFormat, Chunk, Delta};
use super::unsupported;
use super::{Caller, Server, new_id};
use crate::status::Progress;
use crate::transfer::KvTransfer;

pub(super) async fn chat(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Fields,
) -> Result<Response, ApiError> {
    let hosted = server.hosted(&fields).await?;
    unsupported::check_chat(&fields)?;
    let (mut request, Turn { tokens, answer: AnswerFormat { parser, .. }, .. }) =
        hosted.open(&fields, &server.sampling_defaults(&hosted), &caller).await?;
    request.kv_transfer = KvTransfer::read(&fields)?;
    let head = Envelope::new(&hosted, &fields, &request, ResponseKind::CHAT);
    let answers = vec![Answer { parser: parser.clone(), n_calls: 0 }; request.n];
    let prompt = request.return_tokens.then(|| tokens.clone());
    hosted.answer(vec![tokens], &request, &caller, Chat { head, parser, answers, prompt }).await
}

struct Chat {
    head: Envelope,
    /// Output parser in its initial state.
    parser: OutputParser,
    /// Parser state of each answer.
    answers: Vec<Answer>,
    /// Prompt tokens to return, if requested and not yet sent.
    prompt: Option<Vec<u32>>,
}

#[derive(Clone)]
struct Answer {
    parser: OutputParser,
    n_calls: usize,
}

fn call(call: &Call) -> Value {
    let function = json!({ "name": call.name, "arguments": call.arguments });
    json!({ "id": new_id("call"), "type": "function", "function": function })
}

fn finish(finish: Finish, n_calls: usize) -> &'static str {
    if n_calls > 0 && finish != Finish::Length { "tool_calls" } else { finish.name() }
}

impl Answer {
    /// Returns the `delta` of a chunk for a part of the output.
    fn delta(&mut self, part: Part) -> Value {
        match part {
            Part::Text(text) => json!({ "content": text }),
            Part::Reasoning(text) => json!({ "reasoning_content": text }),
            Part::Call(name) => {
                let mut call = call(&Call::of(name));
                call["index"] = self.n_calls.into();
                self.n_calls += 1;
                json!({ "tool_calls": [call] })
            }
            Part::Arguments(text) => {
                let index = self.n_calls.saturating_sub(1);
                json!({ "tool_calls": [{ "index": index, "function": { "arguments": text } }] })
            }
        }
    }
}

impl Chat {
    fn logprobs(&self, logprobs: &[TokenLogprobs]) -> Value {
        if self.head.request.answer.logprobs.is_none() {
            return Value::Null;
        }
        json!({ "content": self.head.logprobs(logprobs) })
    }

    fn chunk(&self, piece: &Delta<'_>, delta: &Value) -> Value {
        let mut choice = json!({ "index": piece.index, "delta": delta, "finish_reason": null });
        if !piece.logprobs.is_empty() {
            choice["logprobs"] = self.logprobs(piece.logprobs);
        }
        if self.head.request.return_tokens {
            choice["token_ids"] = json!(piece.token.as_slice());
        }
        let mut chunk = self.head.chunk(choice);
        if self.head.request.timings_per_token {
            chunk.insert("timings".to_owned(), timings(&piece.answer.times));
        }
        chunk.into()
    }

    fn message(&self, answer: &Accumulated) -> (Value, usize) {
        let parsed = self.parser.clone().whole(&answer.text);
        let ParsedAnswer { text: content, reasoning, calls } = parsed.into_iter().collect();
        let n_calls = calls.len();
        let is_silent = content.is_empty() && n_calls > 0;
        let content = if is_silent { Value::Null } else { content.into() };
        let mut message = json!({ "role": "assistant", "content": content });
        if !reasoning.is_empty() {
            message["reasoning_content"] = reasoning.into();
        }
        if n_calls > 0 {
            message["tool_calls"] = calls.iter().map(call).collect();
        }
        (message, n_calls)
    }
}

impl ApiFormat for Chat {
    fn set_kv_transfer(&mut self, params: Option<Value>) {
        self.head.kv_transfer = params;
    }

    fn warn(&mut self, warnings: Vec<String>) {
        self.head.warnings = warnings;
    }

    fn begin(&mut self, out: &mut VecDeque<Chunk>) {
        for index in 0..self.head.request.n {
            let delta = json!({ "role": "assistant", "content": "" });
            let choice = json!({ "index": index, "delta": delta, "finish_reason": null });
            let mut chunk = self.head.chunk(choice);
            self.head.add_warnings(&mut chunk);
            if let Some(prompt) = self.prompt.take() {
                chunk.insert("prompt_token_ids".to_owned(), json!(prompt));
            }
            out.push_back(Chunk(chunk.into()));
        }
    }

    fn progress(&mut self, progress: Progress, out: &mut VecDeque<Chunk>) {
        let choice = json!({ "index": 0, "delta": {}, "finish_reason": null });
        self.head.progress(progress, choice, out);
    }

    fn delta(&mut self, piece: &Delta<'_>, out: &mut VecDeque<Chunk>) {
        let answer = &mut self.answers[piece.index];
        let parts = answer.parser.push_text(piece.text, piece.finish.is_some());
        let mut deltas: Vec<Value> = parts.into_iter().map(|part| answer.delta(part)).collect();
        let has_token = self.head.request.return_tokens && piece.token.is_some();
        if deltas.is_empty() && (!piece.logprobs.is_empty() || has_token) {
            deltas.push(json!({ "content": "" }));
        }
        let n_calls = answer.n_calls;
        let chunks = deltas.iter().enumerate().map(|(i, delta)| {
            // The first chunk of a token carries its id and logprobs.
            let logprobs = if i == 0 { piece.logprobs } else { &[] };
            self.chunk(&Delta { logprobs, token: piece.token.filter(|_| i == 0), ..*piece }, delta)
        });
        out.extend(chunks.map(Chunk).collect::<Vec<_>>());
        if let Some(reason) = piece.finish {
            let reason = finish(reason, n_calls);
            let choice = json!({ "index": piece.index, "delta": {}, "finish_reason": reason });
            let mut chunk = self.head.chunk(choice);
            chunk.extend(usage_fields(std::slice::from_ref(piece.answer), 1));
            // Usage has its own chunk, sent only on request.
            chunk.remove("usage");
            out.push_back(Chunk(chunk.into()));
        }
    }

    fn end(&mut self, answers: &[Accumulated], out: &mut VecDeque<Chunk>) {
        self.head.end(answers, out);
    }

    fn whole(&mut self, answers: &[Accumulated]) -> Value {
        let choices = answers.iter().enumerate().map(|(index, answer)| {
            let (message, n_calls) = self.message(answer);
            let mut choice = json!({
                "index": index,
                "message": message,
                "logprobs": self.logprobs(&answer.logprobs),
                "finish_reason": answer.finish.map(|reason| finish(reason, n_calls)),
            });
            if self.head.request.return_tokens {
                choice["token_ids"] = json!(answer.tokens);
            }
            choice
        });
        let choices = choices.collect();
        let mut whole = self.head.whole(choices, answers);
        if let Some(prompt) = self.prompt.take() {
            whole["prompt_token_ids"] = json!(prompt);
        }
        whole
    }
}
