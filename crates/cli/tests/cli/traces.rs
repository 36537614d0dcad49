//! Tests of the traces that an OpenTelemetry collector receives.

#![cfg(all(unix, feature = "otel"))]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::serve::{QUESTION, Server};

const TRACE: [u8; 16] = *b"a trace's number";

/// Accepts requests, and forwards the first line and body of each.
fn collect() -> (String, Receiver<(String, Vec<u8>)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, received) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            if sender.send(take(stream.unwrap())).is_err() {
                return;
            }
        }
    });
    (url, received)
}

fn take(stream: TcpStream) -> (String, Vec<u8>) {
    let mut reader = BufReader::new(stream);
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        assert!(reader.read_until(b'\n', &mut head).unwrap() > 0, "it ends in its head");
    }
    let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
    let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next()).unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    reader.read_exact(&mut body).unwrap();
    let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    reader.into_inner().write_all(answer).unwrap();
    (head.lines().next().unwrap().to_owned(), body)
}

fn holds(body: &[u8], what: &[u8]) -> bool {
    body.windows(what.len()).any(|window| window == what)
}

#[test]
fn requests_are_exported_in_the_trace_of_their_client() {
    let (url, received) = collect();
    let server = Server::start(&["--otlp-endpoint", &url, "--alias", "pocket-model"]);
    let number: String = TRACE.iter().map(|byte| format!("{byte:02x}")).collect();
    let heads = format!("traceparent: 00-{number}-0123456789abcdef-01\r\n");
    assert!(server.request_with(&heads, QUESTION).contains("Paris"));
    assert!(server.end().success());
    let (line, body) =
        received.recv_timeout(Duration::from_secs(10)).expect("something is sent before it ends");
    assert_eq!(line, "post /v1/traces http/1.1");
    for what in [
        "POST /v1/chat/completions",
        "http.response.status_code",
        "answer",
        "gen_ai.usage.output_tokens",
        "gen_ai.server.time_to_first_token",
        "pocket-model",
        "stop",
    ] {
        assert!(holds(&body, what.as_bytes()), "{what} is missing");
    }
    assert!(holds(&body, &TRACE), "it is not part of the sender's trace");
}

#[test]
fn an_unreachable_collector_is_noted_and_ignored() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let server = Server::start(&["--otlp-endpoint", &format!("http://{closed}")]);
    assert!(server.request(QUESTION).contains("Paris"));
    assert!(server.end().success());
}
