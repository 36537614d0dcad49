//! Checks sources against WGSL's grammar where naga is laxer than browsers: bit operators, shifts,
//! and `&&` beside `||`, require parentheses.

use std::collections::BTreeMap;

use crate::cross_compile::sources;

/// Role of a token in an expression.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Token<'a> {
    /// A name or a number, with its template list in angle brackets.
    Operand,
    Open,
    Close,
    Operator(&'a str),
    Space,
    /// Ends an expression, or is outside of one.
    Other,
}

/// Tokens of more than one character, none of which may be read as two.
const LONG: [&str; 22] = [
    "<<=", ">>=", "->", "++", "--", "&&", "||", "<<", ">>", "<=", ">=", "==", "!=", "+=", "-=", "*=", "/=",
    "%=", "&=", "|=", "^=", "//",
];
/// Words that an expression may follow.
const LEADING: [&str; 4] = ["return", "if", "while", "case"];
/// Words that a template list may follow.
const GENERIC: [&str; 8] = ["array", "vec2", "vec3", "vec4", "bitcast", "ptr", "var", "atomic"];

/// Returns the first token of `text`, and its length.
fn first_token(text: &str) -> (Token<'_>, usize) {
    let word_len = text.find(|c: char| !c.is_alphanumeric() && !"_.".contains(c)).unwrap_or(text.len());
    if word_len > 0 {
        let word = &text[..word_len];
        let list_len = if GENERIC.contains(&word) { angles(&text[word_len..]) } else { 0 };
        let token = if LEADING.contains(&word) { Token::Other } else { Token::Operand };
        return (token, word_len + list_len);
    }
    let sign = LONG.into_iter().find(|sign| text.starts_with(sign)).unwrap_or(&text[..1]);
    let token = match sign {
        " " => Token::Space,
        "(" | "[" => Token::Open,
        ")" | "]" => Token::Close,
        "&&" | "||" | "<<" | ">>" | "<=" | ">=" | "==" | "!=" => Token::Operator(sign),
        "<" | ">" | "+" | "-" | "*" | "/" | "%" | "&" | "|" | "^" => Token::Operator(sign),
        _ => Token::Other,
    };
    (token, sign.len())
}

/// Returns the length of the template list at the start of `text`; 0 without one.
fn angles(text: &str) -> usize {
    let mut depth = 0;
    let ends = |c: char| {
        depth += i32::from(c == '<') - i32::from(c == '>');
        depth == 0
    };
    text.find(ends).map_or(0, |at| if at == 0 { 0 } else { at + 1 })
}

/// Returns whether `b` may follow `a` in an expression without parentheses.
fn may_follow(a: &str, b: &str) -> bool {
    let both = [a, b];
    let n_of = |kind: &[&str]| both.iter().filter(|operator| kind.contains(operator)).count();
    let (bits, shifts) = (n_of(&["&", "|", "^"]), n_of(&["<<", ">>"]));
    let (logical, relations) = (n_of(&["&&", "||"]), n_of(&["<", ">", "<=", ">=", "==", "!="]));
    if bits > 0 || logical == 2 {
        return a == b;
    }
    relations < 2 && (shifts == 0 || relations + logical == 1)
}

/// Returns the first line, from 1, with operators that the grammar requires parentheses between.
fn first_mixed(text: &str) -> Option<usize> {
    // For each open pair of brackets: the previous operator, and the previous logical one.
    let mut open: Vec<[Option<&str>; 2]> = vec![[None; 2]];
    let mut is_operand = false;
    for (index, line) in text.lines().enumerate() {
        let mut rest = line.split("//").next().unwrap_or_default();
        while !rest.is_empty() {
            let (token, len) = first_token(rest);
            let [before, logical] = open.last_mut().expect("brackets are in pairs");
            match token {
                Token::Operator(name) if is_operand => {
                    let is_logical = ["&&", "||"].contains(&name);
                    let next_to = [*before, logical.filter(|_| is_logical)];
                    if next_to.iter().flatten().any(|before| !may_follow(before, name)) {
                        return Some(index + 1);
                    }
                    *before = Some(name);
                    if is_logical {
                        *logical = Some(name);
                    }
                }
                Token::Open => open.push([None; 2]),
                Token::Close => _ = open.pop(),
                Token::Other => (*before, *logical) = (None, None),
                Token::Operator(_) | Token::Operand | Token::Space => {}
            }
            if token != Token::Space {
                is_operand = matches!(token, Token::Operand | Token::Close);
            }
            rest = &rest[len..];
        }
    }
    None
}

#[test]
fn operators_are_not_mixed_where_browsers_want_parentheses() {
    let sound = [
        "let a = (b >> 1u) & (c | (d << 2u));",
        "x |= y & 1u & z;",
        "if a + 1u == b << c && (d & 1u) == 0u && e { f(-a, b); }",
        "array<vec4<u32>, 8>(a << b, c & d); // e & f | g",
        "return (a < b || (c && d)) == e;",
    ];
    let mixed = [
        "a & b | c",
        "a >> b & c",
        "a + (b) << c",
        "a == b & 1u",
        "a || b == c && d",
        "a[0] << b << c",
        "a < b == c",
    ];
    for text in sound {
        assert_eq!(first_mixed(text), None, "{text}");
    }
    for text in mixed {
        assert_eq!(first_mixed(text), Some(1), "{text}");
    }
    let parts: BTreeMap<_, _> =
        sources().flat_map(|(source, _)| source.parts).map(|part| (part.name, part.text)).collect();
    for (name, text) in parts {
        let at = first_mixed(text);
        assert_eq!(at, None, "{name}: parentheses are required here");
    }
}
