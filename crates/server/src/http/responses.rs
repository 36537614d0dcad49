//! `/v1/responses` of OpenAI's API; nothing is stored. A request is translated to the chat API; the
//! response is that of the Responses API.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};

use kvant::Turn;
use kvant::generate::conversation::AnswerFormat;
use kvant::generate::decoding::Finish;
use kvant::generate::output_parser::{Call, OutputParser, Part};

use super::error::ApiError;
use super::fields::Fields;
use super::response::{Accumulated, ApiFormat, Chunk, Delta, Framing};
use super::unknown_blocks;
use super::unsupported;
use super::{Caller, Server, new_id};

pub(super) async fn responses(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Fields,
) -> Result<Response, ApiError> {
    let hosted = server.hosted(&fields).await?;
    unsupported::check_responses(&fields)?;
    let model = fields.get("model", "a name")?.unwrap_or_else(|| hosted.name.clone());
    let words = to_openai(&fields)?;
    let (request, Turn { tokens, answer: AnswerFormat { parser, .. }, .. }) =
        hosted.open(&words, &server.sampling_defaults(&hosted), &caller).await?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let (id, number) = (new_id("resp"), 0);
    let format = Responses { id, model, created, request: fields, parser, items: Vec::new(), number };
    hosted.answer(vec![tokens], &request, &caller, format).await
}

/// Translates a request to the chat API.
fn to_openai(fields: &Fields) -> Result<Fields, ApiError> {
    let mut into = Map::new();
    const SAME: [&str; 10] = [
        "max_output_tokens",
        "temperature",
        "top_p",
        "stream",
        "parallel_tool_calls",
        "seed",
        "kv_type",
        "top_k",
        "lora",
        "model",
    ];
    for name in SAME {
        if let Some(value) = fields.value(name) {
            into.insert(name.to_owned(), value.clone());
        }
    }
    let mut messages = Vec::new();
    if let Some(text) = fields.get::<String>("instructions", "a text")? {
        messages.push(json!({ "role": "system", "content": text }));
    }
    match fields.value("input") {
        None => return Err(ApiError::field("input", "a text or a list of items", "nothing")),
        Some(Value::String(text)) => messages.push(json!({ "role": "user", "content": text })),
        Some(Value::Array(items)) => {
            for given in items {
                messages.extend(item(given)?);
            }
        }
        Some(other) => return Err(ApiError::field("input", "a text or a list of items", other)),
    }
    into.insert("messages".to_owned(), messages.into());
    if let Some(tools) = fields.get::<Vec<Value>>("tools", "a list of tools")? {
        // Tools other than functions run at OpenAI; the model does not get tools it cannot call.
        let functions = tools.into_iter().filter(|tool| tool["type"] == "function");
        let tools = functions.map(|function| json!({ "type": "function", "function": function }));
        into.insert("tools".to_owned(), tools.collect());
    }
    if let Some(choice) = fields.value("tool_choice") {
        into.insert("tool_choice".to_owned(), choice.clone());
    }
    if let Some(effort) = fields.object("reasoning")?.value("effort") {
        into.insert("reasoning_effort".to_owned(), effort.clone());
    }
    let format = fields.object("text")?.object("format")?;
    if let Some(kind) = format.value("type") {
        let schema = format.value("schema");
        let format = json!({ "type": kind, "json_schema": { "schema": schema } });
        into.insert("response_format".to_owned(), format);
    }
    Ok(Fields::new(into))
}

/// Converts an item of the conversation to a message; earlier reasoning is omitted.
fn item(given: &Value) -> Result<Option<Value>, ApiError> {
    Ok(Some(match given["type"].as_str().unwrap_or("message") {
        "message" => json!({ "role": given["role"], "content": given["content"] }),
        "function_call" => {
            let function = json!({ "name": given["name"], "arguments": given["arguments"] });
            let call = json!({ "id": given["call_id"], "type": "function", "function": function });
            json!({ "role": "assistant", "content": null, "tool_calls": [call] })
        }
        "function_call_output" => {
            json!({ "role": "tool", "tool_call_id": given["call_id"], "content": given["output"] })
        }
        "reasoning" => return Ok(None),
        _ => unknown_blocks::item(given)?,
    }))
}

struct Responses {
    id: String,
    model: String,
    created: u64,
    request: Fields,
    parser: OutputParser,
    /// Output items so far; the last one may grow.
    items: Vec<OutputItem>,
    /// Number of events sent.
    number: u64,
}

/// Output item of a response.
struct OutputItem {
    id: String,
    content: Content,
}

enum Content {
    Text(String),
    Reasoning(String),
    Call(Call),
}

impl OutputItem {
    fn new(content: Content) -> Self {
        let prefix = match content {
            Content::Text(_) => "msg",
            Content::Reasoning(_) => "rs",
            Content::Call(_) => "fc",
        };
        Self { id: new_id(prefix), content }
    }

    /// Appends a part to the item. Returns whether the part is of the item's type.
    fn extend(&mut self, part: &Part) -> bool {
        let (so_far, more) = match (&mut self.content, part) {
            (Content::Text(text), Part::Text(more)) | (Content::Reasoning(text), Part::Reasoning(more)) => {
                (text, more)
            }
            (Content::Call(call), Part::Arguments(more)) => (&mut call.arguments, more),
            _ => return false,
        };
        *so_far += more;
        true
    }

    /// Returns the item in the API's format; `status` is `in_progress` while it may grow.
    fn value(&self, status: &str) -> Value {
        let id = &self.id;
        match &self.content {
            Content::Text(text) => {
                let content =
                    json!([{ "type": "output_text", "text": text, "annotations": [], "logprobs": [] }]);
                json!({ "type": "message", "id": id, "status": status, "role": "assistant", "content": content })
            }
            Content::Reasoning(text) => {
                let content = json!([{ "type": "reasoning_text", "text": text }]);
                json!({ "type": "reasoning", "id": id, "status": status, "summary": [], "content": content })
            }
            Content::Call(call) => json!({
                "type": "function_call",
                "id": id,
                "call_id": format!("call_{id}"),
                "status": status,
                "name": call.name,
                "arguments": call.arguments,
            }),
        }
    }
}

impl Responses {
    fn response(&self, status: &str, output: Vec<Value>, answer: Option<&Accumulated>) -> Value {
        let requested = |name: &str, otherwise: Value| self.request.value(name).cloned().unwrap_or(otherwise);
        let usage = answer.map(|answer| {
            let (read, n_generated) = (answer.times.prompt.total, answer.times.n_generated);
            json!({
                "input_tokens": read,
                "input_tokens_details": { "cached_tokens": answer.times.prompt.cached, "cache_write_tokens": 0 },
                "output_tokens": n_generated,
                "output_tokens_details": { "reasoning_tokens": answer.times.n_reasoning },
                "total_tokens": read + n_generated,
            })
        });
        let reason = (status == "incomplete").then(|| json!({ "reason": "max_output_tokens" }));
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details": reason,
            "instructions": requested("instructions", Value::Null),
            "max_output_tokens": requested("max_output_tokens", Value::Null),
            "model": self.model,
            "output": output,
            "parallel_tool_calls": requested("parallel_tool_calls", true.into()),
            "previous_response_id": null,
            "store": false,
            "temperature": requested("temperature", Value::Null),
            "text": requested("text", json!({ "format": { "type": "text" } })),
            "tool_choice": requested("tool_choice", "auto".into()),
            "tools": requested("tools", json!([])),
            "top_p": requested("top_p", Value::Null),
            "truncation": "disabled",
            "metadata": requested("metadata", json!({})),
            "usage": usage,
        })
    }

    fn send(&mut self, mut data: Value, out: &mut VecDeque<Chunk>) {
        data["sequence_number"] = self.number.into();
        self.number += 1;
        out.push_back(Chunk(data));
    }

    /// Starts an item.
    fn open(&mut self, content: Content, out: &mut VecDeque<Chunk>) {
        self.close(out);
        let (index, item) = (self.items.len(), OutputItem::new(content));
        let added = match &item.content {
            Content::Text(_) => json!({
                "type": "message", "id": item.id, "status": "in_progress", "role": "assistant", "content": [],
            }),
            _ => item.value("in_progress"),
        };
        let (id, is_text) = (item.id.clone(), matches!(item.content, Content::Text(_)));
        self.items.push(item);
        self.send(json!({ "type": "response.output_item.added", "output_index": index, "item": added }), out);
        if is_text {
            let part = json!({ "type": "output_text", "text": "", "annotations": [], "logprobs": [] });
            self.send(
                json!({ "type": "response.content_part.added", "item_id": id, "output_index": index, "content_index": 0, "part": part }),
                out,
            );
        }
    }

    /// Ends the last item.
    fn close(&mut self, out: &mut VecDeque<Chunk>) {
        let Some(item) = self.items.last() else { return };
        let (index, id, value) = (self.items.len() - 1, item.id.clone(), item.value("completed"));
        let done = |kind: &str| json!({ "type": kind, "item_id": id, "output_index": index });
        let mut ends = Vec::new();
        match &item.content {
            Content::Text(text) => {
                let mut event = done("response.output_text.done");
                (event["content_index"], event["text"], event["logprobs"]) =
                    (0.into(), text.as_str().into(), json!([]));
                let mut part = done("response.content_part.done");
                (part["content_index"], part["part"]) = (0.into(), value["content"][0].clone());
                ends.extend([event, part]);
            }
            Content::Reasoning(text) => {
                let mut event = done("response.reasoning_text.done");
                (event["content_index"], event["text"]) = (0.into(), text.as_str().into());
                ends.push(event);
            }
            Content::Call(call) => {
                let mut made = done("response.function_call_arguments.done");
                (made["name"], made["arguments"]) =
                    (call.name.as_str().into(), call.arguments.as_str().into());
                ends.push(made);
            }
        }
        ends.push(json!({ "type": "response.output_item.done", "output_index": index, "item": value }));
        ends.into_iter().for_each(|end| self.send(end, out));
    }

    /// Extends the last item, or starts another one.
    fn part(&mut self, part: Part, out: &mut VecDeque<Chunk>) {
        let goes_on = self.items.last_mut().is_some_and(|item| item.extend(&part));
        let (kind, more) = match part {
            Part::Call(name) => return self.open(Content::Call(Call::of(name)), out),
            Part::Text(text) => ("response.output_text.delta", text),
            Part::Reasoning(text) => ("response.reasoning_text.delta", text),
            Part::Arguments(text) => ("response.function_call_arguments.delta", text),
        };
        if !goes_on {
            let content =
                if kind == "response.reasoning_text.delta" { Content::Reasoning } else { Content::Text };
            self.open(content(more.clone()), out);
        }
        let index = self.items.len() - 1;
        let mut delta =
            json!({ "type": kind, "item_id": self.items[index].id, "output_index": index, "delta": more });
        if kind != "response.function_call_arguments.delta" {
            delta["content_index"] = 0.into();
        }
        if kind == "response.output_text.delta" {
            delta["logprobs"] = json!([]);
        }
        self.send(delta, out);
    }

    fn output(&self) -> Vec<Value> {
        self.items.iter().map(|item| item.value("completed")).collect()
    }

    fn push(&mut self, text: &str, is_last: bool, out: &mut VecDeque<Chunk>) {
        let parts = self.parser.push_text(text, is_last);
        parts.into_iter().for_each(|part| self.part(part, out));
        if is_last {
            self.close(out);
        }
    }
}

fn status(answer: &Accumulated) -> &'static str {
    if answer.finish == Some(Finish::Length) { "incomplete" } else { "completed" }
}

impl ApiFormat for Responses {
    const FRAMING: Framing = Framing::Named;

    fn begin(&mut self, out: &mut VecDeque<Chunk>) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress", Vec::new(), None);
            self.send(json!({ "type": kind, "response": response }), out);
        }
    }

    fn delta(&mut self, piece: &Delta<'_>, out: &mut VecDeque<Chunk>) {
        self.push(piece.text, piece.finish.is_some(), out);
    }

    fn end(&mut self, answers: &[Accumulated], out: &mut VecDeque<Chunk>) {
        let status = status(&answers[0]);
        let response = self.response(status, self.output(), answers.first());
        self.send(json!({ "type": format!("response.{status}"), "response": response }), out);
    }

    fn broken(&mut self, error: &ApiError, out: &mut VecDeque<Chunk>) {
        let mut data = error.object();
        data["type"] = "error".into();
        self.send(data, out);
    }

    fn whole(&mut self, answers: &[Accumulated]) -> Value {
        // The items have been collected from the events of the answer.
        self.response(status(&answers[0]), self.output(), answers.first())
    }
}
