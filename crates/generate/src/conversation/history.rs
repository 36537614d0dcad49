//! Converts messages of any client to the form that chat templates expect.

use serde_json::{Map, Value, json};

use super::InvalidConversation;
use crate::output_parser::tool_calls::Format;

/// Converts a message: the ids and the arguments of its calls get the form of the template.
pub(super) fn message(message: Value, format: &Format) -> Result<Value, InvalidConversation> {
    let Value::Object(mut message) = message else {
        return Err(InvalidConversation::new("messages", "a list of messages", message));
    };
    let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
    if role.is_empty() {
        return Err(InvalidConversation::new("messages", "a role in every message", Value::Object(message)));
    }
    // Newer clients' name of a system message.
    if role == "developer" {
        message.insert("role".to_owned(), "system".into());
    }
    if message.get("content").is_none_or(Value::is_null) {
        message.insert("content".to_owned(), "".into());
    }
    if let Some(id) = message.get_mut("tool_call_id") {
        *id = format.id(id);
    }
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
        for call in calls {
            if let Some(id) = call.get_mut("id") {
                *id = format.id(id);
            }
            if let Some(Value::Object(function)) = call.get_mut("function") {
                let given = function.remove("arguments").unwrap_or_default();
                function.insert("arguments".to_owned(), arguments(given, format.expects_text()));
            }
        }
    }
    Ok(message.into())
}

/// Returns the arguments of a past call as templates expect them: an object, or its text. Clients
/// send an empty string or null for no arguments. A truncated call is not JSON: its text becomes
/// the value of one argument.
fn arguments(given: Value, wants_text: bool) -> Value {
    let object = match given {
        Value::Null => Value::Object(Map::new()),
        Value::String(text) if text.trim().is_empty() => Value::Object(Map::new()),
        Value::String(text) => match serde_json::from_str::<Value>(&text) {
            Ok(value @ Value::Object(_)) => value,
            Ok(Value::Null) => Value::Object(Map::new()),
            _ => json!({ "arguments": text }),
        },
        other => other,
    };
    if wants_text { object.to_string().into() } else { object }
}

/// Splits messages so that each has one call, followed by its result.
pub(super) fn one_call_each(messages: Vec<Value>) -> Vec<Value> {
    let mut into: Vec<Value> = Vec::with_capacity(messages.len());
    let mut messages = messages.into_iter().peekable();
    while let Some(message) = messages.next() {
        let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
        if calls.len() < 2 {
            into.push(message);
            continue;
        }
        let mut results = Vec::new();
        while let Some(result) = messages.next_if(|message| message["role"] == "tool") {
            results.push(result);
        }
        for (i, call) in calls.into_iter().enumerate() {
            let own = results.iter().position(|result| result["tool_call_id"] == call["id"]);
            let mut single = message.clone();
            if i > 0 {
                single["content"] = "".into();
            }
            single["tool_calls"] = json!([call]);
            into.push(single);
            into.extend(own.map(|at| results.remove(at)));
        }
        into.extend(results);
    }
    into
}

/// Converts the arguments of calls to strings.
pub(super) fn with_text_arguments(messages: &[Value]) -> Vec<Value> {
    let mut messages = messages.to_vec();
    let calls = messages.iter_mut().filter_map(|message| message.get_mut("tool_calls")?.as_array_mut());
    for call in calls.flatten() {
        if let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments"))
            && !arguments.is_string()
        {
            *arguments = arguments.to_string().into();
        }
    }
    messages
}

/// Converts messages for a template without tool support: calls and results become text, and
/// `instructions` a system message or, for templates that reject those, a prefix of the first
/// message together with the client's system message.
pub(super) fn in_words(messages: &[Value], instructions: &str) -> [Vec<Value>; 2] {
    let mut converted: Vec<Value> = Vec::with_capacity(messages.len());
    for message in messages {
        let mut message = message.clone();
        let calls = message.as_object_mut().and_then(|fields| fields.remove("tool_calls"));
        for call in calls.iter().filter_map(Value::as_array).flatten() {
            let function = &call["function"];
            let call = json!({ "name": function["name"], "arguments": function["arguments"] });
            add(&mut message, &format!("<tool_call>\n{call}\n</tool_call>"));
        }
        if message["role"] == "tool" {
            let result =
                message["content"].as_str().map_or_else(|| message["content"].to_string(), str::to_owned);
            let result = format!("<tool_response>\n{result}\n</tool_response>");
            // Roles alternate: the results of several calls form one message.
            match converted.last_mut().filter(|last| last["role"] == "user") {
                Some(last) => add(last, &result),
                None => converted.push(json!({ "role": "user", "content": result })),
            }
        } else {
            converted.push(message);
        }
    }
    let has_system = converted.first().is_some_and(|message| message["role"] == "system");
    let mut as_system = converted.clone();
    if !has_system {
        as_system.insert(0, json!({ "role": "system", "content": "" }));
    }
    if let Some(system) = as_system.first_mut() {
        add(system, instructions);
    }
    let system = if has_system { converted.remove(0)["content"].as_str().map(str::to_owned) } else { None };
    let text = system.iter().map(String::as_str).chain([instructions]).collect::<Vec<_>>().join("\n\n");
    if let Some(first) = converted.first_mut() {
        match &mut first["content"] {
            Value::Array(parts) => parts.insert(0, json!({ "type": "text", "text": text })),
            content => *content = format!("{text}\n\n{}", content.as_str().unwrap_or_default()).into(),
        }
    }
    [as_system, converted]
}

/// Appends text to a message.
fn add(message: &mut Value, text: &str) {
    match &mut message["content"] {
        Value::Array(parts) => parts.push(json!({ "type": "text", "text": text })),
        content => {
            let existing = content.as_str().unwrap_or_default();
            let blank = if existing.is_empty() { "" } else { "\n\n" };
            *content = format!("{existing}{blank}{text}").into();
        }
    }
}
