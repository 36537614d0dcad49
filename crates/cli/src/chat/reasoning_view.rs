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
    thoughts: ReasoningParser,
    shown: ReasoningDisplay,
    /// Reasoning was written; the answer begins below it.
    has_reasoning: bool,
    /// The output is a terminal, which interprets control characters.
    is_terminal: bool,
}

impl ReasoningView {
    /// Creates the writer of an answer to `prompt`, rendered by the template `source`.
    pub fn new(source: &str, prompt: &str, shown: ReasoningDisplay) -> Self {
        let thoughts = match shown {
            ReasoningDisplay::AsWritten => ReasoningParser::none(),
            ReasoningDisplay::Dimmed | ReasoningDisplay::Hidden => ReasoningParser::of(source, prompt),
        };
        Self { thoughts, shown, has_reasoning: false, is_terminal: console::stdout_is_terminal() }
    }

    /// Writes the text that is certain after `text` arrived.
    pub fn say(&mut self, text: &str, out: &mut impl Write) -> io::Result<()> {
        let said = self.thoughts.push(text);
        self.write(said, out)
    }

    /// Writes the withheld rest at the end.
    pub fn end(&mut self, out: &mut impl Write) -> io::Result<()> {
        let said = self.thoughts.rest();
        self.write(said, out)
    }

    fn write(&mut self, said: Vec<TextPart>, out: &mut impl Write) -> io::Result<()> {
        for said in said {
            match said {
                TextPart::Reasoning(_) if self.shown == ReasoningDisplay::Hidden => {}
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

    fn shown(shown: ReasoningDisplay, pieces: &[&str]) -> String {
        said(ReasoningView { is_terminal: false, ..ReasoningView::new("</think>", "", shown) }, pieces)
    }

    fn said(mut voice: ReasoningView, pieces: &[&str]) -> String {
        let mut out = Vec::new();
        pieces.iter().for_each(|piece| voice.say(piece, &mut out).unwrap());
        voice.end(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn reasoning_is_dimmed_hidden_or_verbatim() {
        let pieces = ["<thi", "nk>\nHm", ", so.\n</think>\n", "\nYes", "."];
        assert_eq!(
            shown(ReasoningDisplay::Dimmed, &pieces),
            "\u{1b}[2mHm\u{1b}[0m\u{1b}[2m, so.\u{1b}[0m\n\nYes."
        );
        assert_eq!(shown(ReasoningDisplay::Hidden, &pieces), "Yes.");
        assert_eq!(shown(ReasoningDisplay::AsWritten, &pieces), pieces.concat());
        for how in [ReasoningDisplay::Dimmed, ReasoningDisplay::Hidden, ReasoningDisplay::AsWritten] {
            assert_eq!(shown(how, &["Yes", "."]), "Yes.");
        }
    }

    #[test]
    fn terminals_receive_no_control_characters_of_the_model() {
        let pieces = ["<think>\nHm\u{1b}[31m", "\n</think>\n", "\nYes\u{1b}]52;c;b3du\u{7}", "\u{9b}2J."];
        let voice = |shown| ReasoningView { is_terminal: true, ..ReasoningView::new("</think>", "", shown) };
        assert_eq!(
            said(voice(ReasoningDisplay::Dimmed), &pieces),
            "\u{1b}[2mHm[31m\u{1b}[0m\n\nYes]52;c;b3du2J."
        );
        assert_eq!(said(voice(ReasoningDisplay::Hidden), &pieces), "Yes]52;c;b3du2J.");
        assert!(!said(voice(ReasoningDisplay::AsWritten), &pieces).contains(['\u{1b}', '\u{7}', '\u{9b}']));
    }
}
