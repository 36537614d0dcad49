//! A tree as a program: each case is a process of it.

use std::io::{BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::case::Case;
use crate::subject::{Contender, Settings, Subject};
use crate::wire::{Digest, receive, send, to_bytes};

/// A built tree.
#[derive(Debug, Clone)]
pub struct Program {
    /// The `kvant` binary of the tree.
    pub path: PathBuf,
}

/// Selects the kernel set of a CPU; the judge's own is passed on where a case names none.
const ISA: &str = "KVANT_ISA";

impl Contender for Program {
    fn start(&mut self, case: &Case, state: &[u8], settings: &Settings) -> Result<Box<dyn Subject>, String> {
        let mut command = Command::new(&self.path);
        command.args(["lab", "worker", "--device", &settings.device]);
        command.args(["--threads", &settings.threads.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(isa) = settings.isa {
            command.env(ISA, isa);
        }
        let mut child = command.spawn().map_err(|error| format!("worker: {error}"))?;
        let requests = child.stdin.take().expect("stdin is a pipe");
        let replies = BufReader::new(child.stdout.take().expect("stdout is a pipe"));
        let mut process = Process { child, requests: Some(requests), replies };
        process.send(case.to_string().as_bytes())?;
        process.send(state)?;
        process.receive()?;
        Ok(Box::new(process))
    }
}

/// A worker that serves one case.
struct Process {
    child: Child,
    /// `None` once its requests have ended.
    requests: Option<ChildStdin>,
    replies: BufReader<ChildStdout>,
}

impl Process {
    fn send(&mut self, bytes: &[u8]) -> Result<(), String> {
        let requests = self.requests.as_mut().expect("requests end last");
        send(requests, bytes).map_err(|_| self.end())
    }

    fn receive(&mut self) -> Result<Vec<u8>, String> {
        match receive(&mut self.replies) {
            Ok(Some(reply)) => reply,
            Ok(None) => Err(self.end()),
            Err(error) => Err(format!("worker: {error}")),
        }
    }

    /// Waits for the end of a worker that ended by itself, and says how.
    fn end(&mut self) -> String {
        self.requests = None;
        let mut said = String::new();
        // An error that it could still send says more than its end.
        if let Ok(Some(Err(line))) = receive(&mut self.replies) {
            return line;
        }
        if let Some(stderr) = &mut self.child.stderr {
            let _ = stderr.read_to_string(&mut said);
        }
        let status = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        let last = said.lines().last().map(|line| format!(": {line}")).unwrap_or_default();
        format!("the worker ended ({status}){last}")
    }
}

impl Subject for Process {
    fn run(&mut self, inputs: &[f32]) -> Result<Digest, String> {
        self.send(&to_bytes(inputs))?;
        let digest = self.receive()?;
        Digest::from_bytes(&digest).ok_or_else(|| format!("a digest of {} bytes", digest.len()))
    }

    fn answers(&mut self) -> Result<Vec<u8>, String> {
        self.receive()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // At the end of its requests a worker ends; one that hangs in a kernel does not.
        self.requests = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
