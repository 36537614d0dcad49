//! Tests of audio inputs.

use crate::usage::{assert_refused, json, kvant, stderr};

const TESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../audio/tests");
const VISION: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../vision/tests");

fn run(more: &[&str]) -> std::process::Output {
    let model = format!("{TESTS}/models/voxtral/text.gguf");
    let plain = ["run", "-m", &model, "What is said?", "-n", "4", "--temp", "0", "--json", "--device", "cpu"];
    kvant(&[&plain[..], more].concat())
}

#[test]
fn audio_precedes_the_prompt() {
    let n_prompt = |more: &[&str]| {
        let output = run(more);
        assert!(output.status.success(), "{}", stderr(&output));
        json(&output)["n_prompt"].as_u64().unwrap()
    };
    // The audio encoder is the file beside the model named mmproj.
    let [wav, mp3] = ["clip.wav", "stereo.mp3"].map(|name| format!("{TESTS}/clips/{name}"));
    let deaf = n_prompt(&[]);
    // One window of 12 rows, behind a marker.
    assert_eq!(n_prompt(&["--audio", &wav]), deaf + 13);
    assert_eq!(n_prompt(&["--audio", &mp3]), deaf + 13);
    let mmproj = format!("{TESTS}/models/voxtral/mmproj.gguf");
    assert_eq!(n_prompt(&["--audio", &format!("{wav},{mp3}"), "--mmproj", &mmproj]), deaf + 26);
}

#[test]
fn a_chat_takes_audio() {
    let model = format!("{TESTS}/models/voxtral/text.gguf");
    let clip = format!("{TESTS}/clips/clip.flac");
    let plain = ["chat", "-m", &model, "-n", "2", "--temp", "0", "--device", "cpu", "-p", "Hi"];
    let output = kvant(&[&plain[..], &["--audio", &clip]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn unusable_audio_is_rejected_with_the_reason() {
    let clip = format!("{TESTS}/clips/clip.wav");
    let refused = |more: &[&str], line: &str| assert_refused(&run(more), 1, &[line]);
    refused(&["--audio", "/nowhere.wav"], "/nowhere.wav");
    refused(&["--audio", &format!("{TESTS}/models/voxtral/mmproj.gguf")], "not readable audio (WAV, MP3");
    refused(
        &["--image", &format!("{VISION}/images/wide.png")],
        "image: expected a model with a vision encoder",
    );
    let line = "a vision or audio encoder, which is not a language model";
    let encoder = format!("{TESTS}/models/voxtral/mmproj.gguf");
    assert_refused(&kvant(&["run", "-m", &encoder, "Hi"]), 1, &[line]);
    let line = "--audio: no audio encoder beside the model: expected --mmproj FILE";
    assert_refused(&kvant(&["run", "Hi", "--audio", &clip]), 2, &[line]);
    assert_refused(&run(&["--audio", &clip, "--no-mmproj"]), 2, &[line]);
    assert_refused(&run(&["--audio", &clip, "--raw"]), 2, &["--raw"]);
    // A model with a vision encoder alone.
    let seeing = format!("{VISION}/models/smolvlm/text.gguf");
    let output = kvant(&["run", "-m", &seeing, "Hi", "--audio", &clip, "--device", "cpu"]);
    assert_refused(&output, 1, &["clip.wav: audio: expected a model with an audio encoder"]);
}
