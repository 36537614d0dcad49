//! Messages as they are typed or piped in, and what Ctrl-C does.

use std::io::{ErrorKind, IsTerminal, stdin};
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvant::CancelFlag;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::failure::Failure;
use crate::{console, log};

/// Begins and ends a message of several lines.
const FENCE: &str = "\"\"\"";

/// Exit code of a program that Ctrl-C has ended.
const INTERRUPTED: i32 = 130;

/// The prompt, plain and in colour.
const PROMPT: (&str, &str) = ("> ", "\u{1b}[1;32m> \u{1b}[0m");

/// What comes from the terminal or through a pipe.
pub struct Lines(DefaultEditor);

/// What was read.
pub enum Read {
    Message(String),
    Interrupted,
    End,
}

impl Lines {
    /// Opens stdin.
    pub fn open() -> Result<Self, Failure> {
        let mut editor = DefaultEditor::new().map_err(|error| Failure::work("terminal", error))?;
        // The editor shows colours when it has a helper.
        if console::has_colours() {
            editor.set_helper(Some(()));
        }
        Ok(Self(editor))
    }

    /// The next message that is not empty.
    pub fn next(&mut self) -> Result<Read, Failure> {
        loop {
            match self.message() {
                Ok(message) if message.is_empty() => {}
                Ok(message) => {
                    // A message that cannot be remembered is no worse for it.
                    let _ = self.0.add_history_entry(&message);
                    return Ok(Read::Message(message));
                }
                // The conversation is worth more than the line.
                Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                    log::note("a line that is no UTF-8 text was left out");
                }
                Err(ReadlineError::Interrupted) => return Ok(Read::Interrupted),
                Err(ReadlineError::Eof) => return Ok(Read::End),
                Err(error) => return Err(Failure::work("terminal", error)),
            }
        }
    }

    /// A line, those that it says follow, or those between fences.
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

/// What Ctrl-C stops: the answer that is being written, or a program at the end of a pipe that waits for the next message. On a
/// terminal the line editor reads the key.
#[derive(Clone)]
pub struct Interrupt {
    /// Stops the answer.
    pub cancel: CancelFlag,
    answering: Arc<AtomicBool>,
}

impl Interrupt {
    /// Begins to listen.
    pub fn listen() -> Result<Self, Failure> {
        let interrupt = Self { cancel: CancelFlag::default(), answering: Arc::default() };
        let (heard, on_terminal) = (interrupt.clone(), stdin().is_terminal());
        let handler = move || {
            let answering = heard.answering.load(Ordering::Relaxed);
            // A second time, nobody wants to wait for the answer to stop.
            let stopping = answering && heard.cancel.is_cancelled();
            if stopping || !answering && !on_terminal {
                exit(INTERRUPTED);
            }
            heard.cancel.cancel();
        };
        ctrlc::set_handler(handler).map_err(|error| Failure::work("Ctrl-C", error))?;
        Ok(interrupt)
    }

    /// Runs what Ctrl-C is to stop.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        self.cancel.reset();
        self.answering.store(true, Ordering::Relaxed);
        let done = work();
        self.answering.store(false, Ordering::Relaxed);
        done
    }
}
