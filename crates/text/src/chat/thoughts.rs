//! What a model thinks, told from what it says while it says it.

const THINKS: &str = "<think>";
/// What ends a thought.
pub const HAS_THOUGHT: &str = "</think>";

/// A piece of what a model writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// Of the answer.
    Text(String),
    /// Of what comes before it, between its marks.
    Thought(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but blanks has been written.
    Start,
    Thinking,
    Speaking,
}

/// Takes apart text that comes in pieces: one thought at its beginning, and all that follows. What may be the beginning of a mark is
/// held back, and blanks between a mark and what it parts belong to neither.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thoughts {
    state: State,
    /// Blanks that come now are part of nothing.
    skips_blanks: bool,
    held: String,
    /// Bytes at the start of what is held that are blanks, and need not be looked at again: a run of them may be long.
    blanks: usize,
}

impl Thoughts {
    /// Of an answer to `prompt`, which a template of this `source` has written: one that knows no thoughts has none, and one may
    /// end its prompt within a thought.
    pub fn of(source: &str, prompt: &str) -> Self {
        let state = match source.contains(HAS_THOUGHT) {
            true if prompt.trim_end().ends_with(THINKS) => State::Thinking,
            true => State::Start,
            false => State::Speaking,
        };
        Self { state, skips_blanks: state == State::Thinking, held: String::new(), blanks: 0 }
    }

    /// Of an answer that is all text.
    pub fn none() -> Self {
        Self { state: State::Speaking, skips_blanks: false, held: String::new(), blanks: 0 }
    }

    /// Whether a thought has begun and not ended.
    pub fn is_thinking(&self) -> bool {
        self.state == State::Thinking
    }

    /// What has become certain with more text.
    pub fn push(&mut self, text: &str) -> Vec<Said> {
        self.held += text;
        let mut said = Vec::new();
        while self.step(&mut said) {}
        said
    }

    /// What was held back, at the end.
    pub fn rest(&mut self) -> Vec<Said> {
        let mut said = self.push("");
        let held = std::mem::take(&mut self.held);
        put(&mut said, if self.state == State::Thinking { Said::Thought } else { Said::Text }, held);
        said
    }

    /// Takes one thing from what is held. Whether there may be more.
    fn step(&mut self, said: &mut Vec<Said>) -> bool {
        if self.skips_blanks {
            self.keep(first_word(&self.held, 0));
            self.skips_blanks = self.held.is_empty();
        }
        match self.state {
            State::Start => self.start(),
            State::Thinking => {
                let (thought, is_complete) = take_from(&mut self.held, &mut self.blanks, HAS_THOUGHT);
                put(said, Said::Thought, thought);
                if is_complete {
                    (self.state, self.skips_blanks) = (State::Speaking, true);
                }
                is_complete
            }
            State::Speaking => {
                put(said, Said::Text, std::mem::take(&mut self.held));
                false
            }
        }
    }

    /// What an answer begins with decides whether it is a thought.
    fn start(&mut self) -> bool {
        self.blanks = first_word(&self.held, self.blanks);
        let begun = &self.held[self.blanks..];
        if begun.starts_with(THINKS) {
            self.keep(self.blanks + THINKS.len());
            (self.state, self.skips_blanks) = (State::Thinking, true);
            return true;
        }
        if THINKS.starts_with(begun) {
            return false;
        }
        self.state = State::Speaking;
        true
    }

    /// Lets go of what is held before byte `from`.
    fn keep(&mut self, from: usize) {
        self.held.drain(..from);
        self.blanks = 0;
    }
}

/// Takes what stands before `mark` and, where that is there, the mark too, and says so; else all that cannot be the beginning of one.
/// Blanks before a mark belong to nothing.
pub fn take_until(held: &mut String, mark: &str) -> (String, bool) {
    take_from(held, &mut 0, mark)
}

/// As [`take_until`], where the first `blanks` bytes of what is held are known to be blanks; as many are then.
fn take_from(held: &mut String, blanks: &mut usize, mark: &str) -> (String, bool) {
    let known = std::mem::take(blanks);
    if let Some(at) = held[known..].find(mark) {
        let after = held.split_off(known + at);
        let said = std::mem::replace(held, after[mark.len()..].to_owned());
        return (said.trim_end().to_owned(), true);
    }
    let word = held.len() - begun(&held[known..], mark);
    let at = match held[known..word].trim_end().len() {
        0 => 0,
        len => known + len,
    };
    *blanks = word - at;
    // Taking nothing leaves what is held where it is, however long.
    (held.drain(..at).collect(), false)
}

/// How many bytes at the end of `text` are the beginning of a `mark` and not all of it.
pub fn begun(text: &str, mark: &str) -> usize {
    let beginnings = mark.char_indices().map(|(at, _)| &mark[..at]);
    beginnings.rev().find(|start| text.ends_with(start)).map_or(0, str::len)
}

/// Where the first character that is no blank stands, from byte `from` on.
fn first_word(text: &str, from: usize) -> usize {
    text.len() - text[from..].trim_start().len()
}

/// Puts text behind what is there; none is nothing.
fn put(said: &mut Vec<Said>, kind: fn(String) -> Said, text: String) {
    if !text.is_empty() {
        said.push(kind(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is thought and what is said, however the text is cut.
    fn taken_apart(source: &str, prompt: &str, text: &str) -> (String, String) {
        let chars: Vec<char> = text.chars().collect();
        let ways = (1..=chars.len()).map(|size| {
            let mut thoughts = Thoughts::of(source, prompt);
            let pieces = chars.chunks(size).map(|piece| thoughts.push(&piece.iter().collect::<String>()));
            let mut all = pieces.collect::<Vec<_>>().concat();
            all.extend(thoughts.rest());
            let mut parts = (String::new(), String::new());
            for said in all {
                match said {
                    Said::Thought(text) => parts.0 += &text,
                    Said::Text(text) => parts.1 += &text,
                }
            }
            parts
        });
        let ways: Vec<_> = ways.collect();
        assert!(ways.iter().all(|way| *way == ways[0]), "{text:?}: {ways:?}");
        ways[0].clone()
    }

    #[test]
    fn a_thought_is_told_from_an_answer_however_the_text_is_cut() {
        let knows = "{{ '</think>' }}";
        for (source, prompt, text, thought, answer) in [
            (knows, "", "Hello.", "", "Hello."),
            (knows, "", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
            (knows, "", " <think>Hm", "Hm", ""),
            (knows, "", "a <think> b", "", "a <think> b"),
            (knows, "", "<thin air", "", "<thin air"),
            (knows, "", "<think></think>Yes. <think>No.</think>", "", "Yes. <think>No.</think>"),
            (knows, "Go on: <think>\n", "Hm.</think>Yes.", "Hm.", "Yes."),
            (knows, "", " \n <think>a \n b  </thin  </think> c", "a \n b  </thin", "c"),
            (knows, "", "  <thin", "", "  <thin"),
            (knows, "", "<think>é  \u{2003} é</</think>ü", "é  \u{2003} é</", "ü"),
            ("", "<think>", "<think>x</think>", "", "<think>x</think>"),
        ] {
            let got = taken_apart(source, prompt, text);
            assert_eq!(got, (thought.to_owned(), answer.to_owned()), "{text:?}");
        }
    }
    #[test]
    fn what_is_known_to_be_blank_is_not_looked_at_again() {
        for begins in ["", "<think>a"] {
            let mut thoughts = Thoughts::of("</think>", "");
            thoughts.push(begins);
            for n in 1..=100 {
                assert_eq!(thoughts.push(" "), []);
                assert_eq!(thoughts.push("\u{2003}"), []);
                assert_eq!(thoughts.held.len(), 4 * n);
                assert!(thoughts.blanks + 4 > thoughts.held.len(), "{} of {}", thoughts.blanks, 4 * n);
            }
        }
        let mut held = "a  <tool".to_owned();
        assert_eq!(take_until(&mut held, "<tool_call>"), ("a".to_owned(), false));
        assert_eq!(held, "  <tool");
    }
}
