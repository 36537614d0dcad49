//! How a command fails: one clear line, and the exit code that goes with it.

use std::io;
use std::process::ExitCode;

use crate::{console, hints};

/// Why a command did not do its work.
#[derive(Debug)]
pub enum Failure {
    /// The work failed: exit code 1.
    Work(String),
    /// The command was called wrongly: exit code 2.
    Usage(String),
    /// A result could not be [written](crate::console::results), nor could another one.
    Output(io::Error),
    /// Whoever read our output has gone, as `head` does; nothing is wrong.
    BrokenPipe,
}

impl Failure {
    /// A failure of the work, with what was being done.
    pub fn work(doing: impl std::fmt::Display, error: impl std::fmt::Display) -> Self {
        Self::Work(format!("{doing}: {error}"))
    }

    /// What went wrong, in one line, where there is something to say.
    pub fn line(&self) -> Option<String> {
        match self {
            Self::Work(line) | Self::Usage(line) => Some(one_line(line)),
            Self::Output(error) => Some(format!("stdout: {error}")),
            Self::BrokenPipe => None,
        }
    }

    /// Says the line.
    pub fn tell(&self) {
        if let Some(line) = self.line() {
            console::say(format_args!("error: {line}"));
        }
    }

    /// Says the line and gives the exit code.
    pub fn report(self) -> ExitCode {
        self.tell();
        match self {
            Self::Work(_) | Self::Output(_) => ExitCode::from(1),
            Self::Usage(_) => ExitCode::from(2),
            Self::BrokenPipe => ExitCode::SUCCESS,
        }
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl From<clap::Error> for Failure {
    /// Wrong usage in one line: what clap says first, and where to read on.
    fn from(error: clap::Error) -> Self {
        let text = error.render().to_string();
        let paragraph = text.split("\n\n").next().unwrap_or_default();
        Self::Usage(format!("{} (see --help)", paragraph.trim_start_matches("error: ").trim_end()))
    }
}

impl From<kvant::Error> for Failure {
    fn from(error: kvant::Error) -> Self {
        Self::Work(hints::of_engine(&error))
    }
}

impl From<io::Error> for Failure {
    /// A result that could not be [written](console::results).
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::BrokenPipe,
            _ => Self::Output(error),
        }
    }
}
