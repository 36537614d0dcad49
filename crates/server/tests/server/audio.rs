//! Audio in requests.

use std::path::{Path, PathBuf};

use crate::client::Client;
use crate::media::{self, chat, refused, text_part};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../audio/tests")
}

/// Starts a server of a tiny model, with or without audio encoder.
fn start(has_audio: bool) -> Client {
    media::start(&folder().join("models/qwen2audio"), has_audio)
}

fn base64(name: &str) -> String {
    STANDARD.encode(std::fs::read(folder().join("clips").join(name)).unwrap())
}

/// Returns the part of OpenAI's API.
fn part(name: &str) -> Value {
    let format = name.rsplit('.').next();
    json!({ "type": "input_audio", "input_audio": { "data": base64(name), "format": format } })
}

/// Token count of `transformers`' processor: `tools/reference/audio.py`.
const N_CLIP: u64 = 111;

#[test]
fn audio_is_encoded_and_found_again_in_the_cache() {
    let client = &start(true);
    let describe =
        |name: &str| chat(client, json!([text_part("Hear "), part(name), text_part("and say what it is.")]));
    let [first, other, again] = ["clip.wav", "stereo.mp3", "clip.wav"].map(describe);
    let prompt = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!([&first, &other, &again].map(prompt), [N_CLIP; 3]);
    let logprobs = |answer: &Value| answer["choices"][0]["logprobs"].clone();
    assert_eq!(logprobs(&first), logprobs(&again));
    assert_ne!(logprobs(&first), logprobs(&other));
    // A repeated conversation finds its prefix in the cache, including the clip.
    let long = json!([part("clip.wav"), text_part(&"what was it again? ".repeat(4))]);
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!([0; 2].map(|_| cached(&chat(client, long.clone())) >= 128), [false, true]);
    let (status, props) = client.get("/props");
    assert_eq!((status, &props["modalities"]), (200, &json!({ "vision": false, "audio": true })));
    // The same file as a data URL, and in /v1/responses.
    let url = format!("data:audio/wav;base64,{}", base64("clip.wav"));
    let by_url = json!({ "type": "audio_url", "audio_url": { "url": url } });
    let same = chat(client, json!([text_part("Hear "), by_url, text_part("and say what it is.")]));
    assert_eq!(logprobs(&same), logprobs(&first));
    let content = json!([
        { "type": "input_text", "text": "Hear " }, part("clip.wav"),
        { "type": "input_text", "text": "and say what it is." },
    ]);
    let input = json!([{ "role": "user", "content": content }]);
    let (status, answer) = client.post("/v1/responses", &json!({ "input": input, "max_output_tokens": 4 }));
    assert_eq!((status, answer["usage"]["input_tokens"].as_u64()), (200, Some(N_CLIP)), "{answer}");
}

#[test]
fn rejected_audio_has_a_reason() {
    let line = refused(&start(false), part("clip.wav"));
    assert!(line.contains("this model has no audio encoder: no mmproj file was given"), "{line}");
    let client = &start(true);
    let line =
        refused(client, json!({ "type": "audio_url", "audio_url": { "url": "https://example.com/a" } }));
    assert!(line.contains("this server fetches nothing"), "{line}");
    let line =
        refused(client, json!({ "type": "input_audio", "input_audio": { "data": "AAAA", "format": "wav" } }));
    assert!(line.contains("not readable audio"), "{line}");
    let line =
        refused(client, json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,AA" } }));
    assert!(line.contains("this model has no vision encoder"), "{line}");
}
