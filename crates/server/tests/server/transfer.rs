//! Prefill on one server, decode on another: the answer is that of one server, whatever becomes of
//! the cache between them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::LazyLock;

use kvant::{DType, KvOptions};
use kvant_server::Options;
use serde_json::{Value, json};

use crate::client::{Client, options, start, start_at};

/// About 1,000 tokens.
static PROMPT: LazyLock<String> =
    LazyLock::new(|| (0..200).map(|i| format!("{} is a number. ", (i * 37) % 101)).collect());

/// Answer of a server that reads the prompt itself.
static EXPECTED: LazyLock<Vec<u32>> = LazyLock::new(|| answer(&start(options()), &json!({})).tokens);

struct Answer {
    tokens: Vec<u32>,
    /// Prompt tokens, and those from the cache.
    n_prompt: u64,
    n_cached: u64,
}

fn request(more: &Value) -> Value {
    let mut body = json!({ "prompt": *PROMPT, "max_tokens": 12, "temperature": 0, "return_tokens": true });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn answer(client: &Client, more: &Value) -> Answer {
    let (status, body) = client.post("/v1/completions", &request(more));
    assert_eq!(status, 200, "{body}");
    let tokens = body["choices"][0]["token_ids"].as_array().unwrap().iter();
    let usage = &body["usage"];
    Answer {
        tokens: tokens.map(|token| token.as_u64().unwrap() as u32).collect(),
        n_prompt: usage["prompt_tokens"].as_u64().unwrap(),
        n_cached: usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(),
    }
}

fn prefill_options() -> Options {
    Options { kv_transfer: 64 << 20, ..options() }
}

fn decode_options() -> Options {
    Options { kv_peers: vec!["127.0.0.1".to_owned()], ..options() }
}

/// Has the prompt read and its cache kept. Returns the parameters for a decode worker.
fn prefill(client: &Client) -> Value {
    let asked = json!({ "max_tokens": 1, "kv_transfer_params": { "do_remote_decode": true } });
    let (status, body) = client.post("/v1/completions", &request(&asked));
    assert_eq!(status, 200, "{body}");
    body["kv_transfer_params"].clone()
}

fn path(params: &Value) -> String {
    format!("/kv/transfers/{}", params["remote_transfer_id"].as_str().unwrap())
}

fn metric(client: &Client, name: &str) -> u64 {
    let metrics = client.get_text("/metrics");
    let line = metrics.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("{name}: {metrics}")).parse().unwrap()
}

/// Asserts that a decode worker answers as one server, by reading the prompt itself, and counts the
/// failure.
fn assert_recomputed(decode: &Client, params: &Value) {
    let failures = || metric(decode, "kvant:kv_fetch_failures_total");
    let before = failures();
    let Answer { tokens, n_cached, .. } = answer(decode, &json!({ "kv_transfer_params": params }));
    assert_eq!((tokens, n_cached), (EXPECTED.clone(), 0));
    assert_eq!(failures(), before + 1);
}

#[test]
fn a_fetched_cache_gives_the_answer_of_one_server() {
    let (prefill_worker, decode_worker) = (start(prefill_options()), start(decode_options()));
    let params = prefill(&prefill_worker);
    assert_eq!((&params["do_remote_prefill"], &params["remote_host"]), (&json!(true), &json!("127.0.0.1")));
    let kept = || prefill_worker.get("/kv").1["transfer_bytes"].as_u64().unwrap();
    let sent = kept();
    assert!(sent > 0);
    let Answer { tokens, n_prompt, n_cached } =
        answer(&decode_worker, &json!({ "kv_transfer_params": params }));
    assert_eq!(tokens, *EXPECTED);
    // The next token attends to the last two tiles in f16, which a shorter prefix may lack.
    assert!(n_cached + 512 > n_prompt && n_cached > 512, "{n_cached} of {n_prompt}");
    assert_eq!(metric(&decode_worker, "kvant:kv_fetched_bytes_total"), sent);
    assert_eq!(metric(&decode_worker, "kvant:kv_fetch_failures_total"), 0);
    prefill_worker.wait_for("/kv", |kv| kv["transfer_bytes"] == 0);
    let f16 = decode_worker.get("/kv").1["idle_bytes_f16"].as_u64().unwrap();
    assert!(sent * 2 < f16, "{sent} bytes of {f16} in f16");
}

#[test]
fn a_chat_is_transferred_as_a_completion_is() {
    let (prefill_worker, decode_worker) = (start(prefill_options()), start(decode_options()));
    let ask = |client: &Client, max_tokens: u32, params: Value| {
        let messages = json!([{ "role": "user", "content": *PROMPT }]);
        let body = json!({ "messages": messages, "max_tokens": max_tokens, "temperature": 0, "kv_transfer_params": params });
        let (status, body) = client.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{body}");
        (body["choices"][0]["message"].clone(), body["kv_transfer_params"].clone())
    };
    let (_, params) = ask(&prefill_worker, 1, json!({ "do_remote_decode": true }));
    let (fetched, none) = ask(&decode_worker, 8, params);
    assert_eq!(none, Value::Null);
    assert_eq!(fetched, ask(&start(options()), 8, Value::Null).0);
    assert!(metric(&decode_worker, "kvant:kv_fetched_bytes_total") > 0);
}

/// Returns parameters that name this address.
fn params_at(address: SocketAddr) -> Value {
    json!({
        "do_remote_prefill": true,
        "remote_host": address.ip().to_string(),
        "remote_port": address.port(),
        "remote_transfer_id": "0123456789abcdef0123456789abcdef",
    })
}

/// Starts a peer that answers its first request with these bytes and closes the connection.
fn fake_peer(response: Vec<u8>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(&stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            reader.read_line(&mut head).unwrap();
        }
        _ = (&stream).write_all(&response);
    });
    address
}

/// Returns head and body of the kept cache as a decode worker receives them.
fn kept_cache(client: SocketAddr, params: &Value) -> (String, Vec<u8>) {
    let mut stream = Client::at(client).connect();
    let request = format!("GET {} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", path(params));
    stream.write_all(request.as_bytes()).unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    let end = all.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
    let head = String::from_utf8(all[..end].to_vec()).unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    (head, all.split_off(end))
}

#[test]
fn a_prompt_is_read_where_its_cache_cannot_be_fetched() {
    let source = start_at(prefill_options());
    let params = prefill(&Client::at(source));
    let (head, body) = kept_cache(source, &params);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let with = |head: &str, body: &[u8]| params_at(fake_peer([head.as_bytes(), body].concat()));
    let mut flipped = body.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    let length = |n: u64| {
        let mut lines: Vec<String> =
            head.lines().filter(|line| !line.starts_with("content-length")).map(str::to_owned).collect();
        lines.insert(1, format!("content-length: {n}"));
        lines.join("\r\n") + "\r\n"
    };
    let key = head.lines().find(|line| line.starts_with("x-kvant-cache-key")).unwrap();
    for (name, params) in [
        ("an id that the peer does not know", params_at(source)),
        ("a port where no peer listens", params_at(closed)),
        ("the peer dies within the cache", with(&head, &body[..middle])),
        ("the peer dies within the head", with(&head[..20], &[])),
        ("a changed byte", with(&head, &flipped)),
        ("another length in the file", with(&length(body.len() as u64 - 64), &body[..body.len() - 64])),
        ("an endless cache", with(&length(u64::MAX), &body)),
        ("no context file", with(&length(5), b"hello")),
        ("another key", with(&head.replace(key, "x-kvant-cache-key: 0123456789abcdef"), &body)),
        ("no key", with(&head.replace(key, "x-other: 1"), &body)),
        ("no HTTP", with("hello", &[])),
        ("an error", with("HTTP/1.1 500 Broken\r\ncontent-length: 0\r\n\r\n", &[])),
    ] {
        println!("{name}");
        assert_recomputed(&start(decode_options()), &params);
    }
    // The real one is still there.
    let decode_worker = start(decode_options());
    assert!(answer(&decode_worker, &json!({ "kv_transfer_params": params })).n_cached > 512);
}

#[test]
fn a_cache_of_another_type_or_key_is_refused() {
    let keys = vec!["alice".to_owned(), "bob".to_owned()];
    let prefill_worker = start(Options { api_keys: keys.clone(), ..prefill_options() });
    let params = prefill(&prefill_worker.with_key("alice"));
    assert_eq!(prefill_worker.with_key("bob").get(&path(&params)).0, 404);
    assert_eq!(prefill_worker.get(&path(&params)).0, 401);
    let decode_worker = start(Options { api_keys: keys, ..decode_options() });
    assert_recomputed_with_key(&decode_worker, "bob", &params);
    let found = answer(&decode_worker.with_key("alice"), &json!({ "kv_transfer_params": params }));
    assert!(found.tokens == *EXPECTED && found.n_cached > 512);

    let prefill_worker = start(Options { kv: KvOptions::symmetric(DType::Turbo4), ..prefill_options() });
    assert_recomputed(&start(decode_options()), &prefill(&prefill_worker));
}

fn assert_recomputed_with_key(decode_worker: &Client, key: &str, params: &Value) {
    let Answer { tokens, n_cached, .. } =
        answer(&decode_worker.with_key(key), &json!({ "kv_transfer_params": params }));
    assert_eq!((tokens, n_cached), (EXPECTED.clone(), 0));
}

#[test]
fn caches_are_kept_within_their_budget() {
    // Room for one.
    let first = start(prefill_options());
    prefill(&first);
    let bytes = first.get("/kv").1["transfer_bytes"].as_u64().unwrap();
    let prefill_worker = start(Options { kv_transfer: bytes, ..options() });
    let [older, newer] = [(); 2].map(|()| prefill(&prefill_worker));
    assert_eq!(prefill_worker.get("/kv").1["transfer_bytes"].as_u64().unwrap(), bytes);
    assert_recomputed(&start(decode_options()), &older);
    assert!(answer(&start(decode_options()), &json!({ "kv_transfer_params": newer })).n_cached > 512);
    // Room for none.
    let prefill_worker = start(Options { kv_transfer: bytes - 1, ..options() });
    assert_recomputed(&start(decode_options()), &prefill(&prefill_worker));
}

#[test]
fn transfers_that_cannot_work_are_refused() {
    let (plain, prefill_worker) = (start(options()), start(prefill_options()));
    let keep = || json!({ "do_remote_decode": true });
    let fetch = || params_at("127.0.0.1:1".parse().unwrap());
    for (client, more, message) in [
        (&plain, json!({ "kv_transfer_params": keep() }), "keeps no KV caches for decode workers"),
        (&plain, json!({ "kv_transfer_params": fetch() }), "remote_host: expected a host that this server"),
        (
            &prefill_worker,
            json!({ "kv_transfer_params": keep(), "stream": true }),
            "not streamed, got a stream",
        ),
        (&prefill_worker, json!({ "kv_transfer_params": keep(), "n": 2 }), "for one answer, got 2"),
        (&prefill_worker, json!({ "kv_transfer_params": 1 }), "kv_transfer_params: expected an object"),
    ] {
        let (status, body) = client.post("/v1/completions", &request(&more));
        let text = body["error"]["message"].as_str().unwrap();
        assert!(status == 400 && text.contains(message), "{body}");
    }
    let (status, _) = plain.get("/kv/transfers/0123456789abcdef0123456789abcdef");
    assert_eq!((status, plain.get("/kv/transfers/%2e%2e").0), (404, 404));
}
