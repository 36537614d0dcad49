//! What Python lends to templates: how `str` writes values, `json.dumps`, and the date.

use std::fmt::Write as _;
use std::io;

use jiff::civil::DateTime;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::error::Raised;

/// `raise_exception(message)`: the template's own refusal.
pub(super) fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

/// `strftime_now(format)` at the time `now`.
pub(super) fn strftime(now: DateTime, format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, now)
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now('{format}'): {e}")))
}

/// Whether Python iterates over a value: unlike minijinja not over none.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Whether Jinja2 calls a value a sequence: whatever has a length and items, text and mappings too.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
}

/// `str(value)`: as Jinja prints a value on a page. Text stands bare at the top and quoted inside.
pub(super) fn str(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => {
            let mut out = String::new();
            repr(value, MAX_DEPTH, &mut out);
            out
        }
    }
}

/// Values nest no deeper than this in any conversation; Python writes `...` where one holds itself.
const MAX_DEPTH: usize = 100;

/// Appends `repr(value)`.
fn repr(value: &Value, depth: usize, out: &mut String) {
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => quote(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Map if depth == 0 => out.push_str("..."),
        kind @ (ValueKind::Seq | ValueKind::Map) => {
            let map = kind == ValueKind::Map;
            out.push(if map { '{' } else { '[' });
            for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&item, depth - 1, out);
                if map {
                    out.push_str(": ");
                    repr(&value.get_item(&item).unwrap_or_default(), depth - 1, out);
                }
            }
            out.push(if map { '}' } else { ']' });
        }
        // Numbers, and what Python has no counterpart of.
        _ => drop(write!(out, "{value}")),
    }
}

/// Appends Python's literal for `text`: in single quotes, unless it holds one and no double quote.
fn quote(text: &str, out: &mut String) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == mark => out.extend(['\\', c]),
            c if c.is_control() => drop(write!(out, "\\x{:02x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push(mark);
}

/// The `tojson` filter as `transformers` defines it: `json.dumps` without HTML escapes, with the
/// arguments `ensure_ascii`, `indent`, `separators` and `sort_keys`, in this order or by name.
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let arg = |at: usize, name: &str| -> Result<Option<Value>, Error> {
        let by_name: Option<Value> = kwargs.get(name)?;
        Ok(by_name.or_else(|| args.get(at).cloned()).filter(|v| !v.is_none()))
    };
    let ensure_ascii = arg(0, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = arg(1, "indent")?.map(usize::try_from).transpose()?.map(|n| n.min(MAX_INDENT));
    let item = if indent.is_some() { "," } else { ", " };
    let (item, key) = match arg(2, "separators")? {
        Some(pair) => (pair.get_item(&0.into())?.to_string(), pair.get_item(&1.into())?.to_string()),
        None => (item.to_owned(), ": ".to_owned()),
    };
    let sort_keys = arg(3, "sort_keys")?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    let fail = |what: String| Error::new(ErrorKind::InvalidOperation, format!("cannot write JSON: {what}"));
    if value.is_undefined() {
        return Err(fail("the value is undefined".to_owned()));
    }
    let mut json = serde_json::to_value(value).map_err(|e| fail(e.to_string()))?;
    if sort_keys {
        json.sort_all_objects();
    }
    let spaces = " ".repeat(indent.unwrap_or(0));
    let lines = indent.map(|_| PrettyFormatter::with_indent(spaces.as_bytes()));
    let mut out = Vec::new();
    let style = Style { item, key, ensure_ascii, lines };
    json.serialize(&mut Serializer::with_formatter(&mut out, style)).map_err(|e| fail(e.to_string()))?;
    Ok(Value::from(String::from_utf8_lossy(&out)))
}

/// More spaces than anybody indents by.
const MAX_INDENT: usize = 64;

/// `json.dumps`'s choices, on top of serde's pretty printer where an indent is asked for.
struct Style<'a> {
    item: String,
    key: String,
    ensure_ascii: bool,
    lines: Option<PrettyFormatter<'a>>,
}

impl Style<'_> {
    /// What stands before an item: a separator, but for the first, then a new line if indenting.
    fn between<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        if !first {
            w.write_all(self.item.as_bytes())?;
        }
        match &mut self.lines {
            // Called as for a first item, serde breaks the line without a comma of its own.
            Some(pretty) => pretty.begin_array_value(w, true),
            None => Ok(()),
        }
    }
}

/// Passes a call on to the pretty printer, or else writes the compact form.
macro_rules! brackets {
    ($($call:ident: $compact:literal),*) => {$(
        fn $call<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
            match &mut self.lines {
                Some(pretty) => pretty.$call(w),
                None => w.write_all($compact),
            }
        }
    )*};
}

impl Formatter for Style<'_> {
    brackets!(begin_array: b"[", end_array: b"]", end_array_value: b"");
    brackets!(begin_object: b"{", end_object: b"}", end_object_value: b"");

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.between(w, first)
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.between(w, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(self.key.as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, w: &mut W, text: &str) -> io::Result<()> {
        if !self.ensure_ascii || text.is_ascii() {
            return w.write_all(text.as_bytes());
        }
        for c in text.chars() {
            match u8::try_from(c).ok().filter(u8::is_ascii) {
                Some(ascii) => w.write_all(&[ascii])?,
                None => c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(w, "\\u{unit:04x}"))?,
            }
        }
        Ok(())
    }
}
