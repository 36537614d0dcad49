//! Reads messages from the terminal or a pipe.

use std::io::ErrorKind;

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::failure::Failure;
use crate::{console, log};

/// Begins and ends a message of several lines.
const FENCE: &str = "\"\"\"";

/// The prompt, plain and in colour.
const PROMPT: (&str, &str) = ("> ", "\u{1b}[1;32m> \u{1b}[0m");

/// Reads lines from the terminal or a pipe.
pub struct Lines(DefaultEditor);

/// Result of a read.
pub enum Read {
    Message(String),
    Interrupted,
    End,
}

impl Lines {
    /// Opens stdin.
    pub fn open() -> Result<Self, Failure> {
        let mut editor = DefaultEditor::new().map_err(|error| Failure::work("terminal", error))?;
        // The editor shows colours only with a helper.
        if console::has_colours() {
            editor.set_helper(Some(()));
        }
        Ok(Self(editor))
    }

    /// Reads the next message that is not empty.
    pub fn next(&mut self) -> Result<Read, Failure> {
        loop {
            match self.message() {
                Ok(message) if message.is_empty() => {}
                Ok(message) => {
                    // A history failure does not affect the message.
                    let _ = self.0.add_history_entry(&message);
                    return Ok(Read::Message(message));
                }
                // Skips the invalid line, so that the conversation continues.
                Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                    log::note("skipped a line that is not UTF-8");
                }
                Err(ReadlineError::Interrupted) => return Ok(Read::Interrupted),
                Err(ReadlineError::Eof) => return Ok(Read::End),
                Err(error) => return Err(Failure::work("terminal", error)),
            }
        }
    }

    /// Reads one line with its continuation lines, or a fenced message.
    fn message(&mut self) -> Result<String, ReadlineError> {
        let line = self.0.readline(&PROMPT)?;
        let mut text = line.trim().to_owned();
        if let Some(begun) = text.strip_prefix(FENCE) {
            let mut block = begun.to_owned();
            while !block.ends_with(FENCE) {
                block.push('\n');
                block += &self.0.readline(". ")?;
            }
            return Ok(block.trim_end_matches(FENCE).trim_matches('\n').to_owned());
        }
        while let Some(begun) = text.strip_suffix('\\') {
            text = format!("{begun}\n{}", self.0.readline(". ")?.trim_end());
        }
        Ok(text)
    }
}
