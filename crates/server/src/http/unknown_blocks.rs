//! Content blocks and items of unknown types: a conversation that contains one remains usable.

use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::short;

/// Types whose content matters to the answer and that are supported nowhere, or in messages alone.
const UNREADABLE: [&str; 6] = ["input_audio", "audio", "audio_url", "video", "video_url", "input_video"];
/// Maximum nesting that is read.
const MAX_LEVELS: usize = 4;

/// Returns a block as text: its content, or its type in brackets.
///
/// # Errors
/// Audio, video, and files without text.
pub(super) fn as_text(block: &Value) -> Result<String, ApiError> {
    let kind = block["type"].as_str().unwrap_or("none");
    let expected = "text, images and audio (this server reads nothing else)";
    if UNREADABLE.contains(&kind) {
        return Err(ApiError::field("content", expected, kind));
    }
    let mut texts = Vec::new();
    gather(block, MAX_LEVELS, &mut texts);
    match kind {
        _ if !texts.is_empty() => Ok(texts.join("\n")),
        "document" | "file" | "input_file" => Err(ApiError::field("content", expected, kind)),
        kind => Ok(format!("[{}]", short(&kind.into()).trim_matches('"'))),
    }
}

/// Collects the texts of a block in document order.
fn gather<'b>(block: &'b Value, levels: usize, texts: &mut Vec<&'b str>) {
    match block {
        Value::String(text) => texts.push(text),
        Value::Array(blocks) if levels > 0 => {
            blocks.iter().for_each(|block| gather(block, levels - 1, texts))
        }
        Value::Object(fields) if levels > 0 => {
            for name in ["title", "text", "refusal", "content"] {
                fields.get(name).into_iter().for_each(|value| gather(value, levels - 1, texts));
            }
            let source = fields.get("source").filter(|source| source["type"] == "text");
            texts.extend(source.and_then(|source| source["data"].as_str()));
        }
        _ => {}
    }
}

/// Converts an unknown item of the Responses API to a message: calls and their results by their
/// common fields.
///
/// # Errors
/// References to stored items, and as [`as_text`].
pub(super) fn item(given: &Value) -> Result<Value, ApiError> {
    let kind = given["type"].as_str().unwrap_or_default();
    let first = |names: [&str; 3]| names.into_iter().map(|name| &given[name]).find(|value| !value.is_null());
    let id = first(["call_id", "id", "item_id"]).cloned().unwrap_or_default();
    if kind == "item_reference" {
        return Err(ApiError::field("input", "whole items (none are stored here)", kind));
    }
    if kind.ends_with("_call_output") {
        let output = first(["output", "result", "content"]);
        return Ok(json!({ "role": "tool", "tool_call_id": id, "content": text_of(output) }));
    }
    if let Some(tool) = kind.strip_suffix("_call") {
        let name = given["name"].as_str().unwrap_or(tool);
        let arguments = match first(["arguments", "input", "action"]) {
            Some(object @ Value::Object(_)) => object.clone(),
            Some(other) => json!({ "input": other }),
            None => json!({}),
        };
        let function = json!({ "name": name, "arguments": arguments });
        let call = json!({ "id": id, "type": "function", "function": function });
        return Ok(json!({ "role": "assistant", "content": null, "tool_calls": [call] }));
    }
    Ok(json!({ "role": given["role"].as_str().unwrap_or("user"), "content": as_text(given)? }))
}

fn text_of(output: Option<&Value>) -> String {
    output
        .map_or_else(String::new, |output| output.as_str().map_or_else(|| output.to_string(), str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_blocks_are_read_as_far_as_they_contain_text() {
        for (block, want) in [
            (json!({ "type": "refusal", "refusal": "No." }), "No."),
            (
                json!({ "type": "search_result", "title": "A", "source": "u", "content": [{ "type": "text", "text": "B" }] }),
                "A\nB",
            ),
            (json!({ "type": "document", "title": "A", "source": { "type": "text", "data": "B" } }), "A\nB"),
            (json!({ "type": "tool_reference", "tool_name": "x" }), "[tool_reference]"),
            (json!({}), "[none]"),
        ] {
            assert_eq!(as_text(&block).unwrap(), want, "{block}");
        }
        for kind in ["input_audio", "video_url", "file"] {
            assert!(
                as_text(&json!({ "type": kind, "file": { "data": "x" } }))
                    .unwrap_err()
                    .message()
                    .contains(kind)
            );
        }
    }

    #[test]
    fn a_call_of_any_kind_is_a_call() {
        let call =
            item(&json!({ "type": "local_shell_call", "call_id": "1", "action": { "command": ["ls"] } }))
                .unwrap();
        let function = &call["tool_calls"][0]["function"];
        assert_eq!(
            (&function["name"], &function["arguments"]),
            (&json!("local_shell"), &json!({ "command": ["ls"] }))
        );
        let custom =
            item(&json!({ "type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "x" }))
                .unwrap();
        assert_eq!(
            custom["tool_calls"][0]["function"],
            json!({ "name": "patch", "arguments": { "input": "x" } })
        );
        let output =
            item(&json!({ "type": "custom_tool_call_output", "call_id": "2", "output": "done" })).unwrap();
        assert_eq!(output, json!({ "role": "tool", "tool_call_id": "2", "content": "done" }));
        assert!(item(&json!({ "type": "item_reference", "id": "msg_1" })).is_err());
    }
}
