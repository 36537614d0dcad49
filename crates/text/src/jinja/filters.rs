//! Filters and tests.

use std::cmp::Ordering;

use super::Fault;
use super::eval::{CallArgs, Interpreter};
use super::repr::{self, JsonStyle};
use super::text::{Text, TextBuilder};
use super::value::{Entries, Items, List, Value};
use super::{layout, methods, ops, printf};

type Result<T> = std::result::Result<T, Fault>;

/// Maximum indentation of JSON, in spaces.
const MAX_INDENT: usize = 64;

impl Interpreter {
    /// `value|name(args)`
    pub(super) fn filter(&mut self, name: &str, value: Value, mut args: CallArgs) -> Result<Value> {
        self.meter.work(1)?;
        match name {
            "string" | "safe" => {
                args.finish(0)?;
                Ok(Value::Text(self.text(&value)?))
            }
            "upper" | "lower" | "capitalize" | "title" | "trim" | "replace" | "indent" | "escape" | "e"
            | "forceescape" | "truncate" | "center" => {
                let text = self.text(&value)?;
                self.text_filter(name, text, args).map(Value::Text)
            }
            "default" | "d" => {
                let other = args.take(0, "default_value").map_or_else(|| Value::own(&self.meter, ""), Ok)?;
                let falsy_too = args.take(1, "boolean").is_some_and(|b| b.is_true());
                args.finish(2)?;
                let absent = matches!(value, Value::Undefined) || (falsy_too && !value.is_true());
                Ok(if absent { other } else { value })
            }
            "wordcount" => {
                args.finish(0)?;
                layout::n_words(&self.text(&value)?)
            }
            "format" => self.format(&value, args),
            "tojson" => self.tojson(&value, args),
            "length" | "count" => {
                args.finish(0)?;
                let n = match &value {
                    Value::Text(text) => {
                        self.meter.read(text.len())?;
                        text.as_str().chars().count()
                    }
                    Value::Loop(round) => round.list.items().len(),
                    _ => ops::list(&value, &self.meter)?.items().len(),
                };
                Ok(Value::Int(n as i128))
            }
            "first" | "last" => {
                args.finish(0)?;
                let list = ops::list(&value, &self.meter)?;
                let items = list.items();
                let found = if name == "first" { items.first() } else { items.last() };
                Ok(found.cloned().unwrap_or(Value::Undefined))
            }
            "attr" => {
                let key = args.need(0, "name")?;
                args.finish(1)?;
                self.item(&value, &key)
            }
            "abs" | "int" | "float" | "round" => number_filter(name, &value, args, &self.meter),
            "items" | "dictsort" => self.pairs(name, &value, args),
            "join" => {
                let between = args.take(0, "d").map_or_else(|| Value::own(&self.meter, ""), Ok)?;
                let attribute = args.take(1, "attribute");
                args.finish(2)?;
                let between = self.text(&between)?;
                let list = self.picked(&value, attribute.as_ref())?;
                methods::join(&between, &list, &self.meter)
            }
            _ => self.list_filter(name, &value, args),
        }
    }

    /// Filters from lists to lists.
    fn list_filter(&mut self, name: &str, value: &Value, mut args: CallArgs) -> Result<Value> {
        match name {
            "list" => {
                args.finish(0)?;
                Ok(Value::List(ops::list(value, &self.meter)?))
            }
            "reverse" => {
                args.finish(0)?;
                let backwards = [None, None, Some(Value::Int(-1))];
                match value {
                    Value::Text(_) => ops::slice(value, backwards, &self.meter),
                    _ => ops::slice(&Value::List(ops::list(value, &self.meter)?), backwards, &self.meter),
                }
            }
            "sort" | "unique" | "min" | "max" => {
                let is_sort = name == "sort";
                let reverse = is_sort && args.take(0, "reverse").is_some_and(|r| r.is_true());
                let at = usize::from(is_sort);
                let cased = args.take(at, "case_sensitive").is_some_and(|c| c.is_true());
                let attribute = args.take(at + 1, "attribute");
                args.finish(at + 2)?;
                let list = ops::list(value, &self.meter)?;
                let mut keyed = Vec::new();
                for item in list.items() {
                    let key = self.pick(item, attribute.as_ref())?;
                    keyed.push((self.sort_key(key, cased)?, item.clone()));
                }
                self.ordered(name, keyed, reverse)
            }
            "sum" => {
                let attribute = args.take(0, "attribute");
                let mut sum = args.take(1, "start").unwrap_or(Value::Int(0));
                args.finish(2)?;
                for item in self.picked(value, attribute.as_ref())?.items() {
                    sum = ops::binary(super::ast::Op::Add, sum, item, &self.meter)?;
                }
                Ok(sum)
            }
            "map" => self.map(value, args),
            "batch" => self.batch(value, args),
            "slice" => self.slices(value, args),
            "groupby" => self.group_by(value, args),
            "select" | "reject" | "selectattr" | "rejectattr" => self.select(name, value, args),
            _ => Err(Fault::failed(format!("there is no filter '{name}'"))),
        }
    }

    /// `str(value)`
    pub(super) fn text(&self, value: &Value) -> Result<Text> {
        repr::str(value, &self.meter)
    }

    fn text_filter(&self, name: &str, text: Text, mut args: CallArgs) -> Result<Text> {
        match name {
            "replace" => {
                let (old, new) = (self.text(&args.need(0, "old")?)?, self.text(&args.need(1, "new")?)?);
                let count = args.take(2, "count").and_then(|n| n.as_int());
                args.finish(3)?;
                text.replace(old.as_str(), &new, count.map_or(usize::MAX, methods::limit))
            }
            "trim" => {
                let chars = args.take(0, "chars").filter(|c| matches!(c, Value::Text(_)));
                args.finish(1)?;
                methods::strip(&text, chars.map(|c| self.text(&c)).transpose()?.as_ref(), true, true)
            }
            "indent" => {
                let width = args.take(0, "width").unwrap_or(Value::Int(4));
                let first = args.take(1, "first").is_some_and(|f| f.is_true());
                let blank = args.take(2, "blank").is_some_and(|b| b.is_true());
                args.finish(3)?;
                let width = match &width {
                    Value::Text(text) => Value::Text(text.clone()),
                    n => ops::binary(super::ast::Op::Mul, Value::own(&self.meter, " ")?, n, &self.meter)?,
                };
                indent(&text, &self.text(&width)?, first, blank)
            }
            "truncate" => self.truncate(&text, args),
            "center" => {
                let width = args.take(0, "width").unwrap_or(Value::Int(80));
                args.finish(1)?;
                layout::justify(name, &text, &width, None)
            }
            "escape" | "e" | "forceescape" => {
                args.finish(0)?;
                let escape = |c: char| match c {
                    '&' => "&amp;".to_owned(),
                    '<' => "&lt;".to_owned(),
                    '>' => "&gt;".to_owned(),
                    '\'' => "&#39;".to_owned(),
                    '"' => "&#34;".to_owned(),
                    c => c.to_string(),
                };
                text.map(|piece| piece.chars().map(escape).collect())
            }
            _ => {
                args.finish(0)?;
                // Jinja's `title` starts words after these characters.
                methods::change_case(name, &text, |c| c.is_whitespace() || "-({[<".contains(c))
            }
        }
    }

    fn tojson(&self, value: &Value, mut args: CallArgs) -> Result<Value> {
        if matches!(value, Value::Undefined) {
            return Err(Fault::failed("cannot write JSON: the value is undefined"));
        }
        let mut take =
            |at, name| args.take(at, name).filter(|v| !matches!(v, Value::None | Value::Undefined));
        let ensure_ascii = take(0, "ensure_ascii").is_some_and(|v| v.is_true());
        let indent = match take(1, "indent") {
            Some(Value::Text(text)) => Some(text),
            Some(n) => {
                let n = n
                    .as_int()
                    .ok_or_else(|| Fault::failed("the indentation of JSON must be a number or text"))?;
                let n = usize::try_from(n).unwrap_or(0).min(MAX_INDENT);
                Some(Text::new(&self.meter, &" ".repeat(n), false)?)
            }
            None => None,
        };
        let separators = match take(2, "separators") {
            Some(pair) => {
                let part = |at| self.text(&ops::item(&pair, &Value::Int(at), &self.meter)?);
                (part(0)?, part(1)?)
            }
            None => {
                let own = |text| Text::new(&self.meter, text, false);
                (own(if indent.is_some() { "," } else { ", " })?, own(": ")?)
            }
        };
        let sort_keys = take(3, "sort_keys").is_some_and(|v| v.is_true());
        args.finish(4)?;
        let mut out = TextBuilder::new(&self.meter);
        JsonStyle { ensure_ascii, indent, separators, sort_keys }.write(value, 0, &mut out, &self.meter)?;
        Ok(Value::Text(out.finish()?))
    }

    /// `items` and `dictsort`: a mapping as a list of pairs.
    fn pairs(&self, name: &str, value: &Value, mut args: CallArgs) -> Result<Value> {
        let map = match value {
            Value::Map(map) => map,
            Value::Undefined if name == "items" => return Items::new(&self.meter).finish(),
            _ => return Err(Fault::failed(format!("'{name}' expects a mapping, got {}", value.kind()))),
        };
        let pair =
            |(key, value): &(Value, Value)| List::tuple(&self.meter, [Ok(key.clone()), Ok(value.clone())]);
        if name == "items" {
            args.finish(0)?;
            return List::collect(&self.meter, map.entries().iter().map(pair));
        }
        let cased = args.take(0, "case_sensitive").is_some_and(|c| c.is_true());
        let by = args.take(1, "by").map(|by| self.text(&by)).transpose()?;
        let by_value = by.is_some_and(|by| by.as_str() == "value");
        let reverse = args.take(2, "reverse").is_some_and(|r| r.is_true());
        args.finish(3)?;
        let mut keyed = Vec::new();
        for entry in map.entries() {
            let key = if by_value { &entry.1 } else { &entry.0 };
            keyed.push((self.sort_key(key.clone(), cased)?, pair(entry)?));
        }
        self.ordered("sort", keyed, reverse)
    }

    /// Returns the sort key of `value`: lowercased text, unless case-sensitive.
    pub(super) fn sort_key(&self, value: Value, cased: bool) -> Result<Value> {
        match &value {
            Value::Text(text) if !cased => Ok(Value::Text(text.map(str::to_lowercase)?)),
            _ => Ok(value),
        }
    }

    /// Returns the values of `keyed` sorted by key, without duplicates, or the minimum or maximum.
    fn ordered(&self, how: &str, keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Value> {
        if how == "unique" {
            let mut seen: Vec<&Value> = Vec::new();
            let mut kept = Items::new(&self.meter);
            'next: for (key, value) in &keyed {
                for other in &seen {
                    if key.equals(other, &self.meter)? {
                        continue 'next;
                    }
                }
                seen.push(key);
                kept.push(value.clone())?;
            }
            return kept.finish();
        }
        if matches!(how, "min" | "max") {
            return self.extreme(keyed, if how == "min" { Ordering::Less } else { Ordering::Greater });
        }
        let keyed = self.in_order(keyed, reverse)?;
        List::collect(&self.meter, keyed.into_iter().map(|(_, value)| Ok(value)))
    }

    /// Sorts by key; equal keys keep their order in both directions.
    pub(super) fn in_order(&self, keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<(Value, Value)>> {
        sorted(keyed, &mut |a, b| {
            let order = a.compare(b, &self.meter)?;
            Ok(if reverse { order.is_lt() } else { order.is_gt() })
        })
    }

    /// `format(values...)`: formats like `%`, with values by position or by name.
    fn format(&self, value: &Value, args: CallArgs) -> Result<Value> {
        let template = self.text(value)?;
        let values = match (args.positional.is_empty(), args.named.is_empty()) {
            (false, false) => return Err(Fault::failed("'format' expects values by position or by name")),
            (true, false) => {
                let mut entries = Entries::new(&self.meter);
                for (name, value) in args.named {
                    entries.set(Value::own(&self.meter, &name)?, value)?;
                }
                entries.finish()?
            }
            (_, true) => List::tuple(&self.meter, args.positional.into_iter().map(Ok))?,
        };
        printf::format(&template, &values, &self.meter)
    }

    /// Returns the first value whose key compares as `order` to all others.
    fn extreme(&self, keyed: Vec<(Value, Value)>, order: Ordering) -> Result<Value> {
        let mut keyed = keyed.into_iter();
        let Some(mut best) = keyed.next() else { return Ok(Value::Undefined) };
        for one in keyed {
            if one.0.compare(&best.0, &self.meter)? == order {
                best = one;
            }
        }
        Ok(best.1)
    }

    /// Returns the attribute `path` of `value`, with dots, or the value itself.
    pub(super) fn pick(&mut self, value: &Value, path: Option<&Value>) -> Result<Value> {
        let path = match path {
            None | Some(Value::None) => return Ok(value.clone()),
            Some(Value::Text(path)) => path.clone(),
            Some(key) => return self.item(value, key),
        };
        let mut found = value.clone();
        for name in path.as_str().split('.') {
            self.meter.work(1)?;
            found = match (name.parse::<u32>(), &found) {
                (_, Value::Undefined) => return Ok(found),
                (Ok(at), _) => self.item(&found, &Value::Int(i128::from(at)))?,
                (Err(_), _) => self.attr(&found, name)?,
            };
        }
        Ok(found)
    }

    fn picked(&mut self, value: &Value, path: Option<&Value>) -> Result<List> {
        let list = ops::list(value, &self.meter)?;
        if path.is_none() {
            return Ok(list);
        }
        let mut items = Items::new(&self.meter);
        for item in list.items() {
            items.push(self.pick(item, path)?)?;
        }
        ops::list(&items.finish()?, &self.meter)
    }

    /// `map(attribute=...)`, or `map(filter, arguments...)`.
    fn map(&mut self, value: &Value, mut args: CallArgs) -> Result<Value> {
        let mut items = Items::new(&self.meter);
        if let Some(attribute) = args.take(usize::MAX, "attribute") {
            let other = args.take(usize::MAX, "default").unwrap_or(Value::Undefined);
            args.finish(0)?;
            for item in self.picked(value, Some(&attribute))?.items() {
                items.push(if matches!(item, Value::Undefined) { other.clone() } else { item.clone() })?;
            }
            return items.finish();
        }
        let name = self.text(&args.need(0, "filter")?)?;
        for item in ops::list(value, &self.meter)?.items() {
            let filter = CallArgs { positional: args.positional[1..].to_vec(), named: args.named.clone() };
            items.push(self.filter(name.as_str(), item.clone(), filter)?)?;
        }
        items.finish()
    }

    /// `select`, `reject` and their `attr` variants: keeps or drops items by a test, or else by
    /// truth value.
    fn select(&mut self, how: &str, value: &Value, args: CallArgs) -> Result<Value> {
        let mut args = args.positional;
        let attribute = if how.ends_with("attr") {
            if args.is_empty() {
                return Err(Fault::failed(format!("'{how}' expects an attribute")));
            }
            Some(args.remove(0))
        } else {
            None
        };
        let test = if args.is_empty() { None } else { Some(self.text(&args.remove(0))?) };
        let mut items = Items::new(&self.meter);
        for item in ops::list(value, &self.meter)?.items() {
            let tested = self.pick(item, attribute.as_ref())?;
            let holds = match &test {
                Some(test) => {
                    let args = CallArgs { positional: args.clone(), named: Vec::new() };
                    self.test(test.as_str(), &tested, args)?
                }
                None => tested.is_true(),
            };
            if holds == how.starts_with("select") {
                items.push(item.clone())?;
            }
        }
        items.finish()
    }

    /// `value is name(args)`
    pub(super) fn test(&mut self, name: &str, value: &Value, args: CallArgs) -> Result<bool> {
        self.meter.work(1)?;
        let meter = &self.meter;
        let case = |is: fn(char) -> bool, not: fn(char) -> bool| match value {
            Value::Text(text) => text.as_str().chars().any(is) && !text.as_str().chars().any(not),
            _ => false,
        };
        if let [other] = &args.positional[..] {
            return Ok(match name {
                "eq" | "equalto" | "==" => value.equals(other, meter)?,
                "ne" | "!=" => !value.equals(other, meter)?,
                "lt" | "lessthan" | "<" => value.compare(other, meter)?.is_lt(),
                "le" | "<=" => value.compare(other, meter)?.is_le(),
                "gt" | "greaterthan" | ">" => value.compare(other, meter)?.is_gt(),
                "ge" | ">=" => value.compare(other, meter)?.is_ge(),
                "in" => ops::contains(other, value, meter)?,
                "sameas" => value.kind() == other.kind() && value.equals(other, meter)?,
                "divisibleby" => match (value.as_int(), other.as_int()) {
                    (Some(n), Some(by)) if by != 0 => n.checked_rem(by) == Some(0),
                    _ => return Err(Fault::failed("'divisibleby' expects whole numbers, the second not 0")),
                },
                _ => return Err(Fault::failed(format!("there is no test '{name}' with an argument"))),
            });
        }
        args.finish(0)?;
        Ok(match name {
            "defined" => !matches!(value, Value::Undefined),
            "undefined" => matches!(value, Value::Undefined),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "integer" => matches!(value, Value::Int(_)),
            "float" => matches!(value, Value::Float(_)),
            "number" => value.as_float().is_some(),
            "string" => matches!(value, Value::Text(_)),
            "mapping" => matches!(value, Value::Map(_)),
            "sequence" => matches!(value, Value::Text(_) | Value::List(_) | Value::Map(_)),
            "iterable" => {
                matches!(value, Value::Undefined | Value::Text(_) | Value::List(_) | Value::Map(_))
            }
            "callable" => matches!(value, Value::Macro(_) | Value::Function(_) | Value::Method(..)),
            "odd" => value.as_int().is_some_and(|n| n % 2 != 0),
            "even" => value.as_int().is_some_and(|n| n % 2 == 0),
            "lower" => case(char::is_lowercase, char::is_uppercase),
            "upper" => case(char::is_uppercase, char::is_lowercase),
            _ => return Err(Fault::failed(format!("there is no test '{name}'"))),
        })
    }
}

fn number_filter(
    name: &str,
    value: &Value,
    mut args: CallArgs,
    meter: &super::limits::Budget,
) -> Result<Value> {
    meter.work(1)?;
    let parsed = match value {
        Value::Text(text) => {
            meter.read(text.len())?;
            let text = &without_digit_separators(text.as_str().trim());
            text.parse::<i64>().map(|n| Value::Int(n.into())).or_else(|_| text.parse().map(Value::Float)).ok()
        }
        _ if value.as_float().is_some() => Some(value.clone()),
        _ => None,
    };
    let number = parsed.as_ref().and_then(Value::as_float);
    match name {
        "int" => {
            let other = args.take(0, "default").unwrap_or(Value::Int(0));
            args.finish(1)?;
            let whole = parsed.as_ref().and_then(Value::as_int);
            Ok(whole.or(number.filter(|x| x.is_finite()).map(|x| x as i128)).map_or(other, Value::Int))
        }
        "float" => {
            let other = args.take(0, "default").unwrap_or(Value::Float(0.0));
            args.finish(1)?;
            Ok(number.map_or(other, Value::Float))
        }
        "abs" => {
            args.finish(0)?;
            match value.as_int() {
                Some(n) if n >= 0 => Ok(Value::Int(n)),
                Some(_) => ops::minus(value),
                None => number
                    .map(|x| Value::Float(x.abs()))
                    .ok_or_else(|| Fault::failed(format!("'abs' of {}", value.kind()))),
            }
        }
        _ => {
            let digits = args.take(0, "precision").and_then(|n| n.as_int()).unwrap_or(0).clamp(-300, 300);
            let method = args.take(1, "method");
            args.finish(2)?;
            let x = number.ok_or_else(|| Fault::failed(format!("'round' of {}", value.kind())))?;
            let method = match &method {
                Some(Value::Text(method)) => method.as_str(),
                _ => "common",
            };
            match (method, value.as_int()) {
                ("common", Some(n)) => Ok(Value::Int(round_int(n, digits as i32))),
                ("common", None) => Ok(Value::Float(round(x, digits as i32))),
                ("floor" | "ceil", _) => {
                    let scale = 10f64.powi(digits as i32);
                    let whole = if method == "floor" { (x * scale).floor() } else { (x * scale).ceil() };
                    Ok(Value::Float(if whole.is_finite() { whole / scale } else { x }))
                }
                _ => Err(Fault::failed("'round' supports common, ceil and floor")),
            }
        }
    }
}

/// Removes the `_` that Python allows between two digits of a number.
fn without_digit_separators(text: &str) -> String {
    let bytes = text.as_bytes();
    let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let is_separator = |at: usize| bytes[at] == b'_' && at > 0 && is_digit(at - 1) && is_digit(at + 1);
    text.char_indices().filter(|(at, _)| !is_separator(*at)).map(|(_, c)| c).collect()
}

/// Python's `round` of an integer, which stays one: to a multiple of a power of ten, ties to even.
fn round_int(n: i128, digits: i32) -> i128 {
    let Some(unit) = u32::try_from(-digits.min(0)).ok().and_then(|power| 10i128.checked_pow(power)) else {
        return 0; // beyond the range of integers
    };
    let (below, rest) = (n.div_euclid(unit), n.rem_euclid(unit));
    let up = match rest.cmp(&(unit - rest)) {
        Ordering::Less => 0,
        Ordering::Equal => below.rem_euclid(2),
        Ordering::Greater => 1,
    };
    (below + up).saturating_mul(unit)
}

/// Python's `round`: the float nearest to the exact value's decimals.
fn round(x: f64, digits: i32) -> f64 {
    if digits < 0 {
        let unit = 10f64.powi(-digits);
        return (x / unit).round_ties_even() * unit;
    }
    format!("{x:.*}", digits as usize).parse().unwrap_or(x)
}

/// Merge sort by key, such that no earlier key is `after` a later one. The sorts of the standard
/// library may panic on an inconsistent order, which values of templates can have.
fn sorted(
    mut left: Vec<(Value, Value)>,
    after: &mut dyn FnMut(&Value, &Value) -> Result<bool>,
) -> Result<Vec<(Value, Value)>> {
    if left.len() < 2 {
        return Ok(left);
    }
    let right = left.split_off(left.len() / 2);
    let (left, right) = (sorted(left, after)?, sorted(right, after)?);
    let mut out = Vec::with_capacity(left.len() + right.len());
    let (mut left, mut right) = (left.into_iter().peekable(), right.into_iter().peekable());
    while let (Some(l), Some(r)) = (left.peek(), right.peek()) {
        let right_first = after(&l.0, &r.0)?;
        out.extend(if right_first { right.next() } else { left.next() });
    }
    out.extend(left.chain(right));
    Ok(out)
}

/// Indents every line except the first (unless `first`) by `width`; empty lines only if `blank`.
fn indent(text: &Text, width: &Text, first: bool, blank: bool) -> Result<Text> {
    let mut out = TextBuilder::new(text.meter());
    // Jinja appends a newline before splitting, so a text that ends with one has an empty line
    // after it.
    let all = text.as_str();
    let last = methods::lines(all).last().is_none_or(|(line, whole)| line != whole && !whole.ends_with('\r'));
    let lines = methods::lines(all).map(|(line, _)| line).chain(last.then_some(&all[all.len()..]));
    for (i, line) in lines.enumerate() {
        if i > 0 {
            out.own("\n")?;
        }
        if if i == 0 { first } else { blank || !line.is_empty() } {
            out.push_text(width)?;
        }
        out.push_text(&text.part(line)?)?;
    }
    out.finish()
}
