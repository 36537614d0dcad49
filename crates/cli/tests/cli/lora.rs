//! Tests of LoRA adapters.

use crate::usage::{assert_refused, json, kvant, stderr};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures");
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/adapters/llama-h64-g8");

#[test]
fn a_model_is_named_with_its_adapters_and_reads_their_bytes() {
    let model = format!("{FIXTURES}/llama-h64-g8.gguf");
    let adapter = format!("{FIXTURES}/adapters/llama-h64-g8.gguf");
    let bench = |more: &[&str]| {
        let plain = ["bench", "-m", &model, "-p", "0", "-n", "1", "-r", "1", "-o", "json", "--device", "cpu"];
        let output = kvant(&[&plain[..], more].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        let row = json(&output)[0].clone();
        (row["model"].as_str().unwrap().to_owned(), row["bytes_per_token"].as_u64().unwrap())
    };
    let (name, plain) = bench(&[]);
    assert_eq!(name, "llama-h64-g8.gguf");
    let half = format!("{FOLDER}:0.5");
    let (name, adapted) = bench(&["--lora", &adapter, "--lora-scaled", &half]);
    assert_eq!(name, "llama-h64-g8.gguf + llama-h64-g8 + 0.5 llama-h64-g8");
    assert!(adapted > plain, "{adapted} {plain}");
}

#[test]
fn invalid_adapters_and_models_are_rejected_in_one_line() {
    let model = format!("{FIXTURES}/llama-h64-g8.gguf");
    let adapter = format!("{FIXTURES}/adapters/llama-h64-g8.gguf");
    let bench = |lora: &[&str]| kvant(&[&["bench", "-m", &model, "-p", "0", "-n", "1"][..], lora].concat());
    assert_refused(
        &bench(&["--lora", &model]),
        1,
        &[&format!("adapter {model}: general.type: expected adapter, got nothing")],
    );
    let other = format!("{FIXTURES}/adapters/arcee-h64-g2-yarn.gguf");
    assert_refused(
        &bench(&["--lora", &other]),
        1,
        &[&format!("adapter {other}: general.architecture: expected llama, got arcee")],
    );
    assert_refused(&bench(&["--lora-scaled", &adapter]), 2, &["expected FILE:SCALE"]);
    for alone in [&adapter[..], FOLDER] {
        let refusal = ["an adapter, not a model by itself (--lora takes it, beside the model)"];
        assert_refused(&kvant(&["run", alone, "Hi"]), 1, &refusal);
    }
    assert_refused(
        &kvant(&["plan", "-m", &model, "--lora", &adapter]),
        2,
        &["expected -o FILE for this one"],
    );
    assert_refused(
        &kvant(&["run", "--lora-init-without-apply", "Hi"]),
        2,
        &["--lora-scaled FILE:0 loads an adapter with scale 0"],
    );
}
