//! Errors of chat templates.

use std::fmt;

use kvant_gguf::GgufError;

use crate::jinja::{self, Fault, Located};

/// A failure of a chat template. Each displays as one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The file has no template, and its vocabulary indicates no known format.
    #[error(
        "the file has no 'tokenizer.chat_template', and its vocabulary no '<|im_start|>' that would mean ChatML"
    )]
    Missing,
    /// The template's metadata key holds a value that is not a string.
    #[error("{0}")]
    Metadata(String),
    /// The template itself refuses the conversation (`raise_exception`).
    #[error("the chat template refuses this conversation: {0}")]
    Refused(String),
    /// The template is not valid Jinja.
    #[error("the chat template does not parse{at}: {message}")]
    Syntax {
        /// The line of the error.
        at: Line,
        /// The parser's message.
        message: String,
    },
    /// The template failed on this conversation.
    #[error("the chat template failed{at}: {message}")]
    Render {
        /// The line of the error.
        at: Line,
        /// The cause.
        message: String,
    },
    /// The template exceeded a limit on steps, memory, nesting or depth.
    #[error("the chat template was stopped{at}: {limit}")]
    Limit {
        /// The line where rendering stopped.
        at: Line,
        /// The limit that was exceeded.
        limit: String,
    },
    /// The template drops or changes the final message, so it cannot be continued.
    #[error("the chat template does not write the last message as it is, so that it cannot be continued")]
    FinalMessage,
    /// The template drops, repeats or reorders images or audio clips.
    #[error("the chat template drops or reorders media: expected {expected}, got {got}")]
    Media {
        /// Kinds in the conversation.
        expected: String,
        /// Kinds in the rendered text.
        got: String,
    },
}

/// A line of a template, counted from 1, if known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line(pub Option<usize>);

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |line| write!(f, " at line {line}"))
    }
}

impl From<GgufError> for TemplateError {
    fn from(error: GgufError) -> Self {
        TemplateError::Metadata(error.to_string())
    }
}

impl TemplateError {
    /// Converts a parser fault.
    pub(super) fn syntax((fault, line): Located) -> Self {
        match Self::render((fault, line)) {
            TemplateError::Render { at, message } => TemplateError::Syntax { at, message },
            other => other,
        }
    }

    /// Converts a rendering fault.
    pub(super) fn render((fault, line): Located) -> Self {
        let at = Line(Some(line as usize));
        let limit = match fault {
            Fault::Raised(words) => return TemplateError::Refused(one_line(&words)),
            Fault::Failed(message) => return TemplateError::Render { at, message: one_line(&message) },
            Fault::Steps => format!("more than {} million steps", jinja::MAX_STEPS / 1_000_000),
            Fault::Bytes => format!("more than {} MiB at a time", jinja::MAX_BYTES >> 20),
            Fault::Nesting => format!("values nested deeper than {} levels", jinja::MAX_NESTING),
            Fault::Depth => format!("calls and expressions deeper than {} levels", jinja::MAX_DEPTH),
        };
        TemplateError::Limit { at, limit }
    }
}

/// Longest message, in characters. Some messages repeat text that the template wrote.
const MAX_MESSAGE: usize = 300;

fn one_line(text: &str) -> String {
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() {
            line.push(' ');
        }
        line.extend(word.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE));
        if line.len() > MAX_MESSAGE {
            line = line.chars().take(MAX_MESSAGE).chain(['…']).collect();
            break;
        }
    }
    line
}
