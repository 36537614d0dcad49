//! Writes rules in Lark, with as few words as can be.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use super::{Item, Rules};

/// The longest regular expression, in bytes: a larger one is left to the grammar.
const LONGEST: usize = 20_000;

pub(super) struct Writer<'a> {
    rules: &'a Rules,
    /// The regular expression of each rule that has one.
    words: Vec<Option<Word>>,
    /// Words by their regular expression, and in their order.
    places: HashMap<String, usize>,
    named: Vec<String>,
}

/// A regular expression.
#[derive(Debug, Clone)]
struct Word {
    regex: String,
    /// No characters at all are of it.
    may_be_nothing: bool,
    /// No others are.
    is_nothing: bool,
}

impl Word {
    /// This one and then `next`; none where that is too long.
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

    /// As one thing for what follows.
    fn whole(self) -> Self {
        Self { regex: format!("(?:{})", self.regex), ..self }
    }
}

impl<'a> Writer<'a> {
    pub fn new(rules: &'a Rules) -> Self {
        let words = vec![None; rules.len()];
        let mut writer = Self { rules, words, places: HashMap::new(), named: Vec::new() };
        // Those that name only words are words: one after the other. What comes back to itself never is one.
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

    /// The regular expression of one of several sequences, where they have one.
    fn any(&self, all: &[Vec<Item>]) -> Option<Word> {
        let mut words = all
            .iter()
            .map(|items| items.iter().try_fold(nothing(), |word, item| word.then(&self.word(item)?)));
        let first = words.next().flatten()?;
        words.try_fold(first, |word, next| word.or(&next?))
    }

    fn word(&self, item: &Item) -> Option<Word> {
        match item {
            Item::Class { ranges, is_negated } => {
                Some(Word { regex: class(ranges, *is_negated), may_be_nothing: false, is_nothing: false })
            }
            Item::Rule(place) => self.words[*place].clone(),
            Item::Any(all) => Some(self.any(all)?.whole()),
            Item::Times(item, least, most) => {
                let mut word = self.word(item)?.whole();
                let most_text = most.map_or_else(String::new, |most| most.to_string());
                _ = write!(word.regex, "{{{least},{most_text}}}");
                word.may_be_nothing |= *least == 0;
                word.is_nothing |= *most == Some(0);
                Some(word.whole())
            }
            Item::Token { .. } => None,
        }
    }

    /// All rules that are not words, and the words.
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
            // A word of no letters is none: where one may be missing, it is optional.
            _ = writeln!(out, "WORD_{index}: /{word}/ & /(?s:.+)/");
        }
        out
    }

    fn alternatives(&mut self, all: &[Vec<Item>]) -> String {
        let all: Vec<String> = all.iter().map(|items| self.sequence(items)).collect();
        all.join(" | ")
    }

    /// A sequence, with what can be words in as few as can be.
    fn sequence(&mut self, items: &[Item]) -> String {
        let mut parts: Vec<String> = Vec::new();
        let mut open: Option<Word> = None;
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

    /// Something that is no word.
    fn part(&mut self, item: &Item) -> String {
        match item {
            Item::Rule(place) => rule_name(*place),
            Item::Any(all) => format!("({})", self.alternatives(all)),
            Item::Times(item, least, most) => {
                let inner = self.sequence(std::slice::from_ref(item));
                match (least, most) {
                    (0, None) => format!("({inner})*"),
                    (1, None) => format!("({inner})+"),
                    (least, None) => format!("({inner}){{{least},}}"),
                    (least, Some(most)) => format!("({inner}){{{least},{most}}}"),
                }
            }
            Item::Token { id, is_negated } => format!("<[{}{id}]>", if *is_negated { "^" } else { "" }),
            // It is a word.
            Item::Class { .. } => self.sequence(std::slice::from_ref(item)),
        }
    }

    fn name_of(&mut self, word: Word) -> String {
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

fn nothing() -> Word {
    Word { regex: String::new(), may_be_nothing: true, is_nothing: true }
}

fn rule_name(place: usize) -> String {
    if place == 0 { "start".to_owned() } else { format!("rule_{place}") }
}

/// The rules that a rule names.
fn named_in(rule: &[Vec<Item>]) -> HashSet<usize> {
    fn look(item: &Item, into: &mut HashSet<usize>) {
        match item {
            Item::Rule(place) => _ = into.insert(*place),
            Item::Any(all) => all.iter().flatten().for_each(|item| look(item, into)),
            Item::Times(item, ..) => look(item, into),
            Item::Class { .. } | Item::Token { .. } => {}
        }
    }
    let mut names = HashSet::new();
    rule.iter().flatten().for_each(|item| look(item, &mut names));
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
