//! End-to-end tests of `kvant quantize`.

use std::fs;

use kvant::{DType, Gguf};

use crate::usage::{assert_refused, bundled, kvant, scratch, stderr, stdout};

#[test]
fn a_quantized_model_answers_and_its_source_is_unchanged() {
    let dir = scratch("quantize");
    let out = dir.join("q8_0.gguf");
    let again = kvant(&["quantize", bundled().to_str().unwrap(), out.to_str().unwrap(), "q8_0", "--quiet"]);
    assert!(again.status.success(), "{}", stderr(&again));
    let small = dir.join("q4_K.gguf");
    assert!(kvant(&["quantize", out.to_str().unwrap(), small.to_str().unwrap(), "q4_K"]).status.success());
    assert!(fs::metadata(&small).unwrap().len() < fs::metadata(&out).unwrap().len());
    let (mixed, pure) = (dir.join("mixed.gguf"), dir.join("pure.gguf"));
    let sizes = [(&mixed, &[][..]), (&pure, &["--pure"])].map(|(path, more)| {
        let from = bundled();
        let args = ["quantize", from.to_str().unwrap(), path.to_str().unwrap(), "Q4_K_M"];
        let done = kvant(&[&args[..], more].concat());
        assert!(done.status.success() && stderr(&done).contains(" matrices"), "{}", stderr(&done));
        fs::metadata(path).unwrap().len()
    });
    assert!(sizes[0] > sizes[1], "{sizes:?}");
    let answer =
        kvant(&["run", "-m", out.to_str().unwrap(), "-p", "What is the capital of France?", "--temp", "0"]);
    assert!(stdout(&answer).contains("Paris"), "{}", stdout(&answer));
    let refused = kvant(&["quantize", out.to_str().unwrap(), small.to_str().unwrap(), "turbo3"]);
    assert_refused(&refused, 2, &["turbo3", "q4_K"]);
    // Targets that are the source itself, or a model.
    let before = fs::read(&small).unwrap();
    let onto_itself = kvant(&["quantize", small.to_str().unwrap(), small.to_str().unwrap(), "q8_0"]);
    assert_refused(&onto_itself, 1, &["q4_K.gguf", "is the source model"]);
    let base = kvant(&["eval", "ppl", "-c", "64", "--chunks", "1", "--save-base", small.to_str().unwrap()]);
    assert_refused(&base, 1, &["q4_K.gguf", "is a model"]);
    assert_eq!(fs::read(&small).unwrap(), before);
}

#[test]
fn a_measured_importance_weighs_the_errors_of_a_model() {
    let dir = scratch("importance");
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let model = bundled().to_str().unwrap().to_owned();
    let (one, two) = (path("one.gguf"), path("two.gguf"));
    let done = kvant(&["imatrix", &model, "-c", "128", "--chunks", "2", "-o", &one]);
    assert!(done.status.success(), "{}", stderr(&done));
    let n = Gguf::open(&one).unwrap().tensors().len() / 2;
    assert!(stderr(&done).contains(&format!("{n} tensors, 2 chunks")), "{}", stderr(&done));
    let more = kvant(&["imatrix", &model, "-c", "64", "--chunks", "1", "-o", &two, "--in-file", &one]);
    assert!(stderr(&more).contains(&format!("{n} tensors, 3 chunks")), "{}", stderr(&more));
    let count = |file: &str| {
        let gguf = Gguf::open(file).unwrap();
        let counts = gguf.tensor("blk.0.attn_q.weight.counts").unwrap();
        f32::from_le_bytes(counts.bytes[..].try_into().unwrap())
    };
    assert_eq!([&one, &two].map(|file| count(file)), [256.0, 320.0]);

    let (plain, weighted) = (path("plain.gguf"), path("weighted.gguf"));
    assert!(kvant(&["quantize", &model, &plain, "iq3_s", "--quiet"]).status.success());
    let done = kvant(&["quantize", &model, &weighted, "iq3_s", "--imatrix", &one]);
    let text = stderr(&done);
    assert!(text.contains("iq3_s: ") && text.contains(&format!("used in {n} of ")), "{text}");
    assert_eq!(fs::metadata(&plain).unwrap().len(), fs::metadata(&weighted).unwrap().len());
    assert_ne!(fs::read(&plain).unwrap(), fs::read(&weighted).unwrap());
    let answer = kvant(&["run", &weighted, "The capital of France is", "--temp", "0", "-n", "4"]);
    assert!(answer.status.success(), "{}", stderr(&answer));
    // Copied as it is.
    let again = path("again.gguf");
    assert!(kvant(&["quantize", &weighted, &again, "iq3_s", "--quiet"]).status.success());
    let bytes = |file: &str| {
        let gguf = Gguf::open(file).unwrap();
        let info = gguf.find_info("blk.0.ffn_up.weight").unwrap();
        gguf.stored_data(info).to_vec()
    };
    assert_eq!(bytes(&again), bytes(&weighted));

    let refused = kvant(&["quantize", &model, &again, "q4_K", "--imatrix", &plain]);
    assert_refused(&refused, 1, &["plain.gguf", "expected an importance matrix", "general.type"]);
    let long = kvant(&["imatrix", &model, "-c", "100000"]);
    assert_refused(&long, 1, &["-c: expected 4 to 2048 tokens", "100000"]);
}

#[test]
fn recipes_are_lines_of_types_and_tensors() {
    let dir = scratch("recipes");
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let model = bundled().to_str().unwrap().to_owned();
    let (recipe, out) = (path("own.recipe"), path("out.gguf"));
    fs::write(&recipe, "q4_0 *\nq8_0 first:1 # sensitive\nq5_0 ffn_down\n").unwrap();
    let done = kvant(&["quantize", &model, &out, "--recipe", &recipe]);
    assert!(done.status.success(), "{}", stderr(&done));
    let gguf = Gguf::open(&out).unwrap();
    let type_of = |name: &str| gguf.find_info(name).unwrap().dtype;
    let names = ["blk.0.attn_q.weight", "blk.0.ffn_down.weight", "blk.1.attn_q.weight"];
    assert_eq!(names.map(type_of), [DType::Q8_0, DType::Q5_0, DType::Q4_0]);
    fs::write(&recipe, "q4_0 *\nturbo3 ffn_down\n").unwrap();
    let refused = kvant(&["quantize", &model, &out, "--recipe", &recipe]);
    assert_refused(&refused, 2, &["own.recipe: line 2: expected a weight type", "turbo3"]);
    let list = stdout(&kvant(&["quantize", "--list"]));
    assert!(list.contains("q4_K_M      4.5000 bits") && list.contains("config_i"), "{list}");
    assert!(kvant(&["quantize", &model, &out, "config_i", "--quiet"]).status.success());
}
