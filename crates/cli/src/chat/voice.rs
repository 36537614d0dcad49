//! How an answer is shown: what the model thinks first is dimmed, or left out.

use std::io::{self, Write};

use kvant::chat::{Said, Thoughts};

use crate::console;

const DIM: &str = "\u{1b}[2m";
const PLAIN: &str = "\u{1b}[0m";

/// What becomes of thoughts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// They are dimmed.
    Dimmed,
    /// As the model writes them, marks and all: where there are no colours.
    AsWritten,
    /// They are left out.
    Hidden,
}

impl Shown {
    /// Hidden where that is wanted, else as results can be shown.
    pub fn of(hides: bool) -> Self {
        match (hides, console::has_colours()) {
            (true, _) => Self::Hidden,
            (false, true) => Self::Dimmed,
            (false, false) => Self::AsWritten,
        }
    }
}

/// An answer on its way to the terminal.
pub struct Voice {
    thoughts: Thoughts,
    shown: Shown,
    /// A thought stands there; what is said begins below it.
    has_thought: bool,
    /// A terminal would obey what the model writes.
    is_obeyed: bool,
}

impl Voice {
    /// Of an answer to `prompt`, which a template of this `source` has written.
    pub fn new(source: &str, prompt: &str, shown: Shown) -> Self {
        let thoughts = match shown {
            Shown::AsWritten => Thoughts::none(),
            Shown::Dimmed | Shown::Hidden => Thoughts::of(source, prompt),
        };
        Self { thoughts, shown, has_thought: false, is_obeyed: console::is_obeyed() }
    }

    /// Writes what has become certain with more text.
    pub fn say(&mut self, text: &str, out: &mut impl Write) -> io::Result<()> {
        let said = self.thoughts.push(text);
        self.write(said, out)
    }

    /// Writes what was held back, at the end.
    pub fn end(&mut self, out: &mut impl Write) -> io::Result<()> {
        let said = self.thoughts.rest();
        self.write(said, out)
    }

    fn write(&mut self, said: Vec<Said>, out: &mut impl Write) -> io::Result<()> {
        for said in said {
            match said {
                Said::Thought(_) if self.shown == Shown::Hidden => {}
                // Each piece by itself: an answer may be stopped after any.
                Said::Thought(text) => {
                    self.has_thought = true;
                    let text = console::spoken(&text, self.is_obeyed);
                    write!(out, "{DIM}{text}{PLAIN}")?;
                }
                Said::Text(text) => {
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
    fn thoughts_are_dimmed_left_out_or_as_they_were_written() {
        let pieces = ["<thi", "nk>\nHm", ", so.\n</think>\n", "\nYes", "."];
        assert_eq!(shown(Shown::Dimmed, &pieces), "\u{1b}[2mHm\u{1b}[0m\u{1b}[2m, so.\u{1b}[0m\n\nYes.");
        assert_eq!(shown(Shown::Hidden, &pieces), "Yes.");
        assert_eq!(shown(Shown::AsWritten, &pieces), pieces.concat());
        for how in [Shown::Dimmed, Shown::Hidden, Shown::AsWritten] {
            assert_eq!(shown(how, &["Yes", "."]), "Yes.");
        }
    }

    #[test]
    fn a_terminal_obeys_the_marks_of_a_thought_and_nothing_of_what_is_said() {
        let pieces = ["<think>\nHm\u{1b}[31m", "\n</think>\n", "\nYes\u{1b}]52;c;b3du\u{7}", "\u{9b}2J."];
        let voice = |shown| Voice { is_obeyed: true, ..Voice::new("</think>", "", shown) };
        assert_eq!(said(voice(Shown::Dimmed), &pieces), "\u{1b}[2mHm[31m\u{1b}[0m\n\nYes]52;c;b3du2J.");
        assert_eq!(said(voice(Shown::Hidden), &pieces), "Yes]52;c;b3du2J.");
        assert!(!said(voice(Shown::AsWritten), &pieces).contains(['\u{1b}', '\u{7}', '\u{9b}']));
    }
}
