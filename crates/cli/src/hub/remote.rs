//! Client of the hub: a repository's files, their metadata and content.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use kvant::gguf::printable;
use serde_json::Value;
use sha2::{Digest, Sha256};
use ureq::{Agent, Body, http::Response};

use crate::progress;

/// Maximum reconnections without progress.
const RETRIES: usize = 5;

/// Bytes per read.
const BUFFER: usize = 1 << 16;
/// Timeout between parts of a body.
const STALL: Duration = Duration::from_secs(30);
/// Maximum size of a file whose size the hub does not state.
const MAX_UNKNOWN_SIZE: u64 = 16 << 20;

/// Why a download failed.
#[derive(Debug)]
pub enum Problem {
    /// The hub cannot be reached; a partial download is preserved.
    Unreachable(String),
    /// The hub rejects the request, or sends invalid content.
    Failed(String),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(why) | Self::Failed(why) => f.write_str(why),
        }
    }
}

/// Metadata of a file.
pub struct About {
    /// Name of the content: the SHA-256 of large files, in hex.
    pub etag: String,
    /// Size in bytes, if the hub states it.
    pub size: Option<u64>,
}

/// A repository on the hub.
pub struct Remote {
    agent: Agent,
    endpoint: String,
    repo: String,
    token: Option<String>,
    stall: Duration,
}

impl Remote {
    /// Returns the hub at `HF_ENDPOINT`, or huggingface.co.
    pub fn from_env(repo: &str, token: Option<String>) -> Self {
        let endpoint = std::env::var("HF_ENDPOINT").ok().filter(|endpoint| !endpoint.is_empty());
        let endpoint = endpoint.unwrap_or_else(|| "https://huggingface.co".to_owned());
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_recv_response(Some(Duration::from_secs(30)))
            .user_agent(concat!("kvant/", env!("CARGO_PKG_VERSION")));
        let (agent, endpoint) = (config.build().into(), endpoint.trim_end_matches('/').to_owned());
        Self { agent, endpoint, repo: repo.to_owned(), token, stall: STALL }
    }

    /// Returns the newest commit, and the names of its files.
    pub fn files(&self) -> Result<(String, Vec<String>), Problem> {
        let url = format!("{}/api/models/{}/revision/main", self.endpoint, self.repo);
        let mut response = self.answer(self.get(&url).call())?;
        let text = response.body_mut().read_to_string().map_err(|error| unreachable(&url, error))?;
        let value: Value = serde_json::from_str(&text).unwrap_or_default();
        let names = value["siblings"].as_array().map(|files| {
            files.iter().filter_map(|file| file["rfilename"].as_str()).map(str::to_owned).collect()
        });
        let commit = value["sha"].as_str().map(str::to_owned);
        let found = commit.zip(names);
        found.ok_or_else(|| {
            Problem::Failed(format!("{url}: expected a commit and its files, got an invalid response"))
        })
    }

    /// Returns the metadata of a file of a commit.
    pub fn about(&self, commit: &str, file: &str) -> Result<About, Problem> {
        let mut url = self.url(commit, file);
        // Follows redirects within the hub only, as of a renamed repository: its headers count, not
        // those of its storage.
        for _ in 0..RETRIES {
            let request =
                self.agent.head(&url).config().max_redirects(0).max_redirects_will_error(false).build();
            let response = self.answer(self.signed(request).call())?;
            let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            if let Some(moved) = header("location").filter(|to| to.starts_with('/')) {
                url = format!("{}{moved}", self.endpoint);
                continue;
            }
            let etag = header("x-linked-etag")
                .or(header("etag"))
                .map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned());
            let size =
                header("x-linked-size").or(header("content-length")).and_then(|size| size.parse().ok());
            let etag = etag.ok_or_else(|| Problem::Failed(format!("{url}: the hub sent no checksum")))?;
            return Ok(About { etag, size });
        }
        Err(Problem::Failed(format!("{url}: too many redirects")))
    }

    /// Downloads the content of a file after its first `from` bytes, and verifies the whole file.
    pub fn fetch(
        &self,
        commit: &str,
        file: &str,
        about: &About,
        part: &mut File,
        from: u64,
        quiet: bool,
    ) -> Result<(), Problem> {
        let url = self.url(commit, file);
        let bar = progress::bar("fetching", about.size.unwrap_or(0), quiet);
        bar.set_message(printable(file, 64));
        let (mut done, mut max_done) = (from, from);
        let mut tries = 0;
        while about.size.is_none_or(|size| done < size) {
            let on_progress = &mut |done| bar.set_position(done);
            let size = about.size.unwrap_or(MAX_UNKNOWN_SIZE);
            match self.fetch_on(&url, part, &mut done, size, on_progress) {
                Ok(()) if about.size.is_none() => break,
                // A body that ends early is a broken connection.
                Ok(()) => {}
                Err(problem @ Problem::Failed(_)) => return Err(problem),
                Err(problem) if tries == RETRIES => return Err(problem),
                Err(_) => {}
            }
            // Progress resets the number of tries.
            tries = if done > max_done { 0 } else { tries + 1 };
            max_done = max_done.max(done);
            if tries > RETRIES {
                return Err(Problem::Unreachable(format!("{url}: no data after {done} bytes")));
            }
        }
        bar.finish_and_clear();
        part.flush().map_err(file_error)?;
        check(part, about, &url)
    }

    /// Downloads over one connection, from byte `done` on, to `size` bytes in all.
    fn fetch_on(
        &self,
        url: &str,
        part: &mut File,
        done: &mut u64,
        size: u64,
        on_progress: &mut dyn FnMut(u64),
    ) -> Result<(), Problem> {
        let request = self.get(url);
        let request = if *done > 0 { request.header("Range", format!("bytes={done}-")) } else { request };
        let response = self.answer(request.call())?;
        if *done > 0 && response.status() != 206 {
            // The server ignored the range and sends the whole file.
            part.set_len(0).map_err(file_error)?;
            *done = 0;
        }
        let parts = parts(response.into_body());
        loop {
            let bytes = match parts.recv_timeout(self.stall) {
                Ok(Ok(bytes)) => bytes,
                Ok(Err(error)) => return Err(unreachable(url, error)),
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {
                    let seconds = self.stall.as_secs();
                    return Err(Problem::Unreachable(format!("{url}: no data for {seconds} seconds")));
                }
            };
            if *done + bytes.len() as u64 > size {
                return Err(Problem::Failed(format!("{url}: expected {size} bytes, got more")));
            }
            part.write_all(&bytes).map_err(file_error)?;
            *done = part.metadata().map_err(file_error)?.len();
            on_progress(*done);
        }
    }

    fn url(&self, commit: &str, file: &str) -> String {
        // File names may contain characters that are invalid in a URL.
        let escape = |c: char| match c {
            ' ' | '%' | '#' | '?' | '+' | '"' | '<' | '>' => format!("%{:02X}", u32::from(c)),
            c => c.to_string(),
        };
        let file: String = file.chars().map(escape).collect();
        format!("{}/{}/resolve/{commit}/{file}", self.endpoint, self.repo)
    }

    fn get(&self, url: &str) -> ureq::RequestBuilder<ureq::typestate::WithoutBody> {
        self.signed(self.agent.get(url))
    }

    fn signed<B>(&self, request: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        match &self.token {
            Some(token) => request.header("Authorization", format!("Bearer {token}")),
            None => request,
        }
    }

    fn answer(&self, response: Result<Response<Body>, ureq::Error>) -> Result<Response<Body>, Problem> {
        let response = response.map_err(|error| unreachable(&self.endpoint, error))?;
        match response.status().as_u16() {
            200..=399 => Ok(response),
            401 | 403 | 404 => Err(Problem::Failed(format!(
                "no such file here, and {} shows none without a token (HF_TOKEN)",
                self.endpoint
            ))),
            status @ (429 | 500..) => {
                Err(Problem::Unreachable(format!("{} answers {status}", self.endpoint)))
            }
            status => Err(Problem::Failed(format!("{} answers {status}", self.endpoint))),
        }
    }
}

/// Returns the parts of a body as they arrive, read by a separate thread so that the receiver can
/// time out. The thread ends with the process if the server never closes the connection.
fn parts(body: Body) -> Receiver<io::Result<Vec<u8>>> {
    let (to, parts) = sync_channel(4);
    let mut body = body.into_reader();
    let read = move || {
        let mut buffer = vec![0; BUFFER];
        loop {
            let part = match body.read(&mut buffer) {
                Ok(0) => return,
                Ok(n) => Ok(buffer[..n].to_vec()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
            let is_last = part.is_err();
            if to.send(part).is_err() || is_last {
                return;
            }
        }
    };
    std::thread::spawn(read);
    parts
}

/// Verifies the content's SHA-256, if its name is one, and its size.
fn check(part: &mut File, about: &About, url: &str) -> Result<(), Problem> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; BUFFER];
    let mut n_bytes = 0;
    part.seek(SeekFrom::Start(0)).map_err(file_error)?;
    loop {
        match part.read(&mut buffer).map_err(file_error)? {
            0 => break,
            n => hash.update(&buffer[..n]),
        }
        n_bytes = part.stream_position().map_err(file_error)?;
    }
    if n_bytes == 0 {
        return Err(Problem::Failed(format!("{url}: the file is empty")));
    }
    if let Some(size) = about.size.filter(|size| *size != n_bytes) {
        return Err(Problem::Failed(format!("{url}: expected {size} bytes, got {n_bytes}")));
    }
    let is_sha256 = about.etag.len() == 64 && about.etag.bytes().all(|b| b.is_ascii_hexdigit());
    let got: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    if is_sha256 && !got.eq_ignore_ascii_case(&about.etag) {
        return Err(Problem::Failed(format!("{url}: expected SHA-256 {}, got {got}", about.etag)));
    }
    Ok(())
}

/// Converts a failure to read or write the local file.
fn file_error(error: io::Error) -> Problem {
    Problem::Failed(error.to_string())
}

fn unreachable(what: &str, error: impl fmt::Display) -> Problem {
    Problem::Unreachable(format!("{what} cannot be reached: {error}"))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Returns the result of downloading ten bytes from a hub that sends this over each connection,
    /// and the number of requests.
    fn fetched(size: Option<u64>, sends: fn(&mut dyn Write)) -> (String, usize) {
        let hub = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", hub.local_addr().unwrap());
        let (sender, connections) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut open_streams = Vec::new();
            for stream in hub.incoming() {
                let mut stream = stream.unwrap();
                _ = sender.send(());
                let mut head = [0; 4096];
                _ = stream.read(&mut head);
                sends(&mut stream);
                open_streams.push(stream);
            }
        });
        let (agent, stall) = (Agent::new_with_defaults(), Duration::from_millis(200));
        let remote = Remote { agent, endpoint, repo: "a/b".to_owned(), token: None, stall };
        let mut part = tempfile();
        let about = About { etag: "x".to_owned(), size };
        let result = remote.fetch("c", "f", &about, &mut part, 0, true);
        assert!(part.metadata().unwrap().len() <= MAX_UNKNOWN_SIZE);
        (
            result.map_or_else(|problem| problem.to_string(), |()| "all".to_owned()),
            connections.try_iter().count(),
        )
    }

    fn tempfile() -> File {
        let path = std::env::temp_dir().join(format!("kvant-hub-{:?}", std::thread::current().id()));
        _ = std::fs::remove_file(&path);
        let file = File::options().create_new(true).read(true).append(true).open(&path).unwrap();
        _ = std::fs::remove_file(path);
        file
    }

    #[test]
    fn an_endless_body_is_aborted_at_the_stated_size() {
        fn endless(stream: &mut dyn Write) {
            _ = stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
            while stream.write_all(&[b'x'; 4096]).is_ok() {}
        }
        let (line, n) = fetched(Some(10), endless);
        assert!(line.ends_with("expected 10 bytes, got more") && n == 1, "{n}: {line}");
        let (line, n) = fetched(None, endless);
        assert!(line.ends_with("expected 16777216 bytes, got more") && n == 1, "{n}: {line}");
    }

    #[test]
    fn stalled_downloads_are_aborted() {
        fn stalls(stream: &mut dyn Write) {
            _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc");
        }
        let (line, n) = fetched(Some(10), stalls);
        assert!(line.contains("no data") && (2..=RETRIES + 3).contains(&n), "{n}: {line}");
    }

    #[test]
    fn an_empty_file_is_none() {
        fn nothing(stream: &mut dyn Write) {
            _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
        assert!(fetched(Some(0), nothing).0.ends_with("the file is empty"));
        assert!(fetched(None, nothing).0.ends_with("the file is empty"));
    }
}
