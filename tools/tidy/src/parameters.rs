//! A test that holds parameters to names: unlike things that travel together are a struct, not a
//! tuple, which hides them from the limit on parameters; like things are an array.

use super::{WrittenFile, without_comments, written};

/// Rooms with functions that still take tuples: points of plots, shapes, and this file's examples.
const EXEMPT: [&str; 4] = ["crates/eval/", "crates/generate/", "crates/quantize/", "tools/tidy/"];

/// Returns the text without comments, and without the tests at its end.
fn code(text: &str) -> String {
    without_comments(text.split("#[cfg(test)]\nmod ").next().unwrap_or_default())
}

/// Splits text that follows `open`, the start of a list, into the list's items and the text after
/// its end.
fn items(open: char, text: &str) -> (Vec<&str>, &str) {
    let (mut depth, mut first, mut before) = (0, 0, ' ');
    let mut items = Vec::new();
    for (at, c) in text.char_indices() {
        let is_arrow = c == '>' && matches!(before, '-' | '=');
        before = c;
        match c {
            '(' | '[' | '{' | '<' => depth += 1,
            ')' | ']' | '}' | '>' if !is_arrow => {
                if depth == 0 {
                    items.push(&text[first..at]);
                    return (items, &text[at + c.len_utf8()..]);
                }
                depth -= 1;
            }
            ',' if depth == 0 => {
                items.push(&text[first..at]);
                first = at + c.len_utf8();
            }
            _ => {}
        }
    }
    panic!("a list that begins with '{open}' has no end");
}

/// Returns whether a parameter is a tuple of several things, or a reference to one.
fn is_tuple(parameter: &str) -> bool {
    let mut depth = 0;
    let colon = parameter.char_indices().find(|&(_, c)| {
        depth += i32::from(matches!(c, '(' | '[' | '{')) - i32::from(matches!(c, ')' | ']' | '}'));
        c == ':' && depth == 0
    });
    let Some((colon, _)) = colon else { return false };
    let mut words = parameter[colon + 1..].trim_start().trim_start_matches('&');
    while let Some(word) =
        words.split_whitespace().next().filter(|word| word.starts_with('\'') || *word == "mut")
    {
        words = words.trim_start()[word.len()..].trim_start();
    }
    let Some(members) = words.trim_start().strip_prefix('(') else { return false };
    items('(', members).0.into_iter().filter(|member| !member.trim().is_empty()).count() > 1
}

/// Returns the names of the functions in `code` that take tuples.
fn with_tuples(code: &str) -> Vec<&str> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let rest = &code[at + "fn ".len()..];
        let (name, rest) = rest.split_at(rest.find(|c| !is_name(c)).unwrap_or(rest.len()));
        if name.is_empty() || code[..at].ends_with(is_name) {
            continue;
        }
        let rest = rest.strip_prefix('<').map_or(rest, |generics| items('<', generics).1);
        let Some(parameters) = rest.strip_prefix('(') else { continue };
        if items('(', parameters).0.into_iter().any(is_tuple) {
            found.push(name);
        }
    }
    found
}

#[test]
fn tuple_parameters_are_found() {
    for function in [
        "fn f((a, b): (usize, &str)) {}",
        "fn f(&self, pair: &'a mut (A, B), c: C) -> D",
        "pub fn f<F: Fn(A) -> B, const N: usize>(\n    a: A,\n    (b, c): (\n        B,\n        C,\n    ),\n)",
    ] {
        assert_eq!(with_tuples(function), ["f"], "{function}");
    }
    for function in [
        "fn f([a, b]: [usize; 2], Pair { c, d }: Pair)",
        "fn f(pairs: &[(A, B)], g: impl Fn((A, B)), one: (A), none: ()) -> (A, B)",
        "let g: fn(A) -> B = f;",
    ] {
        assert_eq!(with_tuples(function), [""; 0], "{function}");
    }
}

#[test]
fn functions_take_structs_instead_of_tuples() {
    let mut found = Vec::new();
    let mut n_files = 0;
    for WrittenFile { name, text } in written(&["rs"]) {
        let is_exempt = EXEMPT.iter().any(|room| name.starts_with(room));
        if is_exempt || name.ends_with("tests.rs") || name.contains("/tests/") {
            continue;
        }
        n_files += 1;
        let functions = code(text);
        found.extend(with_tuples(&functions).into_iter().map(|function| format!("{name}: {function}")));
    }
    assert!(n_files > 200, "only {n_files} files were found");
    assert!(found.is_empty(), "take a struct, an array or separate parameters:\n{}", found.join("\n"));
}
