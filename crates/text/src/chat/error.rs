//! Why a chat template cannot be used.

use std::fmt;

use kvant_gguf::GgufError;
use minijinja::ErrorKind;

/// Every way in which a chat template fails. Each reads as one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The file has no template, and its vocabulary does not tell of a format.
    #[error(
        "the file has no 'tokenizer.chat_template', and its vocabulary no '<|im_start|>' that would mean ChatML"
    )]
    Missing,
    /// The template's key holds something else than text.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// The template itself refuses the conversation (`raise_exception`).
    #[error("the chat template refuses this conversation: {0}")]
    Refused(String),
    /// The template is not valid Jinja.
    #[error("the chat template does not parse{at}: {message}")]
    Syntax {
        /// Where.
        at: Line,
        /// What the parser says.
        message: String,
    },
    /// The template failed on this conversation.
    #[error("the chat template failed{at}: {message}")]
    Render {
        /// Where.
        at: Line,
        /// What went wrong.
        message: String,
    },
    /// The template ran longer, or wrote more, than any honest one does.
    #[error("the chat template was stopped after {limit}")]
    Limit {
        /// The limit that it met.
        limit: &'static str,
    },
}

/// A line of a template, counted from 1, where known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line(pub Option<usize>);

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |line| write!(f, " at line {line}"))
    }
}

/// Marks an error as coming from `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

/// Marks an error as too much output.
#[derive(Debug, thiserror::Error)]
#[error("too much output")]
pub(super) struct TooLong;

impl TemplateError {
    /// The error of a template that did not parse.
    pub(super) fn syntax(error: &minijinja::Error) -> Self {
        TemplateError::Syntax { at: Line(error.line()), message: message(error) }
    }

    /// The error of a template that did not render.
    pub(super) fn render(error: &minijinja::Error) -> Self {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(e) = cause {
            if let Some(Raised(text)) = e.downcast_ref() {
                return TemplateError::Refused(one_line(text));
            }
            let io_error = e.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
            if io_error.is_some_and(|inner| inner.is::<TooLong>()) {
                return TemplateError::Limit { limit: super::MAX_OUTPUT_TEXT };
            }
            cause = e.source();
        }
        if error.kind() == ErrorKind::OutOfFuel {
            return TemplateError::Limit { limit: super::MAX_STEPS_TEXT };
        }
        TemplateError::Render { at: Line(error.line()), message: message(error) }
    }
}

/// Kind and detail, without the name and line that `Display` appends.
fn message(error: &minijinja::Error) -> String {
    let kind = error.kind().to_string();
    error.detail().map_or(kind.clone(), |detail| one_line(&format!("{kind}: {detail}")))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
