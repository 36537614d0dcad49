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
        Self { state, skips_blanks: state == State::Thinking, held: String::new() }
    }

    /// Of an answer that is all text.
    pub fn none() -> Self {
        Self { state: State::Speaking, skips_blanks: false, held: String::new() }
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
            self.held = self.held.trim_start().to_owned();
            self.skips_blanks = self.held.is_empty();
        }
        match self.state {
            State::Start => self.start(),
            State::Thinking => {
                let (thought, is_complete) = take_until(&mut self.held, HAS_THOUGHT);
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
        let begun = self.held.trim_start();
        if let Some(thought) = begun.strip_prefix(THINKS) {
            self.held = thought.to_owned();
            (self.state, self.skips_blanks) = (State::Thinking, true);
            return true;
        }
        if THINKS.starts_with(begun) {
            return false;
        }
        self.state = State::Speaking;
        true
    }
}

/// Takes what stands before `mark` and, where that is there, the mark too, and says so; else all that cannot be the beginning of one.
/// Blanks before a mark belong to nothing.
pub fn take_until(held: &mut String, mark: &str) -> (String, bool) {
    if let Some(at) = held.find(mark) {
        let after = held.split_off(at);
        let said = std::mem::replace(held, after[mark.len()..].to_owned());
        return (said.trim_end().to_owned(), true);
    }
    let is_begun = |at: &usize| mark.starts_with(held[*at..].trim_start());
    let at = held.char_indices().map(|(at, _)| at).find(is_begun).unwrap_or(held.len());
    let left = held.split_off(at);
    (std::mem::replace(held, left), false)
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
            ("", "<think>", "<think>x</think>", "", "<think>x</think>"),
        ] {
            let got = taken_apart(source, prompt, text);
            assert_eq!(got, (thought.to_owned(), answer.to_owned()), "{text:?}");
        }
    }
}
