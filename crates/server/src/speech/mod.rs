//! What a model says, taken apart while it says it: what it thinks, what it says, and which tools it calls.

pub(crate) mod tools;

use tools::{Call, Format, Tool};

/// A part of what was said.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Part {
    Text(String),
    Thought(String),
    Call(Call),
}

const THINKS: &str = "<think>";
const HAS_THOUGHT: &str = "</think>";

#[derive(Debug, Clone, PartialEq)]
enum State {
    /// Nothing but blanks has been said, or nothing since a thought.
    Start,
    Thinking,
    Speaking,
    Calling,
    /// A call has been made; others may follow.
    Called,
}

/// Takes text apart that comes in pieces. What may be the beginning of a mark is held back.
#[derive(Debug, Clone)]
pub(crate) struct Speech {
    state: State,
    /// How calls are written and what may be called, where anything may.
    tools: Option<(&'static Format, Vec<Tool>)>,
    thinks: bool,
    /// Blanks that come now are part of nothing.
    skips_blanks: bool,
    held: String,
}

impl Speech {
    /// Of a model whose template knows thoughts, or not; the answer may begin within one.
    pub fn new(thinks: bool, is_thinking: bool, tools: Option<(&'static Format, Vec<Tool>)>) -> Self {
        let state = if is_thinking { State::Thinking } else { State::Start };
        Self { state, tools, thinks, skips_blanks: is_thinking, held: String::new() }
    }

    /// What has become certain with more text.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.held += text;
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// What was held back, at the end.
    pub fn rest(&mut self) -> Vec<Part> {
        let mut parts = self.push("");
        let held = std::mem::take(&mut self.held);
        // Where a call begins as an answer does, the mark was kept.
        let opens =
            self.tools.as_ref().map_or("", |(format, _)| if format.only_first { "" } else { format.opens });
        match self.state {
            State::Thinking => put(&mut parts, Part::Thought, &held),
            // What was no call after all is not lost.
            State::Calling => put(&mut parts, Part::Text, &format!("{opens}{held}")),
            State::Called => put(&mut parts, Part::Text, self.beyond_calls(held.trim())),
            State::Start | State::Speaking => put(&mut parts, Part::Text, &held),
        }
        parts
    }

    /// What stands behind the last call, but for a mark that is cut.
    fn beyond_calls<'t>(&self, left: &'t str) -> &'t str {
        let is_mark = self.tools.as_ref().is_some_and(|(format, _)| format.marks_begin_with(left));
        if is_mark { "" } else { left }
    }

    /// Takes one thing from what is held. Whether there may be more.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        if self.skips_blanks {
            self.held = self.held.trim_start().to_owned();
            self.skips_blanks = self.held.is_empty();
        }
        match self.state {
            State::Start => self.start(),
            State::Thinking => self.until(HAS_THOUGHT, Part::Thought, State::Start, parts),
            State::Speaking => match self.tools {
                Some((format, _)) if !format.only_first => {
                    self.until(format.opens, Part::Text, State::Calling, parts)
                }
                _ => {
                    put(parts, Part::Text, &std::mem::take(&mut self.held));
                    false
                }
            },
            State::Calling => self.call(parts),
            State::Called => {
                let Some((format, _)) = &self.tools else { return false };
                self.held = format.behind(&self.held).to_owned();
                self.call(parts)
            }
        }
    }

    /// What the answer begins with decides what it is.
    fn start(&mut self) -> bool {
        let begun = self.held.trim_start();
        if begun.is_empty() {
            return false;
        }
        if self.thinks
            && let Some(thought) = begun.strip_prefix(THINKS)
        {
            self.held = thought.to_owned();
            (self.state, self.thinks, self.skips_blanks) = (State::Thinking, false, true);
            return true;
        }
        if self.thinks && THINKS.starts_with(begun) {
            return false;
        }
        let calls =
            self.tools.as_ref().filter(|(format, _)| format.only_first && begun.starts_with(format.opens));
        self.state = if calls.is_some() { State::Calling } else { State::Speaking };
        if calls.is_some() {
            self.held = begun.to_owned();
        }
        true
    }

    /// Says all up to a mark; there, another state begins.
    fn until(&mut self, mark: &str, part: fn(String) -> Part, then: State, parts: &mut Vec<Part>) -> bool {
        if let Some(at) = self.held.find(mark) {
            let after = self.held.split_off(at);
            let said = std::mem::replace(&mut self.held, after[mark.len()..].to_owned());
            // Lines between a mark and what is said are part of neither.
            put(parts, part, said.trim_end());
            self.skips_blanks = then == State::Start;
            self.state = then;
            return true;
        }
        // So are blanks before it.
        let is_begun = |at: &usize| mark.starts_with(self.held[*at..].trim_start());
        let at = self.held.char_indices().map(|(at, _)| at).find(is_begun).unwrap_or(self.held.len());
        let held = self.held.split_off(at);
        put(parts, part, &std::mem::replace(&mut self.held, held));
        false
    }

    /// Takes a call that is complete.
    fn call(&mut self, parts: &mut Vec<Part>) -> bool {
        let Some((format, tools)) = &self.tools else { return false };
        let Some((call, rest)) = format.read(&self.held, tools) else { return false };
        self.held = rest.to_owned();
        self.state = State::Called;
        parts.push(Part::Call(call));
        true
    }
}

/// Puts text behind what is there; none is no part.
fn put(parts: &mut Vec<Part>, part: fn(String) -> Part, text: &str) {
    if !text.is_empty() {
        parts.push(part(text.to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The parts of a text however it is cut, joined.
    fn parts(make: impl Fn() -> Speech, text: &str) -> Vec<Part> {
        let chars: Vec<char> = text.chars().collect();
        let mut ways: Vec<Vec<Part>> = Vec::new();
        for size in 1..=chars.len().max(1) {
            let mut speech = make();
            let mut all: Vec<Part> = Vec::new();
            let pieces = chars.chunks(size).map(|piece| speech.push(&piece.iter().collect::<String>()));
            let mut said: Vec<Part> = pieces.collect::<Vec<_>>().concat();
            said.extend(speech.rest());
            for part in said {
                match (all.last_mut(), part) {
                    (Some(Part::Text(text)), Part::Text(more)) => *text += &more,
                    (Some(Part::Thought(text)), Part::Thought(more)) => *text += &more,
                    (_, part) => all.push(part),
                }
            }
            ways.push(all);
        }
        assert!(ways.iter().all(|way| *way == ways[0]), "{text:?}: {ways:?}");
        ways.swap_remove(0)
    }

    fn text(text: &str) -> Part {
        Part::Text(text.to_owned())
    }

    fn thought(text: &str) -> Part {
        Part::Thought(text.to_owned())
    }

    #[test]
    fn thoughts_are_told_from_what_is_said_however_the_text_is_cut() {
        let plain = || Speech::new(true, false, None);
        assert_eq!(parts(plain, "Hello."), [text("Hello.")]);
        assert_eq!(parts(plain, "<think>\nHm.\n</think>\n\nYes."), [thought("Hm."), text("Yes.")]);
        assert_eq!(parts(plain, " <think>Hm"), [thought("Hm")]);
        assert_eq!(parts(plain, "a <think> b"), [text("a <think> b")]);
        assert_eq!(parts(plain, "<thin air"), [text("<thin air")]);
        assert_eq!(
            parts(|| Speech::new(true, true, None), "Hm.</think>Yes."),
            [thought("Hm."), text("Yes.")]
        );
        assert_eq!(parts(|| Speech::new(false, false, None), "<think>x</think>"), [text("<think>x</think>")]);
    }

    #[test]
    fn calls_are_told_from_what_is_said_and_nothing_is_lost() {
        let tools = vec![Tool { name: "f".to_owned(), parameters: json!({ "type": "object" }) }];
        let of = |template: &str| {
            let (format, tools) = (tools::format_of(template), tools.clone());
            move || Speech::new(true, false, Some((format, tools.clone())))
        };
        let call =
            |arguments: &str| Part::Call(Call { name: "f".to_owned(), arguments: arguments.to_owned() });
        let hermes = of("");
        let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
        assert_eq!(parts(&hermes, one), [call("{\"a\":1}")]);
        let two = format!("<think>Hm</think>Let me see.\n{one}\n{one}");
        let expected = [thought("Hm"), text("Let me see."), call("{\"a\":1}"), call("{\"a\":1}")];
        assert_eq!(parts(&hermes, &two), expected);
        assert_eq!(parts(&hermes, "a < b, a <tool"), [text("a < b, a <tool")]);
        assert_eq!(parts(&hermes, "<tool_call>\n{\"name\":"), [text("<tool_call>\n{\"name\":")]);
        let llama = of("\"parameters\": dictionary of argument name and its value");
        assert_eq!(parts(&llama, "{\"name\": \"f\", \"parameters\": {}}"), [call("{}")]);
        assert_eq!(parts(&llama, "It is {\"name\": \"f\"}"), [text("It is {\"name\": \"f\"}")]);
        let mistral = of("[TOOL_CALLS]");
        let list = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"f\", \"arguments\": {}}]";
        assert_eq!(parts(&mistral, list), [call("{}"), call("{}")]);
    }
}
