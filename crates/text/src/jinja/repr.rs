//! Values as text: Python's `str` and `repr`, and `json.dumps`.

use std::fmt::Write as _;
use std::sync::LazyLock;

use regex_automata::meta::Regex;

use super::Fault;
use super::limits::Budget;
use super::text::{Text, TextBuilder};
use super::value::{Shape, Value};

/// `str(value)`, as Jinja prints it: text is unquoted at the top level and quoted inside.
pub(super) fn str(value: &Value, meter: &std::rc::Rc<Budget>) -> Result<Text, Fault> {
    if let Value::Text(text) = value {
        return Ok(text.clone());
    }
    let mut out = TextBuilder::new(meter);
    print(value, &mut out, meter)?;
    out.finish()
}

/// Appends `str(value)`.
pub(super) fn print(value: &Value, out: &mut TextBuilder, meter: &Budget) -> Result<(), Fault> {
    match value {
        Value::Text(text) => out.push_text(text),
        Value::Undefined => Ok(()),
        _ => repr(value, out, meter),
    }
}

/// `repr(value)`
pub(super) fn quoted(value: &Value, meter: &std::rc::Rc<Budget>) -> Result<Text, Fault> {
    let mut out = TextBuilder::new(meter);
    repr(value, &mut out, meter)?;
    out.finish()
}

/// Appends `repr(value)`. Values are nested at most [`super::value::MAX_NESTING`] deep.
fn repr(value: &Value, out: &mut TextBuilder, meter: &Budget) -> Result<(), Fault> {
    meter.work(1)?;
    match value {
        Value::Undefined => out.own("Undefined"),
        Value::None => out.own("None"),
        Value::Bool(b) => out.own(if *b { "True" } else { "False" }),
        Value::Int(n) => out.own(&n.to_string()),
        Value::Float(x) => out.own(&float(*x)),
        Value::Text(text) => quote(text, out, meter),
        Value::List(list) => {
            let is_tuple = list.shape() != Shape::List;
            out.own(if is_tuple { "(" } else { "[" })?;
            for (i, item) in list.items().iter().enumerate() {
                out.own(if i > 0 { ", " } else { "" })?;
                repr(item, out, meter)?;
            }
            out.own(match (is_tuple, list.items().len()) {
                (true, 1) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            })
        }
        Value::Map(map) => {
            out.own("{")?;
            for (i, (key, value)) in map.entries().iter().enumerate() {
                out.own(if i > 0 { ", " } else { "" })?;
                repr(key, out, meter)?;
                out.own(": ")?;
                repr(value, out, meter)?;
            }
            out.own("}")
        }
        Value::Namespace(_) => out.own("<namespace>"),
        Value::Macro(closure) => {
            out.own("<macro ")?;
            out.own(&closure.def.name)?;
            out.own(">")
        }
        Value::Function(_) | Value::Method(..) => out.own("<function>"),
        Value::Loop(..) => out.own("<loop>"),
    }
}

/// `repr` of a float: the shortest digits that round-trip, with an exponent from 1e16 on and below
/// 1e-4.
pub(super) fn float(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() {
            "nan".to_owned()
        } else if x > 0.0 {
            "inf".to_owned()
        } else {
            "-inf".to_owned()
        };
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    format!("{x:?}").split_once('e').map_or_else(|| format!("{x:?}"), |_| format!("{x:.1}"))
}

/// Whether Python's `repr` prints a character unescaped.
fn is_printable(c: char) -> bool {
    /// Characters without a visible shape: controls, format marks, private and unassigned
    /// characters, spaces.
    static SHAPELESS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"[\p{C}\p{Z}]").ok());
    match c {
        ' '..='~' => true,
        '\0'..='\u{a0}' => false,
        c if c.is_alphanumeric() => true,
        c => !SHAPELESS
            .as_ref()
            .is_some_and(|shapeless| shapeless.is_match(c.encode_utf8(&mut [0; 4]) as &str)),
    }
}

/// Appends a Python string literal.
fn quote(text: &Text, out: &mut TextBuilder, meter: &Budget) -> Result<(), Fault> {
    // Characters beyond ASCII require a table lookup.
    meter.work(text.as_str().bytes().filter(|&byte| byte >= 0xc0).count())?;
    let mark = if text.as_str().contains('\'') && !text.as_str().contains('"') { '"' } else { '\'' };
    let mark_text = mark.to_string();
    out.own(&mark_text)?;
    let escape = |c: char| match c {
        '\n' => Some("\\n".to_owned()),
        '\r' => Some("\\r".to_owned()),
        '\t' => Some("\\t".to_owned()),
        '\\' => Some("\\\\".to_owned()),
        c if c == mark => Some(format!("\\{c}")),
        c if is_printable(c) => None,
        c @ ..='\u{ff}' => Some(format!("\\x{:02x}", u32::from(c))),
        c @ ..='\u{ffff}' => Some(format!("\\u{:04x}", u32::from(c))),
        c => Some(format!("\\U{:08x}", u32::from(c))),
    };
    escaped(text, escape, out)?;
    out.own(&mark_text)
}

/// Appends `text`, with each character replaced where `escape` returns a replacement.
fn escaped(text: &Text, escape: impl Fn(char) -> Option<String>, out: &mut TextBuilder) -> Result<(), Fault> {
    for (piece, is_input) in text.pieces(0..text.len()) {
        let mut plain = 0;
        for (i, c) in piece.char_indices() {
            if let Some(other) = escape(c) {
                out.push(&piece[plain..i], is_input)?;
                out.push(&other, is_input)?;
                plain = i + c.len_utf8();
            }
        }
        out.push(&piece[plain..], is_input)?;
    }
    Ok(())
}

/// Formatting options of `json.dumps`.
pub(super) struct JsonStyle {
    pub(super) ensure_ascii: bool,
    /// Indentation per level; without it, the output is a single line.
    pub(super) indent: Option<Text>,
    /// Separators between items, and between a key and its value.
    pub(super) separators: (Text, Text),
    pub(super) sort_keys: bool,
}

impl JsonStyle {
    /// Appends `json.dumps(value)` at nesting level `level`.
    pub(super) fn write(
        &self,
        value: &Value,
        level: usize,
        out: &mut TextBuilder,
        meter: &Budget,
    ) -> Result<(), Fault> {
        meter.work(1)?;
        match value {
            Value::None => out.own("null"),
            Value::Bool(b) => out.own(if *b { "true" } else { "false" }),
            Value::Int(n) => out.own(&n.to_string()),
            Value::Float(x) if x.is_finite() => out.own(&float(*x)),
            Value::Float(x) => out.own(if x.is_nan() {
                "NaN"
            } else if *x > 0.0 {
                "Infinity"
            } else {
                "-Infinity"
            }),
            Value::Text(text) => self.string(text, out),
            Value::List(list) => {
                out.own("[")?;
                for (i, item) in list.items().iter().enumerate() {
                    self.between(i == 0, level + 1, out)?;
                    self.write(item, level + 1, out, meter)?;
                }
                self.close(list.items().is_empty(), level, "]", out)
            }
            Value::Map(map) => {
                let mut entries: Vec<_> = map.entries().iter().collect();
                if self.sort_keys {
                    meter.work(entries.len() * 8)?;
                    let key = |value: &Value| match value {
                        Value::Text(text) => text.as_str().to_owned(),
                        _ => String::new(),
                    };
                    entries.sort_by_key(|(k, _)| key(k));
                }
                out.own("{")?;
                for (i, (key, value)) in entries.iter().enumerate() {
                    self.between(i == 0, level + 1, out)?;
                    self.key(key, out)?;
                    out.push_text(&self.separators.1)?;
                    self.write(value, level + 1, out, meter)?;
                }
                self.close(entries.is_empty(), level, "}", out)
            }
            _ => Err(Fault::failed(format!("cannot write JSON: the value is {}", undefined(value)))),
        }
    }

    /// Appends the separator, except before the first item, and a new line if indenting.
    fn between(&self, first: bool, level: usize, out: &mut TextBuilder) -> Result<(), Fault> {
        if !first {
            out.push_text(&self.separators.0)?;
        }
        self.line(level, out)
    }

    fn line(&self, level: usize, out: &mut TextBuilder) -> Result<(), Fault> {
        let Some(indent) = &self.indent else { return Ok(()) };
        out.own("\n")?;
        for _ in 0..level {
            out.push_text(indent)?;
        }
        Ok(())
    }

    fn close(&self, empty: bool, level: usize, bracket: &str, out: &mut TextBuilder) -> Result<(), Fault> {
        if !empty {
            self.line(level, out)?;
        }
        out.own(bracket)
    }

    fn key(&self, key: &Value, out: &mut TextBuilder) -> Result<(), Fault> {
        let word = match key {
            Value::Text(text) => return self.string(text, out),
            Value::None => "null".to_owned(),
            Value::Bool(b) => b.to_string(),
            Value::Int(n) => n.to_string(),
            Value::Float(x) => float(*x),
            _ => return Err(Fault::failed(format!("cannot write JSON: a key is {}", key.kind()))),
        };
        out.own(&format!("\"{word}\""))
    }

    fn string(&self, text: &Text, out: &mut TextBuilder) -> Result<(), Fault> {
        let escape = |c: char| match c {
            '"' => Some("\\\"".to_owned()),
            '\\' => Some("\\\\".to_owned()),
            '\n' => Some("\\n".to_owned()),
            '\r' => Some("\\r".to_owned()),
            '\t' => Some("\\t".to_owned()),
            '\u{8}' => Some("\\b".to_owned()),
            '\u{c}' => Some("\\f".to_owned()),
            c if c < ' ' => Some(format!("\\u{:04x}", u32::from(c))),
            c if self.ensure_ascii && !(' '..='~').contains(&c) => {
                let mut word = String::new();
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(word, "\\u{unit:04x}"); // writing to a string does not fail
                }
                Some(word)
            }
            _ => None,
        };
        out.own("\"")?;
        escaped(text, escape, out)?;
        out.own("\"")
    }
}

fn undefined(value: &Value) -> &'static str {
    if matches!(value, Value::Undefined) { "undefined" } else { value.kind() }
}
