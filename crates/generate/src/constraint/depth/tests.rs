//! Limits of every notation, and the count of every kind of depth.

use serde_json::json;

use super::*;

fn lark_levels(lark: &str) -> (usize, usize) {
    let mut reader = LarkReader::new(lark);
    reader.read();
    (reader.names.levels(), reader.max_brackets)
}

/// Returns a schema with a chain of `n` references, each `arrays` arrays above the next.
fn chain(n: usize, arrays: usize) -> Value {
    let nested = |inner: Value| (0..arrays).fold(inner, |inner, _| json!({ "items": inner }));
    let mut defs: serde_json::Map<String, Value> =
        (0..n).map(|i| (i.to_string(), nested(json!({ "$ref": format!("#/$defs/{}", i + 1) })))).collect();
    defs.insert(n.to_string(), json!({}));
    json!({ "$defs": defs, "$ref": "#/$defs/0" })
}

#[test]
fn levels_of_a_schema_follow_the_longest_reference_chain() {
    assert_eq!(levels_of_schema(&json!({})), 1);
    assert_eq!(levels_of_schema(&json!({ "items": { "items": {} } })), 3);
    // The whole document comes first: definitions, one of them, and the keyword in it.
    assert_eq!(levels_of_schema(&chain(1, 0)), 4 + 2 + 1);
    assert_eq!(levels_of_schema(&chain(100, 0)), 4 + 100 * 2 + 1);
    assert_eq!(levels_of_schema(&chain(4, 110)), 114 + 4 * 112 + 1);
    // Parallel branches do not add up; a cycle counts whole, with what hangs off it.
    let tree = json!({ "$defs": { "a": { "$ref": "#/$defs/c" }, "b": { "$ref": "#/$defs/c" }, "c": {} },
        "anyOf": [{ "$ref": "#/$defs/a" }, { "$ref": "#/$defs/b" }] });
    assert_eq!(levels_of_schema(&tree), 4 + 2 + 1);
    let ring = json!({ "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } }, "$ref": "#/$defs/a" });
    assert_eq!(levels_of_schema(&ring), 4 + 2 + 2);
    assert_eq!(levels_of_schema(&json!({ "items": { "$ref": "#" } })), 3);
}

#[test]
fn a_reference_to_an_unknown_target_counts_as_the_whole() {
    for reference in ["#name", "other.json#/a", "#/%24defs/a", "#/missing"] {
        let schema = json!({ "$defs": { "a": { "items": {} } }, "$ref": reference });
        assert_eq!(levels_of_schema(&schema), 8, "{reference}");
    }
}

#[test]
fn levels_of_a_grammar_follow_the_longest_rule_chain() {
    assert_eq!(lark_levels("start: \"a\""), (1, 0));
    assert_eq!(lark_levels("start: a b\na: b\n  | \"b:\" (c)\nb: c\nc: /x/"), (1 + 2 + 1 + 1, 1));
    // Text that is not a name: strings, regular expressions, comments, tokens by name.
    let none = "start: \"\\\"b\" /[\"b]\\/(((/ # b ((\n  // b\n  | <b(> | \"b\"i\nb: start2\nstart2: \"x\"";
    assert_eq!(lark_levels(none), (2, 0));
    // Terminals, prefixes of names, attributes, and nested grammars.
    assert_eq!(lark_levels("start: A\nA: _B\n_B: C-\nC-: \"x\""), (4, 0));
    assert_eq!(lark_levels("?start[max_tokens=5]: !a\n!a.2: _b\n_b: \"x\""), (2 + 1 + 1, 1));
    assert_eq!(lark_levels("start: %lark {\n  start: b\n  b: \"x\"\n}"), (2 + 1, 1));
    // A cycle counts whole.
    assert_eq!(lark_levels("start: a | b\na: b start\nb: \"(\" a \")\""), (3, 0));
    let deep = "start: ".to_owned() + &"(".repeat(200) + "\"a\"" + &")".repeat(200);
    assert_eq!(lark_levels(&deep), (201, 200));
}

#[test]
fn a_constraint_beyond_a_limit_is_refused_with_the_limit() {
    let message = |result: Result<(), TooLarge>| result.unwrap_err().to_string();
    let rules: String = (0..20_000).map(|i| format!("r{i}: \"a\" r{}\n", i + 1)).collect();
    assert_eq!(
        message(check_lark(&format!("start: r0\n{rules}r20000: \"b\""))),
        "the constraint has too many levels of rules that name each other: expected at most 10000, got 20002"
    );
    let deep = "start: a".to_owned() + &"{a".repeat(101) + &"}".repeat(101);
    assert_eq!(
        message(check_lark(&deep)),
        "the constraint has too many brackets within brackets: expected at most 100, got 101"
    );
    let levels_error = message(check_schema(&chain(6_000, 0)));
    assert_eq!(
        levels_error,
        "the constraint has too many levels of references and nesting: expected at most 10000, got 12005"
    );
    let many: serde_json::Map<_, _> = (0..2_001).map(|i| (i.to_string(), json!({}))).collect();
    let many = json!({ "properties": many });
    assert_eq!(
        message(check_schema(&many)),
        "the constraint has too many properties in an object: expected at most 2000, got 2001"
    );
    // The same within a grammar.
    assert_eq!(message(check_lark(&format!("start: %json {many} \"x\""))), message(check_schema(&many)));
    assert_eq!(
        message(check_lark(&" ".repeat(MAX_BYTES + 1))),
        "the constraint has too many bytes: expected at most 4194304, got 4194305"
    );
}
