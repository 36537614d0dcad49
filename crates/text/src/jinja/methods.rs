//! Python's methods of text, mappings and lists.

use std::ops::Range;
use std::rc::Rc;

use super::Fault;
use super::eval::{CallArgs, Interpreter};
use super::limits::Budget;
use super::repr;
use super::text::{Text, TextBuilder};
use super::value::{Items, List, Value};
use super::{eval, layout, ops};

type Result<T> = std::result::Result<T, Fault>;

impl Interpreter {
    /// `value.name(args)`
    pub(super) fn method(&mut self, value: &Value, name: &str, args: CallArgs) -> Result<Value> {
        self.meter.work(1)?;
        // A function in a mapping or namespace precedes the mapping's own methods.
        if matches!(value, Value::Map(_) | Value::Namespace(_) | Value::Undefined) {
            let found = self.attr(value, name)?;
            if matches!(found, Value::Macro(_) | Value::Function(_)) {
                return self.call(&found, args);
            }
        }
        let unknown = || Fault::failed(format!("{} has no method '{name}'", value.kind()));
        let done = match value {
            Value::Text(text) => self.text_method(text, name, args)?,
            Value::List(_) | Value::Map(_) if name == "copy" && args.positional.is_empty() => {
                Some(value.clone())
            }
            Value::Map(map) => map_method(map, name, args, &self.meter)?,
            Value::List(list) if matches!(name, "count" | "index") => {
                Some(list_method(list, name, args, &self.meter)?)
            }
            Value::Loop(round) if name == "cycle" => {
                let n = args.positional.len().max(1);
                args.positional.get(round.at % n).cloned()
            }
            _ => None,
        };
        done.ok_or_else(unknown)
    }

    fn text_method(&self, text: &Text, name: &str, mut args: CallArgs) -> Result<Option<Value>> {
        // These methods read only one end of the text, and count those bytes alone.
        if !["startswith", "endswith", "removeprefix", "removesuffix"].contains(&name) {
            self.meter.read(text.len())?;
        }
        let all = text.as_str();
        let every = |is: fn(char) -> bool| Value::Bool(!all.is_empty() && all.chars().all(is));
        let has_only_case = |is: fn(char) -> bool, not: fn(char) -> bool| {
            Value::Bool(all.chars().any(is) && !all.chars().any(not))
        };
        let (value, n_args) = match name {
            "upper" | "lower" | "capitalize" | "title" => {
                (Value::Text(change_case(name, text, |c| !c.is_alphabetic())?), 0)
            }
            "strip" | "lstrip" | "rstrip" => {
                let chars = text_or_none(name, args.take(0, "chars"))?;
                (Value::Text(strip(text, chars.as_ref(), name != "rstrip", name != "lstrip")?), 1)
            }
            "isspace" => (every(char::is_whitespace), 0),
            "swapcase" => (Value::Text(text.map(swapped)?), 0),
            "center" | "ljust" | "rjust" => {
                let (width, fill) = (args.need(0, "width")?, args.take(1, "fillchar"));
                let fill = fill.map(|fill| self.text(&fill)).transpose()?;
                (Value::Text(layout::justify(name, text, &width, fill.as_ref())?), 2)
            }
            "zfill" => (Value::Text(layout::fill_zeros(text, &args.need(0, "width")?)?), 1),
            "format" => return layout::format(text, args, self).map(Some),
            "isdigit" | "isnumeric" => (every(char::is_numeric), 0),
            "isalpha" => (every(char::is_alphabetic), 0),
            "isalnum" => (every(char::is_alphanumeric), 0),
            "islower" => (has_only_case(char::is_lowercase, char::is_uppercase), 0),
            "isupper" => (has_only_case(char::is_uppercase, char::is_lowercase), 0),
            "isascii" => (Value::Bool(all.is_ascii()), 0),
            "split" | "rsplit" => {
                let by = text_or_none(name, args.take(0, "sep"))?;
                let n = args.take(1, "maxsplit").and_then(|n| n.as_int()).map_or(usize::MAX, limit);
                (split(text, by.as_ref(), n, name == "rsplit")?, 2)
            }
            "splitlines" => {
                let keep = args.take(0, "keepends").is_some_and(|k| k.is_true());
                (ops::parts(text, lines(all).map(|(line, whole)| if keep { whole } else { line }))?, 1)
            }
            "join" => (join(text, &ops::list(&args.need(0, "iterable")?, &self.meter)?, &self.meter)?, 1),
            _ => return self.text_search(text, name, args),
        };
        args.finish(n_args)?;
        Ok(Some(value))
    }

    /// The methods that search for other text.
    fn text_search(&self, text: &Text, name: &str, mut args: CallArgs) -> Result<Option<Value>> {
        const KNOWN: [&str; 12] = [
            "replace",
            "startswith",
            "endswith",
            "find",
            "rfind",
            "index",
            "rindex",
            "count",
            "partition",
            "rpartition",
            "removeprefix",
            "removesuffix",
        ];
        if !KNOWN.contains(&name) {
            return Ok(None);
        }
        let first = args.need(0, "sub")?;
        let all = text.as_str();
        if let ("startswith" | "endswith", Value::List(list)) = (name, &first) {
            let mut found = false;
            for one in list.items() {
                let mut positional = args.positional.clone();
                positional[0] = one.clone();
                let args = CallArgs { positional, named: Vec::new() };
                found |= self.text_search(text, name, args)?.is_some_and(|found| found.is_true());
            }
            return Ok(Some(Value::Bool(found)));
        }
        let Value::Text(sub) = &first else {
            return Err(Fault::failed(format!("'{name}' expects text, got {}", first.kind())));
        };
        self.meter.read(sub.len())?;
        let at = |byte: Option<usize>| byte.map_or(-1, |byte| all[..byte].chars().count() as i128);
        if ["startswith", "endswith", "find", "rfind", "index", "rindex", "count"].contains(&name) {
            // Finding a start or an end counts characters.
            self.meter.read(if args.positional.len() > 1 { all.len() } else { 0 })?;
            let range = window(all, args.take(1, "start"), args.take(2, "end"))?;
            args.finish(3)?;
            let part = range.clone().map(|range| &all[range]);
            let found =
                |found: Option<usize>| Value::Int(at(found.zip(range).map(|(at, range)| range.start + at)));
            let value = match name {
                "startswith" => Value::Bool(part.is_some_and(|part| part.starts_with(sub.as_str()))),
                "endswith" => Value::Bool(part.is_some_and(|part| part.ends_with(sub.as_str()))),
                "find" | "index" => found(part.and_then(|part| part.find(sub.as_str()))),
                "rfind" | "rindex" => found(part.and_then(|part| part.rfind(sub.as_str()))),
                _ => Value::Int(part.map_or(0, |part| part.matches(sub.as_str()).count()) as i128),
            };
            if name.ends_with("index") && matches!(value, Value::Int(-1)) {
                return Err(Fault::failed("the text has no such substring"));
            }
            return Ok(Some(value));
        }
        let (value, n_args) = match name {
            "removeprefix" => (Value::Text(text.part(all.strip_prefix(sub.as_str()).unwrap_or(all))?), 1),
            "partition" | "rpartition" => (layout::partition(text, sub.as_str(), name == "rpartition")?, 1),
            "removesuffix" => (Value::Text(text.part(all.strip_suffix(sub.as_str()).unwrap_or(all))?), 1),
            _ => {
                let new = self.text(&args.need(1, "new")?)?;
                let count = args.take(2, "count").and_then(|n| n.as_int()).map_or(usize::MAX, limit);
                (Value::Text(text.replace(sub.as_str(), &new, count)?), 3)
            }
        };
        args.finish(n_args)?;
        Ok(Some(value))
    }
}

/// Swaps the case of all letters.
fn swapped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c.is_uppercase() {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
    }
    out
}

/// Splits a text into lines as Python does, each without and with its terminator.
pub(super) fn lines(text: &str) -> impl Iterator<Item = (&str, &str)> {
    const ENDS: [char; 10] =
        ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let len = rest.find(ENDS).unwrap_or(rest.len());
        let end = rest[len..].chars().next().map_or(0, char::len_utf8);
        let end = if rest[len..].starts_with("\r\n") { 2 } else { end };
        let (whole, behind) = rest.split_at(len + end);
        rest = behind;
        Some((&whole[..len], whole))
    })
}

/// Returns the method `name` of a mapping as a value, without calling it.
pub(super) fn of_map(map: &super::value::Map, name: &str) -> Option<Value> {
    let known = ["get", "items", "keys", "values"].into_iter().find(|known| *known == name)?;
    Some(Value::Method(map.clone(), known))
}

/// Returns an optional argument that method `name` takes as text; `none` and a missing one agree.
fn text_or_none(name: &str, value: Option<Value>) -> Result<Option<Text>> {
    match value {
        None | Some(Value::None) => Ok(None),
        Some(Value::Text(text)) => Ok(Some(text)),
        Some(other) => Err(Fault::failed(format!("'{name}' expects text, got {}", other.kind()))),
    }
}

/// Converts a count; negative means unlimited.
pub(super) fn limit(n: i128) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Joins the items with `between`.
pub(super) fn join(between: &Text, list: &List, meter: &Rc<Budget>) -> Result<Value> {
    let mut out = TextBuilder::new(meter);
    for (i, item) in list.items().iter().enumerate() {
        if i > 0 {
            out.push_text(between)?;
        }
        repr::print(item, &mut out, meter)?;
    }
    Ok(Value::Text(out.finish()?))
}

/// Strips whitespace, or else `chars`, at the start and end of `text`.
pub(super) fn strip(text: &Text, chars: Option<&Text>, start: bool, end: bool) -> Result<Text> {
    let is_stripped = |c: char| chars.map_or(c.is_whitespace(), |chars| chars.as_str().contains(c));
    text.meter().read(text.len())?;
    // Every removed character is searched in `chars`.
    let n_chars = chars.map_or(0, Text::len);
    let mut part = text.as_str();
    if start {
        part = part.trim_start_matches(is_stripped);
    }
    if end {
        part = part.trim_end_matches(is_stripped);
    }
    text.meter().read((text.len() - part.len() + 2).saturating_mul(n_chars))?;
    text.part(part)
}

/// `upper`, `lower`, `capitalize` or `title`. Words start after characters for which `ends` holds.
pub(super) fn change_case(how: &str, text: &Text, ends: fn(char) -> bool) -> Result<Text> {
    match how {
        "upper" => return text.map(str::to_uppercase),
        "lower" => return text.map(str::to_lowercase),
        _ => {}
    }
    let mut out = TextBuilder::new(text.meter());
    let mut begins = true;
    for (c, is_input) in text.chars() {
        let changed: String = if begins { c.to_uppercase().collect() } else { c.to_lowercase().collect() };
        out.push(&changed, is_input)?;
        begins = how == "title" && ends(c);
    }
    out.finish()
}

/// Splits at `by`, or else at whitespace, at most `n` times from the start or from the end.
fn split(text: &Text, by: Option<&Text>, n: usize, from_end: bool) -> Result<Value> {
    let all = text.as_str();
    let Some(by) = by else {
        if n == usize::MAX {
            return ops::parts(text, all.split_whitespace());
        }
        if from_end {
            return split_words_from_end(text, n);
        }
        // The remainder keeps its inner and trailing whitespace.
        let mut parts = Items::new(text.meter());
        let mut rest = all.trim_start();
        for _ in 0..n {
            let Some(end) = rest.find(char::is_whitespace) else { break };
            parts.push(Value::Text(text.part(&rest[..end])?))?;
            rest = rest[end..].trim_start();
        }
        if !rest.is_empty() {
            parts.push(Value::Text(text.part(rest)?))?;
        }
        return parts.finish();
    };
    if by.len() == 0 {
        return Err(Fault::failed("cannot split by an empty text"));
    }
    let n = n.saturating_add(1);
    if from_end && n < usize::MAX {
        let mut parts: Vec<&str> = Vec::new();
        for part in all.rsplitn(n, by.as_str()) {
            text.meter().work(1)?;
            parts.push(part);
        }
        return ops::parts(text, parts.into_iter().rev());
    }
    ops::parts(text, all.splitn(n, by.as_str()))
}

/// Splits off at most `n` words from the end, preceded by the remainder.
fn split_words_from_end(text: &Text, n: usize) -> Result<Value> {
    let mut parts = Vec::new();
    let mut rest = text.as_str().trim_end();
    for _ in 0..n {
        let Some((at, blank)) = rest.char_indices().rev().find(|(_, c)| c.is_whitespace()) else { break };
        text.meter().work(1)?;
        parts.push(&rest[at + blank.len_utf8()..]);
        rest = rest[..at].trim_end();
    }
    parts.extend(Some(rest).filter(|rest| !rest.is_empty()));
    ops::parts(text, parts.into_iter().rev())
}

/// Returns the byte range of `text[start:end]`; `None` if it starts after its end.
fn window(text: &str, start: Option<Value>, end: Option<Value>) -> Result<Option<Range<usize>>> {
    let place = |value: Option<Value>, other: usize| match value {
        None | Some(Value::None) => Ok(Some(other)),
        Some(value) => {
            let at =
                value.as_int().ok_or_else(|| Fault::failed("the bounds of a substring must be numbers"))?;
            Ok(byte_at(text, at))
        }
    };
    let (start, end) = (place(start, 0)?, place(end, text.len())?.unwrap_or(text.len()));
    Ok(start.filter(|&start| start <= end).map(|start| start..end))
}

/// Returns the byte offset of character `at`, counted from the end if negative; `None` past the
/// end.
fn byte_at(text: &str, at: i128) -> Option<usize> {
    if at >= 0 {
        let mut starts = text.char_indices().map(|(byte, _)| byte).chain([text.len()]);
        return starts.nth(usize::try_from(at).ok()?);
    }
    let back = usize::try_from(at.unsigned_abs() - 1).unwrap_or(usize::MAX);
    Some(text.char_indices().rev().nth(back).map_or(0, |(byte, _)| byte))
}

fn map_method(
    map: &super::value::Map,
    name: &str,
    mut args: CallArgs,
    meter: &Rc<Budget>,
) -> Result<Option<Value>> {
    let entries = map.entries();
    let value = match name {
        "get" => {
            let found = map.get(&args.need(0, "key")?, meter)?;
            let other = args.take(1, "default").unwrap_or(Value::None);
            args.finish(2)?;
            return Ok(Some(found.unwrap_or(other)));
        }
        "keys" => List::collect(meter, entries.iter().map(|(key, _)| Ok(key.clone())))?,
        "values" => List::collect(meter, entries.iter().map(|(_, value)| Ok(value.clone())))?,
        "items" => {
            let pair =
                |(key, value): &(Value, Value)| List::tuple(meter, [Ok(key.clone()), Ok(value.clone())]);
            List::collect(meter, entries.iter().map(pair))?
        }
        _ => return Ok(None),
    };
    args.finish(0)?;
    Ok(Some(value))
}

fn list_method(list: &List, name: &str, mut args: eval::CallArgs, meter: &Budget) -> Result<Value> {
    let needle = args.need(0, "value")?;
    args.finish(1)?;
    let mut n = 0;
    for (at, item) in list.items().iter().enumerate() {
        if item.equals(&needle, meter)? {
            if name == "index" {
                return Ok(Value::Int(at as i128));
            }
            n += 1;
        }
    }
    if name == "index" { Err(Fault::failed("the list has no such value")) } else { Ok(Value::Int(n)) }
}
