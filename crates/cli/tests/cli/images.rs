//! Tests of image inputs.

use std::path::Path;

use crate::usage::{assert_refused, json, kvant, stderr};

const TESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../vision/tests");

fn run(more: &[&str]) -> std::process::Output {
    let model = format!("{TESTS}/models/smolvlm/text.gguf");
    let plain = ["run", "-m", &model, "What is it?", "-n", "4", "--temp", "0", "--json", "--device", "cpu"];
    kvant(&[&plain[..], more].concat())
}

#[test]
fn an_image_precedes_the_prompt() {
    let image = |name: &str| format!("{TESTS}/images/{name}.png");
    let n_prompt = |more: &[&str]| {
        let output = run(more);
        assert!(output.status.success(), "{}", stderr(&output));
        json(&output)["n_prompt"].as_u64().unwrap()
    };
    // The vision encoder is the file beside the model named mmproj.
    let (wide, tall) = (image("wide"), image("tall"));
    let blind = n_prompt(&[]);
    let [one, other] = [&wide, &tall].map(|image| n_prompt(&["--image", image]));
    assert!(one > blind + 28 && other > blind + 28, "{blind} {one} {other}");
    let mmproj = format!("{TESTS}/models/smolvlm/mmproj.gguf");
    let both = n_prompt(&["--image", &format!("{wide},{tall}"), "--mmproj", &mmproj]);
    // The template writes one colon less for a message that begins with an image.
    assert!((one + other - blind).abs_diff(both) <= 1, "{blind} {one} {other} {both}");
}

#[test]
fn unusable_images_are_rejected_with_the_reason() {
    let wide = format!("{TESTS}/images/wide.png");
    let refused = |more: &[&str], line: &str| assert_refused(&run(more), 1, &[line]);
    refused(&["--image", "/nowhere.png"], "/nowhere.png");
    refused(&["--image", &format!("{TESTS}/models/smolvlm/wide.golden")], "not a readable image");
    let other = format!("{TESTS}/models/smolvlm/text.gguf");
    refused(&["--image", &wide, "--mmproj", &other], "general.architecture: expected clip");
    let encoder = format!("{TESTS}/models/smolvlm/mmproj.gguf");
    let line =
        "a vision or audio encoder, which is not a language model (--mmproj takes it, beside the model)";
    assert_refused(&kvant(&["run", "-m", &encoder, "Hi"]), 1, &[line]);
    assert_refused(&kvant(&["run", "Hi", "--image", &wide]), 2, &["expected --mmproj FILE"]);
    assert_refused(&run(&["--image", &wide, "--no-mmproj"]), 2, &["expected --mmproj FILE"]);
    assert_refused(&run(&["--image", &wide, "--raw"]), 2, &["--raw"]);
}

/// A vision encoder of another model beside the model does not prevent text generation.
#[test]
fn an_unusable_vision_encoder_is_noted_and_ignored() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("beside");
    // Files of an earlier run.
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let model = folder.join("model.gguf");
    std::fs::copy(format!("{TESTS}/models/qwen3vl/text.gguf"), &model).unwrap();
    let encoder = folder.join("mmproj-other.gguf");
    std::fs::copy(format!("{TESTS}/models/smolvlm/mmproj.gguf"), &encoder).unwrap();
    let (model, wide) = (model.to_str().unwrap(), format!("{TESTS}/images/wide.png"));
    let plain = ["-m", model, "-n", "2", "--temp", "0", "--device", "cpu", "-p", "Hi"];
    let line = "mmproj: expected the encoder of this model, with rows of 64 values, got rows of 128";
    let output = kvant(&[&["chat"][..], &plain].concat());
    let lines = stderr(&output);
    assert!(
        output.status.success() && lines.contains(line) && lines.contains("images and audio are disabled"),
        "{lines}"
    );
    assert_refused(&kvant(&[&["run"][..], &plain, &["--image", &wide]].concat()), 1, &[line]);
    // Two vision encoders are ambiguous.
    std::fs::copy(format!("{TESTS}/models/qwen3vl/mmproj.gguf"), folder.join("mmproj.gguf")).unwrap();
    let both = kvant(&[&["run"][..], &plain, &["--image", &wide]].concat());
    assert_refused(&both, 2, &["several encoders beside the model", "--mmproj FILE selects one"]);
    std::fs::remove_file(encoder).unwrap();
    let output = kvant(&[&["run"][..], &plain, &["--image", &wide]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
}
