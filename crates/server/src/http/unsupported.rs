//! Documented request fields that would change an answer and that Kvant does not support. A request
//! that sets one gets a 400 with the field's name; a request with the field's neutral value passes,
//! since SDKs send all their fields.

use serde_json::Value;

use super::error::ApiError;
use super::fields::{Fields, short};

/// Unsupported samplers with their neutral values.
pub(super) const SAMPLERS: [(&str, f64); 2] = [("tfs_z", 1.0), ("adaptive_target", -1.0)];

/// Field, its neutral value, and the expectation in the error.
pub(super) type Missing = (&'static str, Off, &'static str);

#[derive(Clone, Copy)]
pub(super) enum Off {
    /// `false`, an empty list, object or text, or `none`.
    Empty,
    True,
    UpTo(f64),
    Exactly(f64),
}

/// Fields of all APIs.
const OF_ALL: [Missing; 21] = [
    ("tfs_z", Off::Exactly(1.0), "not to be set: this sampler is not supported"),
    ("adaptive_target", Off::UpTo(0.0), "not to be set: this sampler is not supported"),
    ("min_keep", Off::UpTo(0.0), "0: samplers keep the most probable token"),
    ("best_of", Off::UpTo(1.0), "1: n gives several answers"),
    ("n_cmpl", Off::UpTo(1.0), "1: n of /v1/completions gives several answers"),
    ("use_beam_search", Off::Empty, "false: answers are sampled"),
    ("length_penalty", Off::Exactly(1.0), "1: there is no beam search"),
    ("functions", Off::Empty, "nothing: tools describes the functions"),
    ("function_call", Off::Empty, "nothing: tool_choice selects the function"),
    ("prompt_embeds", Off::Empty, "nothing: prompts are texts or token numbers"),
    ("allowed_token_ids", Off::Empty, "nothing: logit_bias or a grammar restricts the tokens"),
    ("logits_processors", Off::Empty, "nothing: logits processors are not supported"),
    ("prompt_logprobs", Off::Empty, "nothing: echo and logprobs of /v1/completions return those of a prompt"),
    ("return_tokens_as_token_ids", Off::Empty, "false: return_token_ids returns the numbers"),
    ("skip_special_tokens", Off::True, "true: control tokens are no text"),
    ("truncate_prompt_tokens", Off::UpTo(0.0), "nothing: no prompt is ever cut"),
    ("n_indent", Off::UpTo(0.0), "0: a grammar controls indentation"),
    ("t_max_predict_ms", Off::UpTo(0.0), "0: max_tokens bounds an answer"),
    ("cache_salt", Off::Empty, "nothing: API keys separate the caches"),
    ("mm_processor_kwargs", Off::Empty, "nothing: the model defines image preprocessing"),
    ("chat_template", Off::Empty, "nothing: the server's --chat-template sets it"),
];

/// Fields of OpenAI's chat API.
const OF_CHAT: [Missing; 4] = [
    ("audio", Off::Empty, "nothing: answers are text"),
    ("web_search_options", Off::Empty, "nothing: web search is not supported"),
    ("documents", Off::Empty, "nothing: a message may hold texts"),
    ("add_special_tokens", Off::Empty, "false: the template adds the special tokens"),
];

/// Fields of text completions.
pub(super) const OF_COMPLETIONS: [Missing; 1] =
    [("add_special_tokens", Off::True, "true: for none, send token numbers as the prompt")];

/// Fields of the Responses API, where nothing is stored and every request is answered at once.
const OF_RESPONSES: [Missing; 5] = [
    ("previous_response_id", Off::Empty, "nothing: no response is stored here, send the whole conversation"),
    ("conversation", Off::Empty, "nothing: no conversation is stored here, send all of it"),
    ("background", Off::Empty, "false: responses come at once"),
    ("context_management", Off::Empty, "nothing: no conversation is ever cut"),
    ("top_logprobs", Off::UpTo(0.0), "0: /v1/chat/completions returns logprobs"),
];

/// Fields of Anthropic's API.
pub(super) const OF_MESSAGES: [Missing; 3] = [
    ("container", Off::Empty, "nothing: there are no containers here"),
    ("mcp_servers", Off::Empty, "nothing: the client calls its servers itself"),
    ("context_management", Off::Empty, "nothing: the client edits the conversation itself"),
];

/// Fields of ollama's API.
pub(super) const OF_OLLAMA: [Missing; 3] = [
    ("suffix", Off::Empty, "nothing: /infill fills gaps"),
    ("template", Off::Empty, "nothing: the server's --chat-template sets it"),
    ("context", Off::Empty, "nothing: /api/chat takes the whole conversation"),
];

/// Samplers in the order of application, by llama.cpp's names.
const ORDER: [&str; 9] =
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"];

/// Rejects fields that no API supports.
pub(super) fn check(fields: &Fields) -> Result<(), ApiError> {
    let order = fields.get::<Vec<String>>("samplers", "a list of names")?;
    if let Some(order) = order.filter(|order| !order.is_empty() && *order != ORDER) {
        return Err(ApiError::field("samplers", &ORDER.join(", "), order.join(", ")));
    }
    check_all(fields, &OF_ALL)
}

/// Rejects fields of the chat API.
pub(super) fn check_chat(fields: &Fields) -> Result<(), ApiError> {
    let kinds: Vec<String> = fields.get("modalities", "a list of texts")?.unwrap_or_default();
    if let Some(kind) = kinds.iter().find(|kind| *kind != "text") {
        return Err(ApiError::field("modalities", "text: answers are text", kind));
    }
    check_all(fields, &OF_CHAT)
}

/// Rejects fields of the Responses API.
pub(super) fn check_responses(fields: &Fields) -> Result<(), ApiError> {
    if fields.value("truncation").is_some_and(|value| value == "auto") {
        return Err(ApiError::field("truncation", "disabled: nothing is ever cut", "auto"));
    }
    if let Some(prompt) = fields.value("prompt").filter(|prompt| prompt.is_object()) {
        let expected = "nothing: no prompt is stored here, send instructions and input";
        return Err(ApiError::field("prompt", expected, prompt));
    }
    // Encrypted content and outputs of OpenAI's tools never occur, so requests for them are
    // harmless; missing logprobs would not be.
    let include: Vec<String> = fields.get("include", "a list of texts")?.unwrap_or_default();
    if let Some(name) = include.iter().find(|name| name.ends_with("logprobs")) {
        return Err(ApiError::field("include", "no logprobs: /v1/chat/completions returns them", name));
    }
    check_all(fields, &OF_RESPONSES)
}

/// Rejects fields of a table that are set.
pub(super) fn check_all(fields: &Fields, missing: &[Missing]) -> Result<(), ApiError> {
    for &(name, off, expected) in missing {
        if let Some(value) = fields.value(name).filter(|value| !is_off(value, off)) {
            return Err(ApiError::field(name, expected, short(value)));
        }
    }
    Ok(())
}

/// Reports whether a value is neutral.
fn is_off(value: &Value, off: Off) -> bool {
    match (off, value) {
        (_, Value::Null) | (Off::Empty, Value::Bool(false)) | (Off::True, Value::Bool(true)) => true,
        (Off::Empty, Value::Array(items)) => items.is_empty(),
        (Off::Empty, Value::Object(fields)) => fields.is_empty(),
        (Off::Empty, Value::String(text)) => text.is_empty() || text == "none",
        (Off::UpTo(max), value) => value.as_f64().is_some_and(|number| number <= max),
        (Off::Exactly(neutral), value) => value.as_f64() == Some(neutral),
        _ => false,
    }
}
