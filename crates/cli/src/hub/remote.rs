//! The hub itself: a repository's files, what is known of one, and its content.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::time::Duration;

use kvant::gguf::printable;
use serde_json::Value;
use sha2::{Digest, Sha256};
use ureq::{Agent, Body, http::Response};

use crate::progress;

/// Times that a broken connection is taken up again before giving up.
const RETRIES: usize = 5;

/// Bytes that are read at once.
const BUFFER: usize = 1 << 16;

/// Why something could not be had.
#[derive(Debug)]
pub enum Problem {
    /// The hub cannot be reached; what was fetched so far is kept.
    Unreachable(String),
    /// It says no, or what it sends is not right.
    Failed(String),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(why) | Self::Failed(why) => f.write_str(why),
        }
    }
}

/// What the hub says of a file.
pub struct About {
    /// The name of its content: of large files the SHA-256, in hex.
    pub etag: String,
    /// Bytes, where it says so.
    pub size: Option<u64>,
}

/// A repository on the hub.
pub struct Remote {
    agent: Agent,
    endpoint: String,
    repo: String,
    token: Option<String>,
}

impl Remote {
    /// The hub at `HF_ENDPOINT`, or the one that everybody means.
    pub fn from_env(repo: &str, token: Option<String>) -> Self {
        let endpoint = std::env::var("HF_ENDPOINT").ok().filter(|endpoint| !endpoint.is_empty());
        let endpoint = endpoint.unwrap_or_else(|| "https://huggingface.co".to_owned());
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_recv_response(Some(Duration::from_secs(30)))
            .user_agent(concat!("kvant/", env!("CARGO_PKG_VERSION")));
        let (agent, endpoint) = (config.build().into(), endpoint.trim_end_matches('/').to_owned());
        Self { agent, endpoint, repo: repo.to_owned(), token }
    }

    /// The newest commit, and the names of its files.
    pub fn files(&self) -> Result<(String, Vec<String>), Problem> {
        let url = format!("{}/api/models/{}/revision/main", self.endpoint, self.repo);
        let mut response = self.answer(self.get(&url).call())?;
        let text = response.body_mut().read_to_string().map_err(|error| unreachable(&url, error))?;
        let value: Value = serde_json::from_str(&text).unwrap_or_default();
        let names = value["siblings"].as_array().map(|files| {
            files.iter().filter_map(|file| file["rfilename"].as_str()).map(str::to_owned).collect()
        });
        let commit = value["sha"].as_str().map(str::to_owned);
        let known = commit.zip(names);
        known.ok_or_else(|| {
            Problem::Failed(format!("{url}: expected a commit and its files, got something else"))
        })
    }

    /// What is known of a file of a commit.
    pub fn about(&self, commit: &str, file: &str) -> Result<About, Problem> {
        let mut url = self.url(commit, file);
        // The answer is that of the hub, not that of the store that it sends to; a renamed repository is still the hub's.
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
            let etag = etag.ok_or_else(|| Problem::Failed(format!("{url}: the hub names no checksum")))?;
            return Ok(About { etag, size });
        }
        Err(Problem::Failed(format!("{url}: sent from one address to the next without end")))
    }

    /// Fetches the content of a file after the `from` bytes that are there, and checks all of it.
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
        let mut done = from;
        let mut tries = 0;
        while about.size.is_none_or(|size| done < size) {
            let before = done;
            match self.fetch_on(&url, part, &mut done, &mut |done| bar.set_position(done)) {
                Ok(()) if about.size.is_none() => break,
                // An end that came too early is a broken connection.
                Ok(()) => {}
                Err(problem @ Problem::Failed(_)) => return Err(problem),
                Err(problem) if tries == RETRIES => return Err(problem),
                Err(_) => {}
            }
            // As long as something comes, it goes on.
            tries = if done > before { 0 } else { tries + 1 };
            if tries > RETRIES {
                return Err(Problem::Unreachable(format!("{url}: nothing came after {done} bytes")));
            }
        }
        bar.finish_and_clear();
        part.flush().map_err(broken)?;
        check(part, about, &url)
    }

    /// One connection's worth of it.
    fn fetch_on(
        &self,
        url: &str,
        part: &mut File,
        done: &mut u64,
        tell: &mut dyn FnMut(u64),
    ) -> Result<(), Problem> {
        let request = self.get(url);
        let request = if *done > 0 { request.header("Range", format!("bytes={done}-")) } else { request };
        let response = self.answer(request.call())?;
        if *done > 0 && response.status() != 206 {
            // The whole comes again.
            part.set_len(0).map_err(broken)?;
            *done = 0;
        }
        let mut body = response.into_body().into_reader();
        let mut buffer = vec![0; BUFFER];
        loop {
            match body.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(n) => part.write_all(&buffer[..n]).map_err(broken)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(unreachable(url, error)),
            }
            *done = part.metadata().map_err(broken)?.len();
            tell(*done);
        }
    }

    fn url(&self, commit: &str, file: &str) -> String {
        // A name may contain what an address may not.
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
                "no such file here, and none that {} shows without a token (HF_TOKEN)",
                self.endpoint
            ))),
            status @ (429 | 500..) => {
                Err(Problem::Unreachable(format!("{} answers {status}", self.endpoint)))
            }
            status => Err(Problem::Failed(format!("{} answers {status}", self.endpoint))),
        }
    }
}

/// Holds the content to its checksum, where that is a SHA-256, and to its size.
fn check(part: &mut File, about: &About, url: &str) -> Result<(), Problem> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; BUFFER];
    let mut n_bytes = 0;
    part.seek(SeekFrom::Start(0)).map_err(broken)?;
    loop {
        match part.read(&mut buffer).map_err(broken)? {
            0 => break,
            n => hash.update(&buffer[..n]),
        }
        n_bytes = part.stream_position().map_err(broken)?;
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

/// The file on this machine cannot be written or read.
fn broken(error: io::Error) -> Problem {
    Problem::Failed(error.to_string())
}

fn unreachable(what: &str, error: impl fmt::Display) -> Problem {
    Problem::Unreachable(format!("{what} cannot be reached: {error}"))
}
