//! A malicious client must not crash, occupy, read or starve the server.

use std::time::{Duration, Instant};

use kvant_server::Options;
use serde_json::{Map, Value, json};

use crate::client::{options, start};

/// Returns a schema of 5 KB that yields 660 levels of references and arrays per six of these.
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
fn no_constraint_of_any_api_crashes_the_server() {
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
            let message = answer.to_string();
            let is_typed = status == 400 && message.contains("expected at most 10000, got ");
            assert!(if is_refused { is_typed } else { status == 200 }, "{path} {n}: {status} {message}");
        }
    }
    // Tools are part of the prompt too, which limits them first.
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

/// Returns a grammar of `n` alternatives with a common beginning, after `beginning`: with thousands
/// of them a mask takes minutes.
pub fn ambiguous(n: usize, beginning: &str) -> String {
    let same = vec!["\"a\" s \"b\""; n].join(" | ");
    format!("start: {beginning} s\ns: {same} | \"c\"\n")
}

#[test]
fn the_masks_of_one_owner_delay_no_other() {
    let keys = ["alice", "bob"].map(str::to_owned).to_vec();
    let client = start(Options { api_keys: keys, ..options() });
    let (alice, bob) = (client.with_key("alice"), client.with_key("bob"));
    let plain = json!({ "prompt": "hi", "max_tokens": 8, "ignore_eos": true });
    let formed = json!({ "prompt": "hi", "max_tokens": 30, "guided_regex": "[a-z ]{20}" });
    for beginning in ["", "\"xxxxxxxxxxxxxxxxxxxxxxx\"", "/[a-z]{30}/"] {
        // Masks of about half a second each, and some beyond the time limit.
        let sent: Vec<_> = [1000, 1000, 1900, 1900, 1900, 5000]
            .map(|n| {
                let grammar = ambiguous(n, beginning);
                bob.send(
                    "/v1/completions",
                    &json!({ "prompt": "hi", "max_tokens": 200, "guided_grammar": grammar }),
                )
            })
            .into();
        let began = Instant::now();
        for body in [&plain, &formed, &plain, &formed] {
            let (status, answer) = alice.post("/v1/completions", body);
            assert_eq!(status, 200, "{answer}");
        }
        // Some of bob's masks would take longer by themselves.
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        drop(sent);
    }
    // The work ends with its client.
    alice.wait_for("/slots", |slots| {
        slots.as_array().unwrap().iter().all(|slot| slot["is_processing"] == false)
    });
    let (status, answer) = bob.post(
        "/v1/completions",
        &json!({ "prompt": "hi", "max_tokens": 200, "guided_grammar": ambiguous(1900, "\"xx\"") }),
    );
    let expected = "the constraint is too ambiguous: expected at most 2 s per token mask, got more";
    assert!(status == 400 && answer.to_string().contains(expected), "{status} {answer}");
}

#[test]
fn an_unsatisfiable_constraint_is_refused_before_the_answer() {
    let client = start(options());
    for (form, expected) in [
        (json!({ "guided_regex": "[^\\s\\S]" }), "no text matches the constraint"),
        (json!({ "guided_json": { "$ref": "#" } }), "no text matches the constraint"),
        (json!({ "guided_grammar": "start: a\na: b\nb: a" }), "no text matches the constraint"),
    ] {
        let mut body = json!({ "prompt": "hi", "max_tokens": 8, "stream": true });
        body.as_object_mut().unwrap().extend(form.as_object().unwrap().clone());
        let (status, answer) = client.post("/v1/completions", &body);
        assert!(status == 400 && answer["error"]["message"] == expected, "{status} {answer}");
    }
    // A constraint that fails only after the answer has started.
    let many = "start: ".to_owned() + &vec!["/[a-z]+/ s"; 3000].join(" | ") + "\ns: \"x\"\n";
    let (status, answer) =
        client.post("/v1/completions", &json!({ "prompt": "hi", "max_tokens": 8, "guided_grammar": many }));
    let expected = "the constraint is too ambiguous: expected at most 2000 parser items, got more";
    assert!(status == 400 && answer.to_string().contains(expected), "{status} {answer}");
}

#[test]
fn pages_of_other_sites_cannot_use_a_server_without_keys() {
    let client = start(options());
    let post = |path: &str, heads: &str, body: &str| {
        let n = body.len();
        let head =
            format!("POST {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {n}\r\n{heads}\r\n{body}");
        client.raw(&head)
    };
    let body = r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":1}"#;
    let chat = |heads: &str| post("/v1/chat/completions", heads, body);
    let local = "Host: 127.0.0.1:8080\r\n";
    for kind in ["", "text/plain", "application/x-www-form-urlencoded", "application/json"] {
        let kind = if kind.is_empty() { String::new() } else { format!("Content-Type: {kind}\r\n") };
        // As curl sends it.
        let answer = chat(&format!("{local}{kind}"));
        assert!(answer.starts_with("HTTP/1.1 200"), "{kind}: {answer}");
        let foreign = format!("{local}{kind}Origin: https://evil.example\r\nSec-Fetch-Site: cross-site\r\n");
        let answer = chat(&foreign);
        assert!(answer.starts_with("HTTP/1.1 403"), "{kind}: {answer}");
        assert!(
            answer
                .contains("Origin: expected the server's own or an allowed origin, got https://evil.example"),
            "{answer}"
        );
    }
    for path in ["/", "/slots", "/metrics", "/v1/models", "/props", "/health"] {
        let get = |host: &str| {
            client.raw(&format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
        };
        assert!(get("localhost:8080").starts_with("HTTP/1.1 200"), "{path}");
        let answer = get("evil.example");
        let expected = "Host: expected localhost, an IP address or an allowed host, got evil.example";
        assert!(answer.starts_with("HTTP/1.1 403") && answer.contains(expected), "{path}: {answer}");
    }
    // Changes of server state require JSON.
    for (kind, status) in [
        ("", 415),
        ("Content-Type: text/plain\r\n", 415),
        ("Content-Type: Application/JSON; charset=utf-8\r\n", 200),
    ] {
        let answer = post("/lora-adapters", &format!("{local}{kind}"), "[]");
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{kind}: {answer}");
    }
}

#[test]
fn a_key_cannot_take_all_slots_or_the_whole_queue() {
    let keys = ["alice", "bob"].map(str::to_owned).to_vec();
    let client = start(Options { api_keys: keys, n_running: 8, n_waiting: 16, ..options() });
    let (alice, bob) = (client.with_key("alice"), client.with_key("bob"));
    let hi = json!({ "prompt": "hi", "max_tokens": 2 });
    let long = json!({ "prompt": "x", "n": 8, "max_tokens": 1900, "ignore_eos": true });
    let all = bob.send("/v1/completions", &long);
    bob.wait_for("/slots", |slots| {
        slots.as_array().unwrap().iter().filter(|slot| slot["is_processing"] == true).count() == 8
    });
    assert_eq!(alice.post("/v1/completions", &hi).0, 200);
    // Bob's answers are not complete, so a slot became free only by preemption.
    let (_, slots) = alice.get("/slots");
    assert!(slots.as_array().unwrap().iter().any(|slot| slot["is_processing"] == true), "{slots}");
    let more: Vec<_> = (0..40).map(|_| bob.send("/v1/completions", &long)).collect();
    // Bob's reserved part of the queue, four, and the shared part.
    bob.wait_for("/kv", |kv| kv["waiting"] == 12);
    let refused = |answer: &serde_json::Value| answer["error"]["code"] == 429;
    let (_, answer) = bob.post("/v1/completions", &hi);
    assert!(refused(&answer), "{answer}");
    for _ in 0..3 {
        let (status, answer) = alice.post("/v1/completions", &hi);
        assert_eq!(status, 200, "{answer}");
    }
    drop((all, more));
}

#[test]
fn a_body_of_too_many_values_is_refused_before_parsing() {
    let client = start(options());
    let error_of = |body: String| {
        let (status, answer) = client.post_text("/v1/completions", &body);
        (
            status,
            serde_json::from_str::<Value>(&answer).unwrap()["error"]["message"].as_str().unwrap().to_owned(),
        )
    };
    let zeros = |n: usize, each: &str| vec![each; n].join(",");
    for (body, status, expected) in [
        (
            format!("{{\"prompt\":[{}],\"max_tokens\":1}}", zeros(2_000_000, "[0]")),
            413,
            " values, at most 1200000 are read",
        ),
        (
            format!("{{\"prompt\":\"x\",\"a\":[{}]}}", zeros(1_000_000, "{\"\":0}")),
            413,
            " values, at most 1200000 are read",
        ),
        (
            format!("{{\"prompt\":[{}]}}", zeros(1_000_000, "7")),
            400,
            "the prompt (1000000 tokens) exceeds the available context size",
        ),
    ] {
        let (got, message) = error_of(body);
        assert!(got == status && message.contains(expected), "{got} {message}");
    }
}

#[test]
fn stalled_large_bodies_keep_no_small_ones_out() {
    use std::io::{Read, Write};
    let client = start(options());
    let n = 31 << 20;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {n}\r\n\r\n"
    );
    let part = vec![b' '; n - 1];
    let send = |part: &[u8]| {
        let mut stream = client.connect();
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(part)).unwrap();
        stream
    };
    let stalled: Vec<_> = (0..4).map(|_| send(&part)).collect();
    let body = json!({ "prompt": "hi", "max_tokens": 1 });
    assert_eq!(client.post("/v1/completions", &body).0, 200);
    // The budget has no room for another one of these.
    let mut refused = String::new();
    let mut last = send(&part[..8 << 20]);
    last.read_to_string(&mut refused).unwrap();
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("bodies of other requests"), "{refused}");
    assert_eq!(client.post("/v1/completions", &body).0, 200);
    drop(stalled);
    let large = json!({ "prompt": "hi", "max_tokens": 1, "user": "x".repeat(20 << 20) });
    client.wait_for("/health", |_| client.post("/v1/completions", &large).0 == 200);
}

#[test]
fn an_api_key_is_any_text_and_its_scheme_has_any_case() {
    let keys = ["schlüssel", " padded ", "plain"].map(str::to_owned).to_vec();
    let client = start(Options { api_keys: keys, ..options() });
    let status = |head: &str| {
        let answer = client
            .raw(&format!("GET /slots HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}\r\n\r\n"));
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    for head in [
        "Authorization: Bearer schlüssel",
        "authorization: bearer plain",
        "Authorization: BEARER padded",
        "X-Api-Key: schlüssel",
    ] {
        assert_eq!(status(head), "200", "{head}");
    }
    for head in [
        "Authorization: Bearer schlussel",
        "Authorization: Basic plain",
        "Authorization: Bearer",
        "X-Api-Key:",
        "X: plain",
    ] {
        assert_eq!(status(head), "401", "{head}");
    }
    let model =
        kvant::Model::bundled(kvant::OpenOptions { n_threads: Some(1), ..Default::default() }).unwrap();
    for key in ["", "  ", "two\nlines"] {
        let options = Options { api_keys: vec![key.to_owned()], ..options() };
        let error = kvant_server::serve(model.clone(), options, |_| ()).unwrap_err().to_string();
        assert_eq!(error, format!("expected an API key in one line that is not blank, got {key:?}"));
    }
}

#[test]
fn an_error_quotes_little_of_the_request() {
    let client = start(options());
    let long = "x".repeat(1_000_000);
    for more in [
        json!({ "kv_type": long }),
        json!({ "guided_regex": format!("({long}") }),
        json!({ "temperature": long }),
        json!({ "grammar": format!("root ::= {long}") }),
    ] {
        let mut body = json!({ "prompt": "hi", "max_tokens": 1 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = client.post_text("/v1/completions", &body.to_string());
        assert!(status == 400 && answer.len() < 1000, "{status}, {} bytes", answer.len());
    }
}

#[test]
fn extreme_biases_include_or_exclude_without_breaking() {
    let client = start(options());
    let complete = |bias: Value| {
        let body = json!({ "prompt": "hi", "max_tokens": 1, "logit_bias": bias });
        client.post("/v1/completions", &body)
    };
    assert_eq!(complete(json!({ "5": 1e308, "6": -1e308 })).0, 200);
    let model =
        kvant::Model::bundled(kvant::OpenOptions { n_threads: Some(1), ..Default::default() }).unwrap();
    let none: Vec<Value> = (0..model.n_vocab()).map(|token| json!([token, false])).collect();
    let (status, answer) = complete(none.into());
    assert!(status == 400 && answer["error"]["message"].is_string(), "{status} {answer}");
    assert_eq!(complete(json!({})).0, 200);
}

#[test]
fn a_path_that_is_not_utf8_is_refused() {
    let client = start(options());
    for path in ["/v1/models/%ff", "/v1/models/%00", "/%ff"] {
        let answer =
            client.raw(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let error: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{path}: {answer}"));
        assert!(head.starts_with("HTTP/1.1 4") && error["error"]["message"].is_string(), "{path}: {answer}");
    }
}
