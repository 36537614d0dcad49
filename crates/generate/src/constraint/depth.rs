//! Depth of a constraint, measured before it is compiled.
//!
//! `llguidance` recurses for each level of a schema, for each reference that leads to another and
//! for each rule that names another. A stack overflow ends the process, so a constraint is compiled
//! on a large stack, and rejected if it is too deep for that stack. All measures are upper bounds:
//! they may overestimate the depth, never underestimate it.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};

use serde_json::Value;

use super::TooLarge;

/// Maximum levels of a constraint. Each takes about 5 KiB of stack during compilation.
pub(super) const MAX_LEVELS: usize = 10_000;
/// Maximum nesting of brackets in a grammar: conditions retain theirs until the last token is
/// sampled.
pub(super) const MAX_BRACKETS: usize = 100;
/// Maximum properties of an object: `llguidance` nests them in order, in quadratic time.
pub(super) const MAX_PROPERTIES: usize = 2_000;
/// Maximum size of a grammar or schema in bytes.
pub(super) const MAX_BYTES: usize = 4 << 20;

fn within(what: &'static str, expected: usize, got: usize) -> Result<(), TooLarge> {
    if got <= expected { Ok(()) } else { Err(TooLarge { what, expected, got }) }
}

/// Rejects a constraint of too many bytes.
pub(super) fn check_bytes(n: usize) -> Result<(), TooLarge> {
    within("bytes", MAX_BYTES, n)
}

/// Rejects a schema that cannot be compiled safely.
pub(super) fn check_schema(schema: &Value) -> Result<(), TooLarge> {
    let mut size = Size::default();
    size.add(schema);
    check_bytes(size.bytes)?;
    within("properties in an object", MAX_PROPERTIES, size.properties)?;
    within("levels of references and nesting", MAX_LEVELS, levels_of_schema(schema))
}

/// Rejects a Lark grammar that cannot be compiled safely.
pub(super) fn check_lark(lark: &str) -> Result<(), TooLarge> {
    check_bytes(lark.len())?;
    let mut reader = LarkReader::new(lark);
    let schemas = reader.read();
    within("brackets within brackets", MAX_BRACKETS, reader.max_brackets)?;
    within("levels of rules that name each other", MAX_LEVELS, reader.names.levels())?;
    schemas.iter().try_for_each(check_schema)
}

/// Approximate size of a schema, and the maximum number of properties of an object.
#[derive(Default)]
struct Size {
    bytes: usize,
    properties: usize,
}

impl Size {
    fn add(&mut self, value: &Value) {
        self.bytes += 4;
        match value {
            Value::String(text) => self.bytes += text.len(),
            Value::Array(items) => items.iter().for_each(|item| self.add(item)),
            Value::Object(fields) => {
                for (name, field) in fields {
                    self.bytes += name.len();
                    self.add(field);
                    let n = match (name.as_str(), field) {
                        ("properties", Value::Object(properties)) => properties.len(),
                        // A required name without a description is a property too.
                        ("required", Value::Array(names)) => names.len(),
                        _ => 0,
                    };
                    self.properties = self.properties.max(n);
                }
            }
            _ => {}
        }
    }
}

/// Returns the levels of a schema: the longest chain of references, each with the nesting of its
/// target.
fn levels_of_schema(root: &Value) -> usize {
    let mut names = Names::default();
    let whole = names.place("#");
    let (depth, references) = outline(root);
    names.weights[whole] = depth;
    let mut left: Vec<(usize, &str)> = references.into_iter().map(|to| (whole, to)).collect();
    while let Some((from, reference)) = left.pop() {
        let n_known = names.weights.len();
        let to = names.place(reference);
        names.edges[from].push(to);
        if to < n_known {
            continue;
        }
        match target(root, reference) {
            Some(value) => {
                let (depth, references) = outline(value);
                names.weights[to] = depth;
                left.extend(references.into_iter().map(|next| (to, next)));
            }
            // A reference that is not a plain location may lead anywhere.
            None => {
                names.weights[to] = depth;
                names.edges[to].push(whole);
            }
        }
    }
    names.levels()
}

/// Returns the target of a reference that is a plain location within the schema.
fn target<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    reference.strip_prefix('#').filter(|pointer| !pointer.contains('%')).and_then(|at| root.pointer(at))
}

/// Returns the nesting of a value, and all references in it.
fn outline(value: &Value) -> (usize, Vec<&str>) {
    fn visit<'a>(value: &'a Value, depth: usize, deepest: &mut usize, references: &mut Vec<&'a str>) {
        *deepest = depth.max(*deepest);
        match value {
            Value::Array(items) => items.iter().for_each(|item| visit(item, depth + 1, deepest, references)),
            Value::Object(fields) => {
                references.extend(fields.get("$ref").and_then(Value::as_str));
                fields.values().for_each(|field| visit(field, depth + 1, deepest, references));
            }
            _ => {}
        }
    }
    let (mut deepest, mut references) = (0, Vec::new());
    visit(value, 1, &mut deepest, &mut references);
    (deepest, references)
}

/// Graph of names and the names in their definitions.
#[derive(Default)]
struct Names {
    places: HashMap<String, usize>,
    /// Levels of each name by itself.
    weights: Vec<usize>,
    /// Names in its definition.
    edges: Vec<Vec<usize>>,
}

impl Names {
    fn place(&mut self, name: &str) -> usize {
        if let Some(&place) = self.places.get(name) {
            return place;
        }
        self.places.insert(name.to_owned(), self.weights.len());
        self.weights.push(1);
        self.edges.push(Vec::new());
        self.weights.len() - 1
    }

    /// Returns the levels of the longest chain in which each name occurs once. All names on cycles
    /// count: the longest path through a cycle takes too long to find.
    fn levels(&self) -> usize {
        let mut named_by = vec![Vec::new(); self.edges.len()];
        for (from, to) in self.edges.iter().enumerate() {
            to.iter().for_each(|&to| named_by[to].push(from));
        }
        let mut is_left = vec![true; self.edges.len()];
        let below = self.peel(&self.edges, &named_by, &mut is_left);
        let above = self.peel(&named_by, &self.edges, &mut is_left);
        let rings = (0..is_left.len()).filter(|&place| is_left[place]).map(|place| self.weights[place]);
        above + rings.sum::<usize>() + below
    }

    /// Removes names whose `next` are all removed, until none remains. Returns the levels of the
    /// longest chain of removed names.
    fn peel(&self, next: &[Vec<usize>], before: &[Vec<usize>], is_left: &mut [bool]) -> usize {
        let in_graph = |places: &[usize], is_left: &[bool]| places.iter().filter(|&&at| is_left[at]).count();
        let mut n_next: Vec<usize> = next.iter().map(|next| in_graph(next, is_left)).collect();
        let mut longest = vec![0; next.len()];
        let mut ready: VecDeque<usize> =
            (0..next.len()).filter(|&place| is_left[place] && n_next[place] == 0).collect();
        let mut all = 0;
        while let Some(place) = ready.pop_front() {
            is_left[place] = false;
            longest[place] += self.weights[place];
            all = all.max(longest[place]);
            for &at in before[place].iter().filter(|&&at| is_left[at]) {
                longest[at] = longest[at].max(longest[place]);
                n_next[at] -= 1;
                if n_next[at] == 0 {
                    ready.push_back(at);
                }
            }
        }
        all
    }
}

const JSON_DIRECTIVES: [&str; 3] = ["%json", "%regex", "%llguidance"];

/// Finds the names in each definition of a Lark grammar, with the tokenization of `llguidance`.
struct LarkReader<'a> {
    rest: &'a str,
    names: Names,
    /// Name being defined.
    defined: Option<usize>,
    brackets: usize,
    max_brackets: usize,
}

impl<'a> LarkReader<'a> {
    fn new(lark: &'a str) -> Self {
        Self { rest: lark, names: Names::default(), defined: None, brackets: 0, max_brackets: 0 }
    }

    /// Reads the whole grammar. Returns the schemas in it.
    fn read(&mut self) -> Vec<Value> {
        let mut schemas = Vec::new();
        let mut begins_line = true;
        while let Some(c) = self.rest.chars().next() {
            match c {
                '\n' => begins_line = true,
                ' ' | '\t' | '\r' | '!' | '?' => {}
                _ if self.is_comment() => {
                    self.rest = self.rest.trim_start_matches(|c| c != '\n');
                    continue;
                }
                'a'..='z' | 'A'..='Z' | '_' => {
                    self.name(begins_line);
                    begins_line = false;
                    continue;
                }
                _ => {
                    // A directive may define a name.
                    begins_line &= c == '%' && !self.begins_json();
                    if self.text(c, &mut schemas) {
                        continue;
                    }
                }
            }
            self.rest = &self.rest[c.len_utf8()..];
        }
        schemas
    }

    fn is_comment(&self) -> bool {
        self.rest.starts_with('#') || self.rest.starts_with("//")
    }

    /// Skips text that is not a name. Returns whether it was consumed; otherwise it is one
    /// character.
    fn text(&mut self, first: char, schemas: &mut Vec<Value>) -> bool {
        match first {
            '"' | '/' => {
                self.rest = quoted(self.rest, first);
                return true;
            }
            '<' => {
                let length = self.rest.find(['>', '\n']).unwrap_or(self.rest.len());
                self.rest = &self.rest[length..];
                return true;
            }
            '%' => return self.directive(schemas),
            '(' | '[' | '{' => {
                self.brackets += 1;
                self.max_brackets = self.max_brackets.max(self.brackets);
                if let Some(defined) = self.defined {
                    self.names.weights[defined] = self.names.weights[defined].max(1 + self.brackets);
                }
            }
            ')' | ']' | '}' => self.brackets = self.brackets.saturating_sub(1),
            _ => {}
        }
        false
    }

    /// Reports whether a directive with a JSON value starts here.
    fn begins_json(&self) -> bool {
        JSON_DIRECTIVES.iter().any(|name| self.rest.starts_with(name))
    }

    fn directive(&mut self, schemas: &mut Vec<Value>) -> bool {
        let Some(name) = JSON_DIRECTIVES.iter().find(|name| self.rest.starts_with(**name)) else {
            return false;
        };
        self.rest = &self.rest[name.len()..];
        let mut values = serde_json::Deserializer::from_str(self.rest).into_iter::<Value>();
        if let Some(Ok(value)) = values.next() {
            schemas.push(value);
            self.rest = &self.rest[values.byte_offset()..];
        }
        true
    }

    /// Reads a name; at the beginning of a line it is the one being defined.
    fn name(&mut self, begins_line: bool) {
        let kind = self.rest.trim_start_matches('_').chars().next();
        let is_upper = kind.is_some_and(|c| c.is_ascii_uppercase());
        let is_part = |c: char| match c {
            '_' | '-' | '0'..='9' => true,
            'a'..='z' => !is_upper,
            'A'..='Z' => is_upper,
            _ => false,
        };
        let length = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len()).max(1);
        let place = self.names.place(&self.rest[..length]);
        self.rest = &self.rest[length..];
        match self.defined {
            Some(defined) if !begins_line => self.names.edges[defined].push(place),
            _ => self.defined = Some(place),
        }
    }
}

/// Returns the text after a string or a regular expression.
fn quoted(text: &str, quote: char) -> &str {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            c if c == quote => return &text[at + 1..],
            _ => {}
        }
    }
    ""
}
