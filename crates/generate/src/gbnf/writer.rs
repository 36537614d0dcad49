//! Writes rules as Lark, with as few lexemes as possible.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use super::{Item, Rules};

/// Maximum size of a regular expression in bytes: a larger one becomes grammar rules.
const LONGEST: usize = 20_000;

pub(super) struct Writer<'a> {
    rules: &'a Rules,
    /// Regular expression of each rule that has one.
    words: Vec<Option<Lexeme>>,
    /// Lexemes by their regular expression, and in order.
    places: HashMap<String, usize>,
    named: Vec<String>,
}

/// Regular expression of a lexeme.
#[derive(Debug, Clone)]
struct Lexeme {
    regex: String,
    /// Matches the empty text.
    may_be_nothing: bool,
    /// Matches only the empty text.
    is_nothing: bool,
}

impl Lexeme {
    /// Returns the concatenation with `next`, or `None` if it is too long.
    fn then(mut self, next: &Self) -> Option<Self> {
        self.regex += &next.regex;
        self.may_be_nothing &= next.may_be_nothing;
        self.is_nothing &= next.is_nothing;
        (self.regex.len() <= LONGEST).then_some(self)
    }

    fn or(mut self, other: &Self) -> Option<Self> {
        self.regex = self.regex + "|" + &other.regex;
        self.may_be_nothing |= other.may_be_nothing;
        self.is_nothing &= other.is_nothing;
        (self.regex.len() <= LONGEST).then_some(self)
    }

    /// Returns the expression as a group.
    fn whole(self) -> Self {
        Self { regex: format!("(?:{})", self.regex), ..self }
    }
}

impl<'a> Writer<'a> {
    pub fn new(rules: &'a Rules) -> Self {
        let words = vec![None; rules.len()];
        let mut writer = Self { rules, words, places: HashMap::new(), named: Vec::new() };
        // Rules that name only lexemes are lexemes, in topological order. A recursive rule never
        // becomes one.
        let mut named_by: Vec<Vec<usize>> = vec![Vec::new(); rules.len()];
        let mut n_left = vec![0; rules.len()];
        for (place, rule) in rules.iter().enumerate() {
            let names = named_in(rule);
            n_left[place] = names.len();
            names.into_iter().for_each(|name| named_by[name].push(place));
        }
        let mut ready: Vec<usize> = (0..rules.len()).filter(|&place| n_left[place] == 0).collect();
        while let Some(place) = ready.pop() {
            let Some(word) = writer.any(&rules[place]) else { continue };
            writer.words[place] = Some(word.whole());
            for &by in &named_by[place] {
                n_left[by] -= 1;
                if n_left[by] == 0 {
                    ready.push(by);
                }
            }
        }
        writer
    }

    /// Returns the regular expression of alternatives, if all have one.
    fn any(&self, all: &[Vec<Item>]) -> Option<Lexeme> {
        let mut words = all
            .iter()
            .map(|items| items.iter().try_fold(nothing(), |word, item| word.then(&self.word(item)?)));
        let first = words.next().flatten()?;
        words.try_fold(first, |word, next| word.or(&next?))
    }

    fn word(&self, item: &Item) -> Option<Lexeme> {
        match item {
            Item::Class { ranges, is_negated } => {
                Some(Lexeme { regex: class(ranges, *is_negated), may_be_nothing: false, is_nothing: false })
            }
            Item::Rule(place) => self.words[*place].clone(),
            Item::Choice(all) => Some(self.any(all)?.whole()),
            Item::Times(item, min, max) => {
                let mut word = self.word(item)?.whole();
                let max_text = max.map_or_else(String::new, |max| max.to_string());
                _ = write!(word.regex, "{{{min},{max_text}}}");
                word.may_be_nothing |= *min == 0;
                word.is_nothing |= *max == Some(0);
                Some(word.whole())
            }
            Item::Token { .. } => None,
        }
    }

    /// Returns all rules that are not lexemes, and the lexemes.
    pub fn grammar(mut self) -> String {
        let mut out = String::new();
        let mut left = vec![0];
        let mut seen = HashSet::from([0]);
        while let Some(place) = left.pop() {
            let rule = match self.words[place].clone() {
                Some(word) => self.name_of(word),
                None => self.alternatives(&self.rules[place]),
            };
            _ = writeln!(out, "{}: {rule}", rule_name(place));
            if self.words[place].is_none() {
                let named = named_in(&self.rules[place]).into_iter();
                left.extend(named.filter(|&place| self.words[place].is_none() && seen.insert(place)));
            }
        }
        for (index, word) in self.named.iter().enumerate() {
            // A lexeme must not be empty: one that may be is optional where it is used.
            _ = writeln!(out, "WORD_{index}: /{word}/ & /(?s:.+)/");
        }
        out
    }

    fn alternatives(&mut self, all: &[Vec<Item>]) -> String {
        let all: Vec<String> = all.iter().map(|items| self.sequence(items)).collect();
        all.join(" | ")
    }

    /// Returns a sequence, with adjacent lexemes merged as far as possible.
    fn sequence(&mut self, items: &[Item]) -> String {
        let mut parts: Vec<String> = Vec::new();
        let mut open: Option<Lexeme> = None;
        for item in items {
            let word = self.word(item);
            let joined = word.as_ref().and_then(|word| open.clone().unwrap_or_else(nothing).then(word));
            if joined.is_none() {
                parts.extend(open.take().map(|word| self.name_of(word)));
            }
            match (&word, joined) {
                (_, Some(joined)) => open = Some(joined),
                (Some(_), None) => open = word,
                (None, None) => parts.push(self.part(item)),
            }
        }
        parts.extend(open.map(|word| self.name_of(word)));
        if parts.is_empty() { "\"\"".to_owned() } else { parts.join(" ") }
    }

    /// Returns an item that is not a lexeme.
    fn part(&mut self, item: &Item) -> String {
        match item {
            Item::Rule(place) => rule_name(*place),
            Item::Choice(all) => format!("({})", self.alternatives(all)),
            Item::Times(item, min, max) => {
                let inner = self.sequence(std::slice::from_ref(item));
                match (min, max) {
                    (0, None) => format!("({inner})*"),
                    (1, None) => format!("({inner})+"),
                    (min, None) => format!("({inner}){{{min},}}"),
                    (min, Some(max)) => format!("({inner}){{{min},{max}}}"),
                }
            }
            Item::Token { id, is_negated } => format!("<[{}{id}]>", if *is_negated { "^" } else { "" }),
            // A class is a lexeme.
            Item::Class { .. } => self.sequence(std::slice::from_ref(item)),
        }
    }

    fn name_of(&mut self, word: Lexeme) -> String {
        if word.is_nothing {
            return "\"\"".to_owned();
        }
        let named = &mut self.named;
        let place = self.places.entry(word.regex).or_insert_with_key(|regex| {
            named.push(regex.clone());
            named.len() - 1
        });
        format!("WORD_{place}{}", if word.may_be_nothing { "?" } else { "" })
    }
}

fn nothing() -> Lexeme {
    Lexeme { regex: String::new(), may_be_nothing: true, is_nothing: true }
}

fn rule_name(place: usize) -> String {
    if place == 0 { "start".to_owned() } else { format!("rule_{place}") }
}

/// Returns the rules that a rule names.
fn named_in(rule: &[Vec<Item>]) -> HashSet<usize> {
    fn visit(item: &Item, into: &mut HashSet<usize>) {
        match item {
            Item::Rule(place) => _ = into.insert(*place),
            Item::Choice(all) => all.iter().flatten().for_each(|item| visit(item, into)),
            Item::Times(item, ..) => visit(item, into),
            Item::Class { .. } | Item::Token { .. } => {}
        }
    }
    let mut names = HashSet::new();
    rule.iter().flatten().for_each(|item| visit(item, &mut names));
    names
}

fn class(ranges: &[(char, char)], is_negated: bool) -> String {
    if ranges.is_empty() {
        return "(?s:.)".to_owned();
    }
    let mut class = String::from(if is_negated { "[^" } else { "[" });
    for &(first, last) in ranges {
        _ = write!(class, "\\x{{{:X}}}-\\x{{{:X}}}", u32::from(first), u32::from(last));
    }
    class + "]"
}
