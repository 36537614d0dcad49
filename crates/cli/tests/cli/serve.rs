//! Tests of the server process: its banner, its shutdown on signals, and its persistent cache.

#![cfg(unix)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Timeout of every step.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Server {
    child: Child,
    address: String,
    /// The first line on stderr.
    pub banner: String,
    /// Lines before the banner.
    warnings: Vec<String>,
    /// The example request in the output.
    pub curl: String,
}

impl Server {
    pub fn start(args: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvant"))
            .arg("serve")
            .args(args)
            .args(["--port", "0"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let mut warnings = Vec::new();
        let banner = loop {
            let line = lines.next().expect("a banner with the address");
            if line.contains("http://") {
                break line;
            }
            warnings.push(line);
        };
        let address = banner.split("http://").nth(1).unwrap().trim().to_owned();
        let curl = lines.next().unwrap();
        // Later output needs a reader, or the pipe would fill up.
        std::thread::spawn(move || lines.for_each(|line| eprintln!("{line}")));
        Self { child, address, banner, warnings, curl }
    }

    fn send(&self, body: &str) -> TcpStream {
        self.send_with("", body)
    }

    /// Sends a request with these header lines.
    fn send_with(&self, heads: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{heads}Content-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        stream
    }

    pub fn request(&self, body: &str) -> String {
        self.request_with("", body)
    }

    /// Sends a request with these header lines and returns the response.
    pub fn request_with(&self, heads: &str, body: &str) -> String {
        let mut answer = String::new();
        self.send_with(heads, body).read_to_string(&mut answer).unwrap();
        answer
    }

    fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    /// Waits until the server has ended.
    pub fn ended(mut self) -> ExitStatus {
        let started = Instant::now();
        loop {
            match self.child.try_wait().unwrap() {
                Some(status) => return status,
                None if started.elapsed() > PATIENCE => {
                    self.child.kill().unwrap();
                    panic!("still there");
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    pub fn end(self) -> ExitStatus {
        self.signal("-TERM");
        self.ended()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Reached when a test failed.
        _ = self.child.kill();
    }
}

fn scratch(test: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("serve").join(test);
    _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

pub const QUESTION: &str =
    r#"{"messages":[{"role":"user","content":"What is the capital of France?"}],"temperature":0}"#;

#[test]
fn the_printed_curl_command_works() {
    let server = Server::start(&["-ctk", "turbo3", "-ctv", "turbo3"]);
    let Ok(output) = Command::new("sh").args(["-c", &server.curl]).output() else { panic!("no shell") };
    if output.status.code() == Some(127) {
        println!("skipped: the curl command: curl is not installed");
        assert!(server.request(QUESTION).contains("Paris"));
    } else {
        assert!(String::from_utf8_lossy(&output.stdout).contains("chat.completion"), "{output:?}");
    }
    assert!(server.end().success());
}

#[test]
fn a_public_address_without_a_key_prints_a_warning() {
    let warns = |args: &[&str]| {
        let server = Server::start(args);
        server.warnings.iter().any(|line| line.contains("anyone who reaches this address"))
    };
    assert!(warns(&["--host", "0.0.0.0"]));
    assert!(!warns(&["--host", "0.0.0.0", "--api-key", "secret"]));
    assert!(!warns(&[]));
}

#[test]
fn environment_variables_of_other_programs_are_noted_once() {
    let kvant = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvant"));
        command.args(["run", "-p", "hi", "-n", "1"]).args(args).env("OLLAMA_CONTEXT_LENGTH", "512");
        let output = command.env("OLLAMA_HOST", "0.0.0.0").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let note = "note: ignored environment variables of other programs: OLLAMA_CONTEXT_LENGTH (here KVANT_CTX_SIZE)\n";
    let notes = kvant(&[]);
    assert!(notes.starts_with(note) && !notes.contains("OLLAMA_HOST"), "{notes}");
    assert!(!kvant(&["-c", "512"]).contains("ignored environment"));
}

#[test]
fn shutdown_finishes_running_requests_and_accepts_no_new_ones() {
    let server = Server::start(&["-c", "700"]);
    let body = r#"{"messages":[{"role":"user","content":"Go on."}],"stream":true,"ignore_eos":true}"#;
    let mut stream = BufReader::new(server.send(body));
    let mut line = String::new();
    while !line.contains("\"content\":\"") {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0);
    }
    server.signal("-TERM");
    // The signal is handled asynchronously.
    let started = Instant::now();
    while !server.request(QUESTION).starts_with("HTTP/1.1 503") {
        assert!(started.elapsed() < PATIENCE, "new work is taken on");
    }
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    assert!(server.ended().success());
}

#[test]
fn prefixes_cached_before_a_restart_are_reused() {
    let kv_disk = scratch("kept").join("kv");
    let kv_disk = format!("{}:1G", kv_disk.display());
    let long = "One, two, three, four. ".repeat(60);
    let body =
        format!(r#"{{"messages":[{{"role":"user","content":"{long}"}}],"temperature":0,"max_tokens":3}}"#);
    let cached = |answer: &str| -> u64 {
        let at = answer.find("\"cached_tokens\":").unwrap_or_else(|| panic!("{answer}"));
        answer[at + 16..].split('}').next().unwrap().parse().unwrap()
    };
    let text =
        |answer: &str| answer.split("\"content\":").nth(1).unwrap().split('}').next().unwrap().to_owned();
    let first = Server::start(&["--kv-disk", &kv_disk, "-ctk", "turbo3", "-ctv", "turbo3"]);
    let before = first.request(&body);
    assert_eq!(cached(&before), 0);
    // The signal of a closed terminal.
    first.signal("-HUP");
    assert!(first.ended().success());
    let second = Server::start(&["--kv-disk", &kv_disk, "-ctk", "turbo3", "-ctv", "turbo3"]);
    let after = second.request(&body);
    assert!(cached(&after) > 300, "{after}");
    assert_eq!(text(&after), text(&before));
    assert!(second.end().success());
    // A server with other KV types does not find it.
    let other = Server::start(&["--kv-disk", &kv_disk, "-ctk", "q8_0", "-ctv", "turbo3"]);
    assert_eq!(cached(&other.request(&body)), 0);
}

#[test]
fn a_server_survives_truncation_of_its_model_file() {
    let file = scratch("truncated").join("model.gguf");
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/assets/pocket-q8_0.gguf"), &file).unwrap();
    let server = Server::start(&["-m", file.to_str().unwrap()]);
    fs::write(&file, []).unwrap();
    for path in ["/props", "/tokenizer_info", "/v1/models", "/api/tags"] {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }
    let answer = server.request(QUESTION);
    assert!(answer.contains("Paris"), "{answer}");
    assert!(server.end().success());
}

#[test]
fn invalid_server_options_are_rejected_with_one_line() {
    let taken = Server::start(&[]);
    let port = taken.address.rsplit(':').next().unwrap().to_owned();
    for (args, words) in [
        (&["--port", &port][..], "127.0.0.1:"),
        (&["--kv-budget", "much"], "8G"),
        (&["--kv-ram", "much"], "8G"),
        (&["--kv-disk", "there"], "kv:100G"),
        (&["--kv-disk", "/dev/null/x:1G"], "/dev/null/x"),
        // The folder exists but is not writable.
        #[cfg(target_os = "linux")]
        (&["--kv-disk", "/proc/self:1G"], "/proc/self"),
        (&["--port", "99999"], "99999"),
        (&["-np", "0"], "from 1 up"),
        (&["--also", "small"], "small=small.gguf"),
        (&["--also", "small=no-such-file.gguf"], "no-such-file.gguf"),
        (&["--also", "bundled=bundled"], "'bundled'"),
        (&["--cors-origin", "chat.example"], "--cors-origin: expected an origin"),
        (
            &["--kv-guard", "-ctk", "f16", "-ctv", "bf16"],
            "--kv-guard: expected a compressed KV type, got f16/bf16",
        ),
        (
            &["--kv-guard", "--device", "cpu,cpu", "--tensor-split", "1,1"],
            "--kv-guard: expected one device for all layers, got 2 devices",
        ),
        (&["--kv-guard", "--also", "small=bundled"], "cannot be used with"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_kvant")).arg("serve").args(args).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && message.contains(words), "{args:?}: {message}");
        assert_eq!(
            message.lines().filter(|line| line.starts_with("error: ")).count(),
            1,
            "{args:?}: {message}"
        );
    }
}

#[cfg(feature = "grpc")]
#[test]
fn the_start_line_names_grpc_and_a_busy_port_is_one_error() {
    let server = Server::start(&["--grpc", "127.0.0.1:0"]);
    let address = server.banner.split("gRPC ").nth(1).unwrap().split(' ').next().unwrap();
    assert!(TcpStream::connect(address).is_ok(), "{}", server.banner);
    let kvant = |grpc: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvant"));
        let output = command.args(["serve", "--port", "0", "--grpc", grpc]).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let error = kvant(address);
    assert!(error.starts_with(&format!("error: {address}: ")) && error.lines().count() == 1, "{error}");
    for text in ["50051", ":50051", "::1:50051", "localhost:port"] {
        let error = kvant(text);
        assert!(error.contains("expected a host and a port, such as 127.0.0.1:50051"), "{error}");
    }
    assert!(server.end().success());
}
