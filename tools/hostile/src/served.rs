//! A server with two API keys: requests with one are hostile, those with the other must be answered
//! all the while.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::judge::Verdict;
use crate::run::resident;

/// Timeout of a token for the regular key.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a hostile request: a schema may compile for half a minute. Then its client
/// disconnects.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(45);
/// Timeout of the shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum growth of resident memory since the start, in bytes.
const MEMORY: u64 = 512 << 20;
/// Polling interval of an unanswered request.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Key of hostile requests.
pub const HOSTILE: &str = "hostile";
const POLITE: &str = "polite";

/// A running server.
pub struct Served {
    child: Child,
    address: (&'static str, u16),
    log: PathBuf,
    /// Resident bytes when the server was ready.
    resident: u64,
}

impl Served {
    /// Starts `binary` with the bundled model and files in `beside`.
    pub fn start(binary: &Path, beside: &Path) -> io::Result<Self> {
        // A port that is free now.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let log = beside.join("served");
        let mut command = Command::new(binary);
        command.args(["serve", "-t", "1", "-c", "2048", "--kv-budget", "64M", "--port", &port.to_string()]);
        command.args(["--api-key", POLITE, "--api-key", HOSTILE]).env("HOME", beside.join("home"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        let child = command.spawn()?;
        let mut served = Self { child, address: ("127.0.0.1", port), log, resident: 0 };
        let began = Instant::now();
        while served.polite().is_err() {
            if began.elapsed() > REQUEST_TIMEOUT {
                return Err(io::Error::other(format!("the server is not ready: {}", served.read_log())));
            }
            sleep(POLL_INTERVAL);
        }
        served.resident = resident(served.child.id());
        Ok(served)
    }

    /// Sends a request, and meanwhile requests with the regular key.
    pub fn send_hostile(&mut self, request: &[u8]) -> io::Result<Verdict> {
        let (address, request) = (self.address, request.to_vec());
        let hostile = TcpStream::connect(address)?;
        hostile.set_read_timeout(Some(REQUEST_TIMEOUT))?;
        let mut stream = hostile.try_clone()?;
        let exchange = std::thread::spawn(move || {
            let mut answer = Vec::new();
            // A request that is rejected early may not be read completely.
            _ = stream.write_all(&request);
            _ = (&stream).take(1 << 20).read_to_end(&mut answer);
            answer
        });
        let began = Instant::now();
        let mut verdict = None;
        while !exchange.is_finished() && began.elapsed() < REQUEST_TIMEOUT {
            verdict = verdict.or_else(|| self.check_health());
            sleep(POLL_INTERVAL);
        }
        _ = hostile.shutdown(Shutdown::Both);
        let answer = exchange.join().unwrap_or_default();
        let verdict = verdict.or_else(|| self.check_health());
        Ok(verdict.unwrap_or_else(|| judge(&answer, began.elapsed())))
    }

    /// Returns the server's fault, as observed by the regular key and the system.
    fn check_health(&mut self) -> Option<Verdict> {
        let began = Instant::now();
        let polite = self.polite();
        if let Ok(Some(status)) = self.child.try_wait() {
            use std::os::unix::process::ExitStatusExt;
            return Some(status.signal().map_or_else(|| Verdict::Wrong(status.to_string()), Verdict::Abort));
        }
        if began.elapsed() > TOKEN_TIMEOUT {
            return Some(Verdict::Hang);
        }
        if resident(self.child.id()) > self.resident + MEMORY {
            return Some(Verdict::Memory);
        }
        match polite {
            Ok(answer) if answer.starts_with("HTTP/1.1 200") => None,
            Ok(answer) => Some(Verdict::Wrong(format!("the polite key: {answer:.200}"))),
            Err(error) => Some(Verdict::Wrong(format!("the polite key: {error}"))),
        }
    }

    /// Returns the answer to a chat request with the regular key.
    fn polite(&self) -> io::Result<String> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(2 * TOKEN_TIMEOUT))?;
        let body =
            r#"{"messages":[{"role":"user","content":"What is the capital of France?"}],"max_tokens":1}"#;
        stream.write_all(&post("/v1/chat/completions", POLITE, body.as_bytes()))?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Terminates the server.
    pub fn end(&mut self) -> io::Result<Verdict> {
        Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status()?;
        let began = Instant::now();
        while self.child.try_wait()?.is_none() {
            if began.elapsed() > SHUTDOWN_TIMEOUT {
                return Ok(Verdict::Hang);
            }
            sleep(POLL_INTERVAL);
        }
        let log = self.read_log();
        let is_broken = log.contains("panicked") || log.contains("internal error");
        Ok(if is_broken { Verdict::Panic } else { Verdict::Answered })
    }

    /// Returns its log.
    pub fn read_log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Reached if it has not ended.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// Returns a request with this body.
pub fn post(path: &str, key: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Classifies a response: only server errors are faults.
fn judge(answer: &[u8], took: Duration) -> Verdict {
    let answer = String::from_utf8_lossy(answer);
    let status = answer.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse::<u16>().ok());
    match status {
        Some(200..=299) => Verdict::Answered,
        Some(400..=499 | 503) => Verdict::Refused,
        Some(_) => Verdict::Wrong(format!("{answer:.200}")),
        // The client has disconnected.
        None if took >= REQUEST_TIMEOUT => Verdict::Refused,
        // Bytes that are no request get no response.
        None if answer.is_empty() => Verdict::Refused,
        None => Verdict::Wrong(format!("no HTTP: {answer:.200}")),
    }
}
