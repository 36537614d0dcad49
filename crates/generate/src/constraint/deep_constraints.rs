//! Deepest constraints that are accepted: each must compile without a stack overflow, which would
//! end the process.

use serde_json::{Map, Value, json};

use super::depth::{MAX_LEVELS, MAX_PROPERTIES};
use super::{ConstraintCompiler, ConstraintError, OutputFormat};

const ARRAY: (&str, &str) = ("array", "items");
const OBJECT: (&str, &str) = ("object", "additionalProperties");

/// Returns a chain of references, each `between` levels above the next, nested by this type and
/// keyword.
fn references(n: usize, between: usize, (kind, keyword): (&str, &str)) -> OutputFormat {
    let refer = |i: usize| json!({ "$ref": format!("#/$defs/{i}") });
    let nested = |inner: Value| (0..between).fold(inner, |inner, _| json!({ "type": kind, keyword: inner }));
    let mut defs: Map<String, Value> = (0..n).map(|i| (i.to_string(), nested(refer(i + 1)))).collect();
    defs.insert(n.to_string(), json!({ "type": "null" }));
    OutputFormat::schema(json!({ "$defs": defs, "$ref": "#/$defs/0" }))
}

fn properties(n: usize, is_required: bool) -> OutputFormat {
    let all: Map<_, _> = (0..n).map(|i| (i.to_string(), json!({ "type": "null" }))).collect();
    let required: Vec<String> = all.keys().filter(|_| is_required).cloned().collect();
    OutputFormat::schema(json!({ "type": "object", "properties": all, "required": required }))
}

/// Returns a chain of rules, each of which names the next.
fn rules(n: usize, name: &str, defines: &str, end: &str) -> String {
    let rules = (0..n).map(|i| format!("{name}{i}{defines}\"a\"{name}{}{end}\n", i + 1));
    rules.collect::<String>() + &format!("{name}{n}{defines} \"b\"\n")
}

/// Returns constraints of `levels` levels, of every kind on which the compiler recurses.
fn forms(levels: usize) -> Vec<(&'static str, OutputFormat)> {
    let lark = |name: &str, end: &str| {
        OutputFormat::Lark(format!("start: {name}0\n{}", rules(levels - 2, name, ":", end)))
    };
    let gbnf = format!("root ::= r0\n{}", rules(levels - 2, "r", "::=", "|root"));
    vec![
        ("references", references((levels - 5) / 2, 0, ARRAY)),
        ("references in arrays", references((levels - 115) / 112, 110, ARRAY)),
        ("references in objects", references((levels - 115) / 112, 110, OBJECT)),
        ("rules", lark("r", "")),
        ("terminals", lark("R", "")),
        ("alternatives of terminals", lark("R", " | \"c\"")),
        ("rules of GBNF", OutputFormat::Lark(crate::gbnf::lark(&gbnf, &|_| None).unwrap())),
    ]
}

#[test]
fn the_deepest_constraints_compile_and_deeper_ones_are_refused() {
    let tokenizer = &crate::test_tokenizer::bundled_tokenizer();
    let grammars = ConstraintCompiler::new().unwrap();
    for (name, form) in forms(MAX_LEVELS) {
        let mut guide =
            grammars.constraint(tokenizer, &form).unwrap_or_else(|error| panic!("{name}: {error}"));
        guide.mask(&mut vec![0.0; tokenizer.n_vocab()]).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    for (name, form) in forms(MAX_LEVELS + 250) {
        let error = grammars.constraint(tokenizer, &form).err();
        assert!(matches!(error, Some(ConstraintError::TooLarge(_))), "{name}: {error:?}");
    }
    for is_required in [true, false] {
        // The compiler has its own limit, below the safe one.
        let error = grammars.constraint(tokenizer, &properties(MAX_PROPERTIES, is_required)).err();
        assert!(!matches!(error, Some(ConstraintError::TooLarge(_))), "{error:?}");
        let error = grammars.constraint(tokenizer, &properties(MAX_PROPERTIES + 1, is_required)).err();
        assert!(matches!(error, Some(ConstraintError::TooLarge(_))), "{error:?}");
    }
}
