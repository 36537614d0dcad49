//! Requirements of agents: tool calls that match their schemas, continued conversations, and named
//! errors.

use kvant_server::Options;
use std::io::{Read as _, Write as _};

use serde_json::{Value, json};

use crate::client::{Client, options, start};
use crate::http::{QUESTION, chat, long, with};

fn tools() -> Value {
    json!([
        { "type": "function", "function": { "name": "weather", "parameters": {
            "type": "object",
            "properties": { "city": { "type": "string", "maxLength": 6 }, "days": { "type": "integer", "minimum": 1, "maximum": 9 } },
            "required": ["city", "days"],
            "additionalProperties": false,
        } } },
        { "type": "function", "function": { "name": "clock", "parameters": { "type": "object", "properties": {}, "additionalProperties": false } } },
    ])
}

#[test]
fn a_required_call_matches_the_schema_of_its_tool() {
    let client = start(options());
    let is_sound = |call: &Value| {
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(call["id"].as_str().unwrap().starts_with("call"), "{call}");
        match call["function"]["name"].as_str().unwrap() {
            "weather" => {
                assert!(arguments["city"].as_str().unwrap().chars().count() <= 6, "{call}");
                assert!((1..=9).contains(&arguments["days"].as_i64().unwrap()), "{call}");
            }
            "clock" => assert_eq!(arguments, json!({})),
            other => panic!("{other}"),
        }
    };
    for seed in 0..4 {
        let forced = json!({ "tools": tools(), "tool_choice": "required", "parallel_tool_calls": false });
        let hot = json!({ "temperature": 1.5, "seed": seed, "max_tokens": 150 });
        let body = with(with(chat("How is it?"), forced), hot);
        let (status, answer) = client.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        assert_eq!(choice["message"]["content"], Value::Null);
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1);
        is_sound(&calls[0]);
        // A stream contains the same call, with its arguments in chunks.
        let chunks = client.stream("/v1/chat/completions", &with(body, json!({ "stream": true })));
        let deltas: Vec<&Value> = chunks
            .iter()
            .filter_map(|c| c["choices"][0]["delta"]["tool_calls"].as_array())
            .flatten()
            .collect();
        assert_eq!(deltas[0]["function"]["name"], calls[0]["function"]["name"]);
        assert!(
            deltas
                .iter()
                .enumerate()
                .all(|(i, piece)| piece["index"] == 0 && piece["id"].is_string() == (i == 0))
        );
        let pieces = deltas.iter().map(|piece| piece["function"]["arguments"].as_str().unwrap());
        assert_eq!(pieces.collect::<String>(), calls[0]["function"]["arguments"].as_str().unwrap());
        assert!(deltas.len() > 2 || calls[0]["function"]["name"] == "clock", "{chunks:?}");
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    }
    // A required call is a single one, even if the model would continue; several must be requested.
    let more = json!({ "tools": tools(), "ignore_eos": true, "max_tokens": 150 });
    let body = with(chat("How is it?"), more);
    let clock = json!({ "type": "function", "function": { "name": "clock" } });
    for choice in [json!("required"), clock.clone()] {
        let (_, answer) =
            client.post("/v1/chat/completions", &with(body.clone(), json!({ "tool_choice": choice })));
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["tool_calls"].as_array().map(Vec::len), Some(1), "{answer}");
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    }
    let body = with(body, json!({ "tool_choice": clock }));
    let (_, answer) =
        client.post("/v1/chat/completions", &with(body, json!({ "parallel_tool_calls": true })));
    let calls = answer["choices"][0]["message"]["tool_calls"].as_array().unwrap();
    assert!(calls.len() > 1 && calls.iter().all(|call| call["function"]["name"] == "clock"), "{answer}");
}

#[test]
fn the_prompt_contains_tools_and_earlier_calls() {
    let client = start(options());
    let conversation = json!({
        "messages": [
            { "role": "user", "content": "How is it?" },
            { "role": "assistant", "content": null, "tool_calls": [
                { "id": "1", "type": "function", "function": { "name": "weather", "arguments": "{\"city\": \"Oslo\", \"days\": 2}" } },
            ] },
            { "role": "tool", "tool_call_id": "1", "content": "Sun." },
        ],
        "tools": tools(),
    });
    let (status, text) = client.post("/apply-template", &conversation);
    assert_eq!(status, 200, "{text}");
    let text = text["prompt"].as_str().unwrap();
    assert!(text.contains("\"weather\"") && text.contains("Sun."), "{text}");
    let (_, text) =
        client.post("/apply-template", &with(conversation.clone(), json!({ "tool_choice": "none" })));
    assert!(!text["prompt"].as_str().unwrap().contains("\"clock\""));
    let (status, answer) =
        client.post("/v1/chat/completions", &with(conversation, json!({ "max_tokens": 8 })));
    assert_eq!(status, 200, "{answer}");
    for (fields, words) in [
        (json!({ "tool_choice": "required" }), "tools"),
        (json!({ "tools": tools(), "tool_choice": "sometimes" }), "tool_choice"),
        (json!({ "tools": tools(), "tool_choice": { "function": { "name": "x" } } }), "tool_choice"),
        (json!({ "tools": [{ "type": "function" }] }), "tools"),
    ] {
        let (status, error) = client.post("/v1/chat/completions", &with(chat("x"), fields.clone()));
        let message = error["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains(words), "{fields}: {error}");
    }
}

#[test]
fn an_unsupported_tool_schema_leaves_the_others_constrained() {
    let client = start(options());
    let odd = json!({ "type": "object", "properties": { "x": { "type": "array", "uniqueItems": true } } });
    let mut all = tools();
    all.as_array_mut()
        .unwrap()
        .push(json!({ "type": "function", "function": { "name": "odd", "parameters": odd } }));
    let body = with(chat("How is it?"), json!({ "tools": all, "max_tokens": 4 }));
    let (status, answer) = client.post("/v1/chat/completions", &body);
    let warning = "the arguments of the tool 'odd' are not constrained to all of their schema: \
                   the schema cannot be enforced: uniqueItems at /properties/x";
    assert!(status == 200 && answer["warnings"] == json!([warning]), "{answer}");
    let chunks = client.stream("/v1/chat/completions", &with(body.clone(), json!({ "stream": true })));
    assert_eq!(chunks[0]["warnings"], answer["warnings"]);
    let (status, error) =
        client.post("/v1/chat/completions", &with(body, json!({ "tool_choice": "required" })));
    let message = error["error"]["message"].as_str().unwrap();
    let words = "the arguments of the tool 'odd' cannot be constrained to their schema: \
                 the schema cannot be enforced: uniqueItems at /properties/x";
    assert!(status == 400 && message == words, "{error}");
    // An unsupported `format` is a note to the client.
    let schema = json!({ "type": "object", "properties": { "c": { "type": "string", "format": "color" } } });
    let format = json!({ "type": "json_schema", "json_schema": { "schema": schema } });
    let body = with(chat("x"), json!({ "response_format": format, "max_tokens": 2 }));
    let (status, answer) = client.post("/v1/chat/completions", &body);
    let warning = "the answer is not constrained to format \"color\" at /properties/c";
    assert!(status == 200 && answer["warnings"] == json!([warning]), "{answer}");
}

#[test]
fn a_required_call_precedes_a_format_else_either_is_valid() {
    let client = start(options());
    let format = json!({ "type": "json_schema", "json_schema": { "schema": { "type": "object", "properties": { "ok": { "type": "boolean" } }, "required": ["ok"], "additionalProperties": false } } });
    let body = with(
        chat("How is it?"),
        json!({ "tools": tools(), "response_format": format, "max_tokens": 150, "parallel_tool_calls": false }),
    );
    let (_, answer) =
        client.post("/v1/chat/completions", &with(body.clone(), json!({ "tool_choice": "required" })));
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{answer}");
    for seed in 0..4 {
        let hot = json!({ "temperature": 1.5, "seed": seed });
        let (status, answer) = client.post("/v1/chat/completions", &with(body.clone(), hot));
        let message = &answer["choices"][0]["message"];
        let value: Value = serde_json::from_str(message["content"].as_str().unwrap_or("null")).unwrap();
        assert!(status == 200 && (value["ok"].is_boolean() || message["tool_calls"].is_array()), "{answer}");
    }
}

#[test]
fn errors_have_the_codes_that_clients_check() {
    let client = start(Options { api_keys: vec!["secret".to_owned()], ..options() });
    let answer = client.raw("GET /slots HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    assert!(answer.contains("\"code\":\"invalid_api_key\""), "{answer}");
    let client = start(Options { n_ctx: Some(64), ..options() });
    let (_, error) = client.get("/v1/models/other");
    assert_eq!(error["error"]["code"], "model_not_found", "{error}");
    let (_, error) = client.post("/v1/chat/completions", &chat(&long(400)));
    assert_eq!(error["error"]["code"], "context_length_exceeded");
}

#[test]
fn integral_floats_are_accepted_and_event_names_come_first() {
    let client = start(options());
    let body = with(chat("x"), json!({ "max_tokens": 2.0, "top_k": 40.0, "seed": 1.0 }));
    let (status, answer) = client.post("/v1/chat/completions", &body);
    assert_eq!((status, &answer["usage"]["completion_tokens"]), (200, &json!(2)), "{answer}");
    assert_eq!(client.post("/v1/chat/completions", &with(chat("x"), json!({ "max_tokens": 2.5 }))).0, 400);
    let request =
        json!({ "max_tokens": 2, "stream": true, "messages": [{ "role": "user", "content": "x" }] });
    let (_, events) = client.post_text("/v1/messages", &request.to_string());
    let (name, data) = (events.find("event: message_start").unwrap(), events.find("data: ").unwrap());
    assert!(name < data, "{events}");
}

#[test]
fn the_assistants_last_message_is_continued() {
    let client = start(options());
    let messages = json!([{ "role": "user", "content": QUESTION }, { "role": "assistant", "content": "The capital of France is" }]);
    let request = json!({ "messages": messages, "temperature": 0, "max_tokens": 8 });
    let (_, text) = client.post("/apply-template", &request);
    assert!(text["prompt"].as_str().unwrap().ends_with("The capital of France is"), "{text}");
    for path in ["/v1/chat/completions", "/v1/messages"] {
        let (status, answer) = client.post(path, &request);
        assert_eq!(status, 200, "{answer}");
        assert!(
            answer.to_string().contains("Paris") && !answer.to_string().contains("France"),
            "{path}: {answer}"
        );
    }
}

#[test]
fn ollama_lists_running_models_and_rejects_changes() {
    let client = start(options());
    let (_, tags) = client.get("/api/tags");
    let digest = tags["models"][0]["digest"].as_str().unwrap();
    assert!(digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()), "{tags}");
    let (_, running) = client.get("/api/ps");
    assert_eq!(running["models"][0]["digest"], digest, "{running}");
    let (status, error) = client.post("/api/pull", &json!({ "model": "other" }));
    assert!(status == 501 && error["error"].is_string(), "{error}");
    let (_, shown) = client.post("/api/show", &json!({ "model": "pocket" }));
    let can = shown["capabilities"].as_array().unwrap();
    assert!(can.contains(&json!("completion")) && !can.contains(&json!("vision")), "{shown}");
}

#[test]
fn fields_that_change_an_answer_are_applied_or_rejected() {
    let client = start(options());
    let complete = |more: Value| client.post("/v1/chat/completions", &with(chat(QUESTION), more));
    let text = |more: Value| {
        let (status, answer) = complete(more);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned()
    };
    let usual = text(json!({}));
    assert!(usual.contains("Paris"), "{usual}");
    assert!(!text(json!({ "bad_words": ["Paris"], "max_tokens": 12 })).contains("Paris"));
    assert!(text(json!({ "stop": ["Paris"], "include_stop_str_in_output": true })).ends_with("Paris"));
    let (_, tokens) = client.post("/tokenize", &json!({ "content": usual }));
    let first = tokens["tokens"][0].as_u64().unwrap();
    assert_eq!(text(json!({ "stop_token_ids": [first] })), "");
    let (_, long) = complete(json!({ "min_tokens": 30, "max_tokens": 40 }));
    assert!(long["usage"]["completion_tokens"].as_u64().unwrap() >= 30, "{long}");
    let value: Value =
        serde_json::from_str(&text(json!({ "structured_outputs": { "choice": ["12", "34"] } }))).unwrap();
    assert!([json!(12), json!(34)].contains(&value), "{value}");
    let constrained = json!({ "structured_outputs": { "regex": "[0-9]{3}" } });
    assert!(text(constrained).bytes().all(|byte| byte.is_ascii_digit()));
    assert_ne!(text(json!({ "repetition_penalty": 1.9, "max_tokens": 40 })), "");
    for (more, name) in [
        (json!({ "functions": [{ "name": "f" }] }), "functions"),
        (json!({ "best_of": 2 }), "best_of"),
        (json!({ "use_beam_search": true }), "use_beam_search"),
        (json!({ "adaptive_target": 0.5 }), "adaptive_target"),
        (json!({ "structured_outputs": { "structural_tag": {} } }), "structural_tag"),
    ] {
        let (status, error) = complete(more);
        assert!(status == 400 && error["error"]["message"].as_str().unwrap().contains(name), "{error}");
    }
    for (more, is_accepted) in [
        (json!({ "functions": [], "best_of": 1, "use_beam_search": false, "repeat_last_n": -1 }), true),
        (json!({ "functions": null, "function_call": "none" }), true),
    ] {
        assert_eq!(complete(more).0 == 200, is_accepted);
    }
    for (path, body, name) in [
        ("/v1/responses", json!({ "input": "x", "background": true }), "background"),
        ("/v1/responses", json!({ "input": "x", "conversation": "conv_1" }), "conversation"),
        ("/v1/responses", json!({ "input": "x", "truncation": "auto" }), "truncation"),
        ("/v1/messages", with(chat("x"), json!({ "max_tokens": 1, "mcp_servers": [{}] })), "mcp_servers"),
        ("/api/chat", with(chat("x"), json!({ "options": { "tfs_z": 0.9 } })), "tfs_z"),
    ] {
        let (status, error) = client.post(path, &body);
        assert!(status == 400 && error.to_string().contains(name), "{path}: {error}");
    }
    let schema = json!({ "type": "object", "properties": { "n": { "type": "integer", "maximum": 9 } }, "required": ["n"], "additionalProperties": false });
    let format = json!({ "max_tokens": 60, "output_config": { "format": { "type": "json_schema", "schema": schema } } });
    let (status, answer) = client.post("/v1/messages", &with(chat("x"), format));
    let value: Value = serde_json::from_str(answer["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(status == 200 && value["n"].is_i64(), "{answer}");
}

/// Returns the status of a response to a body with this encoding.
fn encoded(client: &Client, encoding: &str, body: &[u8]) -> (u16, String) {
    let mut stream = client.connect();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-encoding: {encoding}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    (answer[9..12].parse().unwrap(), answer)
}

#[test]
fn a_gzip_body_counts_with_its_decompressed_size() {
    let client = start(options());
    let packed = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let body = with(chat("How is it?"), json!({ "max_tokens": 1 })).to_string();
    assert_eq!(encoded(&client, "gzip", &packed(body.as_bytes())).0, 200);
    assert_eq!(encoded(&client, "identity", body.as_bytes()).0, 200);
    let (status, answer) = encoded(&client, "br", body.as_bytes());
    assert!(status == 415 && answer.contains("expected identity or gzip, got br"), "{answer}");
    let (status, answer) = encoded(&client, "gzip", body.as_bytes());
    assert!(status == 400 && answer.contains("the body is no gzip"), "{answer}");
    let (status, answer) = encoded(&client, "gzip", &packed(&vec![b' '; 40 << 20]));
    assert!(status == 413 && answer.contains("has 33554433 bytes, at most 33554432 are read"), "{answer}");
}
