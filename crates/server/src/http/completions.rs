//! `/v1/completions` of OpenAI's API.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};

use kvant::generate::decoding::{Finish, TokenLogprobs, token_key, token_text};

use super::error::ApiError;
use super::fields::Fields;
use super::generation_request::GenerationRequest;
use super::openai_envelope::{Envelope, ResponseKind, usage_fields};
use super::prompt::{Prompt, prompts};
use super::response::{Accumulated, ApiFormat, Chunk, Delta};
use super::unsupported;
use super::{Caller, Server};
use crate::status::Progress;
use crate::transfer::KvTransfer;

/// Continues a text.
pub(super) async fn completions(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Fields,
) -> Result<Response, ApiError> {
    let hosted = server.hosted(&fields).await?;
    unsupported::check_all(&fields, &unsupported::OF_COMPLETIONS)?;
    let mut request = GenerationRequest::read(&fields, &server.sampling_defaults(&hosted), &hosted)?;
    request.kv_transfer = KvTransfer::read(&fields)?;
    if fields.value("suffix").is_some_and(|value| value != "") {
        return Err(ApiError::field("suffix", "nothing: /infill fills gaps", "a value"));
    }
    let prompts = prompts(&hosted, &fields).await?;
    let tokens: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.tokens.clone()).collect();
    let of_answers = tokens.iter().flat_map(|tokens| std::iter::repeat_n(Some(tokens.clone()), request.n));
    let prompt_tokens = if request.return_tokens { of_answers.collect() } else { Vec::new() };
    let head = Envelope::new(&hosted, &fields, &request, ResponseKind::TEXT);
    let n_sent = vec![0; tokens.len() * request.n];
    let prompts = if request.echo { prompts } else { Vec::new() };
    let format = Completion { prompts, prompt_tokens, n_sent, head };
    hosted.answer(tokens, &request, &caller, format).await
}

struct Completion {
    head: Envelope,
    /// Prompts, if the answer starts with its prompt (`echo`).
    prompts: Vec<Prompt>,
    /// Prompt tokens of each answer to return, if requested and not yet sent.
    prompt_tokens: Vec<Option<Vec<u32>>>,
    /// Characters of each answer whose logprobs have been sent.
    n_sent: Vec<usize>,
}

impl Completion {
    /// Adds token ids, if requested: those of the prompt once, and these.
    fn add_token_ids(&mut self, choice: &mut Value, index: usize, tokens: &[u32]) {
        if self.head.request.return_tokens {
            choice["token_ids"] = json!(tokens);
        }
        if let Some(prompt) = self.prompt_tokens.get_mut(index).and_then(Option::take) {
            choice["prompt_token_ids"] = json!(prompt);
        }
    }

    /// Returns the prompt that an answer starts with, for `echo`.
    fn prompt(&self, index: usize) -> Option<&Prompt> {
        self.prompts.get(index / self.head.request.n)
    }

    fn has_logprobs(&self) -> bool {
        self.head.request.answer.logprobs.is_some()
    }

    /// Returns logprobs of tokens whose text starts at character `before`. The first token of a
    /// prompt has no logprob.
    fn logprobs<'a>(
        &self,
        logprobs: impl Iterator<Item = (u32, Option<&'a TokenLogprobs>)>,
        before: usize,
    ) -> Value {
        if !self.has_logprobs() {
            return Value::Null;
        }
        let text = |token: u32| token_text(self.head.tokenizer(), token).0;
        let key = |token: u32| token_key(self.head.tokenizer(), token);
        let (mut at, mut tokens, mut offsets) = (before, Vec::new(), Vec::new());
        let (mut chosen, mut top_logprobs) = (Vec::new(), Vec::new());
        for (token, logprob) in logprobs {
            let text_of = text(token);
            offsets.push(at);
            at += text_of.chars().count();
            tokens.push(text_of);
            chosen.push(logprob.map(|of| of.token.logprob));
            top_logprobs.push(logprob.map(|of| {
                let mut by_text = Map::new();
                for top in &of.top {
                    // Two tokens may have the same text: the more probable one comes first and is
                    // retained.
                    by_text.entry(key(top.token)).or_insert(json!(top.logprob));
                }
                by_text
            }));
        }
        json!({ "tokens": tokens, "token_logprobs": chosen, "top_logprobs": top_logprobs, "text_offset": offsets })
    }

    fn choice(&self, index: usize, text: &str, logprobs: &Value, finish: Option<Finish>) -> Value {
        let reason = finish.map(Finish::name);
        json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": reason })
    }
}

/// Returns generated tokens with their logprobs.
fn generated(logprobs: &[TokenLogprobs]) -> impl Iterator<Item = (u32, Option<&TokenLogprobs>)> {
    logprobs.iter().map(|logprob| (logprob.token.token, Some(logprob)))
}

/// Returns prompt tokens with the logprobs of all but the first.
fn read<'a>(
    prompt: &'a Prompt,
    logprobs: &'a [TokenLogprobs],
) -> impl Iterator<Item = (u32, Option<&'a TokenLogprobs>)> {
    let first = prompt.tokens.first().map(|&token| (token, None));
    first.into_iter().chain(generated(logprobs))
}

impl ApiFormat for Completion {
    fn set_kv_transfer(&mut self, params: Option<Value>) {
        self.head.kv_transfer = params;
    }

    fn begin(&mut self, out: &mut VecDeque<Chunk>) {
        // With logprobs, the prompt is sent once they are known.
        if !self.has_logprobs() {
            for index in 0..self.prompts.len() * self.head.request.n {
                let text = self.prompt(index).map_or("", |prompt| &prompt.text);
                let choice = self.choice(index, text, &Value::Null, None);
                out.push_back(Chunk(self.head.chunk(choice).into()));
            }
        }
    }

    fn scored(&mut self, index: usize, answer: &Accumulated, out: &mut VecDeque<Chunk>) {
        if let Some(prompt) = self.prompt(index) {
            let logprobs = self.logprobs(read(prompt, &answer.prompt), 0);
            let choice = self.choice(index, &prompt.text, &logprobs, None);
            out.push_back(Chunk(self.head.chunk(choice).into()));
        }
    }

    fn progress(&mut self, progress: Progress, out: &mut VecDeque<Chunk>) {
        let choice = self.choice(0, "", &Value::Null, None);
        self.head.progress(progress, choice, out);
    }

    fn delta(&mut self, piece: &Delta<'_>, out: &mut VecDeque<Chunk>) {
        let logprobs = piece.logprobs;
        let has_token = self.head.request.return_tokens && piece.token.is_some();
        if piece.text.is_empty() && logprobs.is_empty() && piece.finish.is_none() && !has_token {
            return;
        }
        let text = |logprob: &TokenLogprobs| token_text(self.head.tokenizer(), logprob.token.token).0;
        let n_chars: usize = logprobs.iter().map(|logprob| text(logprob).chars().count()).sum();
        let echoed = self.prompt(piece.index).filter(|_| !logprobs.is_empty());
        let before = self.n_sent[piece.index] + echoed.map_or(0, |prompt| prompt.text.chars().count());
        self.n_sent[piece.index] += n_chars;
        let logprobs = self.logprobs(generated(logprobs), before);
        let mut choice = self.choice(piece.index, piece.text, &logprobs, piece.finish);
        // Otherwise the whole response contains them.
        if self.head.request.stream {
            self.add_token_ids(&mut choice, piece.index, piece.token.as_slice());
        }
        let mut chunk = self.head.chunk(choice);
        if piece.finish.is_some() {
            chunk.extend(usage_fields(std::slice::from_ref(piece.answer), 1));
            chunk.remove("usage");
        }
        out.push_back(Chunk(chunk.into()));
    }

    fn end(&mut self, answers: &[Accumulated], out: &mut VecDeque<Chunk>) {
        self.head.end(answers, out);
    }

    fn whole(&mut self, answers: &[Accumulated]) -> Value {
        let mut choices = Vec::with_capacity(answers.len());
        for (index, answer) in answers.iter().enumerate() {
            let (text, logprobs) = match self.prompt(index) {
                Some(prompt) => {
                    let all = read(prompt, &answer.prompt).chain(generated(&answer.logprobs));
                    (format!("{}{}", prompt.text, answer.text), self.logprobs(all, 0))
                }
                None => (answer.text.clone(), self.logprobs(generated(&answer.logprobs), 0)),
            };
            let mut choice = self.choice(index, &text, &logprobs, answer.finish);
            self.add_token_ids(&mut choice, index, &answer.tokens);
            choices.push(choice);
        }
        self.head.whole(choices, answers)
    }
}
