//! Minimal HTTP client: one connection per request, nothing hidden.
#![allow(dead_code, reason = "each test file uses a part")]

#[cfg(feature = "grpc")]
pub mod grpc;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvant::{DType, KvOptions, Model, OpenOptions};
use kvant_server::{Listening, Options, serve};
use serde_json::Value;

/// Timeout that suffices on any machine.
const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Clone)]
pub struct Client {
    address: SocketAddr,
    key: Option<String>,
}

pub fn options() -> Options {
    Options::new("pocket", KvOptions::symmetric(DType::Turbo3))
}

/// Starts a server with the bundled model; it runs until the test process ends.
pub fn start(options: Options) -> Client {
    Client { address: start_at(options), key: None }
}

/// Like [`start`]; returns the listening address.
pub fn start_at(options: Options) -> SocketAddr {
    start_with(OpenOptions { n_threads: Some(2), ..Default::default() }, options)
}

/// Like [`start_at`], with options of the model.
pub fn start_with(open: OpenOptions<'static>, options: Options) -> SocketAddr {
    serve_model(Model::bundled(open).unwrap(), options)
}

/// Like [`start_at`], with this model.
pub fn serve_model(model: Model, options: Options) -> SocketAddr {
    listen(model, options).http
}

/// Starts a server of this model; it runs until the test process ends.
pub fn listen(model: Model, options: Options) -> Listening {
    let (ready, listening) = mpsc::channel();
    std::thread::spawn(move || {
        serve(model, options, |listening| ready.send(listening).unwrap()).unwrap();
    });
    listening.recv_timeout(TIMEOUT).unwrap()
}

impl Client {
    /// Creates a client of a server at this address.
    pub fn at(address: SocketAddr) -> Self {
        Self { address, key: None }
    }

    pub fn with_key(&self, key: &str) -> Self {
        Self { key: Some(key.to_owned()), ..self.clone() }
    }

    fn request(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let key =
            self.key.as_ref().map_or_else(String::new, |key| format!("Authorization: Bearer {key}\r\n"));
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n{key}Content-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    /// Sends a request without waiting for the response.
    pub fn send(&self, path: &str, body: &Value) -> TcpStream {
        self.request("POST", path, &body.to_string())
    }

    /// Returns status, headers and body of a response.
    fn receive(stream: TcpStream) -> (u16, String, String) {
        let mut reader = BufReader::new(stream);
        let mut headers = String::new();
        while !headers.ends_with("\r\n\r\n") {
            assert!(reader.read_line(&mut headers).unwrap() > 0, "the answer ends in its head: {headers}");
        }
        let status = headers.split(' ').nth(1).unwrap().parse().unwrap();
        let mut body = String::new();
        if headers.to_ascii_lowercase().contains("transfer-encoding: chunked") {
            loop {
                let mut size = String::new();
                reader.read_line(&mut size).unwrap();
                let size = usize::from_str_radix(size.trim(), 16).unwrap();
                let mut chunk = vec![0; size + 2];
                reader.read_exact(&mut chunk).unwrap();
                body += std::str::from_utf8(&chunk[..size]).unwrap();
                if size == 0 {
                    break;
                }
            }
        } else {
            reader.read_to_string(&mut body).unwrap();
        }
        (status, headers, body)
    }

    pub fn post_headers(&self, path: &str, body: &Value) -> (u16, String, Value) {
        let (status, headers, body) = Self::receive(self.send(path, body));
        (status, headers, serde_json::from_str(&body).unwrap_or_else(|_| panic!("{status}: {body}")))
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, _, body) = self.post_headers(path, body);
        (status, body)
    }

    pub fn post_text(&self, path: &str, body: &str) -> (u16, String) {
        let (status, _, body) = Self::receive(self.request("POST", path, body));
        (status, body)
    }

    pub fn get_text(&self, path: &str) -> String {
        Self::receive(self.request("GET", path, "")).2
    }

    pub fn get(&self, path: &str) -> (u16, Value) {
        let (status, _, body) = Self::receive(self.request("GET", path, ""));
        (status, serde_json::from_str(&body).unwrap_or_else(|_| panic!("{status}: {body}")))
    }

    /// Returns the data of all events of a stream, which must end with `[DONE]`.
    pub fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, headers, text) = Self::receive(self.send(path, body));
        assert!(status == 200 && headers.contains("text/event-stream"), "{headers}{text}");
        let mut data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{text}");
        data.into_iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }

    /// Returns the data of all events of a stream without end mark.
    pub fn events_without_end(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, headers, text) = Self::receive(self.send(path, body));
        assert!(status == 200 && headers.contains("text/event-stream"), "{headers}{text}");
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.map(|data| serde_json::from_str(data).unwrap()).collect()
    }

    /// Sends these bytes and returns the whole response.
    pub fn raw(&self, request: &str) -> String {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// Opens a connection.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream
    }

    /// Returns names and data of all events of a stream.
    pub fn events(&self, path: &str, body: &Value) -> Vec<(String, Value)> {
        let (status, headers, text) = Self::receive(self.send(path, body));
        assert!(status == 200 && headers.contains("text/event-stream"), "{headers}{text}");
        let events = text.split("\n\n").filter_map(|event| {
            let name = event.lines().find_map(|line| line.strip_prefix("event: "))?;
            let data = event.lines().find_map(|line| line.strip_prefix("data: "))?;
            Some((name.to_owned(), serde_json::from_str(data).unwrap()))
        });
        events.collect()
    }

    /// Waits until the body at `path` satisfies `holds`.
    pub fn wait_for(&self, path: &str, holds: impl Fn(&Value) -> bool) {
        let started = Instant::now();
        loop {
            let (_, body) = self.get(path);
            if holds(&body) {
                return;
            }
            assert!(started.elapsed() < TIMEOUT, "{body}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
