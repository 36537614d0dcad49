//! Documented fields that change an answer and that Kvant does not have. A request that sets one gets a 400 with the field's name; one that
//! sends the value that switches it off passes, as SDKs send all of their fields.

use serde_json::Value;

use super::error::ApiError;
use super::fields::Fields;

/// Samplers that are missing, with the values that switch them off.
pub(super) const SAMPLERS: [(&str, f64); 2] = [("tfs_z", 1.0), ("adaptive_target", -1.0)];

/// Others, with what to do instead.
const OTHERS: [(&str, &str); 4] = [
    ("functions", "nothing: tools describes what may be called"),
    ("function_call", "nothing: tool_choice says what is to be called"),
    ("use_beam_search", "false: answers are sampled"),
    ("prompt_embeds", "nothing: prompts are texts or token numbers"),
];

/// Of the Responses API alone, where nothing is stored and everything is answered at once.
const OF_RESPONSES: [(&str, &str); 3] = [
    ("previous_response_id", "nothing: no response is stored here, send the whole conversation"),
    ("conversation", "nothing: no conversation is stored here, send all of it"),
    ("background", "false: responses come at once"),
];

/// Of Anthropic's API alone.
const OF_MESSAGES: [(&str, &str); 3] = [
    ("container", "nothing: there are no containers here"),
    ("mcp_servers", "nothing: the client calls its servers itself"),
    ("context_management", "nothing: the client edits the conversation itself"),
];

/// Refuses samplers and other fields of all APIs.
pub(super) fn check(fields: &Fields) -> Result<(), ApiError> {
    for (name, off) in SAMPLERS {
        // Negative and zero are off where the one is.
        let is_on = |value: &f64| if off > 0.0 { *value != off } else { *value > 0.0 };
        if let Some(value) = fields.get(name, "a number")?.filter(is_on) {
            return Err(ApiError::field(name, "not to be set: this way of sampling is not supported", value));
        }
    }
    if let Some(n) = fields.get::<usize>("best_of", "a whole number")?.filter(|&n| n > 1) {
        return Err(ApiError::field("best_of", "1: n gives several answers", n));
    }
    check_all(fields, &OTHERS)
}

/// Refuses fields of the Responses API.
pub(super) fn check_responses(fields: &Fields) -> Result<(), ApiError> {
    if fields.value("truncation").is_some_and(|value| value == "auto") {
        return Err(ApiError::field("truncation", "disabled: nothing is ever cut", "auto"));
    }
    if let Some(prompt) = fields.value("prompt").filter(|prompt| prompt.is_object()) {
        return Err(ApiError::field(
            "prompt",
            "nothing: no prompt is stored here, send instructions and input",
            prompt,
        ));
    }
    check_all(fields, &OF_RESPONSES)
}

/// Refuses fields of Anthropic's API.
pub(super) fn check_messages(fields: &Fields) -> Result<(), ApiError> {
    check_all(fields, &OF_MESSAGES)
}

fn check_all(fields: &Fields, names: &[(&'static str, &str)]) -> Result<(), ApiError> {
    for &(name, expected) in names {
        if let Some(value) = fields.value(name).filter(|value| !is_off(value)) {
            return Err(ApiError::field(name, expected, value));
        }
    }
    Ok(())
}

/// Whether a value says that nothing is asked for.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty() || text == "none",
        _ => false,
    }
}
