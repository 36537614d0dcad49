//! Detects tool calls written as plain JSON objects, independent of the template's format.
//!
//! Qwen2.5-Coder writes `{"name": .., "arguments": ..}` bare or in a Markdown fence, other models
//! in the tags of another family. An object is a call if it starts a line, bare, in a fence or in
//! one of `TAGS`, and its first key names an offered tool. Any other object is content. The outer
//! braces may be doubled: Qwen2.5-Coder's template shows a call that way, and the model copies it.

use std::fmt::Write;
use std::sync::Arc;

use serde_json::json;

use super::tool_calls::{Tool, quoted};
use crate::constraint::with_limited_whitespace;

/// Tags that models write around calls.
const TAGS: [&str; 5] = ["tool_call", "tools", "tool", "function_call", "function"];
/// Maximum length of the language name of a fence.
const MAX_LANGUAGE: usize = 16;

/// Finds the start of a call in streamed text.
#[derive(Debug, Clone)]
pub struct CallScanner {
    /// Offered tools.
    names: Arc<[String]>,
    /// Text that may still turn out to open a call; starts at the beginning of a line.
    pending: String,
    at_line_start: bool,
}

/// Result of scanning a chunk of text.
#[derive(Debug, PartialEq, Default)]
pub struct Scanned {
    /// Text outside of calls.
    pub text: String,
    /// Call that the chunk opened.
    pub call: Option<OpenCall>,
}

/// Call whose tool is known.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenCall {
    /// Object so far, from its brace on.
    pub object: String,
    /// Closing mark of the enclosing fence or tags; empty for a bare object.
    pub closes: String,
}

/// Reason why a text opens no call.
#[derive(Debug, PartialEq)]
pub(super) enum NoMatch {
    /// More text decides.
    Undecided,
    NoCall,
}

impl CallScanner {
    /// Creates a scanner for the beginning of an answer.
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        Self { names: names.into_iter().collect(), pending: String::new(), at_line_start: true }
    }

    /// Scans a chunk and returns the text it decides. Text after an open call is not scanned.
    pub fn push(&mut self, text: &str) -> Scanned {
        self.pending += text;
        let mut scanned = Scanned::default();
        loop {
            if self.at_line_start {
                match opening(&self.pending, &self.names) {
                    Ok(call) => {
                        self.pending.clear();
                        scanned.call = Some(call);
                        return scanned;
                    }
                    Err(NoMatch::Undecided) => return scanned,
                    Err(NoMatch::NoCall) => self.at_line_start = false,
                }
            }
            // An empty line may be part of the opening of a call, so the text before it is released
            // alone.
            let Some(end) = self.pending.find('\n') else {
                scanned.text += &std::mem::take(&mut self.pending);
                return scanned;
            };
            let next = self.pending.split_off(end + 1);
            scanned.text += &std::mem::replace(&mut self.pending, next);
            self.at_line_start = true;
        }
    }

    /// Returns the withheld text at the end of an answer.
    pub fn rest(&mut self) -> String {
        std::mem::take(&mut self.pending)
    }

    /// Reports whether an object directly after another is the next call. `None` while more text
    /// decides.
    pub fn reads_again(&self, text: &str) -> Option<bool> {
        match opening(text, &self.names) {
            Ok(_) => Some(true),
            Err(NoMatch::NoCall) => Some(false),
            Err(NoMatch::Undecided) => None,
        }
    }
}

/// Common Lark rules of all plain JSON calls.
const JSON_CALLS: &str = r#"WS: / {1,4}|\r?\n[ \t]{0,32}/
CLOSES: /```|<\/[a-z_]{4,16}>/
REOPENS: /(```|<\/[a-z_]{4,16}>)\n{1,2}(```json|<[a-z_]{4,16}>)/
json_head: "{" WS? ("\"type\"" WS? ":" WS? "\"function\"" WS? "," WS?)? "\"name\"" WS? ":" WS?
json_key: "," WS? ("\"arguments\"" | "\"parameters\"") WS? ":" WS?"#;

/// Returns the Lark grammar of plain JSON calls in any template format: an object from its brace
/// on, further objects, and what may close them.
pub fn grammar(tools: &[Tool], parallel: bool) -> String {
    let again = if parallel { "(WS? (/[,;]/ WS?)? (REOPENS WS?)? json_call)*" } else { "" };
    let mut lark = format!("start: json_call {again} WS? (\"]\" WS?)? CLOSES?\n{JSON_CALLS}\njson_call: ");
    let either = |i: usize| format!("json_call_{i} | \"{{\" json_call_{i} \"}}\"");
    lark += &(0..tools.len()).map(either).collect::<Vec<_>>().join(" | ");
    for (i, tool) in tools.iter().enumerate() {
        let (name, schema) =
            (quoted(&json!(tool.name).to_string()), with_limited_whitespace(&tool.parameters));
        _ = write!(lark, "\njson_call_{i}: json_head {name} WS? json_key %json {schema} WS? \"}}\"");
    }
    lark
}

/// Returns the call that `text` opens.
fn opening(text: &str, names: &[String]) -> Result<OpenCall, NoMatch> {
    let mut cursor = Cursor(text.trim_start());
    let closes = cursor.enclosure()?;
    cursor.skip_blanks();
    if cursor.0.starts_with('[') {
        cursor.expect("[")?;
        cursor.skip_blanks();
    }
    let object = cursor.0.to_owned();
    cursor.head()?;
    let mut no_match = NoMatch::NoCall;
    for name in names {
        match cursor.clone().expect(&json!(name).to_string()) {
            Ok(()) => return Ok(OpenCall { object, closes }),
            Err(NoMatch::Undecided) => no_match = NoMatch::Undecided,
            Err(NoMatch::NoCall) => {}
        }
    }
    Err(no_match)
}

/// Returns the tool name of a call object, and the text that starts with its arguments.
pub(super) fn open_object(text: &str) -> Result<(String, &str), NoMatch> {
    let mut cursor = Cursor(text);
    cursor.head()?;
    let name = cursor.name()?;
    cursor.expect(",")?;
    cursor.skip_blanks();
    let mut other = cursor.clone();
    match (cursor.token("\"arguments\"", ":"), other.token("\"parameters\"", ":")) {
        (Ok(()), _) => Ok((name, cursor.0)),
        (_, Ok(())) => Ok((name, other.0)),
        (Err(NoMatch::Undecided), _) | (_, Err(NoMatch::Undecided)) => Err(NoMatch::Undecided),
        _ => Err(NoMatch::NoCall),
    }
}

/// Returns the tool name of a truncated call object, and its arguments so far.
pub(super) fn cut_object(text: &str) -> Option<(String, String)> {
    let mut cursor = Cursor(text);
    cursor.head().ok()?;
    let name = cursor.name().ok()?;
    let arguments = open_object(text).map_or("", |(_, arguments)| arguments);
    Some((name, arguments.to_owned()))
}

/// Rest of a text.
#[derive(Clone)]
struct Cursor<'t>(&'t str);

impl Cursor<'_> {
    fn skip_blanks(&mut self) {
        self.0 = self.0.trim_start();
    }

    /// Consumes `literal`.
    fn expect(&mut self, literal: &str) -> Result<(), NoMatch> {
        match self.0.strip_prefix(literal) {
            Some(rest) => {
                self.0 = rest;
                Ok(())
            }
            None if literal.starts_with(self.0) => Err(NoMatch::Undecided),
            None => Err(NoMatch::NoCall),
        }
    }

    /// Consumes the opening of a fence or tags and returns its closing mark.
    fn enclosure(&mut self) -> Result<String, NoMatch> {
        if self.0.is_empty() {
            return Err(NoMatch::Undecided);
        }
        if self.0.starts_with('`') {
            self.expect("```")?;
            let is_language = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let rest = self.0.trim_start_matches(is_language);
            match rest {
                _ if self.0.len() - rest.len() > MAX_LANGUAGE => return Err(NoMatch::NoCall),
                "" => return Err(NoMatch::Undecided),
                rest => self.0 = rest,
            }
            return Ok("```".to_owned());
        }
        // Firefunction's mark.
        if self.0.starts_with('f') {
            self.expect("functools")?;
        }
        if !self.0.starts_with('<') {
            return Ok(String::new());
        }
        let mut no_match = NoMatch::NoCall;
        for tag in TAGS {
            match self.expect(&format!("<{tag}>")) {
                Ok(()) => return Ok(format!("</{tag}>")),
                Err(NoMatch::Undecided) => no_match = NoMatch::Undecided,
                Err(NoMatch::NoCall) => {}
            }
        }
        Err(no_match)
    }

    /// Consumes the object up to the name of its tool: `{"name":`, optionally preceded by
    /// `"type": "function"`.
    fn head(&mut self) -> Result<(), NoMatch> {
        self.expect("{")?;
        self.0 = self.0.strip_prefix('{').unwrap_or(self.0);
        self.skip_blanks();
        let mut typed = self.clone();
        match typed.token("\"type\"", ":").and_then(|()| typed.token("\"function\"", ",")) {
            Ok(()) => *self = typed,
            Err(NoMatch::Undecided) => return Err(NoMatch::Undecided),
            Err(NoMatch::NoCall) => {}
        }
        self.token("\"name\"", ":")
    }

    /// Consumes a quoted name and the whitespace after it.
    fn name(&mut self) -> Result<String, NoMatch> {
        let mut names = serde_json::Deserializer::from_str(self.0).into_iter::<String>();
        match names.next() {
            Some(Ok(name)) => {
                self.0 = self.0[names.byte_offset()..].trim_start();
                Ok(name)
            }
            Some(Err(error)) if !error.is_eof() => Err(NoMatch::NoCall),
            _ => Err(NoMatch::Undecided),
        }
    }

    /// Consumes a quoted text, the mark after it and the whitespace around that.
    fn token(&mut self, token: &str, mark: &str) -> Result<(), NoMatch> {
        self.expect(token)?;
        self.skip_blanks();
        self.expect(mark)?;
        self.skip_blanks();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kvant_text::tokenizer::Special;

    use super::*;
    use crate::constraint::{ConstraintCompiler, OutputFormat};

    fn scanner() -> CallScanner {
        CallScanner::new(["add".to_owned(), "add_all".to_owned()])
    }

    #[test]
    fn a_call_opens_at_a_line_start_bare_fenced_or_tagged() {
        for (text, before, object, closes) in [
            (r#"{"name": "add", "#, "", r#"{"name": "add", "#, ""),
            ("\n ```json\n{\n  \"name\":\"add\"", "", "{\n  \"name\":\"add\"", "```"),
            ("```\n[{\"name\": \"add_all\"", "", "{\"name\": \"add_all\"", "```"),
            ("functools[{\"name\": \"add\"", "", "{\"name\": \"add\"", ""),
            ("<tools>\n{\"name\": \"add\"", "", "{\"name\": \"add\"", "</tools>"),
            ("<tool_call>{\"name\": \"add\"", "", "{\"name\": \"add\"", "</tool_call>"),
            ("Sure.\n\n{\"name\": \"add\"", "Sure.\n", "{\"name\": \"add\"", ""),
            ("{{\"name\": \"add\"", "", "{{\"name\": \"add\"", ""),
            ("```json\n[{{\n\"name\": \"add\"", "", "{{\n\"name\": \"add\"", "```"),
            (
                "a\nb `x`\n{\"type\": \"function\", \"name\": \"add\"",
                "a\nb `x`\n",
                "{\"type\": \"function\", \"name\": \"add\"",
                "",
            ),
        ] {
            for size in 1..=text.len() {
                let (mut scanner, mut output, mut call) = (scanner(), String::new(), None);
                for piece in text.as_bytes().chunks(size) {
                    let piece = std::str::from_utf8(piece).unwrap();
                    match &mut call {
                        None => {
                            let scanned = scanner.push(piece);
                            output += &scanned.text;
                            call = scanned.call;
                        }
                        Some(OpenCall { object, .. }) => *object += piece,
                    }
                }
                let want = OpenCall { object: object.to_owned(), closes: closes.to_owned() };
                assert_eq!((output.as_str(), call), (before, Some(want)), "{text:?} by {size}");
            }
        }
    }

    #[test]
    fn other_text_passes_unchanged_and_soon() {
        for text in [
            "Hello.",
            "{\"name\": \"ada\"}",
            "{\"names\": []}",
            "{\"type\": \"object\"}",
            "{}",
            "{{ name }}",
            "{{\"name\": \"ada\"}}",
            "{{{\"name\": \"add\"",
            "```python\nprint({})\n```\n",
            "a {\"name\": \"add\"}",
            "<thin>\n\n<toolbox>",
            "{\"name\": \"ad\"}\n[1]\n`x`",
            "`` ` ```````",
            "fun\nfunctools are",
        ] {
            for size in 1..=text.len() {
                let (mut scanner, mut output) = (scanner(), String::new());
                for piece in text.as_bytes().chunks(size) {
                    let scanned = scanner.push(std::str::from_utf8(piece).unwrap());
                    output += &scanned.text;
                    assert_eq!(scanned.call, None, "{text:?}");
                }
                assert_eq!(output + &scanner.rest(), text);
            }
        }
        let mut scanner = scanner();
        assert_eq!(scanner.push("{\"name\": \"ada").text, "{\"name\": \"ada");
        assert_eq!(scanner.push(" {\"name\": \"add\"").text, " {\"name\": \"add\"");
    }

    #[test]
    fn plain_calls_must_match_the_schemas_of_their_tools() {
        let number = json!({ "type": "integer" });
        let parameters = json!({ "type": "object", "properties": { "a": number }, "required": ["a"] });
        let tools =
            ["add", "add_all"].map(|name| Tool { name: name.to_owned(), parameters: parameters.clone() });
        let tokenizer = &crate::test_tokenizer::bundled_tokenizer();
        let grammars = ConstraintCompiler::new().unwrap();
        let takes = |text: &str, parallel: bool| {
            let form = OutputFormat::Lark(grammar(&tools, parallel));
            let tokens = tokenizer.encode(text, Special::AsText, false).unwrap();
            grammars.constraint(tokenizer, &form).unwrap().accepts(&tokens)
        };
        let one = r#"{"name": "add", "arguments": {"a": 1}}"#;
        let printed = "{\n  \"name\": \"add_all\",\n  \"arguments\": {\n    \"a\": 1\n  }\n}";
        for text in [
            one.to_owned(),
            one.replace(' ', ""),
            one.replace("arguments", "parameters"),
            one.replace("{\"name", "{\"type\": \"function\", \"name"),
            printed.to_owned(),
            format!("{printed}\n```"),
            format!("{one}]\n</tool_call>"),
            format!("{{{one}}}"),
            format!("{{{printed}}}\n```"),
        ] {
            assert!(takes(&text, false), "{text}");
        }
        for text in [
            format!("{one}\n{printed}"),
            format!("{one}, {one}]"),
            format!("{{{one}}}\n{{{one}}}"),
            format!("{printed}\n```\n\n```json\n{printed}\n```"),
        ] {
            assert!(takes(&text, true) && !takes(&text, false), "{text}");
        }
        for odd in [format!("{one}}}"), format!("{{{one}"), format!("{{{{{one}}}}}")] {
            assert!(!takes(&odd, true), "{odd}");
        }
        for (from, to) in [("1", "\"1\""), ("add", "sub"), ("\"a\"", "\"b\""), ("arguments", "args")] {
            assert!(!takes(&one.replace(from, to), true), "{to}");
        }
    }

    #[test]
    fn a_cut_object_keeps_its_name_and_arguments_so_far() {
        let call = |arguments: &str| ("add".to_owned(), arguments.to_owned());
        for (text, want) in [
            ("{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b", Some(call("{\"a\": 1, \"b"))),
            ("{\"type\": \"function\", \"name\": \"add\", \"parameters\": {", Some(call("{"))),
            ("{{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b", Some(call("{\"a\": 1, \"b"))),
            ("{\"name\": \"add\", \"argum", Some(call(""))),
            ("{\"name\": \"add\"", Some(call(""))),
            ("{\"name\": \"ad", None),
            ("{\"x\": 1", None),
        ] {
            assert_eq!(cut_object(text), want, "{text}");
        }
    }
}
