//! Classifies outcomes.

use std::fs;
use std::path::Path;

use kvant_gguf::Gguf;

use crate::case::{Case, Expect, Stream};
use crate::run::{Ended, Outcome};

/// Classification of an outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Rejected in one line.
    Refused,
    /// Answered.
    Answered,
    /// The program panicked.
    Panic,
    /// Ended by a signal.
    Abort(i32),
    /// Timed out.
    Hang,
    /// Exceeded the memory limit.
    Memory,
    /// Another fault.
    Wrong(String),
}

impl Verdict {
    /// Returns whether the outcome is permitted.
    pub fn is_sound(&self) -> bool {
        matches!(self, Self::Answered | Self::Refused)
    }
}

/// Exit codes: success, failure, wrong usage, Ctrl-C, closed pipe.
const CODES: [i32; 5] = [0, 1, 2, 130, 141];
/// Maximum characters of a line: the program's limit, plus its note on the length.
const LINE: usize = 2200;

/// Classifies `outcome`.
pub fn judge(case: &Case, outcome: &Outcome) -> Verdict {
    let stderr = String::from_utf8_lossy(&outcome.stderr);
    match (outcome.ended, outcome.signal, outcome.code) {
        (Some(Ended::Hang), ..) => return Verdict::Hang,
        (Some(Ended::Memory), ..) => return Verdict::Memory,
        (_, Some(signal), _) => return Verdict::Abort(signal),
        (.., Some(101)) => return Verdict::Panic,
        _ if stderr.contains("internal error") || stderr.contains("panicked") => return Verdict::Panic,
        _ => {}
    }
    let code = outcome.code.unwrap_or(-1);
    let complaints = [wrong_code(case, code), wrong_lines(case, code, &stderr), wrong_files(case, code)];
    if let Some(complaint) = complaints.into_iter().flatten().next() {
        return Verdict::Wrong(complaint);
    }
    if let (Expect::PromptOf(min_tokens), 0) = (case.expect, code) {
        let stdout = String::from_utf8_lossy(&outcome.stdout);
        let n = stdout.split("\"n_prompt\":").nth(1).and_then(|rest| rest.split([',', '}']).next());
        match n.and_then(|n| n.trim().parse::<usize>().ok()) {
            Some(n) if n >= min_tokens => {}
            n => return Verdict::Wrong(format!("a prompt of {n:?} tokens, expected {min_tokens} or more")),
        }
    }
    if code == 0 { Verdict::Answered } else { Verdict::Refused }
}

fn wrong_code(case: &Case, code: i32) -> Option<String> {
    let is_right = match case.expect {
        Expect::Refused => matches!(code, 1 | 2),
        Expect::Answered | Expect::PromptOf(_) => code == 0,
        Expect::Either => CODES.contains(&code),
    };
    (!is_right).then(|| format!("exit code {code}, expected {:?}", case.expect))
}

/// Checks that a failure prints exactly one line that begins with `error: `, a success none, and
/// that no line is overlong or contains control characters.
fn wrong_lines(case: &Case, code: i32, stderr: &str) -> Option<String> {
    if case.stderr != Stream::Kept {
        return None;
    }
    let is_help = code == 2 && stderr.contains("Usage:");
    let errors = stderr.lines().filter(|line| line.starts_with("error: ")).count();
    let expected = usize::from(matches!(code, 1 | 2) && !is_help);
    if errors != expected && !case.is_conversation {
        return Some(format!("{errors} lines of errors, expected {expected}"));
    }
    if let Some(line) = stderr.lines().find(|line| line.chars().count() > LINE) {
        return Some(format!("a line of {} characters", line.chars().count()));
    }
    let is_control = |c: &char| c.is_control() && *c != '\n';
    stderr.chars().find(is_control).map(|c| format!("{c:?} on stderr"))
}

/// Checks that inputs are unchanged, that only outputs were added, and that those of a success are
/// complete.
fn wrong_files(case: &Case, code: i32) -> Option<String> {
    let is_output = |path: &Path| case.outputs.iter().any(|name| case.folder.join(name) == path);
    for (path, bytes) in case.files() {
        let is_changed = fs::read(path).map_or(true, |now| now != *bytes);
        if is_changed && !(is_output(path) && code == 0) {
            return Some(format!("{} has changed", path.display()));
        }
    }
    let entries = fs::read_dir(&case.folder).ok()?;
    for path in entries.flatten().map(|entry| entry.path()) {
        // A folder is known by a file in it.
        let is_known = case.files().iter().any(|(known, _)| known.starts_with(&path));
        if !is_known && !(is_output(&path) && (code == 0 || case.is_conversation)) && !is_given(&path) {
            return Some(format!("{} was left behind", path.display()));
        }
        let is_model = is_output(&path) && path.extension().is_some_and(|ending| ending == "gguf");
        if is_model
            && path.is_file()
            && let Err(error) = Gguf::open(&path)
        {
            return Some(format!("an output that is no model: {error}"));
        }
    }
    None
}

/// Returns whether a case has created this path, besides its files.
fn is_given(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"given"))
}
