//! Streaming output parser: splits generated text into reasoning, content and tool calls.

mod call_reader;
pub mod constraint;
pub mod json_calls;
mod marks;
pub mod tool_calls;

use call_reader::CallReader;
use json_calls::{CallScanner, OpenCall, Scanned};
use kvant_text::chat::{ReasoningParser, TextPart, take_until};
use serde_json::{Value, json};
use tool_calls::{AfterCall, Format, Tool};

/// Part of the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Content.
    Text(String),
    /// Reasoning.
    Reasoning(String),
    /// Start of a call of this tool.
    Call(String),
    /// More of the last call's arguments, as JSON.
    Arguments(String),
}

/// Tool call, as far as it has been parsed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Call {
    /// Name of the tool.
    pub name: String,
    /// JSON object, possibly truncated at the end of an answer.
    pub arguments: String,
}

impl Call {
    /// Creates a call whose arguments follow.
    pub fn of(name: String) -> Self {
        Self { name, arguments: String::new() }
    }

    /// Returns the arguments as an object; an empty one if they are truncated.
    pub fn object(&self) -> Value {
        let value: Option<Value> = serde_json::from_str(&self.arguments).ok();
        value.filter(Value::is_object).unwrap_or_else(|| json!({}))
    }
}

/// Answer, as far as it has been parsed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParsedAnswer {
    /// Content.
    pub text: String,
    /// Reasoning.
    pub reasoning: String,
    /// Tool calls.
    pub calls: Vec<Call>,
}

impl ParsedAnswer {
    /// Returns the message of this answer for the next turn of the conversation, as in OpenAI's
    /// API. The calls have the ids `call_0`, `call_1`, ..., which their results refer to.
    pub fn message(&self) -> Value {
        let mut message = json!({ "role": "assistant", "content": self.text });
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.as_str().into();
        }
        if !self.calls.is_empty() {
            let call = |(index, call): (usize, &Call)| {
                let function = json!({ "name": call.name, "arguments": call.arguments });
                json!({ "id": format!("call_{index}"), "type": "function", "function": function })
            };
            message["tool_calls"] = self.calls.iter().enumerate().map(call).collect();
        }
        message
    }
}

impl Extend<Part> for ParsedAnswer {
    fn extend<I: IntoIterator<Item = Part>>(&mut self, parts: I) {
        for part in parts {
            match part {
                Part::Text(text) => self.text += &text,
                Part::Reasoning(text) => self.reasoning += &text,
                Part::Call(name) => self.calls.push(Call::of(name)),
                Part::Arguments(text) => {
                    self.calls.iter_mut().last().into_iter().for_each(|call| call.arguments += &text);
                }
            }
        }
    }
}

impl FromIterator<Part> for ParsedAnswer {
    fn from_iter<I: IntoIterator<Item = Part>>(parts: I) -> Self {
        let mut answer = Self::default();
        answer.extend(parts);
        answer
    }
}

#[derive(Debug, Clone, PartialEq)]
enum State {
    Text,
    /// After the mark that opens a call in the template's format.
    Call(CallReader),
    /// After a call; others may follow.
    AfterCall,
    /// In a call that is a plain JSON object.
    JsonCall(CallReader),
    /// After such a call.
    AfterJsonCall,
}

/// Callable tools, and the template's call format.
#[derive(Debug, Clone)]
struct Offer {
    format: &'static Format,
    tools: Vec<Tool>,
    scanner: CallScanner,
    /// Closing mark of the fence or the tags around plain calls.
    closes: String,
}

/// Parses streamed text into reasoning, content and tool calls. Withholds text that may be the
/// beginning of a mark.
#[derive(Debug, Clone)]
pub struct OutputParser {
    reasoning: ReasoningParser,
    state: State,
    /// `None` if no tools are offered.
    offer: Option<Offer>,
    held: String,
}

impl OutputParser {
    /// Creates a parser for a model that may reason first and call these tools.
    pub fn new(reasoning: ReasoningParser, tools: Option<(&'static Format, Vec<Tool>)>) -> Self {
        let offer = tools.map(|(format, tools)| {
            let scanner = CallScanner::new(tools.iter().map(|tool| tool.name.clone()));
            Offer { format, tools, scanner, closes: String::new() }
        });
        Self { reasoning, state: State::Text, offer, held: String::new() }
    }

    /// Parses more text and returns the parts that it completes.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        let text_parts = self.reasoning.push(text);
        self.parse_parts(text_parts)
    }

    /// Parses more text. After the last text, includes what it has withheld.
    pub fn push_text(&mut self, text: &str, is_last: bool) -> Vec<Part> {
        let mut parts = self.push(text);
        if is_last {
            parts.extend(self.rest());
        }
        parts
    }

    /// Parses a whole answer: each call has at most one part of arguments.
    pub fn whole(&mut self, text: &str) -> Vec<Part> {
        let mut parts = self.push(text);
        extend(&mut parts, self.rest());
        parts
    }

    fn parse_parts(&mut self, text_parts: Vec<TextPart>) -> Vec<Part> {
        let mut parts = Vec::new();
        for text_part in text_parts {
            match text_part {
                TextPart::Reasoning(text) => push_text(&mut parts, Part::Reasoning, &text),
                TextPart::Text(text) => {
                    self.held += &text;
                    while self.step(&mut parts) {}
                }
            }
        }
        parts
    }

    /// Returns the withheld parts at the end. A truncated call has its arguments so far.
    pub fn rest(&mut self) -> Vec<Part> {
        let text_parts = self.reasoning.rest();
        let mut parts = self.parse_parts(text_parts);
        let held = std::mem::take(&mut self.held);
        let Some(offer) = &mut self.offer else {
            push_text(&mut parts, Part::Text, &held);
            return parts;
        };
        let trimmed = held.trim();
        match &mut self.state {
            State::Text => push_text(&mut parts, Part::Text, &(offer.scanner.rest() + &held)),
            State::Call(reader) => {
                if !reader.finish_truncated(&held, &mut parts) {
                    push_text(&mut parts, Part::Text, &format!("{}{held}", offer.format.opens));
                }
            }
            // The withheld text is a mark that the end has truncated.
            State::AfterCall => {}
            State::JsonCall(reader) => {
                if !reader.finish_truncated(&held, &mut parts) {
                    push_text(&mut parts, Part::Text, &held);
                }
            }
            State::AfterJsonCall => {
                let is_mark = offer.closes.starts_with(trimmed) || ["]", ",", ";"].contains(&trimmed);
                push_text(&mut parts, Part::Text, if is_mark { "" } else { trimmed });
            }
        }
        parts
    }

    /// Consumes one element of the withheld text. Reports whether more may follow.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        let Some(offer) = &mut self.offer else {
            push_text(parts, Part::Text, &std::mem::take(&mut self.held));
            return false;
        };
        match &mut self.state {
            State::Text => {
                // A format without its own mark is plain JSON.
                let (text, opens_call) = match offer.format.only_first {
                    true => (std::mem::take(&mut self.held), false),
                    false => take_until(&mut self.held, offer.format.opens),
                };
                let Scanned { text, call } = offer.scanner.push(&text);
                push_text(parts, Part::Text, &text);
                if let Some(OpenCall { object, closes }) = call {
                    let mark = if opens_call { offer.format.opens } else { "" };
                    self.held = object + mark + &self.held;
                    (offer.closes, self.state) = (closes, State::JsonCall(CallReader::plain()));
                    return true;
                }
                if opens_call {
                    push_text(parts, Part::Text, offer.scanner.rest().trim_end());
                    self.state = State::Call(CallReader::new(offer.format));
                }
                opens_call
            }
            State::Call(reader) => {
                let has_ended = reader.read(&mut self.held, &offer.tools, parts);
                if has_ended {
                    self.state = State::AfterCall;
                }
                has_ended
            }
            State::AfterCall => {
                let (state, rest) = match offer.format.behind(&self.held) {
                    None => return false,
                    Some(AfterCall::Call(rest)) => (State::Call(CallReader::new(offer.format)), rest),
                    Some(AfterCall::Text(rest)) => (State::Text, rest),
                };
                (self.held, self.state) = (rest.to_owned(), state);
                true
            }
            State::JsonCall(reader) => {
                let has_ended = reader.read(&mut self.held, &offer.tools, parts);
                if has_ended {
                    self.state = State::AfterJsonCall;
                }
                has_ended
            }
            State::AfterJsonCall => self.after_json_call(),
        }
    }

    /// Consumes what closes or separates plain calls, until another call or text begins.
    fn after_json_call(&mut self) -> bool {
        let Some(offer) = &mut self.offer else { return false };
        let held = self.held.trim_start();
        let next = held.trim_start_matches([',', ';']).trim_start();
        let rest = match held {
            "" => return false,
            held if !offer.closes.is_empty() && held.starts_with(&offer.closes) => {
                let rest = held[offer.closes.len()..].to_owned();
                offer.closes.clear();
                rest
            }
            held if offer.closes.starts_with(held) => return false,
            held if held.starts_with(']') => held[1..].to_owned(),
            _ if next.is_empty() => return false,
            _ if next.starts_with('{') => match offer.scanner.reads_again(next) {
                None => return false,
                Some(is_call) => {
                    self.state = if is_call { State::JsonCall(CallReader::plain()) } else { State::Text };
                    next.to_owned()
                }
            },
            held => {
                self.state = State::Text;
                held.to_owned()
            }
        };
        self.held = rest;
        true
    }
}

/// Appends a part of text, unless it is empty.
fn push_text(parts: &mut Vec<Part>, part: fn(String) -> Part, text: &str) {
    if !text.is_empty() {
        extend(parts, vec![part(text.to_owned())]);
    }
}

/// Appends parts; text is merged with a last part of the same type.
fn extend(parts: &mut Vec<Part>, more: Vec<Part>) {
    for part in more {
        match (parts.last_mut(), part) {
            (Some(Part::Text(last)), Part::Text(more))
            | (Some(Part::Reasoning(last)), Part::Reasoning(more))
            | (Some(Part::Arguments(last)), Part::Arguments(more)) => *last += &more,
            (_, part) => parts.push(part),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the merged parts of a text, which must be equal for every chunk size.
    fn parts(make: impl Fn() -> OutputParser, text: &str) -> Vec<Part> {
        let chars: Vec<char> = text.chars().collect();
        let mut ways: Vec<Vec<Part>> = Vec::new();
        for size in 1..=chars.len().max(1) {
            let mut parser = make();
            let mut all = Vec::new();
            for piece in chars.chunks(size) {
                extend(&mut all, parser.push(&piece.iter().collect::<String>()));
            }
            extend(&mut all, parser.rest());
            ways.push(all);
        }
        assert!(ways.iter().all(|way| *way == ways[0]), "{text:?}: {ways:?}");
        ways.swap_remove(0)
    }

    fn text(text: &str) -> Part {
        Part::Text(text.to_owned())
    }

    fn reasoning(text: &str) -> Part {
        Part::Reasoning(text.to_owned())
    }

    #[test]
    fn reasoning_and_content_are_separated_in_chunks_of_any_size() {
        let of = |source, prompt| move || OutputParser::new(ReasoningParser::of(source, prompt), None);
        let plain = of("</think>", "");
        assert_eq!(parts(plain, "Hello."), [text("Hello.")]);
        assert_eq!(parts(plain, "<think>\nHm.\n</think>\n\nYes."), [reasoning("Hm."), text("Yes.")]);
        assert_eq!(parts(plain, " <think>Hm"), [reasoning("Hm")]);
        assert_eq!(parts(plain, "a <think> b"), [text("a <think> b")]);
        assert_eq!(parts(plain, "<thin air"), [text("<thin air")]);
        assert_eq!(parts(of("</think>", "<think>\n"), "Hm.</think>Yes."), [reasoning("Hm."), text("Yes.")]);
        assert_eq!(parts(of("", ""), "<think>x</think>"), [text("<think>x</think>")]);
    }

    #[test]
    fn tool_calls_and_content_are_separated_without_loss() {
        let tools = vec![Tool { name: "f".to_owned(), parameters: json!({ "type": "object" }) }];
        let of = |template: &str| {
            let (format, tools) = (tool_calls::format_of(template), tools.clone());
            move || OutputParser::new(ReasoningParser::of("</think>", ""), Some((format, tools.clone())))
        };
        let call = |arguments: &str| vec![Part::Call("f".to_owned()), Part::Arguments(arguments.to_owned())];
        let content = |content: &str| vec![text(content)];
        let hermes = of("");
        let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
        let plain = "{\n \"name\": \"f\",\n \"arguments\": {}\n}";
        let made = call("{\"a\": 1}");
        for (written, expected) in [
            (one.to_owned(), vec![made.clone()]),
            (
                format!("<think>Hm</think>Let me see.\n{one}\n{one}"),
                vec![vec![reasoning("Hm")], content("Let me see."), made.clone(), made.clone()],
            ),
            (format!("{one}\nDone. {one}\n"), vec![made.clone(), content("Done."), made.clone()]),
            ("a < b, a <tool".to_owned(), vec![content("a < b, a <tool")]),
            ("<tool_call>\n{\"name\":".to_owned(), vec![content("<tool_call>\n{\"name\":")]),
            // A truncated call has its arguments so far.
            (one[..45].to_owned(), vec![call("{\"a\": ")]),
            (one[..30].to_owned(), vec![vec![Part::Call("f".to_owned())]]),
            (plain.to_owned(), vec![call("{}")]),
            (format!("\n```json\n{plain}\n```\n"), vec![call("{}")]),
            (format!("<tools>\n{plain}\n{plain}\n</tools>"), vec![call("{}"), call("{}")]),
            (format!("```json\n[{plain}, {plain}]\n```"), vec![call("{}"), call("{}")]),
            (
                format!("Sure.\n```\n{plain}\n```\n\n```\n{plain}\n```\nDone."),
                vec![content("Sure.\n"), call("{}"), call("{}"), content("Done.")],
            ),
            (format!("Sure.\n{one}"), vec![content("Sure."), made.clone()]),
            (format!("{{{plain}}}"), vec![call("{}")]),
            (format!("```json\n{{{plain}}}\n```\nDone."), vec![call("{}"), content("Done.")]),
            (format!("{{{plain}}}\n{{{plain}}}"), vec![call("{}"), call("{}")]),
            (format!("<tool_call>\n{{{plain}}}\n</tool_call>"), vec![call("{}")]),
            (format!("{{{plain}"), vec![call("{}")]),
            ("{{ name }}".to_owned(), vec![content("{{ name }}")]),
            ("{\"name\": \"g\"}".to_owned(), vec![content("{\"name\": \"g\"}")]),
            ("{\"name\": \"f\", \"arguments\": {\"a".to_owned(), vec![call("{\"a")]),
        ] {
            assert_eq!(parts(&hermes, &written), expected.concat(), "{written}");
        }
        let llama = of("\"parameters\": dictionary of argument name and its value");
        assert_eq!(parts(&llama, "{\"name\": \"f\", \"parameters\": {}}"), call("{}"));
        assert_eq!(parts(&llama, "It is {\"name\": \"f\"}"), content("It is {\"name\": \"f\"}"));
        let mistral = of("[TOOL_CALLS]");
        let list = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"f\", \"arguments\": {}}]";
        assert_eq!(parts(&mistral, list), [call("{}"), call("{}")].concat());
    }
}
