//! Supported part of a JSON schema.
//!
//! `llguidance` rejects a schema for one unknown keyword, and reads numbers as `f64`. Therefore a
//! schema is preprocessed: keywords that forbid nothing are dropped, bounds are tightened to
//! numbers that an `f64` represents, and unsupported parts are dropped and reported with their
//! locations.

use std::cmp::Ordering;
use std::fmt;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::OPTIONS;

/// JSON Schema keywords without support. They are dropped if their value forbids nothing.
const UNSUPPORTED: [&str; 18] = [
    "not",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$recursiveRef",
    "$recursiveAnchor",
    "$dynamicRef",
    "$dynamicAnchor",
];
/// Supported string formats.
const FORMATS: [&str; 11] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];
/// Bounds of numbers.
const BOUNDS: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];
/// Keywords with the targets of references.
pub const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// Largest integer up to which each is an `f64`.
const EXACT: u64 = 1 << 53;
/// Largest `f64` below 2^63, the limit of the integers of `llguidance`.
const MAX_INTEGER: i64 = i64::MAX - 1023;

/// Part of a schema that does not constrain answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnsupportedPart {
    /// JSON pointer; empty for the whole schema.
    pub place: String,
    /// Keyword without support.
    pub keyword: String,
    /// Its value, if that shows what is missing.
    pub value: Option<String>,
    /// Whether it is an annotation without obligation, like a format.
    pub is_note: bool,
}

impl fmt::Display for UnsupportedPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, keyword, value, .. } = self;
        match value {
            Some(value) => write!(f, "{keyword} {value}{}", at(place)),
            None => write!(f, "{keyword}{}", at(place)),
        }
    }
}

/// Formats the location of a part of a schema.
pub(super) fn at(place: &str) -> String {
    if place.is_empty() { String::new() } else { format!(" at {place}") }
}

/// Supported part of a schema, and what was dropped.
#[derive(Debug, Clone, PartialEq)]
pub struct SupportedSchema {
    /// The part that is enforced.
    pub schema: Value,
    /// Parts that are not.
    pub dropped: Vec<UnsupportedPart>,
}

impl SupportedSchema {
    /// Returns the supported part of `schema`.
    pub fn of(schema: &Value) -> Self {
        let mut dropped = Vec::new();
        let schema = Reader { place: String::new(), dropped: &mut dropped }.schema(schema);
        Self { schema, dropped }
    }

    /// Returns the dropped parts that are not annotations, in one line.
    pub fn missing(&self) -> Option<String> {
        listed(self.dropped.iter().filter(|dropped| !dropped.is_note))
    }

    /// Returns the ignored annotations, in one line.
    pub fn notes(&self) -> Option<String> {
        listed(self.dropped.iter().filter(|dropped| dropped.is_note))
    }
}

fn listed<'l>(dropped: impl Iterator<Item = &'l UnsupportedPart>) -> Option<String> {
    let texts: Vec<String> = dropped.map(UnsupportedPart::to_string).collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

/// Returns the location of the smallest part of a schema that `fails` by itself. Searches for at
/// most one second.
pub fn faulty_place(schema: &Value, fails: impl Fn(&Value) -> bool) -> String {
    let ends = Instant::now() + Duration::from_secs(1);
    let shared = [DEFINITIONS[0], DEFINITIONS[1], OPTIONS].map(|name| Some((name, schema.get(name)?)));
    let alone = |part: &Value| {
        let mut part = part.clone();
        for (name, defined) in shared.iter().flatten() {
            if let Some(fields) = part.as_object_mut() {
                fields.entry(*name).or_insert_with(|| (*defined).clone());
            }
        }
        part
    };
    let (mut place, mut faulty) = (String::new(), schema);
    let fails = |(_, part): &(String, &Value)| Instant::now() < ends && fails(&alone(part));
    while let Some((key, part)) = parts(faulty).into_iter().find(fails) {
        place = format!("{place}/{key}");
        faulty = part;
    }
    place
}

/// Returns the schemas within a schema, each with the keys that lead to it; the targets of
/// references come first.
fn parts(schema: &Value) -> Vec<(String, &Value)> {
    let mut parts = Vec::new();
    for (keyword, value) in schema.as_object().into_iter().flatten() {
        match (kind(keyword), value) {
            (Some(Kind::Schema), Value::Object(_)) => parts.push((keyword.clone(), value)),
            (Some(Kind::Schema | Kind::List), Value::Array(items)) => {
                parts.extend(items.iter().enumerate().map(|(i, item)| (format!("{keyword}/{i}"), item)));
            }
            (Some(Kind::Map), Value::Object(fields)) => {
                parts.extend(fields.iter().map(|(key, field)| (pointer(keyword, key), field)));
            }
            _ => {}
        }
    }
    parts.sort_by_key(|(key, _)| !DEFINITIONS.iter().any(|name| key.starts_with(name)));
    parts
}

/// Joins two keys as a JSON pointer (RFC 6901).
fn pointer(keyword: &str, key: &str) -> String {
    format!("{keyword}/{}", key.replace('~', "~0").replace('/', "~1"))
}

/// Structure of the schemas in a keyword.
enum Kind {
    /// One, or a list in older drafts.
    Schema,
    List,
    Map,
}

fn kind(keyword: &str) -> Option<Kind> {
    match keyword {
        "items" | "additionalItems" | "additionalProperties" => Some(Kind::Schema),
        "anyOf" | "oneOf" | "allOf" | "prefixItems" => Some(Kind::List),
        "properties" | "patternProperties" | "$defs" | "definitions" => Some(Kind::Map),
        _ => None,
    }
}

/// Preprocessor of a schema.
struct Reader<'r> {
    place: String,
    dropped: &'r mut Vec<UnsupportedPart>,
}

impl Reader<'_> {
    fn schema(&mut self, schema: &Value) -> Value {
        let Value::Object(fields) = schema else { return schema.clone() };
        // Formats of numbers state their width for programs.
        let may_be_text = match fields.get("type") {
            Some(Value::String(kind)) => kind == "string",
            Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
            _ => true,
        };
        let mut held = Map::new();
        for (keyword, value) in fields {
            if keyword == "format" && !may_be_text {
                continue;
            }
            if let Some(value) = self.keyword(keyword, value) {
                held.insert(keyword.clone(), value);
            }
        }
        held.into()
    }

    /// Returns the supported part of a keyword's value.
    fn keyword(&mut self, keyword: &str, value: &Value) -> Option<Value> {
        match (keyword, kind(keyword)) {
            (_, Some(Kind::Map)) => match value {
                Value::Object(fields) => {
                    let field = |(key, field): (&String, &Value)| {
                        (key.clone(), self.part(&pointer(keyword, key), field))
                    };
                    Some(Value::Object(fields.iter().map(field).collect()))
                }
                other => Some(other.clone()),
            },
            (_, Some(_)) => match value {
                Value::Array(items) => {
                    let item = |(i, item)| self.part(&format!("{keyword}/{i}"), item);
                    Some(items.iter().enumerate().map(item).collect())
                }
                other => Some(self.part(keyword, other)),
            },
            ("format", _) if value.as_str().is_some_and(|format| !FORMATS.contains(&format)) => {
                self.drop_keyword(keyword, Some(value), true);
                None
            }
            ("const", _) if !is_exact(value) => {
                self.drop_keyword(keyword, Some(value), false);
                None
            }
            ("enum", _) if !is_exact(value) => {
                self.drop_keyword(keyword, value.as_array()?.iter().find(|value| !is_exact(value)), false);
                None
            }
            _ if BOUNDS.contains(&keyword) => self.bound(keyword, value),
            _ if UNSUPPORTED.contains(&keyword) => {
                if !forbids_nothing(keyword, value) {
                    self.drop_keyword(keyword, None, false);
                }
                None
            }
            _ => Some(value.clone()),
        }
    }

    fn part(&mut self, key: &str, part: &Value) -> Value {
        let place = format!("{}/{key}", self.place);
        Reader { place, dropped: self.dropped }.schema(part)
    }

    fn drop_keyword(&mut self, keyword: &str, value: Option<&Value>, is_note: bool) {
        let (place, value) = (self.place.clone(), value.map(Value::to_string));
        self.dropped.push(UnsupportedPart { place, keyword: keyword.to_owned(), value, is_note });
    }

    /// Tightens a bound to the next number that an `f64` represents, so that answers are within the
    /// given bound.
    fn bound(&mut self, keyword: &str, value: &Value) -> Option<Value> {
        let is_lower = matches!(keyword, "minimum" | "exclusiveMinimum");
        let Some(whole) = whole(value) else {
            return match value.as_f64() {
                // Out of reach on the side that it bounds.
                Some(far) if far.abs() >= MAX_INTEGER as f64 && (far < 0.0) == is_lower => {
                    Some(if is_lower { -MAX_INTEGER } else { MAX_INTEGER }.into())
                }
                Some(far) if far.abs() >= MAX_INTEGER as f64 => {
                    self.drop_keyword(keyword, Some(value), false);
                    None
                }
                _ => Some(value.clone()),
            };
        };
        let (min, max) = (-i128::from(MAX_INTEGER), i128::from(MAX_INTEGER));
        if (is_lower && whole > max) || (!is_lower && whole < min) {
            self.drop_keyword(keyword, Some(value), false);
            return None;
        }
        let within = whole.clamp(min, max) as i64;
        let nearest = within as f64;
        // One more than this may round to this again.
        let excludes = keyword.starts_with("exclusive") && within.unsigned_abs() >= EXACT;
        let is_inside = match (nearest as i64).cmp(&within) {
            Ordering::Less => !is_lower,
            Ordering::Equal => !excludes,
            Ordering::Greater => is_lower,
        };
        let inward = match (is_inside, is_lower) {
            (true, _) => nearest,
            (false, true) => nearest.next_up(),
            (false, false) => nearest.next_down(),
        };
        Some((inward as i64).into())
    }
}

/// Returns an integer written without a point or an exponent.
fn whole(value: &Value) -> Option<i128> {
    value.as_i64().map(i128::from).or(value.as_u64().map(i128::from))
}

/// Reports whether an `f64` represents all numbers in a value exactly.
fn is_exact(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().all(is_exact),
        Value::Object(fields) => fields.values().all(is_exact),
        other => match whole(other) {
            Some(whole) => whole.abs() < i128::from(MAX_INTEGER) && whole as f64 as i128 == whole,
            None => other.as_f64().is_none_or(|number| number.abs() < MAX_INTEGER as f64),
        },
    }
}

/// Reports whether an unsupported keyword forbids nothing with this value.
fn forbids_nothing(keyword: &str, value: &Value) -> bool {
    match keyword {
        "not" => *value == Value::Bool(false),
        "uniqueItems" => *value == Value::Bool(false),
        "propertyNames" => {
            let text = |fields: &Map<String, Value>| {
                fields.iter().all(|(key, value)| key == "type" && value == "string")
            };
            *value == Value::Bool(true) || value.as_object().is_some_and(text)
        }
        "unevaluatedItems" | "unevaluatedProperties" => {
            *value == Value::Bool(true) || value.as_object().is_some_and(Map::is_empty)
        }
        // Meaningless without `contains` or `if`, whose lack of support is reported.
        "minContains" | "maxContains" | "then" | "else" => true,
        "dependencies" | "dependentRequired" | "dependentSchemas" => {
            value.as_object().is_some_and(Map::is_empty)
        }
        "$recursiveAnchor" | "$dynamicAnchor" => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
