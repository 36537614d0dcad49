//! External faults: slow, hostile and disconnecting clients, a full disk, and a kill during a save.

use std::fs;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::client::{Client, options, start};
use kvant::{Model, OpenOptions};
use kvant_server::{Options, serve};
use serde_json::{Value, json};

/// Returns a prompt of about `n` tokens, different for each seed.
fn long(n: usize, seed: usize) -> String {
    (0..n / 7).map(|i| format!("{} is a number. ", (i * 31 + seed * 7) % 97)).collect()
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

#[test]
fn a_head_that_never_ends_is_closed() {
    let client = start(options());
    let mut slow = client.connect();
    slow.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n").unwrap();
    let began = Instant::now();
    let mut writer = slow.try_clone().unwrap();
    let drip = std::thread::spawn(move || {
        // Until the server closes the connection.
        while began.elapsed() < Duration::from_secs(60) && writer.write_all(b"X-A: b\r\n").is_ok() {
            std::thread::sleep(Duration::from_millis(500));
        }
    });
    let mut answer = Vec::new();
    _ = slow.read_to_end(&mut answer);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    drip.join().unwrap();
    assert_eq!(client.get("/health").0, 200);
}

#[test]
fn a_body_that_is_too_large_is_refused_and_freed() {
    let client = start(options());
    let mut stream = client.connect();
    let n = 100 << 20;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {n}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let part = vec![b' '; 1 << 20];
    for _ in 0..100 {
        stream.write_all(&part).unwrap();
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("104857600 bytes"), "{answer}");
    // Chunked: the size is not announced.
    let mut stream = client.connect();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let mut sent = 0;
    while sent < 40 && stream.write_all(format!("{:x}\r\n", part.len()).as_bytes()).is_ok() {
        _ = stream.write_all(&part).and_then(|()| stream.write_all(b"\r\n"));
        sent += 1;
    }
    let mut answer = Vec::new();
    _ = stream.read_to_end(&mut answer);
    // A client that keeps sending may not receive the reason.
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 413"), "{answer}");
    assert_eq!(client.get("/health").0, 200);
}

/// Mutates and truncates bytes.
struct Changes(u64);

impl Changes {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below.max(1)
    }

    fn change(&mut self, text: &str) -> Vec<u8> {
        const WORDS: [&str; 12] = [
            "null",
            "-1",
            "1e999",
            "\"\\ud800\"",
            "[[[[",
            "{}",
            "\u{0}",
            "true",
            "\"",
            "99999999999999999999",
            "}",
            ",",
        ];
        let mut bytes = text.as_bytes().to_vec();
        for _ in 0..=self.next(3) {
            let at = self.next(bytes.len());
            match self.next(4) {
                0 => bytes.truncate(at),
                1 => bytes.splice(at..at, WORDS[self.next(WORDS.len())].bytes()).for_each(drop),
                2 => bytes[at..].iter_mut().take(1).for_each(|byte| *byte = byte.wrapping_add(1)),
                _ => _ = bytes.splice(at..(at + self.next(20)).min(bytes.len()), []).count(),
            }
            if bytes.is_empty() {
                break;
            }
        }
        bytes
    }
}

#[test]
fn a_thousand_malformed_requests_break_nothing() {
    let client = start(Options { n_ctx: Some(64), ..options() });
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": schema } });
    let seeds = [
        (
            "/v1/chat/completions",
            json!({ "messages": messages, "max_tokens": 1, "temperature": 1.0, "stop": ["a"] }),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": messages, "max_tokens": 1, "tools": [tool], "tool_choice": "auto" }),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": messages, "max_tokens": 1, "response_format": { "type": "json_object", "schema": schema } }),
        ),
        (
            "/v1/completions",
            json!({ "prompt": ["a", [1, 2, 3]], "max_tokens": 1, "logprobs": 1, "echo": true, "n": 2 }),
        ),
        (
            "/completion",
            json!({ "prompt": [1, "a"], "n_predict": 1, "logit_bias": [[5, false], ["a", -1]], "kv_type": "q8_0/turbo3" }),
        ),
        ("/infill", json!({ "input_prefix": "a", "input_suffix": "b", "input_extra": [{ "text": "c" }] })),
        ("/v1/messages", json!({ "messages": messages, "max_tokens": 1, "system": "x" })),
        ("/v1/responses", json!({ "input": "Hi", "max_output_tokens": 1 })),
        (
            "/v1/embeddings",
            json!({ "input": ["a", [1, 2, 3]], "dimensions": 3, "encoding_format": "base64" }),
        ),
        ("/tokenize", json!({ "content": "a b", "with_pieces": true })),
        ("/detokenize", json!({ "tokens": [1, 2, 3] })),
        ("/apply-template", json!({ "messages": messages, "chat_template_kwargs": { "a": 1 } })),
    ];
    let mut changes = Changes(17);
    let mut n_refused = 0;
    for i in 0..1000 {
        let (path, body) = &seeds[i % seeds.len()];
        let body = changes.change(&body.to_string());
        let mut head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        // Some are not HTTP either.
        if i % 10 == 9 {
            head = changes.change(&String::from_utf8(head).unwrap());
        }
        let mut stream = client.connect();
        _ = stream.write_all(&[head, body.clone()].concat());
        _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        let status = answer.split(' ').nth(1).unwrap_or("none");
        assert!(
            [
                "none", "200", "400", "403", "404", "405", "408", "411", "413", "414", "415", "431", "501",
                "505"
            ]
            .contains(&status),
            "{path} {}: {answer}",
            String::from_utf8_lossy(&body)
        );
        n_refused += usize::from(status == "400");
    }
    assert!(n_refused > 500, "{n_refused}");
    client.wait_for("/kv", |kv| kv["running"] == 0 && kv["waiting"] == 0);
    assert_eq!(client.post("/completion", &seeds[4].1).0, 200);
}

#[test]
fn two_identical_requests_at_once_read_the_prompt_once() {
    let client = start(options());
    let body = json!({ "prompt": long(1400, 1), "max_tokens": 8, "temperature": 0 });
    let answers: Vec<Value> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..2).map(|_| scope.spawn(|| client.post("/v1/completions", &body).1)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(text(&answers[0]), text(&answers[1]));
    let usage = |answer: &Value, name: &str| answer["usage"][name].as_u64().unwrap();
    let n = usage(&answers[0], "prompt_tokens");
    let metrics = client.get_text("/metrics");
    let read = metrics.lines().find_map(|line| line.strip_prefix("vllm:prompt_tokens_total ")).unwrap();
    // The second one reads the last token.
    assert_eq!(read.parse::<u64>().unwrap(), n + 1);
}

/// A server in its own process that can be killed: this test, run again by the tests below.
#[test]
fn a_server_for_other_tests() {
    let Some(folder) = std::env::var_os("KVANT_TEST_FOLDER").map(PathBuf::from) else { return };
    let model = Model::bundled(OpenOptions { n_threads: Some(1), ..Default::default() }).unwrap();
    // Room for two of the conversations below: the others move to disk.
    let options = Options { kv_budget: 1 << 20, kv_disk: Some((folder.clone(), 1 << 30)), ..options() };
    serve(model, options, |listening| {
        fs::write(folder.with_extension("address"), listening.http.to_string()).unwrap()
    })
    .unwrap();
}

struct Process {
    child: Child,
    client: Client,
}

impl Process {
    /// Starts a process, after shell commands that set its limits.
    fn start(folder: &Path, limits: &str) -> Self {
        let address_file = folder.with_extension("address");
        _ = fs::remove_file(&address_file);
        let test = std::env::current_exe().unwrap();
        let mut child = Command::new("sh")
            .args([
                "-c",
                &format!("{limits} exec \"$0\" --exact faults::a_server_for_other_tests --nocapture"),
            ])
            .arg(test)
            .env("KVANT_TEST_FOLDER", folder)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let began = Instant::now();
        loop {
            let address =
                fs::read_to_string(&address_file).ok().and_then(|text| text.parse::<SocketAddr>().ok());
            if let Some(address) = address {
                return Self { child, client: Client::at(address) };
            }
            assert!(child.try_wait().unwrap().is_none() && began.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn complete(&self, seed: usize) -> (String, u64) {
        let body = json!({ "prompt": long(900, seed), "max_tokens": 4, "temperature": 0 });
        let (status, answer) = self.client.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        (
            text(&answer).to_owned(),
            answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(),
        )
    }

    /// Ends it by a signal and returns its exit status.
    fn end(mut self, signal: &str) -> std::process::ExitStatus {
        assert!(
            Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap().success()
        );
        self.child.wait().unwrap()
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("kvant-faults-{name}-{}", std::process::id()));
    _ = fs::remove_dir_all(&folder);
    folder
}

/// At any point of a write.
#[cfg(unix)]
#[test]
fn after_a_kill_during_a_save_only_whole_files_are_used() {
    let folder = folder("killed");
    let alone = start(options());
    let expected: Vec<String> = (0..6)
        .map(|seed| {
            let body = json!({ "prompt": long(900, seed), "max_tokens": 4, "temperature": 0 });
            text(&alone.post("/v1/completions", &body).1).to_owned()
        })
        .collect();
    let mut n_found = 0;
    for round in 0..6 {
        let server = Process::start(&folder, "");
        for (seed, expected) in expected.iter().enumerate().take(3 + round % 4) {
            let (output, cached) = server.complete(seed);
            assert_eq!(output, *expected, "round {round}, {seed}");
            n_found += usize::from(round > 0 && cached > 512);
        }
        // Other requests are in progress, and evict sessions to disk.
        let sent: Vec<_> = (0..4)
            .map(|i| {
                server
                    .client
                    .send("/v1/completions", &json!({ "prompt": long(900, 10 + i), "max_tokens": 1 }))
            })
            .collect();
        std::thread::sleep(Duration::from_millis(37 * round as u64));
        assert!(!server.end("-9").success());
        drop(sent);
    }
    assert!(n_found > 0, "nothing came back from the disk");
    let server = Process::start(&folder, "");
    // On SIGTERM it saves its sessions, and leaves no partial file.
    assert!(server.end("-TERM").success());
    let names = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names: Vec<String> = names.collect();
    assert!(names.iter().any(|name| name.ends_with(".kvctx")), "{names:?}");
    fs::remove_dir_all(&folder).unwrap();
}

#[cfg(unix)]
#[test]
fn a_full_disk_stops_no_answer_and_leaves_no_partial_file() {
    let folder = folder("full");
    // Files of 64 KiB at most; a larger write raises a signal that ends a process by default.
    let server = Process::start(&folder, "ulimit -f 64;");
    let first: Vec<String> = (0..5).map(|seed| server.complete(seed).0).collect();
    let again: Vec<String> = (0..5).map(|seed| server.complete(seed).0).collect();
    assert_eq!(first, again);
    let names = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.collect::<Vec<_>>(), [".lock"], "what could not be written whole is gone");
    assert!(server.end("-TERM").success());
    fs::remove_dir_all(&folder).unwrap();
}

/// Also while a client's grammar occupies threads, with the client connected or not.
#[cfg(unix)]
#[test]
fn a_shutdown_completes_while_threads_are_busy() {
    let folder = folder("ends");
    for is_there in [true, false] {
        let server = Process::start(&folder, "");
        let (answer, _) = server.complete(1);
        let hostile = |beginning| {
            let grammar = crate::hardening::ambiguous(1900, beginning);
            let body = json!({ "prompt": "x", "max_tokens": 200, "guided_grammar": grammar });
            server.client.send("/v1/completions", &body)
        };
        let mut sent = vec![hostile(""), hostile("\"xx\"")];
        std::thread::sleep(Duration::from_millis(300));
        if !is_there {
            sent.clear();
        }
        let began = Instant::now();
        assert!(server.end("-TERM").success());
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        drop(sent);
        // The earlier conversation has been saved.
        let server = Process::start(&folder, "");
        let (again, cached) = server.complete(1);
        assert!(again == answer && cached > 512, "{cached}");
        assert!(server.end("-TERM").success());
    }
    fs::remove_dir_all(&folder).unwrap();
}

/// Bodies that are many times as large once parsed.
#[cfg(target_os = "linux")]
#[test]
fn a_large_body_takes_little_memory_and_frees_it() {
    let folder = folder("memory");
    let server = Process::start(&folder, "");
    server.complete(1);
    let bytes = |name: &str| {
        let status = fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        line.trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    };
    let before = bytes("VmRSS:");
    let many = |n: usize, value: &str| vec![value; n].join(",");
    for body in [
        format!("{{\"prompt\":[{}],\"max_tokens\":1}}", many(8_000_000, "[0]")),
        format!("{{\"prompt\":\"x\",\"a\":[{}]}}", many(4_000_000, "{\"\":0}")),
        format!("{{\"prompt\":[{}]}}", many(1_100_000, "0")),
    ] {
        let (status, answer) = server.client.post_text("/v1/completions", &body);
        assert!([400, 413].contains(&status), "{status} {answer}");
    }
    let (peak, after) = (bytes("VmHWM:") - before, bytes("VmRSS:").saturating_sub(before));
    // At least four times as much if all values were created.
    assert!(peak < 512 << 20 && after < 256 << 20, "{peak} at most, {after} after");
    assert!(server.end("-TERM").success());
    fs::remove_dir_all(&folder).unwrap();
}
