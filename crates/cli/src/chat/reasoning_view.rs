//! Displays an answer: its reasoning is dimmed or hidden.

use std::io::{self, Write};

use kvant::chat::{ReasoningParser, TextPart};

use crate::console;

const DIM: &str = "\u{1b}[2m";
const PLAIN: &str = "\u{1b}[0m";

/// How reasoning is displayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningDisplay {
    /// Dimmed.
    Dimmed,
    /// Verbatim with its tags, where colours are unavailable.
    AsWritten,
    /// Hidden.
    Hidden,
}

impl ReasoningDisplay {
    /// Returns `Hidden` if `hides` is set, else what the output supports.
    pub fn of(hides: bool) -> Self {
        match (hides, console::has_colours()) {
            (true, _) => Self::Hidden,
            (false, true) => Self::Dimmed,
            (false, false) => Self::AsWritten,
        }
    }
}

/// Writes an answer to the terminal.
pub struct ReasoningView {
    parser: ReasoningParser,
    display: ReasoningDisplay,
    /// Reasoning was written; the answer begins below it.
    has_reasoning: bool,
    /// The output is a terminal, which interprets control characters.
    is_terminal: bool,
}

impl ReasoningView {
    /// Creates the writer of an answer to `prompt`, rendered by the template `source`.
    pub fn new(source: &str, prompt: &str, display: ReasoningDisplay) -> Self {
        let parser = match display {
            ReasoningDisplay::AsWritten => ReasoningParser::none(),
            ReasoningDisplay::Dimmed | ReasoningDisplay::Hidden => ReasoningParser::of(source, prompt),
        };
        Self { parser, display, has_reasoning: false, is_terminal: console::stdout_is_terminal() }
    }

    /// Writes the text that is certain after `text` arrived.
    pub fn write(&mut self, text: &str, out: &mut impl Write) -> io::Result<()> {
        let parts = self.parser.push(text);
        self.write_parts(parts, out)
    }

    /// Writes the withheld rest at the end.
    pub fn end(&mut self, out: &mut impl Write) -> io::Result<()> {
        let parts = self.parser.rest();
        self.write_parts(parts, out)
    }

    fn write_parts(&mut self, parts: Vec<TextPart>, out: &mut impl Write) -> io::Result<()> {
        for part in parts {
            match part {
                TextPart::Reasoning(_) if self.display == ReasoningDisplay::Hidden => {}
                // Each piece is closed by itself: an answer may stop after any.
                TextPart::Reasoning(text) => {
                    self.has_reasoning = true;
                    let text = console::sanitized_output(&text, self.is_terminal);
                    write!(out, "{DIM}{text}{PLAIN}")?;
                }
                TextPart::Text(text) => {
                    let text = console::sanitized_output(&text, self.is_terminal);
                    let between = if std::mem::take(&mut self.has_reasoning) { "\n\n" } else { "" };
                    write!(out, "{between}{text}")?;
                }
            }
        }
        out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn displayed(display: ReasoningDisplay, pieces: &[&str]) -> String {
        written(ReasoningView { is_terminal: false, ..ReasoningView::new("</think>", "", display) }, pieces)
    }

    fn written(mut view: ReasoningView, pieces: &[&str]) -> String {
        let mut out = Vec::new();
        pieces.iter().for_each(|piece| view.write(piece, &mut out).unwrap());
        view.end(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn reasoning_is_dimmed_hidden_or_verbatim() {
        let pieces = ["<thi", "nk>\nHm", ", so.\n</think>\n", "\nYes", "."];
        assert_eq!(
            displayed(ReasoningDisplay::Dimmed, &pieces),
            "\u{1b}[2mHm\u{1b}[0m\u{1b}[2m, so.\u{1b}[0m\n\nYes."
        );
        assert_eq!(displayed(ReasoningDisplay::Hidden, &pieces), "Yes.");
        assert_eq!(displayed(ReasoningDisplay::AsWritten, &pieces), pieces.concat());
        for how in [ReasoningDisplay::Dimmed, ReasoningDisplay::Hidden, ReasoningDisplay::AsWritten] {
            assert_eq!(displayed(how, &["Yes", "."]), "Yes.");
        }
    }

    #[test]
    fn terminals_receive_no_control_characters_of_the_model() {
        let pieces = ["<think>\nHm\u{1b}[31m", "\n</think>\n", "\nYes\u{1b}]52;c;b3du\u{7}", "\u{9b}2J."];
        let view =
            |display| ReasoningView { is_terminal: true, ..ReasoningView::new("</think>", "", display) };
        assert_eq!(
            written(view(ReasoningDisplay::Dimmed), &pieces),
            "\u{1b}[2mHm[31m\u{1b}[0m\n\nYes]52;c;b3du2J."
        );
        assert_eq!(written(view(ReasoningDisplay::Hidden), &pieces), "Yes]52;c;b3du2J.");
        assert!(!written(view(ReasoningDisplay::AsWritten), &pieces).contains(['\u{1b}', '\u{7}', '\u{9b}']));
    }
}
