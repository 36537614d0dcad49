//! Tool call formats of model families: one table, from which both the constraining grammar and the
//! parser are derived.

use std::fmt::Write;

use kvant_text::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::{json_calls, marks};
use crate::constraint::schema::DEFINITIONS;
use crate::constraint::with_limited_whitespace;

/// Tool call format of a model family, recognized by texts of its chat template.
#[derive(Debug, PartialEq)]
pub struct Format {
    /// Name of the format.
    pub name: &'static str,
    /// Texts of the template, all of which identify the format.
    marks: &'static [&'static str],
    /// Text that opens the first call.
    pub opens: &'static str,
    /// Whether calls occur only at the beginning of an answer.
    pub only_first: bool,
    pub(super) style: Style,
    /// Text that closes a call.
    pub(super) closes: &'static str,
    /// Text between calls.
    next: &'static str,
    /// Text after the last call.
    ends: &'static str,
}

/// Body of a call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Style {
    /// JSON object with `name` and, under this key, the arguments. The model writes `before` first.
    Object { before: &'static str, arguments: &'static str },
    /// Name, then the arguments as a JSON object.
    Named { before: &'static str, between: &'static str },
    /// `<function=NAME>`, then for each argument `<parameter=KEY>`, the value on its own lines and
    /// `</parameter>`.
    Function,
    /// Name, then for each argument `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>`.
    Pairs,
}

/// The first match applies; the last entry matches every template.
static FORMATS: &[Format] = &[
    Format {
        name: "pairs",
        marks: &["<tool_call>", "<arg_key>"],
        opens: "<tool_call>",
        only_first: false,
        style: Style::Pairs,
        closes: "</tool_call>",
        next: "\n<tool_call>",
        ends: "",
    },
    Format {
        name: "function",
        marks: &["<tool_call>", "<function="],
        opens: "<tool_call>",
        only_first: false,
        style: Style::Function,
        closes: "\n</tool_call>",
        next: "\n<tool_call>",
        ends: "",
    },
    Format {
        name: "mistral",
        marks: &["[TOOL_CALLS]", "[ARGS]"],
        opens: "[TOOL_CALLS]",
        only_first: false,
        style: Style::Named { before: "", between: "[ARGS]" },
        closes: "",
        next: "[TOOL_CALLS]",
        ends: "",
    },
    Format {
        name: "mistral list",
        marks: &["[TOOL_CALLS]"],
        opens: "[TOOL_CALLS]",
        only_first: false,
        style: Style::Object { before: "[", arguments: "arguments" },
        closes: "",
        next: ", ",
        ends: "]",
    },
    Format {
        name: "deepseek r1",
        marks: &["<｜tool▁call▁begin｜>", "```json"],
        opens: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        only_first: false,
        style: Style::Named { before: "function<｜tool▁sep｜>", between: "\n```json\n" },
        closes: "\n```<｜tool▁call▁end｜>",
        next: "\n<｜tool▁call▁begin｜>",
        ends: "<｜tool▁calls▁end｜>",
    },
    Format {
        name: "deepseek",
        marks: &["<｜tool▁call▁begin｜>"],
        opens: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        only_first: false,
        style: Style::Named { before: "", between: "<｜tool▁sep｜>" },
        closes: "<｜tool▁call▁end｜>",
        next: "<｜tool▁call▁begin｜>",
        ends: "<｜tool▁calls▁end｜>",
    },
    Format {
        name: "llama",
        marks: &["\"parameters\": dictionary of argument name and its value"],
        opens: "{",
        only_first: true,
        style: Style::Object { before: "", arguments: "parameters" },
        closes: "",
        next: "; ",
        ends: "",
    },
    Format {
        name: "hermes",
        marks: &[],
        opens: "<tool_call>",
        only_first: false,
        style: Style::Object { before: "\n", arguments: "arguments" },
        closes: "\n</tool_call>",
        next: "\n<tool_call>",
        ends: "",
    },
];

/// Text after a call.
pub(super) enum AfterCall<'t> {
    /// Another call, after its opening mark.
    Call(&'t str),
    Text(&'t str),
}

/// Callable tool.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Name.
    pub name: String,
    /// JSON schema of its arguments.
    pub parameters: Value,
}

/// Returns the format of models with this chat template.
pub fn format_of(template: &str) -> &'static Format {
    let fits = |format: &&Format| format.marks.iter().all(|mark| template.contains(mark));
    FORMATS.iter().find(fits).expect("the last one fits all")
}

/// Returns tool instructions for a system message, for models whose template has no tool support.
pub fn tool_instructions(tools: &[Value]) -> String {
    let mut text = "You may call functions to help with the question. The functions are described in <tools></tools>:\n<tools>"
        .to_owned();
    for tool in tools {
        // Writing to a string does not fail.
        _ = write!(text, "\n{tool}");
    }
    text + "\n</tools>\nTo call one, write a JSON object with its name and arguments within <tool_call></tool_call>:\n\
            <tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"
}

impl Format {
    /// Returns the id of a call in the form that the template accepts: Mistral's have nine letters
    /// or digits, and its templates reject others.
    pub fn id(&self, id: &Value) -> Value {
        const LEN: usize = 9;
        let Some(text) = id.as_str().filter(|_| self.opens == "[TOOL_CALLS]") else { return id.clone() };
        if text.len() == LEN && text.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return id.clone();
        }
        let digits = b"0123456789abcdefghijklmnopqrstuvwxyz";
        let mut hash = xxh3_64(text.as_bytes());
        let mut digit = || {
            let digit = digits[(hash % digits.len() as u64) as usize];
            hash /= digits.len() as u64;
            char::from(digit)
        };
        (0..LEN).map(|_| digit()).collect::<String>().into()
    }

    /// Reports whether the template expects arguments as a string instead of an object.
    pub fn expects_text(&self) -> bool {
        self.name == "deepseek r1"
    }

    /// Returns the Lark grammar of calls of these tools: of the text after [`Format::opens`], or of
    /// all. At most one call unless `parallel`.
    pub fn grammar(&self, tools: &[Tool], is_open: bool, parallel: bool, tokenizer: &Tokenizer) -> String {
        let mark = |text: &str| marks::lark(text, tokenizer);
        let opens = if is_open { String::new() } else { mark(self.opens) };
        let again = if parallel { format!("({} call)*", mark(self.next)) } else { String::new() };
        let mut lark = format!("start: {opens} call {again} {}\ncall: ", mark(self.ends));
        lark += &(0..tools.len()).map(|i| format!("call_{i}")).collect::<Vec<_>>().join(" | ");
        for (i, tool) in tools.iter().enumerate() {
            _ = write!(lark, "\ncall_{i}: {} {}", self.call(i, tool, &mark), mark(self.closes));
            if self.style == Style::Function || self.style == Style::Pairs {
                lark += &self.values(i, tool, &mark);
            }
        }
        lark
    }

    /// Returns the Lark grammar of an answer that is either a JSON value of this schema or calls of
    /// these tools.
    pub fn grammar_or_value(
        &self,
        tools: &[Tool],
        parallel: bool,
        schema: &Value,
        tokenizer: &Tokenizer,
    ) -> String {
        let named = |name: &str, lark: String| lark.replacen("start:", &format!("{name}:"), 1);
        let calls = named("calls", self.grammar(tools, false, parallel, tokenizer));
        let plain = named("json_calls", json_calls::grammar(tools, parallel));
        let value = with_limited_whitespace(schema);
        format!("start: value | calls | json_calls\nvalue: %json {value}\n{calls}\n{plain}")
    }

    /// Returns the grammar of a call of one tool; `mark` converts texts with special tokens to
    /// Lark.
    fn call(&self, i: usize, tool: &Tool, mark: &dyn Fn(&str) -> String) -> String {
        let schema = with_limited_whitespace(&tool.parameters);
        match self.style {
            Style::Object { before, arguments } => {
                // A brace that already opens the call is not repeated.
                let brace = if self.opens == "{" { "" } else { "{" };
                let head = format!("{brace}\"name\": {}, \"{arguments}\": ", json!(tool.name));
                format!("{} {} %json {schema} \"}}\"", mark(before), quoted(&head))
            }
            Style::Named { before, between } => {
                format!("{} {} {} %json {schema}", mark(before), quoted(&tool.name), mark(between))
            }
            Style::Function => {
                let [head, tail] = [format!("\n<function={}>\n", tool.name), "</function>".to_owned()];
                format!("{} values_{i} {}", quoted(&head), quoted(&tail))
            }
            Style::Pairs => format!("{} values_{i}", quoted(&format!("{}\n", tool.name))),
        }
    }

    /// Returns the rules of a tool's separate arguments, in their order, with optional ones marked.
    fn values(&self, i: usize, tool: &Tool, mark: &dyn Fn(&str) -> String) -> String {
        let none = Map::new();
        let properties = tool.parameters["properties"].as_object().unwrap_or(&none);
        let needed = |key: &str| {
            tool.parameters["required"].as_array().is_some_and(|keys| keys.iter().any(|needed| needed == key))
        };
        let (mut order, mut rules) = (String::new(), String::new());
        for (k, (key, schema)) in properties.iter().enumerate() {
            let (head, tail) = match self.style {
                Style::Function => (quoted(&format!("<parameter={key}>\n")), "\n</parameter>\n"),
                _ => {
                    let [opens, closes] = ["<arg_key>", "</arg_key>\n<arg_value>"].map(mark);
                    (format!("{opens} {} {closes}", quoted(key)), "</arg_value>\n")
                }
            };
            let optional = if needed(key) { "" } else { "?" };
            _ = write!(order, " value_{i}_{k}{optional}");
            let schema = whole(schema, &tool.parameters);
            let (name, ends, tail) = (format!("value_{i}_{k}"), quoted(tail), mark(tail));
            _ = match written(&schema) {
                Written::OneOf(texts) => {
                    let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
                    write!(rules, "\n{name}: {head} ({}) {tail}", texts.join(" | "))
                }
                Written::Text => {
                    let text = format!("text_{i}_{k}");
                    write!(rules, "\n{name}: {head} {text}\n{text}[suffix={ends}]: /(?s:.*)/")
                }
                Written::Json => {
                    write!(rules, "\n{name}: {head} %json {} {tail}", with_limited_whitespace(&schema))
                }
            };
        }
        format!("\nvalues_{i}:{order}{rules}")
    }

    /// Returns the control tokens whose text is part of an answer with tool calls.
    pub fn control_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let mut texts = vec![self.opens, self.closes, self.next, self.ends];
        match self.style {
            Style::Named { before, between } => texts.extend([before, between]),
            Style::Object { before, .. } => texts.push(before),
            Style::Pairs => texts.extend(["<arg_key></arg_key>", "<arg_value></arg_value>"]),
            Style::Function => {}
        }
        marks::control_tokens(&texts, tokenizer)
    }

    /// Returns the text after a call. `None` while more text decides.
    pub(super) fn behind<'t>(&self, text: &'t str) -> Option<AfterCall<'t>> {
        let mut rest = text.trim_start();
        for mark in [self.closes.trim(), self.ends.trim()].into_iter().filter(|mark| !mark.is_empty()) {
            match rest.strip_prefix(mark) {
                Some(after) => rest = after.trim_start(),
                None if mark.starts_with(rest) => return None,
                None => {}
            }
        }
        let next = self.next.trim();
        match rest.strip_prefix(next) {
            Some(call) => Some(AfterCall::Call(call)),
            None if next.starts_with(rest) => None,
            None => Some(AfterCall::Text(rest)),
        }
    }
}

/// Reports whether the schema of the tool `name` requires this argument to be a string.
pub(super) fn is_text(tools: &[Tool], name: &str, key: &str) -> bool {
    let tool = tools.iter().find(|tool| tool.name == name);
    let schema = tool.and_then(|tool| Some(whole(tool.parameters["properties"].get(key)?, &tool.parameters)));
    schema.is_some_and(|schema| written(&schema) != Written::Json)
}

/// Maximum length of a chain of references, which may be cyclic.
const MAX_REFERENCES: usize = 8;

/// Returns a property's schema, with the definitions of the tool's schema that it may refer to; a
/// schema that is only a reference is replaced by its target.
fn whole(schema: &Value, parameters: &Value) -> Value {
    let mut schema = schema.clone();
    for _ in 0..MAX_REFERENCES {
        let path = schema["$ref"].as_str().and_then(|path| path.strip_prefix('#'));
        let Some(target) = path.and_then(|path| parameters.pointer(path)) else { break };
        schema = target.clone();
    }
    if let Some(fields) = schema.as_object_mut() {
        for (name, defined) in DEFINITIONS.iter().filter_map(|name| Some((name, parameters.get(name)?))) {
            fields.entry(*name).or_insert_with(|| defined.clone());
        }
    }
    schema
}

/// Notation of a separate value.
#[derive(Debug, PartialEq)]
enum Written<'s> {
    /// Verbatim, without JSON's quotes.
    Text,
    /// Verbatim, and one of these.
    OneOf(Vec<&'s str>),
    Json,
}

fn written(schema: &Value) -> Written<'_> {
    let values = schema["enum"].as_array().map(Vec::as_slice);
    let values = values.or_else(|| schema.get("const").map(std::slice::from_ref)).unwrap_or_default();
    match values.iter().map(Value::as_str).collect::<Option<Vec<&str>>>() {
        Some(texts) if !texts.is_empty() => Written::OneOf(texts),
        Some(_) if schema["type"] == "string" => Written::Text,
        _ => Written::Json,
    }
}

/// Returns a text as a Lark string.
pub(super) fn quoted(text: &str) -> String {
    if text.is_empty() { String::new() } else { Value::String(text.to_owned()).to_string() }
}

#[cfg(test)]
mod tests {

    use std::path::Path;

    use kvant_text::chat::{ChatTemplate, RenderOptions};
    use kvant_text::tokenizer::Special;

    use super::*;
    use crate::constraint::{ConstraintCompiler, OutputFormat};
    use crate::output_parser::call_reader::CallReader;
    use crate::output_parser::{Call, Part};

    /// Parses the call at the beginning of a text. Returns it with the text after its closing
    /// marks.
    fn read(format: &Format, text: &str, tools: &[Tool]) -> Option<(Call, String)> {
        let (mut held, mut parts) = (text.to_owned(), Vec::new());
        if !CallReader::new(format).read(&mut held, tools, &mut parts) {
            return None;
        }
        let [Part::Call(name), Part::Arguments(arguments)] = &parts[..] else { panic!("{parts:?}") };
        let rest = format.behind(&held).map_or("", |behind| match behind {
            AfterCall::Call(rest) | AfterCall::Text(rest) => rest,
        });
        Some((Call { name: name.clone(), arguments: arguments.clone() }, rest.to_owned()))
    }

    fn tool() -> Value {
        json!({ "type": "function", "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": { "city": { "type": "string" }, "days": { "type": "integer" } },
                "required": ["city"],
            },
        } })
    }

    fn tools() -> Vec<Tool> {
        let function = &tool()["function"];
        vec![Tool { name: "get_weather".to_owned(), parameters: function["parameters"].clone() }]
    }

    /// Calls rendered by the templates of real models are parsed as these calls.
    #[test]
    fn calls_rendered_by_real_templates_are_parsed() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/assets/templates");
        if !folder.is_dir() {
            println!("skipped: {}: the templates are not here", folder.display());
            return;
        }
        for (file, name) in [
            ("Qwen-Qwen2.5-7B-Instruct", "hermes"),
            ("Qwen-Qwen3-0.6B", "hermes"),
            ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "hermes"),
            ("Qwen3-Coder", "function"),
            ("Qwen3.5-4B", "function"),
            ("GLM-4.6", "pairs"),
            ("GLM-4.7-Flash", "pairs"),
            ("mistralai-Mistral-Nemo-Instruct-2407", "mistral list"),
            ("unsloth-mistral-Devstral-Small-2507", "mistral"),
            ("meta-llama-Llama-3.1-8B-Instruct", "llama"),
            ("meta-llama-Llama-3.3-70B-Instruct", "llama"),
            ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek r1"),
            ("deepseek-ai-DeepSeek-V3.1", "deepseek"),
        ] {
            let source = std::fs::read_to_string(folder.join(format!("{file}.jinja"))).unwrap();
            let format = format_of(&source);
            assert_eq!(format.name, name, "{file}");
            let template = ChatTemplate::new(&source, "<s>", "</s>").unwrap();
            let render = |arguments: Value| {
                let call = json!({ "id": "123456789", "type": "function", "function": { "name": "get_weather", "arguments": arguments } });
                let messages = [
                    json!({ "role": "user", "content": "What is the weather?" }),
                    json!({ "role": "assistant", "content": "", "tool_calls": [call] }),
                ];
                let options = RenderOptions { tools: Some(json!([tool()])), ..RenderOptions::default() };
                template.render(&messages, &options).map(|rendered| rendered.to_string())
            };
            let arguments = json!({ "city": "New York", "days": 3 });
            // Some templates expect the arguments as a string.
            let mut text = render(arguments.clone());
            if name == "deepseek r1" || name == "deepseek" {
                text = render(json!(arguments.to_string()));
            }
            let text = text.unwrap_or_else(|error| panic!("{file}: {error}"));
            let turn = &text[text.rfind("weather?").unwrap()..];
            let at = turn.find(if format.only_first { "{\"name\"" } else { format.opens });
            let at = at.unwrap_or_else(|| panic!("{file}: {turn}"));
            let inside = &turn[at + if format.only_first { 0 } else { format.opens.len() }..];
            let (call, rest) = read(format, inside, &tools()).unwrap_or_else(|| panic!("{file}: {inside}"));
            assert_eq!(call.name, "get_weather", "{file}");
            let mut read: Value = serde_json::from_str(&call.arguments).unwrap();
            if let Value::String(text) = &read {
                read = serde_json::from_str(text).unwrap();
            }
            assert_eq!(read, arguments, "{file}: {turn}");
            assert!(!rest.contains("tool") && !rest.contains('}'), "{file}: {rest:?}");
        }
    }

    #[test]
    fn every_format_parses_the_calls_it_writes() {
        for format in FORMATS {
            let call = match format.style {
                Style::Object { before, arguments } => {
                    format!("{before}{{\"name\": \"get_weather\", \"{arguments}\": {{\"city\":\"Oslo\"}}}}")
                }
                Style::Named { before, between } => {
                    format!("{before}get_weather{between}{{\"city\":\"Oslo\"}}")
                }
                Style::Function => {
                    "\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>".to_owned()
                }
                Style::Pairs => {
                    "get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n".to_owned()
                }
            };
            let again = call.strip_prefix('[').unwrap_or(&call);
            let Format { closes, next, ends, .. } = format;
            let text = format!("{call}{closes}{next}{again}{closes}{ends}");
            let want = Call { name: "get_weather".to_owned(), arguments: r#"{"city":"Oslo"}"#.to_owned() };
            let (first, rest) = read(format, &text, &tools()).unwrap();
            let (second, rest) = read(format, &rest, &tools()).unwrap();
            assert_eq!((first, second, rest.trim()), (want.clone(), want, ""), "{}", format.name);
            // A truncated call is not complete.
            assert_eq!(read(format, &call[..call.len() - 1], &tools()), None, "{}", format.name);
        }
    }

    /// Enumerated strings are written verbatim, and references in schemas are resolved.
    #[test]
    fn separate_values_match_their_schemas_and_parse_back() {
        let parameters = json!({
            "type": "object",
            "$defs": {
                "Unit": { "$ref": "#/$defs/Degrees" },
                "Degrees": { "type": "string", "enum": ["C", "F"] },
                "Day": { "type": "object", "properties": { "n": { "type": "integer" } }, "required": ["n"] },
            },
            "properties": {
                "unit": { "$ref": "#/$defs/Unit" },
                "kind": { "enum": ["a \"b\"", "7", ""] },
                "fixed": { "const": "x", "type": "string" },
                "level": { "enum": [1, "2"] },
                "days": { "type": "array", "items": { "$ref": "#/$defs/Day" } },
            },
            "required": ["unit", "kind", "fixed", "level", "days"],
        });
        let tools = [Tool { name: "f".to_owned(), parameters }];
        let tokenizer = &crate::test_tokenizer::bundled_tokenizer();
        let grammars = ConstraintCompiler::new().unwrap();
        for format in FORMATS.iter().filter(|format| matches!(format.style, Style::Function | Style::Pairs)) {
            let form = OutputFormat::Lark(format.grammar(&tools, true, false, tokenizer));
            let call = |[unit, kind, level]: [&str; 3]| {
                let pairs = [
                    ("unit", unit),
                    ("kind", kind),
                    ("fixed", "x"),
                    ("level", level),
                    ("days", "[{\"n\":3}]"),
                ];
                let text = match format.style {
                    Style::Function => {
                        let value = |(key, value)| format!("<parameter={key}>\n{value}\n</parameter>\n");
                        format!("\n<function=f>\n{}</function>", pairs.map(value).concat())
                    }
                    _ => {
                        let value = |(key, value)| {
                            format!("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n")
                        };
                        format!("f\n{}", pairs.map(value).concat())
                    }
                };
                format!("{text}{}", format.closes)
            };
            let takes = |text: &str| {
                let tokens = tokenizer.encode(text, Special::AsText, false).unwrap();
                grammars.constraint(tokenizer, &form).unwrap().accepts(&tokens)
            };
            let text = call(["F", "7", "\"2\""]);
            assert!(takes(&text) && takes(&call(["C", "", "1"])), "{}: {text}", format.name);
            for other in [["\"F\"", "7", "1"], ["K", "7", "1"], ["F", "8", "1"], ["F", "7", "2"]] {
                assert!(!takes(&call(other)), "{}: {other:?}", format.name);
            }
            let read: Value =
                serde_json::from_str(&read(format, &text, &tools).unwrap().0.arguments).unwrap();
            let want = json!({ "unit": "F", "kind": "7", "fixed": "x", "level": "2", "days": [{ "n": 3 }] });
            assert_eq!(read, want, "{}", format.name);
        }
    }
}
