//! End-to-end tests of `kvant quantize`.

use std::fs;

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
