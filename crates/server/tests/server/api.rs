//! Checks the tables of docs/api.md, which document the treatment of each field, against the
//! server.

use std::path::Path;

use serde_json::{Value, json};

use crate::client::*;

/// Row of a table.
struct Field {
    path: String,
    name: String,
    /// The field, and the fields it requires.
    example: Value,
    treatment: String,
}

/// Returns every row of the document. A heading may name two paths with the same fields; the last
/// one is requested.
fn documented() -> Vec<Field> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/api.md");
    let text = std::fs::read_to_string(file).unwrap();
    let (mut fields, mut path) = (Vec::new(), String::new());
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## `POST ") {
            path = heading.rsplit("`POST ").next().unwrap().trim_end_matches('`').to_owned();
        }
        let Some(rest) = line.strip_prefix("| `") else { continue };
        let (name, rest) = rest.split_once("` | `").unwrap();
        let (example, rest) = rest.split_once("` | ").unwrap();
        let example: Value = serde_json::from_str(example).unwrap_or_else(|error| panic!("{line}: {error}"));
        let example = if example.get(name).is_some() { example } else { json!({ name: example }) };
        let treatment = rest.split(" |").next().unwrap().to_owned();
        fields.push(Field { path: path.clone(), name: name.to_owned(), example, treatment });
    }
    fields
}

/// Returns a minimal request.
fn base(path: &str) -> Value {
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    match path {
        "/v1/chat/completions" => json!({ "messages": messages, "max_tokens": 1 }),
        "/v1/messages" => json!({ "messages": messages, "max_tokens": 1, "model": "any" }),
        "/v1/responses" => json!({ "input": "Hi", "max_output_tokens": 1 }),
        "/api/generate" => json!({ "prompt": "Hi", "stream": false, "options": { "num_predict": 1 } }),
        "/completion" => json!({ "prompt": "Hi", "n_predict": 1 }),
        _ => json!({ "prompt": "Hi", "max_tokens": 1 }),
    }
}

/// Returns the body with these fields; `options.name` is a field of `options`.
fn with_fields(body: &Value, fields: &Value) -> Value {
    let mut body = body.clone();
    for (name, value) in fields.as_object().unwrap() {
        match name.split_once('.') {
            Some((outer, inner)) => body[outer][inner] = value.clone(),
            None => body[name] = value.clone(),
        }
    }
    body
}

/// Returns a value of another type than the example.
fn wrong(example: &Value) -> Value {
    if example.is_object() || example.is_array() { json!(5) } else { json!({ "?": [] }) }
}

#[test]
fn every_documented_field_is_treated_as_documented() {
    let client = start(options());
    let fields = documented();
    assert!(fields.len() > 150, "{}", fields.len());
    let mut wrongs = Vec::new();
    for Field { path, name, example, treatment } in &fields {
        let own = name.rsplit('.').next().unwrap();
        let mut expect = |body: Value, is_refused: bool| {
            let (status, answer) = client.post(path, &body);
            let names_it = answer.to_string().contains(own);
            let is_right = if is_refused { status == 400 && names_it } else { status == 200 };
            if !is_right {
                wrongs.push(format!("{path} {name} ({treatment}): {body}: {status} {answer}"));
            }
        };
        let body = with_fields(&base(path), example);
        let of_another_kind = with_fields(&body, &json!({ name: wrong(&example[name]) }));
        match treatment.as_str() {
            "taken" => {
                expect(body, false);
                expect(of_another_kind, true);
            }
            "refused" => expect(body, true),
            "ignored" => {
                expect(body, false);
                expect(of_another_kind, false);
            }
            other => panic!("{name}: {other}"),
        }
    }
    assert!(wrongs.is_empty(), "{}", wrongs.join("\n"));
}
