//! Displays an answer: its reasoning is dimmed or hidden.

use std::io::{self, Write};

use kvant::chat::{ReasoningParser, TextPart};

use crate::console;

const DIM: &str = "\u{1b}[2m";
const PLAIN: &str = "\u{1b}[0m";

/// How reasoning is displayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// Dimmed.
    Dimmed,
    /// Verbatim with its tags, where colours are unavailable.
    AsWritten,
    /// Hidden.
    Hidden,
}

impl Shown {
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
pub struct Voice {
    thoughts: ReasoningParser,
    shown: Shown,
    /// Reasoning was written; the answer begins below it.
    has_thought: bool,
    /// The output is a terminal, which interprets control characters.
    is_obeyed: bool,
}

impl Voice {
    /// Creates the writer of an answer to `prompt`, rendered by the template `source`.
    pub fn new(source: &str, prompt: &str, shown: Shown) -> Self {
        let thoughts = match shown {
            Shown::AsWritten => ReasoningParser::none(),
            Shown::Dimmed | Shown::Hidden => ReasoningParser::of(source, prompt),
        };
        Self { thoughts, shown, has_thought: false, is_obeyed: console::is_obeyed() }
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
                TextPart::Reasoning(_) if self.shown == Shown::Hidden => {}
                // Each piece is closed by itself: an answer may stop after any.
                TextPart::Reasoning(text) => {
                    self.has_thought = true;
                    let text = console::spoken(&text, self.is_obeyed);
                    write!(out, "{DIM}{text}{PLAIN}")?;
                }
                TextPart::Text(text) => {
                    let text = console::spoken(&text, self.is_obeyed);
                    let between = if std::mem::take(&mut self.has_thought) { "\n\n" } else { "" };
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

    fn shown(shown: Shown, pieces: &[&str]) -> String {
        said(Voice { is_obeyed: false, ..Voice::new("</think>", "", shown) }, pieces)
    }

    fn said(mut voice: Voice, pieces: &[&str]) -> String {
        let mut out = Vec::new();
        pieces.iter().for_each(|piece| voice.say(piece, &mut out).unwrap());
        voice.end(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn reasoning_is_dimmed_hidden_or_verbatim() {
        let pieces = ["<thi", "nk>\nHm", ", so.\n</think>\n", "\nYes", "."];
        assert_eq!(shown(Shown::Dimmed, &pieces), "\u{1b}[2mHm\u{1b}[0m\u{1b}[2m, so.\u{1b}[0m\n\nYes.");
        assert_eq!(shown(Shown::Hidden, &pieces), "Yes.");
        assert_eq!(shown(Shown::AsWritten, &pieces), pieces.concat());
        for how in [Shown::Dimmed, Shown::Hidden, Shown::AsWritten] {
            assert_eq!(shown(how, &["Yes", "."]), "Yes.");
        }
    }

    #[test]
    fn terminals_receive_no_control_characters_of_the_model() {
        let pieces = ["<think>\nHm\u{1b}[31m", "\n</think>\n", "\nYes\u{1b}]52;c;b3du\u{7}", "\u{9b}2J."];
        let voice = |shown| Voice { is_obeyed: true, ..Voice::new("</think>", "", shown) };
        assert_eq!(said(voice(Shown::Dimmed), &pieces), "\u{1b}[2mHm[31m\u{1b}[0m\n\nYes]52;c;b3du2J.");
        assert_eq!(said(voice(Shown::Hidden), &pieces), "Yes]52;c;b3du2J.");
        assert!(!said(voice(Shown::AsWritten), &pieces).contains(['\u{1b}', '\u{7}', '\u{9b}']));
    }
}
