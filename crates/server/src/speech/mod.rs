//! What a model says, taken apart while it says it: what it thinks, what it says, and which tools it calls.

pub(crate) mod tools;

use kvant::chat::{Said, Thoughts, take_until};
use tools::{Call, Format, Tool};

/// A part of what was said.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Part {
    Text(String),
    Thought(String),
    Call(Call),
}

#[derive(Debug, Clone, PartialEq)]
enum State {
    /// Nothing but blanks has been said.
    Start,
    Speaking,
    Calling,
    /// A call has been made; others may follow.
    Called,
}

/// Takes text apart that comes in pieces. What may be the beginning of a mark is held back.
#[derive(Debug, Clone)]
pub(crate) struct Speech {
    thoughts: Thoughts,
    state: State,
    /// How calls are written and what may be called, where anything may.
    tools: Option<(&'static Format, Vec<Tool>)>,
    held: String,
}

impl Speech {
    /// Of a model that may think first, and call tools.
    pub fn new(thoughts: Thoughts, tools: Option<(&'static Format, Vec<Tool>)>) -> Self {
        Self { thoughts, state: State::Start, tools, held: String::new() }
    }

    /// What has become certain with more text.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        let said = self.thoughts.push(text);
        self.take_apart(said)
    }

    fn take_apart(&mut self, said: Vec<Said>) -> Vec<Part> {
        let mut parts = Vec::new();
        for said in said {
            match said {
                Said::Thought(thought) => parts.push(Part::Thought(thought)),
                Said::Text(text) => {
                    self.held += &text;
                    while self.step(&mut parts) {}
                }
            }
        }
        parts
    }

    /// What was held back, at the end.
    pub fn rest(&mut self) -> Vec<Part> {
        let said = self.thoughts.rest();
        let mut parts = self.take_apart(said);
        let held = std::mem::take(&mut self.held);
        // Where a call begins as an answer does, the mark was kept.
        let opens =
            self.tools.as_ref().map_or("", |(format, _)| if format.only_first { "" } else { format.opens });
        match self.state {
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
        match self.state {
            State::Start => self.start(),
            State::Speaking => match self.tools {
                Some((format, _)) if !format.only_first => {
                    let (text, is_call) = take_until(&mut self.held, format.opens);
                    put(parts, Part::Text, &text);
                    if is_call {
                        self.state = State::Calling;
                    }
                    is_call
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
        let calls =
            self.tools.as_ref().filter(|(format, _)| format.only_first && begun.starts_with(format.opens));
        self.state = if calls.is_some() { State::Calling } else { State::Speaking };
        if calls.is_some() {
            self.held = begun.to_owned();
        }
        true
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
        let of = |source, prompt| move || Speech::new(Thoughts::of(source, prompt), None);
        let plain = of("</think>", "");
        assert_eq!(parts(plain, "Hello."), [text("Hello.")]);
        assert_eq!(parts(plain, "<think>\nHm.\n</think>\n\nYes."), [thought("Hm."), text("Yes.")]);
        assert_eq!(parts(plain, " <think>Hm"), [thought("Hm")]);
        assert_eq!(parts(plain, "a <think> b"), [text("a <think> b")]);
        assert_eq!(parts(plain, "<thin air"), [text("<thin air")]);
        assert_eq!(parts(of("</think>", "<think>\n"), "Hm.</think>Yes."), [thought("Hm."), text("Yes.")]);
        assert_eq!(parts(of("", ""), "<think>x</think>"), [text("<think>x</think>")]);
    }

    #[test]
    fn calls_are_told_from_what_is_said_and_nothing_is_lost() {
        let tools = vec![Tool { name: "f".to_owned(), parameters: json!({ "type": "object" }) }];
        let of = |template: &str| {
            let (format, tools) = (tools::format_of(template), tools.clone());
            move || Speech::new(Thoughts::of("</think>", ""), Some((format, tools.clone())))
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
