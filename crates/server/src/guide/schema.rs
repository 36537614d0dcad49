//! What of a JSON schema an answer can be held to.
//!
//! `llguidance` refuses a schema for one keyword that it does not know, and reads numbers as `f64`. So a schema is gone through first: what
//! forbids nothing is left out, bounds are drawn in to numbers that an `f64` holds, and what cannot be held is left out and told, each with
//! its place.

use std::cmp::Ordering;
use std::fmt;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::OPTIONS;

/// Keywords of JSON Schema that no answer can be held to. They are left out where this value of theirs forbids nothing.
const UNHELD: [&str; 18] = [
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
/// Formats of texts that answers are held to.
const FORMATS: [&str; 11] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];
/// Bounds of numbers.
const BOUNDS: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];
/// Where schemas keep what others of them refer to.
pub(crate) const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// The largest whole number up to which each is an `f64`.
const EXACT: u64 = 1 << 53;
/// The largest `f64` below 2^63, the end of the integers that `llguidance` counts in.
const FARTHEST: i64 = i64::MAX - 1023;

/// A part of a schema that answers are not held to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lost {
    /// A JSON pointer; empty for the whole schema.
    pub place: String,
    pub keyword: String,
    /// Its value, where that tells what is missing.
    pub value: Option<String>,
    /// Whether it is a note to readers that need not be obeyed, as formats are.
    pub is_note: bool,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, keyword, value, .. } = self;
        match value {
            Some(value) => write!(f, "{keyword} {value}{}", at(place)),
            None => write!(f, "{keyword}{}", at(place)),
        }
    }
}

/// Where a place within a schema is.
pub(super) fn at(place: &str) -> String {
    if place.is_empty() { String::new() } else { format!(" at {place}") }
}

/// A schema, and what is left out of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HeldSchema {
    pub schema: Value,
    pub lost: Vec<Lost>,
}

impl HeldSchema {
    /// What can be held of `schema`.
    pub fn of(schema: &Value) -> Self {
        let mut lost = Vec::new();
        let schema = Reader { place: String::new(), lost: &mut lost }.schema(schema);
        Self { schema, lost }
    }

    /// What is left out and is no mere note, in a line.
    pub fn missing(&self) -> Option<String> {
        listed(self.lost.iter().filter(|lost| !lost.is_note))
    }

    /// Notes that are not obeyed, in a line.
    pub fn notes(&self) -> Option<String> {
        listed(self.lost.iter().filter(|lost| lost.is_note))
    }
}

fn listed<'l>(lost: impl Iterator<Item = &'l Lost>) -> Option<String> {
    let texts: Vec<String> = lost.map(Lost::to_string).collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

/// The place of the smallest part of a schema that `fails` by itself. Looks no longer than a second.
pub(super) fn faulty_place(schema: &Value, fails: impl Fn(&Value) -> bool) -> String {
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

/// The schemas within a schema, each with the keys that lead to it; what others refer to goes first.
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

/// Two keys as a JSON pointer writes them (RFC 6901).
fn pointer(keyword: &str, key: &str) -> String {
    format!("{keyword}/{}", key.replace('~', "~0").replace('/', "~1"))
}

/// How a keyword holds schemas.
enum Kind {
    /// One, or a list as older drafts have it.
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

/// Goes through a schema.
struct Reader<'r> {
    place: String,
    lost: &'r mut Vec<Lost>,
}

impl Reader<'_> {
    fn schema(&mut self, schema: &Value) -> Value {
        let Value::Object(fields) = schema else { return schema.clone() };
        // Formats of numbers tell their width to programs.
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

    /// What is held of a keyword's value.
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
                self.lose(keyword, Some(value), true);
                None
            }
            ("const", _) if !is_exact(value) => {
                self.lose(keyword, Some(value), false);
                None
            }
            ("enum", _) if !is_exact(value) => {
                self.lose(keyword, value.as_array()?.iter().find(|value| !is_exact(value)), false);
                None
            }
            _ if BOUNDS.contains(&keyword) => self.bound(keyword, value),
            _ if UNHELD.contains(&keyword) => {
                if !forbids_nothing(keyword, value) {
                    self.lose(keyword, None, false);
                }
                None
            }
            _ => Some(value.clone()),
        }
    }

    fn part(&mut self, key: &str, part: &Value) -> Value {
        let place = format!("{}/{key}", self.place);
        Reader { place, lost: self.lost }.schema(part)
    }

    fn lose(&mut self, keyword: &str, value: Option<&Value>, is_note: bool) {
        let (place, value) = (self.place.clone(), value.map(Value::to_string));
        self.lost.push(Lost { place, keyword: keyword.to_owned(), value, is_note });
    }

    /// A bound that an `f64` holds: the next one inward, so that what is held to it is within the bound that was meant.
    fn bound(&mut self, keyword: &str, value: &Value) -> Option<Value> {
        let is_lower = matches!(keyword, "minimum" | "exclusiveMinimum");
        let Some(whole) = whole(value) else {
            return match value.as_f64() {
                // Too far away to be reached, on the side that it bounds.
                Some(far) if far.abs() >= FARTHEST as f64 && (far < 0.0) == is_lower => {
                    Some(if is_lower { -FARTHEST } else { FARTHEST }.into())
                }
                Some(far) if far.abs() >= FARTHEST as f64 => {
                    self.lose(keyword, Some(value), false);
                    None
                }
                _ => Some(value.clone()),
            };
        };
        let (least, most) = (-i128::from(FARTHEST), i128::from(FARTHEST));
        if (is_lower && whole > most) || (!is_lower && whole < least) {
            self.lose(keyword, Some(value), false);
            return None;
        }
        let within = whole.clamp(least, most) as i64;
        let nearest = within as f64;
        // One more than this may be this again.
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

/// A whole number that is written without a point or an exponent.
fn whole(value: &Value) -> Option<i128> {
    value.as_i64().map(i128::from).or(value.as_u64().map(i128::from))
}

/// Whether all numbers in a value are what they are as `f64`.
fn is_exact(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().all(is_exact),
        Value::Object(fields) => fields.values().all(is_exact),
        other => match whole(other) {
            Some(whole) => whole.abs() < i128::from(FARTHEST) && whole as f64 as i128 == whole,
            None => other.as_f64().is_none_or(|number| number.abs() < FARTHEST as f64),
        },
    }
}

/// Whether a keyword that cannot be held says nothing with this value.
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
        // Without `contains` these say nothing, without `if` neither do those: the other keyword is told.
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
