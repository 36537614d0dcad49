//! Converted grammars accept what GBNF means.

use std::collections::HashSet;

use kvant_text::tokenizer::Special;

use super::*;
use crate::constraint::{ConstraintCompiler, OutputFormat};

/// Returns the positions where an `item` may end that starts at one of `from`: a reference matcher
/// for GBNF, character by character.
fn ends(rules: &Rules, item: &Item, text: &[char], from: &HashSet<usize>) -> HashSet<usize> {
    match item {
        Item::Class { ranges, is_negated } => {
            let fits = |c: char| ranges.iter().any(|&(a, b)| (a..=b).contains(&c)) != *is_negated;
            from.iter().filter(|&&at| text.get(at).is_some_and(|&c| fits(c))).map(|at| at + 1).collect()
        }
        Item::Rule(place) => any_end(rules, &rules[*place], text, from),
        Item::Choice(all) => any_end(rules, all, text, from),
        Item::Times(item, min, max) => {
            let (mut at, mut found) = (from.clone(), HashSet::new());
            for n in 0..=max.unwrap_or(u32::MAX) {
                let before = found.len();
                if n >= *min {
                    found.extend(&at);
                }
                if at.is_empty() || n > *min && found.len() == before {
                    break;
                }
                at = ends(rules, item, text, &at);
            }
            found
        }
        Item::Token { .. } => unreachable!("no tokens in these"),
    }
}

fn any_end(rules: &Rules, all: &[Vec<Item>], text: &[char], from: &HashSet<usize>) -> HashSet<usize> {
    if from.is_empty() {
        return HashSet::new();
    }
    let sequence =
        |items: &Vec<Item>| items.iter().fold(from.clone(), |from, item| ends(rules, item, text, &from));
    all.iter().flat_map(sequence).collect()
}

const JSON: &str = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# no more than that
ws ::= | " " | "\n" [ \t]{0,20}
"#;

/// Grammars, with texts of which some are accepted.
const CASES: [(&str, &[&str]); 9] = [
    (r#"root ::= "a"{3,3}"#, &["aaa", "aa", "aaaa", "b", ""]),
    (r#"root ::= ("ab" | "a" "c")+ [^x-z]? "#, &["ab", "acab", "abab!", "abz", "a", "acc", "abx"]),
    ("root ::= [\\u00e4-\\u00fc]{2,} .", &["äöx", "ää\n", "ax", "äü"]),
    (
        "root ::= (\n  # a move\n  \"1. \" move \" \" move \"\\n\"\n)\nmove ::= [a-h] [1-8] |\n  \"O-O\" \"-O\"?\n",
        &["1. e4 e5\n", "1. O-O O-O-O\n", "1. e9 e5\n", "1. e4 e5", "1. O-O-O-O e5\n"],
    ),
    (r#"root ::= "(" root ")" | "" "#, &["", "()", "((()))", "(()", ")"]),
    (
        r#"root ::= sum
sum ::= product ("+" product)*
product ::= [0-9]+ | "(" sum ")" "#,
        &["1", "1+2", "(1+22)+3", "1+", "((4)", "+1", "12+(3)"],
    ),
    (
        r#"root ::= list+ "."?
list ::= "- " [a-z]* "\n" list?"#,
        &["- a\n", "- a\n- \n.", "- a", "-a\n", "- x\n- y\n"],
    ),
    (r#"root ::= "x" | root "," "x""#, &["x", "x,x", "x,x,x", ",x", "x,"]),
    (
        JSON,
        &[
            r#"{"a": [1, -2.5e3, true], "b": {"c": "d\u00ff"}}"#,
            "{}",
            "{\n  \"x\": null}",
            r#"{"a":1,}"#,
            r#"["a"]"#,
            r#"{"a": "\q"}"#,
            r#"{"a": 01}"#,
        ],
    ),
];

#[test]
fn converted_grammars_accept_the_same_texts() {
    let tokenizer = &crate::test_tokenizer::bundled_tokenizer();
    let grammars = ConstraintCompiler::new().unwrap();
    let none = |_: &str| None;
    for (grammar, texts) in CASES {
        let rules = Reader::new(grammar, &none).rules().unwrap();
        let lark = lark(grammar, &none).unwrap();
        let mut n_passed = 0;
        for text in texts {
            let characters: Vec<char> = text.chars().collect();
            let is_left_recursive = grammar.contains("root \",\"");
            let expected = match is_left_recursive {
                true => text.split(',').all(|part| part == "x"),
                false => {
                    any_end(&rules, &rules[0], &characters, &HashSet::from([0])).contains(&characters.len())
                }
            };
            let guide = grammars.constraint(tokenizer, &OutputFormat::Lark(lark.clone()));
            let guide = guide.unwrap_or_else(|error| panic!("{grammar}: {error}\n{lark}"));
            let tokens = tokenizer.encode(text, Special::AsText, false).unwrap();
            assert_eq!(guide.accepts(&tokens), expected, "{text:?} of {grammar}\n{lark}");
            n_passed += usize::from(expected);
        }
        assert!(n_passed > 0 && n_passed < texts.len(), "{grammar}");
    }
}

#[test]
fn a_grammar_without_recursion_is_one_lexeme() {
    let token = |text: &str| (text == "<think>").then_some(7);
    let one = lark("root ::= a b\na ::= \"x\"\nb ::= a | [0-9]", &token).unwrap();
    assert_eq!(one.lines().count(), 2, "{one}");
    let thinks = lark("root ::= <think> !<[8]>* <[8]> .*", &token).unwrap();
    assert!(thinks.starts_with("start: <[7]> (<[^8]>)* <[8]> WORD_0?\n"), "{thinks}");
}

#[test]
fn errors_state_their_line() {
    let deep = format!("root ::= {}", "(".repeat(100));
    let signs = format!("root ::= \"a\"{}", "*".repeat(100));
    let large = format!("root ::= \"{}\"", "a".repeat(MAX_BYTES));
    let cases = [
        ("root ::= this is (not valid GBNF", "line 1: expected )"),
        ("", "root is not there"),
        ("root ::= \"a\"\nb := \"c\"", "line 2: expected ::="),
        ("root ::= other", "other is not there"),
        ("root ::= \"a", "line 1: expected the end of a string"),
        ("root ::= [b-a]", "whose first character comes first"),
        ("root ::= [a-", "line 1"),
        ("root ::= \"\\q\"", "an escape"),
        ("root ::= \"\\xzz\"", "hexadecimal"),
        ("root ::= \"a\"{3,2}", "the lesser first"),
        ("root ::= \"a\"{99999}", "a number up to 2000"),
        ("root ::= <unknown>", "a token that there is"),
        ("root ::= \"a\" )", "the end of the line"),
        (&deep, "at most 32 groups"),
        (&signs, "at most 4 signs"),
        (&large, "at most 262144 bytes"),
    ];
    for (grammar, expected) in cases {
        let error = lark(grammar, &|_| None).unwrap_err();
        assert!(error.contains(expected) && error.lines().count() == 1, "{grammar:.40}: {error}");
    }
}

/// Expansions that double with every rule, and long chains of rules.
#[test]
fn a_small_grammar_does_not_become_a_large_one() {
    let doubling: String = (1..60).map(|i| format!("r{i} ::= r{} r{}\n", i - 1, i - 1)).collect();
    let chain: String = (1..9000).map(|i| format!("r{i} ::= r{}\n", i - 1)).collect();
    for rules in [doubling, chain] {
        let last = rules.lines().count();
        let lark = lark(&format!("root ::= r{last}\nr0 ::= \"a\"\n{rules}"), &|_| None).unwrap();
        assert!(lark.len() < 1 << 20, "{} bytes", lark.len());
    }
}
