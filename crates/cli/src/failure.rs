//! Failures of commands: one clear line, and its exit code.

use std::io;

use crate::{console, hints};

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// The work failed: exit code 1.
    Work(String),
    /// Wrong usage: exit code 2.
    Usage(String),
    /// A result could not be [written](crate::console::results); later ones cannot either.
    Output(io::Error),
    /// The reader of the output closed it, as `head` does; not an error.
    BrokenPipe,
    /// A result that has an exit code of its own, and is printed.
    Verdict(u8),
}

impl Failure {
    /// Creates a work failure: `doing: error`.
    pub fn work(doing: impl std::fmt::Display, error: impl std::fmt::Display) -> Self {
        Self::Work(format!("{doing}: {error}"))
    }

    /// Returns the error in one line; `None` for a closed pipe and for a verdict.
    pub fn line(&self) -> Option<String> {
        match self {
            Self::Work(line) | Self::Usage(line) => Some(one_line(line)),
            Self::Output(error) => Some(format!("stdout: {error}")),
            Self::BrokenPipe | Self::Verdict(_) => None,
        }
    }

    /// Prints the line.
    pub fn print(&self) {
        if let Some(line) = self.line() {
            console::eprint_line(format_args!("error: {line}"));
        }
    }

    /// Prints the line and returns the exit code.
    pub fn report(self) -> u8 {
        self.print();
        match self {
            Self::Work(_) | Self::Output(_) => 1,
            Self::Usage(_) => 2,
            Self::BrokenPipe => 0,
            Self::Verdict(code) => code,
        }
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl From<clap::Error> for Failure {
    /// Reduces wrong usage to one line: clap's first paragraph and a pointer to the help.
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

impl From<kvant_quantize::QuantizeError> for Failure {
    fn from(error: kvant_quantize::QuantizeError) -> Self {
        Self::Work(error.to_string())
    }
}

impl From<io::Error> for Failure {
    /// Converts a failure to [write](console::results) a result.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::BrokenPipe,
            _ => Self::Output(error),
        }
    }
}
