//! `/v1/completions`: a text to go on with.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use kvant::Special;
use serde_json::{Value, json};

use super::asked::Asked;
use super::error::ApiError;
use super::fields::Fields;
use super::head::{Head, accounts};
use super::reply::{Format, Heard, Piece, Sent};
use super::{Caller, Server};
use crate::answer::{Likelihood, token_text};
use crate::worker::Progress;

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
        // Counted only where it is told: an answer may be long.
        let before = match piece.likelihood {
            Some(_) => piece.heard.text.chars().count() - piece.text.chars().count(),
            None => 0,
        };
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
        out.push_back(Sent(chunk.into()));
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
