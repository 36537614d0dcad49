//! Schemas with unsupported parts.

use kvant_text::tokenizer::Special;
use serde_json::json;

use super::*;
use crate::constraint::{ConstraintCompiler, ConstraintError, OutputFormat, SchemaReduction};

#[test]
fn unsupported_parts_are_dropped_and_reported() {
    for (schema, held, missing) in [
        (
            json!({ "properties": { "a/b": { "uniqueItems": true, "items": { "not": {} } } } }),
            json!({ "properties": { "a/b": { "items": {} } } }),
            Some("uniqueItems at /properties/a~1b, not at /properties/a~1b/items"),
        ),
        (json!({ "if": {}, "then": {}, "else": {} }), json!({}), Some("if")),
        (json!({ "contains": {}, "minContains": 2 }), json!({}), Some("contains")),
        (
            json!({ "$defs": { "x": { "anyOf": [{}, { "propertyNames": { "pattern": "a" } }] } } }),
            json!({ "$defs": { "x": { "anyOf": [{}, {}] } } }),
            Some("propertyNames at /$defs/x/anyOf/1"),
        ),
        // Names and values are not keywords, and keywords that forbid nothing are not reported.
        (json!({ "properties": { "not": {} } }), json!({ "properties": { "not": {} } }), None),
        (json!({ "default": { "not": 1 } }), json!({ "default": { "not": 1 } }), None),
        (json!({ "uniqueItems": false, "propertyNames": { "type": "string" } }), json!({}), None),
        (
            json!({ "const": { "a": [9_007_199_254_740_993_u64] } }),
            json!({}),
            Some("const {\"a\":[9007199254740993]}"),
        ),
        (json!({ "enum": [1, -9_007_199_254_740_993_i64] }), json!({}), Some("enum -9007199254740993")),
        (json!({ "const": 1e30 }), json!({}), Some("const 1e+30")),
        (json!({ "const": 1_u64 << 60 }), json!({ "const": 1_u64 << 60 }), None),
        (json!({ "minimum": u64::MAX }), json!({}), Some("minimum 18446744073709551615")),
        (json!(true), json!(true), None),
    ] {
        let found = SupportedSchema::of(&schema);
        assert_eq!((&found.schema, found.missing().as_deref()), (&held, missing), "{schema}");
        assert_eq!(found.notes(), None);
        // The remaining schema is fully supported.
        assert_eq!(SupportedSchema::of(&held).dropped, []);
    }
}

#[test]
fn unknown_formats_are_annotations() {
    let schema = json!({ "properties": {
        "a": { "type": "string", "format": "color" },
        "b": { "type": "string", "format": "date" },
        "c": { "type": "integer", "format": "int64" },
    } });
    let held = SupportedSchema::of(&schema);
    assert_eq!(held.notes().as_deref(), Some("format \"color\" at /properties/a"));
    assert_eq!(held.missing(), None);
    let want = json!({ "properties": {
        "a": { "type": "string" }, "b": { "type": "string", "format": "date" }, "c": { "type": "integer" },
    } });
    assert_eq!(held.schema, want);
}

/// Accepted numbers are within bounds of any size, and all numbers that an `f64` can distinguish
/// from them are accepted.
#[test]
fn bounds_beyond_the_range_of_f64_are_respected() {
    let (tokenizer, grammars) =
        (&crate::test_tokenizer::bundled_tokenizer(), ConstraintCompiler::new().unwrap());
    let mut state = 7_u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 16
    };
    let mut bounds = vec![(i64::MIN, i64::MAX), (0, i64::MAX), (i64::MIN, -1), (-5, 5)];
    for bits in [52, 53, 54, 58, 61] {
        for _ in 0..4 {
            let low = (1_i64 << bits) + (random() % 5000) as i64 - 2500;
            bounds.push((low, low + 20_000 + (random() % 3000) as i64));
            bounds.push((-low - 20_000, -low));
        }
    }
    for (low, high) in bounds {
        let exclusive = random() % 2 == 0;
        let [lower, upper] =
            if exclusive { ["exclusiveMinimum", "exclusiveMaximum"] } else { ["minimum", "maximum"] };
        let schema = json!({ "type": "integer", lower: low, upper: high });
        let form = OutputFormat::schema(schema.clone());
        let takes = |number: i128| {
            let tokens = tokenizer.encode(&number.to_string(), Special::AsText, false).unwrap();
            grammars.constraint(tokenizer, &form).unwrap().accepts(&tokens)
        };
        let (low, high) = (i128::from(low), i128::from(high));
        // Beyond 2^53 up to 1,024 integers lie between two adjacent `f64`.
        let tolerance = if low.abs().max(high.abs()) <= 1 << 53 { 0 } else { 2048 };
        for number in [low, high].into_iter().flat_map(|end| {
            [-3000, -2049, -1025, -2, -1, 0, 1, 2, 3, 1025, 2049, 3000].map(|step| end + step)
        }) {
            let is_in =
                if exclusive { low < number && number < high } else { low <= number && number <= high };
            let is_decided = (number - low).abs() > tolerance && (number - high).abs() > tolerance;
            let taken = takes(number);
            assert!(is_in || !taken, "{schema}: {number} is taken");
            assert!(!is_in || taken || !is_decided, "{schema}: {number} is refused");
        }
    }
}

#[test]
fn errors_state_their_location_in_plain_words() {
    let (tokenizer, grammars) =
        (&crate::test_tokenizer::bundled_tokenizer(), ConstraintCompiler::new().unwrap());
    let within = |part: Value| {
        json!({ "type": "object", "properties": {
            "good": { "type": "string" },
            "x": { "anyOf": [{ "type": "null" }, { "type": "array", "items": part }] },
        } })
    };
    let objects = json!({ "oneOf": [
        { "type": "object", "properties": { "a": { "type": "string" } } },
        { "type": "object", "properties": { "b": { "type": "string" } } },
    ] });
    let pattern = |pattern: &str| json!({ "type": "string", "pattern": pattern });
    for (part, why) in [
        (
            pattern("(?=a)b"),
            "the pattern cannot be enforced: look-around, including look-ahead and look-behind, is not supported",
        ),
        (pattern("(a)\\1"), "the pattern cannot be enforced: backreferences are not supported"),
        (pattern("(a"), "the pattern cannot be enforced: unclosed group"),
        (pattern("\\bfoo"), "the pattern cannot be enforced: it asserts a word boundary"),
        (objects, "the alternatives of oneOf cannot be distinguished"),
        (json!({ "type": "strin" }), "Invalid type: strin"),
        (
            json!({ "$ref": "https://a.b/c" }),
            "$ref: expected a place in the same schema (#/..), got 'https://a.b/c'",
        ),
    ] {
        let error = grammars.constraint(tokenizer, &OutputFormat::schema(within(part.clone()))).err();
        let place = "/properties/x/anyOf/1/items".to_owned();
        assert_eq!(error, Some(ConstraintError::InvalidAt { why: why.to_owned(), place }), "{part}");
        let shared = json!({ "$defs": { "d": part }, "properties": { "a": { "$ref": "#/$defs/d" } } });
        let error = grammars
            .constraint(tokenizer, &OutputFormat::schema(shared))
            .err()
            .map(|error| error.to_string());
        assert_eq!(error, Some(format!("{why} at /$defs/d")), "{part}");
    }
}

#[test]
fn the_supported_part_of_a_schema_is_enforced() {
    let (tokenizer, grammars) =
        (&crate::test_tokenizer::bundled_tokenizer(), ConstraintCompiler::new().unwrap());
    let either = |key: &str| json!({ "type": "object", "properties": { key: { "type": "string" } }, "required": [key] });
    let schema = json!({
        "type": "object",
        "properties": {
            "a": { "type": "string", "pattern": "(?!a)" },
            "b": { "type": "integer" },
            "c": { "oneOf": [either("x"), either("y")] },
            "d": { "type": "array", "items": { "type": "integer" }, "uniqueItems": true },
        },
        "required": ["a", "b", "c", "d"],
        "additionalProperties": false,
    });
    let supported_subset = |schema: &Value| {
        let mut reduction = SchemaReduction::of(schema);
        loop {
            let result = grammars.constraint(tokenizer, &reduction.format()).map(drop);
            if let Some(schema) = reduction.next(result) {
                return schema;
            }
        }
    };
    let part = supported_subset(&schema);
    let takes = |text: &str| {
        let tokens = tokenizer.encode(text, Special::AsText, false).unwrap();
        grammars.constraint(tokenizer, &OutputFormat::schema(part.clone())).unwrap().accepts(&tokens)
    };
    assert!(takes(r#"{"a": "a", "b": 1, "c": {"y": "z"}, "d": [1, 1]}"#));
    assert!(!takes(r#"{"a": "a", "b": "1", "c": {"y": "z"}, "d": [1, 1]}"#));
    assert!(!takes(r#"{"a": "a", "b": 1, "c": {"z": "z"}, "d": [1, 1]}"#));
    assert!(!takes(r#"{"a": "a", "b": 1, "c": {"y": 1}, "d": ["1"]}"#));
    // An invalid schema accepts any object.
    assert_eq!(supported_subset(&json!({ "type": "objec" })), json!({ "type": "object" }));
}
