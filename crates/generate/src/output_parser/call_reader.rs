//! Streaming parser of a tool call: reports the tool name as soon as it is known, then the
//! arguments in chunks.
//!
//! Arguments that are a JSON object are forwarded verbatim, digit by digit. Arguments in separate
//! marks are assembled to one object.

use kvant_text::chat::partial_match_len;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::json_calls::{NoMatch, open_object};
use super::tool_calls::{Format, Style, Tool, is_text};
use super::{Part, push_text};

/// Parser of one call.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CallReader {
    style: Style,
    /// Text after all values of [`Style::Pairs`].
    closes: &'static str,
    place: Position,
    name: String,
    /// Braces around the arguments: a model may double them.
    n_braces: usize,
}

/// Position of the parser in a call.
#[derive(Debug, Clone, PartialEq)]
enum Position {
    /// Before the arguments.
    Head,
    /// In an object of arguments.
    Arguments(Nesting),
    /// After the arguments, in the objects around them.
    Tail(Tail),
    /// Between separate values, after so many of them.
    Between(usize),
    Value(OpenValue),
}

/// Rest of the objects around the arguments.
#[derive(Debug, Clone, PartialEq)]
struct Tail {
    /// Braces to be closed.
    n_open: usize,
    /// In other fields of an object.
    fields: Option<Nesting>,
}

/// Value in its own marks.
#[derive(Debug, Clone, PartialEq)]
struct OpenValue {
    key: String,
    /// Index among the arguments.
    index: usize,
    is_text: bool,
    has_begun: bool,
}

/// Result of a parsing step.
enum Step {
    /// More text is needed.
    Wait,
    Again,
    Done,
}

/// Marks of separate values.
struct Marks {
    /// Before and after a key.
    key: [&'static str; 2],
    /// Before a value, after its key, and after it.
    value: [&'static str; 2],
    /// After all values.
    ends: &'static str,
    /// Whether a value is on lines of its own.
    in_lines: bool,
}

impl CallReader {
    /// Creates a parser of the text after [`Format::opens`].
    pub fn new(format: &Format) -> Self {
        Self {
            style: format.style,
            closes: format.closes,
            place: Position::Head,
            name: String::new(),
            n_braces: 1,
        }
    }

    /// Creates a parser of a call that is a plain JSON object.
    pub fn plain() -> Self {
        let style = Style::Object { before: "", arguments: "arguments" };
        Self { style, closes: "", place: Position::Head, name: String::new(), n_braces: 1 }
    }

    /// Consumes text from the beginning of `held`. Returns whether the call has ended.
    pub fn read(&mut self, held: &mut String, tools: &[Tool], parts: &mut Vec<Part>) -> bool {
        loop {
            let step = match &self.place {
                Position::Head => self.head(held, parts),
                Position::Arguments(_) => self.arguments(held, parts),
                Position::Tail(_) => self.tail(held),
                Position::Between(_) => self.between(held, tools, parts),
                Position::Value(_) => self.value(held, parts),
            };
            match step {
                Step::Wait => return false,
                Step::Again => {}
                Step::Done => return true,
            }
        }
    }

    /// Parses the rest of a call that the end of the answer truncates, with its arguments so far.
    /// Returns whether its tool is known.
    pub fn finish_truncated(&self, held: &str, parts: &mut Vec<Part>) -> bool {
        match &self.place {
            Position::Head => {
                let Some((name, arguments)) = self.cut_head(held) else { return false };
                begin(parts, name);
                push_text(parts, Part::Arguments, &arguments);
            }
            Position::Value(OpenValue { is_text: true, has_begun: true, .. })
                if !self.marks().value[1].starts_with(held.trim_start()) =>
            {
                push_text(parts, Part::Arguments, &json_escaped(held));
            }
            _ => {}
        }
        true
    }

    /// Parses up to the arguments.
    fn head(&mut self, held: &mut String, parts: &mut Vec<Part>) -> Step {
        let text = held.trim_start();
        let (name, rest) = match self.style {
            Style::Object { before, .. } => {
                let text = text.strip_prefix(before.trim()).unwrap_or(text);
                self.n_braces = if text.starts_with("{{") { 2 } else { 1 };
                match open_object(text) {
                    Ok((name, rest)) if rest.starts_with('{') => (name, rest),
                    Ok((_, "")) | Err(NoMatch::Undecided) => return Step::Wait,
                    Ok(_) | Err(NoMatch::NoCall) => {
                        let Some(rest) = resolve_references(text, parts) else { return Step::Wait };
                        *held = rest.to_owned();
                        return Step::Done;
                    }
                }
            }
            Style::Named { before, between } => {
                let text = text.strip_prefix(before.trim_start()).unwrap_or(text);
                let Some((name, rest)) = text.split_once(between.trim_end()) else { return Step::Wait };
                match rest.trim_start() {
                    "" => return Step::Wait,
                    object if object.starts_with('{') => (name.trim().to_owned(), object),
                    other => {
                        let Some((value, rest)) = raw(other) else { return Step::Wait };
                        begin(parts, name.trim().to_owned());
                        push_text(parts, Part::Arguments, &object_in(value));
                        *held = rest.to_owned();
                        return Step::Done;
                    }
                }
            }
            Style::Function => {
                let name = text.strip_prefix("<function=").and_then(|text| text.split_once('>'));
                let Some((name, rest)) = name else { return Step::Wait };
                (name.trim().to_owned(), rest)
            }
            Style::Pairs => {
                let marks = self.marks();
                let ends = [marks.key[0], marks.ends].into_iter().filter_map(|mark| text.find(mark));
                let Some(end) = ends.min() else { return Step::Wait };
                (text[..end].trim().to_owned(), &text[end..])
            }
        };
        self.place = match self.style {
            Style::Object { .. } | Style::Named { .. } => Position::Arguments(Nesting::default()),
            Style::Function | Style::Pairs => Position::Between(0),
        };
        self.name.clone_from(&name);
        *held = rest.to_owned();
        begin(parts, name);
        if matches!(self.place, Position::Between(_)) {
            push_text(parts, Part::Arguments, "{");
        }
        Step::Again
    }

    /// Returns the name and the arguments so far of a call that is truncated before its arguments
    /// are parsed.
    fn cut_head(&self, held: &str) -> Option<(String, String)> {
        let text = held.trim_start();
        match self.style {
            Style::Object { before, .. } => {
                super::json_calls::cut_object(text.strip_prefix(before.trim()).unwrap_or(text))
            }
            Style::Named { before, between } => {
                let text = text.strip_prefix(before.trim_start()).unwrap_or(text);
                let (name, arguments) = text.split_once(between.trim_end())?;
                Some((name.trim().to_owned(), arguments.trim_start().to_owned()))
            }
            Style::Function | Style::Pairs => None,
        }
    }

    /// Forwards the available text of an object.
    fn arguments(&mut self, held: &mut String, parts: &mut Vec<Part>) -> Step {
        let Position::Arguments(nesting) = &mut self.place else { return Step::Done };
        let end = nesting.end(held);
        let rest = held.split_off(end.unwrap_or(held.len()));
        push_text(parts, Part::Arguments, &std::mem::replace(held, rest));
        match (end, self.style) {
            (None, _) => Step::Wait,
            (Some(_), Style::Object { .. }) => {
                self.place = Position::Tail(Tail { n_open: self.n_braces, fields: None });
                Step::Again
            }
            (Some(_), _) => Step::Done,
        }
    }

    /// Skips the rest of the objects around the arguments. A model may omit a closing brace.
    fn tail(&mut self, held: &mut String) -> Step {
        let Position::Tail(Tail { n_open, fields }) = &mut self.place else { return Step::Done };
        let end = match (&mut *fields, held.trim_start().chars().next()) {
            (Some(nesting), _) => nesting.end(held),
            (None, None) => return Step::Wait,
            (None, Some('}')) => held.find('}').map(|at| at + 1),
            (None, Some(',')) => {
                *fields = Some(Nesting { depth: 1, ..Nesting::default() });
                return Step::Again;
            }
            (None, Some(_)) => return Step::Done,
        };
        held.drain(..end.unwrap_or(held.len()));
        if end.is_none() {
            return Step::Wait;
        }
        (*n_open, *fields) = (*n_open - 1, None);
        if *n_open == 0 { Step::Done } else { Step::Again }
    }

    /// Parses up to the next value, or the end of all.
    fn between(&mut self, held: &mut String, tools: &[Tool], parts: &mut Vec<Part>) -> Step {
        let Position::Between(index) = self.place else { return Step::Done };
        let marks = self.marks();
        // Text between values is ignored.
        let Some(at) = held.find('<') else {
            held.clear();
            return Step::Wait;
        };
        held.drain(..at);
        if held.starts_with(marks.ends) {
            if self.style == Style::Function {
                held.drain(..marks.ends.len());
            }
            push_text(parts, Part::Arguments, "}");
            return Step::Done;
        }
        let Some(text) = held.strip_prefix(marks.key[0]) else {
            if marks.ends.starts_with(held.as_str()) || marks.key[0].starts_with(held.as_str()) {
                return Step::Wait;
            }
            held.drain(..1);
            return Step::Again;
        };
        let Some((key, rest)) = text.split_once(marks.key[1]) else { return Step::Wait };
        let Some((_, rest)) = rest.split_once(marks.value[0]) else { return Step::Wait };
        let key = key.trim().to_owned();
        let is_text = is_text(tools, &self.name, &key);
        *held = rest.to_owned();
        self.place = Position::Value(OpenValue { key, index, is_text, has_begun: false });
        Step::Again
    }

    /// Forwards the available text of a string value, or all of another value.
    fn value(&mut self, held: &mut String, parts: &mut Vec<Part>) -> Step {
        let (in_lines, mark) = (self.marks().in_lines, self.marks().value[1]);
        let Position::Value(value) = &mut self.place else { return Step::Done };
        let key =
            || format!("{}{}:", if value.index > 0 { "," } else { "" }, Value::from(value.key.as_str()));
        if value.is_text && !value.has_begun {
            if held.is_empty() {
                return Step::Wait;
            }
            if in_lines && held.starts_with('\n') {
                held.drain(..1);
            }
            push_text(parts, Part::Arguments, &format!("{}\"", key()));
            value.has_begun = true;
        }
        let end = held.find(mark);
        if !value.is_text {
            let Some(end) = end else { return Step::Wait };
            let text = in_a_line(&held[..end], in_lines);
            // A value that is not JSON is meant as a string.
            let json = match serde_json::from_str::<&RawValue>(text) {
                Ok(json) => json.get().to_owned(),
                Err(_) => Value::from(text).to_string(),
            };
            push_text(parts, Part::Arguments, &(key() + &json));
            held.drain(..end + mark.len());
            self.place = Position::Between(value.index + 1);
            return Step::Again;
        }
        let Some(end) = end else {
            // The last line break belongs to the mark if the mark follows it.
            let begun = held.len() - partial_match_len(held, mark);
            let n_final =
                if in_lines { held[..begun].strip_suffix('\n').map_or(begun, str::len) } else { begun };
            push_text(
                parts,
                Part::Arguments,
                json_escaped(&held.drain(..n_final).collect::<String>()).as_str(),
            );
            return Step::Wait;
        };
        let text =
            if in_lines { held[..end].strip_suffix('\n').unwrap_or(&held[..end]) } else { &held[..end] };
        push_text(parts, Part::Arguments, &format!("{}\"", json_escaped(text)));
        held.drain(..end + mark.len());
        self.place = Position::Between(value.index + 1);
        Step::Again
    }

    fn marks(&self) -> Marks {
        match self.style {
            Style::Pairs => Marks {
                key: ["<arg_key>", "</arg_key>"],
                value: ["<arg_value>", "</arg_value>"],
                ends: self.closes,
                in_lines: false,
            },
            _ => Marks {
                key: ["<parameter=", ">"],
                value: ["", "</parameter>"],
                ends: "</function>",
                in_lines: true,
            },
        }
    }
}

/// JSON nesting depth at the end of a text.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Nesting {
    depth: usize,
    in_text: bool,
    is_escaped: bool,
}

impl Nesting {
    /// Scans more text. Returns the position after the end of the outermost value, if `text`
    /// contains it.
    fn end(&mut self, text: &str) -> Option<usize> {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.in_text => self.is_escaped = true,
                b'"' => self.in_text = !self.in_text,
                _ if self.in_text => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

/// Parses a call object whose keys are in another order, or that has no arguments. `None` if it is
/// incomplete.
fn resolve_references<'t>(text: &'t str, parts: &mut Vec<Part>) -> Option<&'t str> {
    #[derive(Deserialize)]
    struct Plain<'a> {
        name: String,
        #[serde(borrow, alias = "parameters")]
        arguments: Option<&'a RawValue>,
    }
    let inner = text.strip_prefix('{').filter(|inner| inner.starts_with('{'));
    let (object, rest) = raw(inner.unwrap_or(text))?;
    let rest = if inner.is_some() { rest.trim_start().strip_prefix('}')? } else { rest };
    let Plain { name, arguments } = serde_json::from_str(object.get()).ok()?;
    begin(parts, name);
    push_text(parts, Part::Arguments, &arguments.map_or("{}".to_owned(), object_in));
    Some(rest)
}

/// Returns a JSON value verbatim, and the text after it; `None` if it is incomplete.
fn raw(text: &str) -> Option<(&RawValue, &str)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<&RawValue>();
    let value = values.next()?.ok()?;
    Some((value, &text[values.byte_offset()..]))
}

/// Returns arguments as an object: a string contains the object, and nothing is an empty one.
fn object_in(value: &RawValue) -> String {
    match serde_json::from_str::<Option<String>>(value.get()) {
        Ok(Some(text)) if !text.trim().is_empty() => text,
        Ok(_) => "{}".to_owned(),
        Err(_) => value.get().to_owned(),
    }
}

fn begin(parts: &mut Vec<Part>, name: String) {
    parts.push(Part::Call(name));
}

/// Returns a text escaped for JSON, without the quotes.
fn json_escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Returns a value without the line breaks around it.
fn in_a_line(text: &str, in_lines: bool) -> &str {
    if !in_lines {
        return text;
    }
    let text = text.strip_prefix('\n').unwrap_or(text);
    text.strip_suffix('\n').unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::output_parser::tool_calls::format_of;

    const FUNCTION: &str = "<tool_call> <function=";
    const PAIRS: &str = "<tool_call> <arg_key>";

    fn tools() -> Vec<Tool> {
        let properties = json!({ "path": { "type": "string" }, "n": { "type": "integer" } });
        let parameters = json!({ "type": "object", "properties": properties });
        vec![Tool { name: "write".to_owned(), parameters }]
    }

    /// Returns the argument chunks of a call of `write` in the format of `template`, for input
    /// chunks of one letter.
    fn pieces(template: &str, text: &str) -> Vec<String> {
        let (mut reader, mut held) = (CallReader::new(format_of(template)), String::new());
        let (mut pieces, mut has_name) = (Vec::new(), false);
        for letter in text.chars() {
            held.push(letter);
            let mut parts = Vec::new();
            reader.read(&mut held, &tools(), &mut parts);
            for part in parts {
                match part {
                    Part::Call(name) if name == "write" && !has_name => has_name = true,
                    Part::Arguments(more) if has_name => pieces.push(more),
                    other => panic!("{other:?} in {text:?}"),
                }
            }
        }
        pieces
    }

    #[test]
    fn object_arguments_are_forwarded_verbatim() {
        let object = r#"{"id": 98765432109876543210987, "price":10.00, "a": ["}", "\\\"]"], "b": {}}"#;
        for (template, text) in [
            ("", format!("{{\"name\": \"write\", \"arguments\": {object}}}")),
            ("", format!("{{\"name\": \"write\", \"arguments\": {object}")),
            ("", format!("{{\"name\": \"write\", \"arguments\": {object}\n</tool_call>")),
            ("", format!("{{\"name\": \"write\", \"parameters\": {object}, \"id\": {{\"x\": 1}}}}")),
            ("", format!("{{\"arguments\": {object}, \"name\": \"write\"}}")),
            ("", format!("{{{{\"arguments\": {object}, \"name\": \"write\"}}}}")),
            ("", format!("{{{{\"name\": \"write\", \"arguments\": {object}, \"a\": \"}}\"}} }}")),
            ("", format!("{{\"name\": \"write\", \"arguments\": {}}}", json!(object))),
            ("[TOOL_CALLS][ARGS]", format!("write[ARGS]{object}")),
            ("[TOOL_CALLS][ARGS]", format!("write[ARGS]{}", json!(object))),
        ] {
            assert_eq!(pieces(template, &text).concat(), object, "{text}");
        }
        // Each letter is forwarded at once.
        let text = format!("{{\"name\": \"write\", \"arguments\": {object}");
        let letters: Vec<String> = object.chars().map(String::from).collect();
        assert_eq!(pieces("", &text), letters);
        for text in ["{\"name\": \"write\"}", "{\"name\": \"write\", \"arguments\": null}"] {
            assert_eq!(pieces("", text).concat(), "{}", "{text}");
        }
    }

    #[test]
    fn separate_values_are_assembled_to_one_object_while_streaming() {
        let function = "\n<function=write>\n<parameter=path>\n a\n</function> \"b\"\n\n</parameter>\n\
                        <parameter=n>\n12345678901234567890123\n</parameter>\n<parameter=other>\n[1.00]\n\
                        </parameter>\n<parameter=wrong>\n{a\n</parameter>\n</function>";
        let pairs = "write\n<arg_key>path</arg_key>\n<arg_value> a\n</function> \"b\"\n</arg_value>\n\
                     <arg_key>n</arg_key>\n<arg_value>12345678901234567890123</arg_value>\n\
                     <arg_key>other</arg_key><arg_value>[1.00]</arg_value>\n\
                     <arg_key>wrong</arg_key>\n<arg_value>{a</arg_value>\n</tool_call>";
        let want =
            r#"{"path":" a\n</function> \"b\"\n","n":12345678901234567890123,"other":[1.00],"wrong":"{a"}"#;
        for (template, text) in [(FUNCTION, function), (PAIRS, pairs)] {
            let pieces = pieces(template, text);
            assert_eq!(pieces.concat(), want, "{text}");
            assert!(pieces.len() > 20, "{pieces:?}");
        }
        assert_eq!(pieces(FUNCTION, "<function=write>\n</function>").concat(), "{}");
        assert_eq!(pieces(PAIRS, "write\n</tool_call>").concat(), "{}");
    }

    #[test]
    fn a_truncated_string_value_keeps_its_text_so_far() {
        for (template, text) in [
            (FUNCTION, "<function=write>\n<parameter=n>\n1\n</parameter><parameter=path>\nab\n</para"),
            (
                PAIRS,
                "write<arg_key>n</arg_key><arg_value>1</arg_value><arg_key>path</arg_key><arg_value>ab</ar",
            ),
        ] {
            let (mut reader, mut held, mut parts) =
                (CallReader::new(format_of(template)), text.to_owned(), Vec::new());
            assert!(
                !reader.read(&mut held, &tools(), &mut parts) && reader.finish_truncated(&held, &mut parts)
            );
            let want = [Part::Call("write".to_owned()), Part::Arguments(r#"{"n":1,"path":"ab"#.to_owned())];
            assert_eq!(parts, want);
        }
    }
}
