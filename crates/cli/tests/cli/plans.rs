//! Tests of KV plans, and of the source of the factors on K and V.

use std::fs;

use crate::usage::{assert_refused, bundled, kvant, scratch, stderr, stdout};

#[test]
fn plan_factors_are_rejected_without_a_plan() {
    let unplanned = kvant(&["run", "-p", "x", "--kv-balance", "plan"]);
    let expected = ["--kv-balance plan: no plan is in use", "kvant plan", "--kv-plan FILE"];
    assert_refused(&unplanned, 2, &expected);
}

/// All types of keys and values would have the same bytes.
#[test]
fn inspect_lists_one_cache_without_attention() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/mamba2-space.gguf");
    let shown = kvant(&["inspect", path]);
    let (output, types) = (stdout(&shown), |line: &&str| line.contains("100.0 %"));
    assert!(shown.status.success(), "{}", stderr(&shown));
    let rows: Vec<_> = output.lines().filter(types).collect();
    assert!(rows.len() == 1 && rows[0].contains("none/none"), "{output}");
    assert!(output.contains("3 of 3 layers have one instead of keys and values"), "{output}");
}

/// The weights of the file leave no room for a cache, smaller ones do.
#[test]
fn a_plan_within_memory_chooses_the_weights_too() {
    let dir = scratch("memory");
    let model = dir.join("pocket.gguf");
    fs::copy(bundled(), &model).unwrap();
    let model = model.to_str().unwrap();
    assert_refused(&kvant(&["plan", model, "--memory", "5M"]), 2, &["--context <N>"]);
    let made = kvant(&["plan", model, "--memory", "5M", "-c", "2048", "-q"]);
    let (lines, certificate) = (stderr(&made), stdout(&made));
    assert!(made.status.success(), "{lines}");
    let of_file = lines.lines().find(|line| line.starts_with("weights as in the file")).unwrap_or_default();
    assert!(of_file.ends_with("KLD 0.0000; no cache fits"), "{lines}");
    let command = lines.lines().find_map(|line| line.strip_prefix("run it: kvant run ")).unwrap_or_default();
    assert!(command.contains(" --weights q") && command.ends_with(" -c 2048"), "{lines}");
    assert!(certificate.contains(", weights in q"), "{certificate}");
    assert!(dir.join("pocket.kvplan").exists());
}
