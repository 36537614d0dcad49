//! Incremental parser that separates a model's reasoning from its answer.

const THINK_OPEN: &str = "<think>";
/// The tag that ends reasoning.
pub const THINK_CLOSE: &str = "</think>";

/// A piece of generated text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TextPart {
    /// Text of the answer.
    Text(String),
    /// Text of the reasoning, between its tags.
    Reasoning(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Only whitespace has been generated.
    Start,
    Reasoning,
    Answering,
}

/// Parses streamed text into one leading reasoning section and the answer after it. Buffers a
/// suffix that may be the beginning of a tag, and discards whitespace next to tags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasoningParser {
    state: State,
    /// Whether the parser is discarding whitespace after a tag.
    skips_whitespace: bool,
    buffer: String,
    /// Length of the whitespace prefix of the buffer, in bytes. It is not scanned again, since it
    /// may be long.
    n_whitespace: usize,
}

impl ReasoningParser {
    /// Creates a parser for a response to `prompt`, rendered from the template `source`. A template
    /// without `</think>` implies no reasoning. A prompt may end with an open `<think>`.
    pub fn of(source: &str, prompt: &str) -> Self {
        let state = match source.contains(THINK_CLOSE) {
            true if prompt.trim_end().ends_with(THINK_OPEN) => State::Reasoning,
            true => State::Start,
            false => State::Answering,
        };
        Self { state, skips_whitespace: state == State::Reasoning, buffer: String::new(), n_whitespace: 0 }
    }

    /// Creates a parser that treats all text as the answer.
    pub fn none() -> Self {
        Self { state: State::Answering, skips_whitespace: false, buffer: String::new(), n_whitespace: 0 }
    }

    /// Whether a reasoning section is open.
    pub fn is_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    /// Appends `text` and returns the pieces that are now complete.
    pub fn push(&mut self, text: &str) -> Vec<TextPart> {
        self.buffer += text;
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// Returns the buffered text at the end of the response.
    pub fn rest(&mut self) -> Vec<TextPart> {
        let mut parts = self.push("");
        let held = std::mem::take(&mut self.buffer);
        put(
            &mut parts,
            if self.state == State::Reasoning { TextPart::Reasoning } else { TextPart::Text },
            held,
        );
        parts
    }

    /// Consumes one item of the buffer. Returns whether more may follow.
    fn step(&mut self, parts: &mut Vec<TextPart>) -> bool {
        if self.skips_whitespace {
            self.keep(skip_whitespace(&self.buffer, 0));
            self.skips_whitespace = self.buffer.is_empty();
        }
        match self.state {
            State::Start => self.start(),
            State::Reasoning => {
                let (reasoning, is_complete) =
                    take_from(&mut self.buffer, &mut self.n_whitespace, THINK_CLOSE);
                put(parts, TextPart::Reasoning, reasoning);
                if is_complete {
                    (self.state, self.skips_whitespace) = (State::Answering, true);
                }
                is_complete
            }
            State::Answering => {
                put(parts, TextPart::Text, std::mem::take(&mut self.buffer));
                false
            }
        }
    }

    /// Decides from the beginning of the response whether it opens with reasoning.
    fn start(&mut self) -> bool {
        self.n_whitespace = skip_whitespace(&self.buffer, self.n_whitespace);
        let begun = &self.buffer[self.n_whitespace..];
        if begun.starts_with(THINK_OPEN) {
            self.keep(self.n_whitespace + THINK_OPEN.len());
            (self.state, self.skips_whitespace) = (State::Reasoning, true);
            return true;
        }
        if THINK_OPEN.starts_with(begun) {
            return false;
        }
        self.state = State::Answering;
        true
    }

    /// Discards the buffer before byte `from`.
    fn keep(&mut self, from: usize) {
        self.buffer.drain(..from);
        self.n_whitespace = 0;
    }
}

/// Takes the text before `mark` together with the mark, and returns `true`. Without a mark, takes
/// all text that cannot be the beginning of one, and returns `false`. Discards whitespace before
/// the mark.
pub fn take_until(held: &mut String, mark: &str) -> (String, bool) {
    take_from(held, &mut 0, mark)
}

/// Works as [`take_until`], given that the first `blanks` bytes of the buffer are whitespace.
/// Updates `blanks`.
fn take_from(held: &mut String, blanks: &mut usize, mark: &str) -> (String, bool) {
    let known = std::mem::take(blanks);
    if let Some(at) = held[known..].find(mark) {
        let after = held.split_off(known + at);
        let before = std::mem::replace(held, after[mark.len()..].to_owned());
        return (before.trim_end().to_owned(), true);
    }
    let word = held.len() - partial_match_len(&held[known..], mark);
    let at = match held[known..word].trim_end().len() {
        0 => 0,
        len => known + len,
    };
    *blanks = word - at;
    // Draining zero bytes leaves a long buffer in place.
    (held.drain(..at).collect(), false)
}

/// Returns the length in bytes of the longest suffix of `text` that is a proper prefix of `mark`.
pub fn partial_match_len(text: &str, mark: &str) -> usize {
    let beginnings = mark.char_indices().map(|(at, _)| &mark[..at]);
    beginnings.rev().find(|start| text.ends_with(start)).map_or(0, str::len)
}

/// Returns the byte offset of the first non-whitespace character at or after `from`.
fn skip_whitespace(text: &str, from: usize) -> usize {
    text.len() - text[from..].trim_start().len()
}

/// Appends `text` as a piece unless it is empty.
fn put(parts: &mut Vec<TextPart>, kind: fn(String) -> TextPart, text: String) {
    if !text.is_empty() {
        parts.push(kind(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the reasoning and the answer, which must not depend on how the text is split.
    fn split_reasoning(source: &str, prompt: &str, text: &str) -> (String, String) {
        let chars: Vec<char> = text.chars().collect();
        let ways = (1..=chars.len()).map(|size| {
            let mut parser = ReasoningParser::of(source, prompt);
            let pieces = chars.chunks(size).map(|piece| parser.push(&piece.iter().collect::<String>()));
            let mut all = pieces.collect::<Vec<_>>().concat();
            all.extend(parser.rest());
            let mut parts = (String::new(), String::new());
            for part in all {
                match part {
                    TextPart::Reasoning(text) => parts.0 += &text,
                    TextPart::Text(text) => parts.1 += &text,
                }
            }
            parts
        });
        let ways: Vec<_> = ways.collect();
        assert!(ways.iter().all(|way| *way == ways[0]), "{text:?}: {ways:?}");
        ways[0].clone()
    }

    #[test]
    fn reasoning_is_separated_however_the_text_is_split() {
        let source = "{{ '</think>' }}";
        for (source, prompt, text, reasoning, answer) in [
            (source, "", "Hello.", "", "Hello."),
            (source, "", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
            (source, "", " <think>Hm", "Hm", ""),
            (source, "", "a <think> b", "", "a <think> b"),
            (source, "", "<thin air", "", "<thin air"),
            (source, "", "<think></think>Yes. <think>No.</think>", "", "Yes. <think>No.</think>"),
            (source, "Go on: <think>\n", "Hm.</think>Yes.", "Hm.", "Yes."),
            (source, "", " \n <think>a \n b  </thin  </think> c", "a \n b  </thin", "c"),
            (source, "", "  <thin", "", "  <thin"),
            (source, "", "<think>é  \u{2003} é</</think>ü", "é  \u{2003} é</", "ü"),
            ("", "<think>", "<think>x</think>", "", "<think>x</think>"),
        ] {
            let got = split_reasoning(source, prompt, text);
            assert_eq!(got, (reasoning.to_owned(), answer.to_owned()), "{text:?}");
        }
    }
    #[test]
    fn scanned_whitespace_is_not_scanned_again() {
        for begins in ["", "<think>a"] {
            let mut parser = ReasoningParser::of("</think>", "");
            parser.push(begins);
            for n in 1..=100 {
                assert_eq!(parser.push(" "), []);
                assert_eq!(parser.push("\u{2003}"), []);
                assert_eq!(parser.buffer.len(), 4 * n);
                assert!(
                    parser.n_whitespace + 4 > parser.buffer.len(),
                    "{} of {}",
                    parser.n_whitespace,
                    4 * n
                );
            }
        }
        let mut held = "a  <tool".to_owned();
        assert_eq!(take_until(&mut held, "<tool_call>"), ("a".to_owned(), false));
        assert_eq!(held, "  <tool");
    }
}
