//! Pictures on the command line.

use crate::usage::{assert_refused, json, kvant, stderr};

const TESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../vision/tests");

fn run(more: &[&str]) -> std::process::Output {
    let model = format!("{TESTS}/models/smolvlm/text.gguf");
    let plain = ["run", "-m", &model, "What is it?", "-n", "4", "--temp", "0", "--json", "--device", "cpu"];
    kvant(&[&plain[..], more].concat())
}

#[test]
fn a_picture_is_shown_before_the_prompt() {
    let picture = |name: &str| format!("{TESTS}/pictures/{name}.png");
    let n_prompt = |more: &[&str]| {
        let output = run(more);
        assert!(output.status.success(), "{}", stderr(&output));
        json(&output)["n_prompt"].as_u64().unwrap()
    };
    // The tower is the file beside the model that is called mmproj.
    let (wide, tall) = (picture("wide"), picture("tall"));
    let blind = n_prompt(&[]);
    let [one, other] = [&wide, &tall].map(|picture| n_prompt(&["--image", picture]));
    assert!(one > blind + 28 && other > blind + 28, "{blind} {one} {other}");
    let mmproj = format!("{TESTS}/models/smolvlm/mmproj.gguf");
    let both = n_prompt(&["--image", &format!("{wide},{tall}"), "--mmproj", &mmproj]);
    // The template writes one colon less of a message that begins with a picture.
    assert!((one + other - blind).abs_diff(both) <= 1, "{blind} {one} {other} {both}");
}

#[test]
fn what_cannot_be_seen_says_why() {
    let wide = format!("{TESTS}/pictures/wide.png");
    let refused = |more: &[&str], line: &str| assert_refused(&run(more), 1, &[line]);
    refused(&["--image", "/nowhere.png"], "/nowhere.png");
    refused(&["--image", &format!("{TESTS}/models/smolvlm/wide.golden")], "not a picture that can be read");
    let other = format!("{TESTS}/models/smolvlm/text.gguf");
    refused(&["--image", &wide, "--mmproj", &other], "general.architecture: expected clip");
    let tower = format!("{TESTS}/models/smolvlm/mmproj.gguf");
    let line = "a tower, which makes tokens of pictures for a model and is none by itself (--mmproj takes it, beside the model)";
    assert_refused(&kvant(&["run", "-m", &tower, "Hi"]), 1, &[line]);
    assert_refused(&kvant(&["run", "Hi", "--image", &wide]), 2, &["expected --mmproj FILE"]);
    assert_refused(&run(&["--image", &wide, "--no-mmproj"]), 2, &["expected --mmproj FILE"]);
    assert_refused(&run(&["--image", &wide, "--raw"]), 2, &["--raw"]);
}
