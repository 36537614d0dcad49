//! `/v1/chat/completions` and `/v1/completions`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use kvant::{RenderOptions, Special, Tokenizer};
use serde_json::{Map, Value, json};

use super::asked::Asked;
use super::error::ApiError;
use super::fields::Fields;
use super::reply::{Format, Heard, Piece, Sent};
use super::{Caller, Hosted, Server};
use crate::answer::{Likelihood, Logprob, token_text};
use crate::worker::{Progress, Times};

/// What is the same in every answer to a request.
struct Head {
    hosted: Arc<Hosted>,
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    asked: Asked,
}

impl Head {
    fn new(hosted: &Arc<Hosted>, fields: &Fields, asked: &Asked, kind: (&str, &'static str)) -> Self {
        let (prefix, object) = kind;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let model = fields.value("model").and_then(Value::as_str).unwrap_or(&hosted.name).to_owned();
        let hosted = Arc::clone(hosted);
        Self { id: super::new_id(prefix), hosted, object, created, model, asked: asked.clone() }
    }

    fn tokenizer(&self) -> &Tokenizer {
        self.hosted.tokenizer()
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

    fn whole(&self, choices: Vec<Value>, heard: &[Heard]) -> Value {
        let mut object = self.object(self.object, choices.into());
        object.extend(accounts(heard, self.asked.n));
        object.into()
    }

    fn chunk(&self, choice: Value) -> Map<String, Value> {
        // Chunks of completions are called as the whole is.
        let object = if self.object == "chat.completion" { "chat.completion.chunk" } else { self.object };
        self.object(object, json!([choice]))
    }

    fn progress(&self, progress: Progress, choice: Value, out: &mut VecDeque<Sent>) {
        let mut chunk = self.chunk(choice);
        let Progress { total, cached, done, took } = progress;
        let told = json!({
            "total": total, "cache": cached, "processed": done, "time_ms": took.as_millis() as u64,
        });
        chunk.insert("prompt_progress".to_owned(), told);
        out.push_back(Sent::Data(chunk.into()));
    }

    fn end(&self, heard: &[Heard], out: &mut VecDeque<Sent>) {
        let is_chat = self.object == "chat.completion";
        if self.asked.include_usage {
            let object = if is_chat { "chat.completion.chunk" } else { self.object };
            let mut chunk = self.object(object, json!([]));
            chunk.extend(accounts(heard, self.asked.n));
            out.push_back(Sent::Data(chunk.into()));
        }
        out.push_back(Sent::Done);
    }
}

/// Usage, times, and what the cache takes. Each prompt has `n` answers and is counted once.
pub(super) fn accounts(heard: &[Heard], n: usize) -> Map<String, Value> {
    let first = heard.first().map_or_else(Times::default, |heard| heard.times);
    let n_said: usize = heard.iter().map(|heard| heard.times.n_said).sum();
    let prompts = || heard.chunks(n).filter_map(|answers| answers.first()).map(|heard| heard.times.prompt);
    let (total, cached): (usize, usize) =
        (prompts().map(|p| p.total).sum(), prompts().map(|p| p.cached).sum());
    let fields = json!({
        "usage": {
            "prompt_tokens": total,
            "completion_tokens": n_said,
            "total_tokens": total + n_said,
            "prompt_tokens_details": { "cached_tokens": cached },
        },
        "timings": timings(&first),
        "kv": { "bytes": first.kv_bytes, "bytes_f16": first.kv_bytes_f16 },
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn timings(times: &Times) -> Value {
    let (read, said) = (times.prompt.done - times.prompt.cached.min(times.prompt.done), times.n_said);
    let [prompt, speaking] = [times.prompt.took, times.speaking].map(|time| time.as_secs_f64());
    let rate = |n: usize, seconds: f64| if seconds > 0.0 { n as f64 / seconds } else { 0.0 };
    // The first token comes from the prompt.
    let decoded = said.saturating_sub(1);
    json!({
        "cache_n": times.prompt.cached,
        "prompt_n": read,
        "prompt_ms": prompt * 1e3,
        "prompt_per_token_ms": prompt * 1e3 / read.max(1) as f64,
        "prompt_per_second": rate(read, prompt),
        "predicted_n": said,
        "predicted_ms": speaking * 1e3,
        "predicted_per_token_ms": speaking * 1e3 / decoded.max(1) as f64,
        "predicted_per_second": rate(decoded, speaking),
    })
}

/// A conversation and how to answer it.
pub(super) async fn chat(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Fields,
) -> Result<Response, ApiError> {
    let hosted = server.hosted(&fields)?;
    let asked = Asked::read(&fields, &server.options.sampler, hosted.tokenizer())?;
    let conversation = conversation(&fields)?;
    let prompt = hosted.tokens(move |model| Ok(vec![conversation.tokens(model)?])).await?;
    let format = Chat { head: Head::new(&hosted, &fields, &asked, ("chatcmpl", "chat.completion")) };
    hosted.answer(prompt, &asked, &caller, format).await
}

/// Messages, and what the template is told besides.
pub(super) struct Conversation {
    pub messages: Vec<Value>,
    pub options: RenderOptions,
}

impl Conversation {
    fn tokens(&self, model: &kvant::Model) -> Result<Vec<u32>, ApiError> {
        Ok(model.rendered_prompt(&self.messages, &self.options)?)
    }

    /// The text of the prompt.
    pub fn text(&self, model: &kvant::Model) -> Result<String, ApiError> {
        let rendered = model.chat_template()?.render(&self.messages, &self.options);
        Ok(rendered.map_err(kvant::Error::from)?.to_string())
    }
}

/// The conversation of a request.
pub(super) fn conversation(fields: &Fields) -> Result<Conversation, ApiError> {
    let given: Vec<Map<String, Value>> = fields.need("messages", "a list of messages")?;
    if given.is_empty() {
        return Err(ApiError::field("messages", "at least one message", "none"));
    }
    let messages = given.into_iter().map(message).collect::<Result<_, _>>()?;
    let extra = fields.get("chat_template_kwargs", "an object")?.unwrap_or_default();
    let options = RenderOptions { add_generation_prompt: true, extra, ..RenderOptions::default() };
    Ok(Conversation { messages, options })
}

/// A message as templates read it: its content is text.
fn message(mut message: Map<String, Value>) -> Result<Value, ApiError> {
    let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
    if role.is_empty() {
        return Err(ApiError::field("messages", "a role in every message", Value::Object(message)));
    }
    // What newer clients call a system message.
    if role == "developer" {
        message.insert("role".to_owned(), "system".into());
    }
    let content = message.get("content").cloned().unwrap_or_default();
    let text = match content {
        Value::String(text) => text,
        Value::Null => String::new(),
        Value::Array(parts) => parts.iter().map(part).collect::<Result<_, _>>()?,
        other => return Err(ApiError::field("content", "a text or a list of parts", other)),
    };
    message.insert("content".to_owned(), text.into());
    Ok(message.into())
}

fn part(part: &Value) -> Result<&str, ApiError> {
    let kind = part["type"].as_str().unwrap_or("none");
    match (kind, part["text"].as_str()) {
        ("text" | "input_text" | "output_text", Some(text)) => Ok(text),
        _ => Err(ApiError::field("content", "parts of type text (this server reads nothing else)", kind)),
    }
}

struct Chat {
    head: Head,
}

impl Chat {
    fn logprobs(&self, likelihoods: &[Likelihood]) -> Value {
        if self.head.asked.answer.logprobs.is_none() {
            return Value::Null;
        }
        let of = |of: &Logprob| {
            let (token, bytes) = token_text(self.head.tokenizer(), of.token);
            json!({ "id": of.token, "token": token, "logprob": of.logprob, "bytes": bytes })
        };
        let content = likelihoods.iter().map(|likelihood| {
            let mut content = of(&likelihood.token);
            content["top_logprobs"] = likelihood.top.iter().map(of).collect();
            content
        });
        json!({ "content": content.collect::<Vec<_>>() })
    }
}

impl Format for Chat {
    fn begin(&mut self, out: &mut VecDeque<Sent>) {
        for index in 0..self.head.asked.n {
            let delta = json!({ "role": "assistant", "content": null });
            let choice = json!({ "index": index, "delta": delta, "finish_reason": null });
            out.push_back(Sent::Data(self.head.chunk(choice).into()));
        }
    }

    fn progress(&mut self, progress: Progress, out: &mut VecDeque<Sent>) {
        let choice = json!({ "index": 0, "delta": {}, "finish_reason": null });
        self.head.progress(progress, choice, out);
    }

    fn piece(&mut self, piece: &Piece<'_>, out: &mut VecDeque<Sent>) {
        let likelihoods = piece.likelihood.map(std::slice::from_ref).unwrap_or_default();
        if !piece.text.is_empty() || !likelihoods.is_empty() {
            let delta = json!({ "content": piece.text });
            let mut choice = json!({ "index": piece.index, "delta": delta, "finish_reason": null });
            if !likelihoods.is_empty() {
                choice["logprobs"] = self.logprobs(likelihoods);
            }
            if self.head.asked.return_tokens {
                choice["token_ids"] = json!(piece.token.as_slice());
            }
            let mut chunk = self.head.chunk(choice);
            if self.head.asked.timings_per_token {
                chunk.insert("timings".to_owned(), timings(&piece.heard.times));
            }
            out.push_back(Sent::Data(chunk.into()));
        }
        if let Some(finish) = piece.finish {
            let choice = json!({ "index": piece.index, "delta": {}, "finish_reason": finish.name() });
            let mut chunk = self.head.chunk(choice);
            chunk.extend(accounts(std::slice::from_ref(piece.heard), 1));
            // Usage has a chunk of its own, and only where it was asked for.
            chunk.remove("usage");
            out.push_back(Sent::Data(chunk.into()));
        }
    }

    fn end(&mut self, heard: &[Heard], out: &mut VecDeque<Sent>) {
        self.head.end(heard, out);
    }

    fn whole(&mut self, heard: &[Heard]) -> Value {
        let choices = heard.iter().enumerate().map(|(index, heard)| {
            let mut choice = json!({
                "index": index,
                "message": { "role": "assistant", "content": heard.text },
                "logprobs": self.logprobs(&heard.likelihoods),
                "finish_reason": heard.finish.map(|finish| finish.name()),
            });
            if self.head.asked.return_tokens {
                choice["token_ids"] = json!(heard.tokens);
            }
            choice
        });
        self.head.whole(choices.collect(), heard)
    }
}

/// A text to go on with.
pub(super) async fn completions(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Fields,
) -> Result<Response, ApiError> {
    let hosted = server.hosted(&fields)?;
    let asked = Asked::read(&fields, &server.options.sampler, hosted.tokenizer())?;
    let given =
        fields.value("prompt").cloned().ok_or_else(|| ApiError::field("prompt", "a prompt", "nothing"))?;
    for name in ["echo", "suffix"] {
        if fields.value(name).is_some_and(|value| *value != Value::Bool(false) && value != "") {
            return Err(ApiError::field(name, "nothing: this server does not do that yet", "a value"));
        }
    }
    let prompts = hosted.tokens(move |model| prompts(model, &given)).await?;
    let format = Completion { head: Head::new(&hosted, &fields, &asked, ("cmpl", "text_completion")) };
    hosted.answer(prompts, &asked, &caller, format).await
}

/// The prompts of a completion: a text, token numbers, or a list of either.
pub(super) fn prompts(model: &kvant::Model, given: &Value) -> Result<Vec<Vec<u32>>, ApiError> {
    let expected = "a text, a list of token numbers, or a list of those";
    let wrong = |got: &Value| ApiError::field("prompt", expected, got);
    let one = |value: &Value| match value {
        Value::String(text) => Ok(model.text_prompt(text, Special::Parse)?),
        Value::Array(ids) => {
            let id =
                |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| wrong(value));
            let ids = ids.iter().map(id).collect::<Result<Vec<_>, _>>()?;
            let unknown = ids.iter().find(|&&id| id as usize >= model.n_vocab());
            match unknown {
                Some(id) => Err(ApiError::field("prompt", "numbers of tokens that there are", id)),
                None => Ok(ids),
            }
        }
        other => Err(wrong(other)),
    };
    match given {
        Value::Array(items) if items.iter().any(|item| !item.is_number()) => items.iter().map(one).collect(),
        other => Ok(vec![one(other)?]),
    }
}

struct Completion {
    head: Head,
}

impl Completion {
    fn logprobs(&self, likelihoods: &[Likelihood], before: usize) -> Value {
        if self.head.asked.answer.logprobs.is_none() {
            return Value::Null;
        }
        let text = |token: u32| token_text(self.head.tokenizer(), token).0;
        let mut at = before;
        let offsets: Vec<usize> = likelihoods
            .iter()
            .map(|likelihood| {
                let offset = at;
                at += text(likelihood.token.token).chars().count();
                offset
            })
            .collect();
        let top = |likelihood: &Likelihood| {
            let pairs = likelihood.top.iter().map(|top| (text(top.token), json!(top.logprob)));
            Value::Object(pairs.collect())
        };
        json!({
            "tokens": likelihoods.iter().map(|of| text(of.token.token)).collect::<Vec<_>>(),
            "token_logprobs": likelihoods.iter().map(|of| of.token.logprob).collect::<Vec<_>>(),
            "top_logprobs": likelihoods.iter().map(top).collect::<Vec<_>>(),
            "text_offset": offsets,
        })
    }
}

impl Format for Completion {
    fn progress(&mut self, progress: Progress, out: &mut VecDeque<Sent>) {
        let choice = json!({ "index": 0, "text": "", "logprobs": null, "finish_reason": null });
        self.head.progress(progress, choice, out);
    }

    fn piece(&mut self, piece: &Piece<'_>, out: &mut VecDeque<Sent>) {
        let likelihoods = piece.likelihood.map(std::slice::from_ref).unwrap_or_default();
        if piece.text.is_empty() && likelihoods.is_empty() && piece.finish.is_none() {
            return;
        }
        let before = piece.heard.text.chars().count() - piece.text.chars().count();
        let mut choice = json!({
            "index": piece.index,
            "text": piece.text,
            "logprobs": self.logprobs(likelihoods, before),
            "finish_reason": piece.finish.map(|finish| finish.name()),
        });
        if self.head.asked.return_tokens {
            choice["token_ids"] = json!(piece.token.as_slice());
        }
        let mut chunk = self.head.chunk(choice);
        if piece.finish.is_some() {
            chunk.extend(accounts(std::slice::from_ref(piece.heard), 1));
            chunk.remove("usage");
        }
        out.push_back(Sent::Data(chunk.into()));
    }

    fn end(&mut self, heard: &[Heard], out: &mut VecDeque<Sent>) {
        self.head.end(heard, out);
    }

    fn whole(&mut self, heard: &[Heard]) -> Value {
        let choices = heard.iter().enumerate().map(|(index, heard)| {
            let mut choice = json!({
                "index": index,
                "text": heard.text,
                "logprobs": self.logprobs(&heard.likelihoods, 0),
                "finish_reason": heard.finish.map(|finish| finish.name()),
            });
            if self.head.asked.return_tokens {
                choice["token_ids"] = json!(heard.tokens);
            }
            choice
        });
        self.head.whole(choices.collect(), heard)
    }
}
