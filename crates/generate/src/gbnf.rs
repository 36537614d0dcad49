//! Converts llama.cpp's GBNF grammars to Lark, which `llguidance` reads.
//!
//! GBNF has no lexer: each character is matched by itself. `llguidance` first splits text into
//! lexemes, longest match first, and a grammar of single characters would be too slow. Therefore
//! every part without recursion becomes one lexeme, by one regular expression: a grammar without
//! recursion is a single lexeme and means exactly the same. Where lexemes follow one another in a
//! recursive rule, each is the longest match: accepted text always belongs to the grammar.

#[cfg(test)]
mod tests;
mod writer;

use std::collections::HashMap;

use writer::Writer;

/// Maximum nesting of groups.
const MAX_GROUP_DEPTH: usize = 32;
/// Maximum repetition operators after one item.
const MAX_OPERATORS: usize = 4;
/// Maximum size of a grammar in bytes.
const MAX_BYTES: usize = 256 << 10;
/// Maximum repetition count.
const MAX_TIMES: u32 = 2000;

/// Element of a rule.
#[derive(Debug, Clone, PartialEq)]
enum Item {
    /// One character inside these ranges, or outside of all.
    Class { ranges: Vec<(char, char)>, is_negated: bool },
    /// Rule, by its index.
    Rule(usize),
    /// One of several sequences.
    Choice(Vec<Vec<Item>>),
    /// Item with its minimum and maximum repetitions.
    Times(Box<Item>, u32, Option<u32>),
    /// Token by its id, or any other token.
    Token { id: u32, is_negated: bool },
}

/// Returns a Lark grammar of the same texts, or of fewer where rules are recursive. `token` finds
/// the id of a token by its text.
///
/// # Errors
/// The reason in one line, with the line of the grammar where there is one.
pub fn lark(gbnf: &str, token: &dyn Fn(&str) -> Option<u32>) -> Result<String, String> {
    if gbnf.len() > MAX_BYTES {
        return Err(format!("expected at most {MAX_BYTES} bytes, got {}", gbnf.len()));
    }
    let rules = Reader::new(gbnf, token).rules()?;
    Ok(Writer::new(&rules).grammar())
}

/// Rules of a grammar by index; the first is the root.
type Rules = Vec<Vec<Vec<Item>>>;

struct Reader<'a> {
    text: &'a str,
    at: usize,
    token: &'a dyn Fn(&str) -> Option<u32>,
    rule_indices: HashMap<&'a str, usize>,
    names: Vec<&'a str>,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str, token: &'a dyn Fn(&str) -> Option<u32>) -> Self {
        Self { text, at: 0, token, rule_indices: HashMap::from([("root", 0)]), names: vec!["root"] }
    }

    fn rules(mut self) -> Result<Rules, String> {
        let mut rules: Vec<Option<Vec<Vec<Item>>>> = Vec::new();
        self.space(true);
        while self.at < self.text.len() {
            let name = self.name().ok_or_else(|| self.error("the name of a rule"))?;
            let place = self.place(name);
            self.space(false);
            if !self.take("::=") {
                return Err(self.error("::="));
            }
            self.space(true);
            let rule = self.alternatives(0)?;
            if !self.rest().is_empty() && !self.rest().starts_with(['\n', '\r']) {
                return Err(self.error("the end of the line"));
            }
            rules.resize(self.names.len().max(rules.len()), None);
            rules[place] = Some(rule);
            self.space(true);
        }
        rules.resize(self.names.len(), None);
        let named = rules.into_iter().zip(&self.names);
        named.map(|(rule, name)| rule.ok_or_else(|| format!("the rule {name} is not there"))).collect()
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn error(&self, expected: &str) -> String {
        let line = self.text[..self.at].matches('\n').count() + 1;
        let got: String = self.rest().chars().take_while(|c| !c.is_control()).take(20).collect();
        format!("line {line}: expected {expected}, got {}", if got.is_empty() { "the end" } else { &got })
    }

    fn take(&mut self, what: &str) -> bool {
        let is_there = self.rest().starts_with(what);
        self.at += if is_there { what.len() } else { 0 };
        is_there
    }

    fn next(&mut self) -> Option<char> {
        let next = self.rest().chars().next()?;
        self.at += next.len_utf8();
        Some(next)
    }

    /// Skips whitespace and comments, and line breaks if the rule continues after them.
    fn space(&mut self, passes_lines: bool) {
        loop {
            let rest = self.rest();
            let rest = rest
                .trim_start_matches(|c| matches!(c, ' ' | '\t') || passes_lines && matches!(c, '\n' | '\r'));
            self.at = self.text.len() - rest.len();
            if !rest.starts_with('#') {
                return;
            }
            self.at += rest.find('\n').unwrap_or(rest.len());
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = self.rest();
        let is_end = |c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
        let length = rest.find(is_end).unwrap_or(rest.len());
        self.at += length;
        Some(&rest[..length]).filter(|name| !name.is_empty())
    }

    fn place(&mut self, name: &'a str) -> usize {
        *self.rule_indices.entry(name).or_insert_with(|| {
            self.names.push(name);
            self.names.len() - 1
        })
    }

    fn alternatives(&mut self, depth: usize) -> Result<Vec<Vec<Item>>, String> {
        let mut all = vec![self.sequence(depth)?];
        while self.take("|") {
            self.space(true);
            all.push(self.sequence(depth)?);
        }
        Ok(all)
    }

    fn sequence(&mut self, depth: usize) -> Result<Vec<Item>, String> {
        let mut items: Vec<Item> = Vec::new();
        while let Some(next) = self.rest().chars().next() {
            // Operand of a repetition operator: a string repeats as a whole.
            let item = match next {
                '"' => self.string()?,
                '[' => self.class()?,
                '.' => {
                    self.at += 1;
                    Item::Class { ranges: Vec::new(), is_negated: true }
                }
                '<' | '!' => self.a_token()?,
                '(' if depth < MAX_GROUP_DEPTH => {
                    self.at += 1;
                    self.space(true);
                    let inner = self.alternatives(depth + 1)?;
                    if !self.take(")") {
                        return Err(self.error(")"));
                    }
                    Item::Choice(inner)
                }
                '(' => return Err(self.error("at most 32 groups within each other")),
                _ => match self.name() {
                    Some(name) => Item::Rule(self.place(name)),
                    None => break,
                },
            };
            self.space(depth > 0);
            let item = self.repeated(item, depth)?;
            items.push(item);
        }
        Ok(items)
    }

    fn repeated(&mut self, mut item: Item, depth: usize) -> Result<Item, String> {
        for _ in 0..=MAX_OPERATORS {
            let (min, max) = match self.rest().chars().next() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    self.at += 1;
                    self.space(depth > 0);
                    let min = self.number()?;
                    self.space(depth > 0);
                    let max = if self.take(",") {
                        self.space(depth > 0);
                        let is_open = self.rest().starts_with('}');
                        if is_open { None } else { Some(self.number()?) }
                    } else {
                        Some(min)
                    };
                    self.space(depth > 0);
                    if max.is_some_and(|max| max < min) || !self.rest().starts_with('}') {
                        return Err(self.error("numbers of repetitions, the lesser first, and }"));
                    }
                    (min, max)
                }
                _ => return Ok(item),
            };
            self.at += 1;
            self.space(depth > 0);
            item = Item::Times(Box::new(item), min, max);
        }
        Err(self.error("at most 4 signs of repetition"))
    }

    fn number(&mut self) -> Result<u32, String> {
        let rest = self.rest();
        let length = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let number = rest[..length].parse().ok().filter(|&n| n <= MAX_TIMES);
        let number = number.ok_or_else(|| self.error("a number up to 2000"))?;
        self.at += length;
        Ok(number)
    }

    fn string(&mut self) -> Result<Item, String> {
        self.at += 1;
        let mut characters = Vec::new();
        while !self.take("\"") {
            let c = self.character()?;
            characters.push(Item::Class { ranges: vec![(c, c)], is_negated: false });
        }
        Ok(Item::Choice(vec![characters]))
    }

    fn class(&mut self) -> Result<Item, String> {
        self.at += 1;
        let is_negated = self.take("^");
        let mut ranges = Vec::new();
        while !self.take("]") {
            let first = self.character()?;
            let last = if self.rest().starts_with('-') && !self.rest().starts_with("-]") {
                self.at += 1;
                self.character()?
            } else {
                first
            };
            if last < first {
                return Err(self.error("a range whose first character comes first"));
            }
            ranges.push((first, last));
        }
        if ranges.is_empty() && !is_negated {
            return Err(self.error("characters in ["));
        }
        Ok(Item::Class { ranges, is_negated })
    }

    /// Reads a character of a string or a class, verbatim or escaped.
    fn character(&mut self) -> Result<char, String> {
        let unended = "the end of a string or of ranges";
        let is_open = self.rest().chars().next().is_some_and(|c| !matches!(c, '\n' | '\r'));
        if !is_open {
            return Err(self.error(unended));
        }
        let c = self.next().ok_or_else(|| self.error(unended))?;
        if c != '\\' {
            return Ok(c);
        }
        let n_digits = match self.next().ok_or_else(|| self.error(unended))? {
            't' => return Ok('\t'),
            'r' => return Ok('\r'),
            'n' => return Ok('\n'),
            c @ ('\\' | '"' | '[' | ']' | '-' | '^') => return Ok(c),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => return Err(self.error("an escape such as \\n or \\x20 before this")),
        };
        let digits = self.rest().get(..n_digits);
        let code = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()).and_then(char::from_u32);
        let code = code.ok_or_else(|| self.error("the number of a character, in hexadecimal"))?;
        self.at += n_digits;
        Ok(code)
    }

    /// Reads `<text>` or `<[number]>`, optionally after `!`.
    fn a_token(&mut self) -> Result<Item, String> {
        let expected = "a token, such as <think> or <[1000]>";
        let rest = self.rest();
        let is_negated = rest.starts_with('!');
        let inner = rest[usize::from(is_negated)..].strip_prefix('<').and_then(|rest| rest.split_once('>'));
        let (name, _) = inner.ok_or_else(|| self.error(expected))?;
        let id = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
            Some(number) => number.parse().ok(),
            None => (self.token)(&format!("<{name}>")),
        };
        let id = id.ok_or_else(|| self.error("a token that there is"))?;
        self.at += usize::from(is_negated) + name.len() + 2;
        Ok(Item::Token { id, is_negated })
    }
}
