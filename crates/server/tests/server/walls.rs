//! One stranger must not end, hold, read or starve the server.

use kvant_server::Options;
use serde_json::{Map, Value, json};

use crate::client::{options, start};

/// A schema of 5 KB which 660 levels of references and arrays come out of for each six of these.
fn deep_schema(n: usize) -> Value {
    let nested = |inner: Value| (0..110).fold(inner, |inner, _| json!({ "items": inner }));
    let refer = |i: usize| nested(json!({ "$ref": format!("#/$defs/{i}") }));
    let mut defs: Map<String, Value> = (0..n).map(|i| (i.to_string(), refer(i + 1))).collect();
    defs.insert(n.to_string(), json!({}));
    json!({ "$defs": defs, "$ref": "#/$defs/0" })
}

fn chain(n: usize, head: &str, defines: &str, end: &str) -> String {
    let rules = (0..n).map(|i| format!("r{i}{defines}\"a\"r{}{end}\n", i + 1));
    format!("{head}{defines} r0\n{}r{n}{defines} \"b\"\n", rules.collect::<String>())
}

#[test]
fn no_form_ends_the_server_whichever_way_it_comes() {
    let client = start(Options { n_ctx: Some(8192), ..options() });
    let messages = json!([{ "role": "user", "content": "hi" }]);
    let with = |more: Value| {
        let mut body =
            json!({ "messages": messages, "max_tokens": 2, "prompt": "hi", "input": "hi", "stream": false });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    for (n, is_refused) in [(6, false), (20, false), (100, true)] {
        let schema = deep_schema(n);
        let chain = |head, defines, end| chain(110 * n, head, defines, end);
        let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
        let own = json!({ "format": { "type": "json_schema", "name": "x", "schema": schema } });
        let ways = [
            ("/v1/chat/completions", json!({ "response_format": format })),
            ("/v1/chat/completions", json!({ "guided_json": schema })),
            ("/api/chat", json!({ "format": schema })),
            ("/v1/responses", json!({ "text": own })),
            ("/completion", json!({ "json_schema": schema })),
            ("/v1/completions", json!({ "guided_grammar": chain("start", ":", "") })),
            ("/v1/completions", json!({ "guided_grammar": format!("start: %json {schema}") })),
            ("/v1/completions", json!({ "grammar": chain("root", "::=", "|root") })),
        ];
        for (path, more) in ways {
            let (status, answer) = client.post(path, &with(more));
            let told = answer.to_string();
            let is_typed = status == 400 && told.contains("expected at most 10000, got ");
            assert!(if is_refused { is_typed } else { status == 200 }, "{path} {n}: {status} {told}");
        }
    }
    // Tools stand in the prompt too, which bounds them before.
    let tool = |n| json!({ "type": "function", "function": { "name": "f", "parameters": deep_schema(n) } });
    for choice in ["required", "auto"] {
        let (status, answer) =
            client.post("/v1/chat/completions", &with(json!({ "tools": [tool(6)], "tool_choice": choice })));
        assert_eq!(status, 200, "{answer}");
    }
    let own = json!({ "tools": [{ "name": "f", "input_schema": deep_schema(6) }], "tool_choice": { "type": "any" } });
    let (status, answer) = client.post("/v1/messages", &with(own));
    assert_eq!(status, 200, "{answer}");
    assert_eq!(client.get("/health").0, 200);
}
