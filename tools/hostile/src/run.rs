//! Runs a case within a time and memory limit.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::case::{Case, Stream};

/// Timeout: the bundled model answers in a fraction of a second.
const TIME: Duration = Duration::from_secs(20);
/// Maximum resident memory, in bytes: the bundled model takes some 20 MB.
const MEMORY: u64 = 1 << 30;
/// Maximum mapped memory, in KiB, enforced by the system. Beyond it an allocation fails, which
/// aborts.
const MAPPED: u64 = 8 << 20;

/// Outcome of a run.
pub struct Outcome {
    /// The exit code, if the program exited.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Why it was killed.
    pub ended: Option<Ended>,
    /// Its stdout, if captured.
    pub stdout: Vec<u8>,
    /// As `stdout`.
    pub stderr: Vec<u8>,
}

/// Why a run was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Exceeded [`TIME`].
    Hang,
    /// Exceeded [`MEMORY`].
    Memory,
}

/// Runs `binary` on a case, with output streams and a home folder in `beside`.
pub fn run(case: &Case, binary: &Path, beside: &Path) -> io::Result<Outcome> {
    let (out, err) = (beside.join("stdout"), beside.join("stderr"));
    let mut command = Command::new("sh");
    command.arg("-c").arg(script(case)).arg("sh").arg(binary).args(&case.args);
    command.current_dir(&case.folder).env_clear();
    command.env("PATH", "/usr/bin:/bin").env("HOME", beside.join("home"));
    command.envs(case.env.iter().map(|(key, value)| (key, value)));
    command.stdin(input(case, &beside.join("stdin"))?);
    command.stdout(end(case.stdout, &out)?).stderr(end(case.stderr, &err)?);
    let mut child = command.spawn()?;
    let (status, ended) = wait(&mut child)?;
    Ok(Outcome {
        code: status.code().filter(|_| ended.is_none()),
        signal: status.signal().filter(|_| ended.is_none()),
        ended,
        stdout: fs::read(out).unwrap_or_default(),
        stderr: fs::read(err).unwrap_or_default(),
    })
}

/// Returns a shell script that sets limits and closes streams, which the standard library cannot.
fn script(case: &Case) -> String {
    let closed = [
        (case.stdin.is_none(), " <&-"),
        (case.stdout == Stream::Closed, " >&-"),
        (case.stderr == Stream::Closed, " 2>&-"),
    ];
    let closed: String = closed.iter().filter(|(is, _)| *is).map(|(_, how)| *how).collect();
    format!("ulimit -v {MAPPED}; ulimit -c 0; exec \"$@\"{closed}")
}

fn input(case: &Case, file: &Path) -> io::Result<Stdio> {
    let Some(bytes) = &case.stdin else { return Ok(Stdio::null()) };
    fs::write(file, bytes)?;
    Ok(File::open(file)?.into())
}

fn end(end: Stream, file: &Path) -> io::Result<Stdio> {
    let _ = fs::remove_file(file);
    Ok(match end {
        Stream::Kept => File::create(file)?.into(),
        Stream::Full => OpenOptions::new().write(true).open("/dev/full")?.into(),
        Stream::Closed => Stdio::null(),
    })
}

/// Waits for the end, or kills the program.
fn wait(child: &mut Child) -> io::Result<(ExitStatus, Option<Ended>)> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok((status, None));
        }
        let too_long = (started.elapsed() > TIME).then_some(Ended::Hang);
        let too_large = (resident(child.id()) > MEMORY).then_some(Ended::Memory);
        if let Some(ended) = too_long.or(too_large) {
            child.kill()?;
            return Ok((child.wait()?, Some(ended)));
        }
        sleep(Duration::from_millis(2));
    }
}

/// Returns the resident bytes, if the system reports them.
pub fn resident(id: u32) -> u64 {
    let pages = fs::read_to_string(format!("/proc/{id}/statm")).unwrap_or_default();
    let pages = pages.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok());
    pages.unwrap_or_default().saturating_mul(4096)
}
