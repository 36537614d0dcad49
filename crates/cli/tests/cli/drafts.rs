//! Tests of draft models.

use crate::usage::{assert_refused, json, kvant, stderr, stdout};

#[test]
fn a_draft_model_changes_no_answer_and_is_reported() {
    let run = |more: &[&str]| {
        let plain =
            ["run", "-m", "bundled", "--temp", "0", "-n", "60", "-p", "Count to ten.", "--device", "cpu"];
        kvant(&[&plain[..], more].concat())
    };
    let (plain, drafted) = (run(&["--draft-max", "0"]), run(&["-md", "bundled"]));
    assert!(drafted.status.success(), "{}", stderr(&drafted));
    assert_eq!(stdout(&drafted), stdout(&plain));
    let summary = stderr(&drafted);
    assert!(summary.contains(" draft tokens") && summary.contains(", draft KV "), "{summary}");
    assert!(!stderr(&plain).contains("draft KV"));
    let object = json(&run(&["-md", "bundled", "--json"]));
    assert!(object["kv"]["bytes_draft"].as_u64().unwrap() > 0, "{object}");
    let other = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/predictions/nothing.gguf");
    assert_refused(&run(&["-md", other]), 1, &["nothing.gguf"]);
}

/// A draft head recognizes itself, and needs its model.
#[test]
fn a_draft_head_alone_is_refused_and_inspected() {
    let head = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/heads/llama-h64-g2-six/own.gguf");
    let alone = "a draft head ('eagle3'), which drafts for its model";
    assert_refused(&kvant(&["run", "-m", head, "-p", "Hello"]), 1, &[alone]);
    let inspected = kvant(&["inspect", head]);
    assert!(inspected.status.success() && stdout(&inspected).contains(alone), "{}", stderr(&inspected));
    let with = kvant(&["run", "-m", "bundled", "-md", head, "-p", "Hello", "--device", "cpu"]);
    assert_refused(&with, 1, &["eagle3.target_hidden_size", "256"]);
}
