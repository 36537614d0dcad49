//! Images in requests, in the formats of all APIs.

use std::path::{Path, PathBuf};

use crate::client::Client;
use crate::media::{self, chat, refused, text_part};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../vision/tests")
}

/// Starts a server of a tiny model, with or without vision encoder.
fn start(has_vision: bool) -> Client {
    media::start(&folder().join("models/smolvlm"), has_vision)
}

fn base64(name: &str) -> String {
    STANDARD.encode(std::fs::read(folder().join(format!("images/{name}.png"))).unwrap())
}

fn part(name: &str) -> Value {
    json!({ "type": "image_url", "image_url": { "url": format!("data:image/png;base64,{}", base64(name)) } })
}

/// Token counts of `transformers`' processor: `tools/reference/images.py`.
const N_WIDE: u64 = 87;
const N_TALL: u64 = 88;

#[test]
fn an_image_is_encoded_and_found_again_in_the_cache() {
    let client = &start(true);
    let describe =
        |name: &str| chat(client, json!([text_part("See "), part(name), text_part("and say what it is.")]));
    let [first, other, again] = ["wide", "tall", "wide"].map(describe);
    let prompt = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!([&first, &other, &again].map(prompt), [N_WIDE, N_TALL, N_WIDE]);
    let logprobs = |answer: &Value| answer["choices"][0]["logprobs"].clone();
    assert_eq!(logprobs(&first), logprobs(&again));
    assert_ne!(logprobs(&first), logprobs(&other));
    // A repeated conversation finds its prefix in the cache, including the image.
    let long = json!([part("tall"), text_part(&"what was it again? ".repeat(4))]);
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!([0; 2].map(|_| cached(&chat(client, long.clone())) >= 128), [false, true]);
    let (status, props) = client.get("/props");
    assert_eq!((status, &props["modalities"]["vision"]), (200, &json!(true)));
}

#[test]
fn every_api_accepts_images_in_its_format() {
    let client = &start(true);
    let text = "and say what it is.";
    // All of them with the image first.
    let openai = chat(client, json!([part("wide"), text_part(text)]));
    let n = openai["usage"]["prompt_tokens"].as_u64().unwrap();
    let image = json!({
        "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": base64("wide") },
    });
    let messages = json!([{ "role": "user", "content": [image, text_part(text)] }]);
    let body = json!({ "messages": messages, "max_tokens": 4, "model": "any" });
    let (status, anthropic) = client.post("/v1/messages", &body);
    assert_eq!(status, 200, "{anthropic}");
    let usage = &anthropic["usage"];
    let read = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(read, n);
    let (status, counted) = client.post("/v1/messages/count_tokens", &body);
    assert_eq!((status, counted["input_tokens"].as_u64()), (200, Some(n)));
    let url = part("wide")["image_url"]["url"].clone();
    let content =
        json!([{ "type": "input_image", "image_url": url }, { "type": "input_text", "text": text }]);
    let input = json!([{ "role": "user", "content": content }]);
    let (status, responses) =
        client.post("/v1/responses", &json!({ "input": input, "max_output_tokens": 4 }));
    assert_eq!((status, responses["usage"]["input_tokens"].as_u64()), (200, Some(n)), "{responses}");
    let message = json!({ "role": "user", "content": text, "images": [base64("wide")] });
    let options = json!({ "num_predict": 4 });
    let body = json!({ "messages": [message], "stream": false, "options": options });
    let (status, ollama) = client.post("/api/chat", &body);
    assert_eq!((status, ollama["prompt_eval_count"].as_u64()), (200, Some(n)), "{ollama}");
    let body = json!({ "prompt": text, "images": [base64("wide")], "stream": false, "options": options });
    let (status, ollama) = client.post("/api/generate", &body);
    assert_eq!((status, ollama["prompt_eval_count"].as_u64()), (200, Some(n)), "{ollama}");
}

#[test]
fn rejected_images_have_a_reason() {
    let line = refused(&start(false), part("wide"));
    assert!(line.contains("this model has no vision encoder: no mmproj file was given"), "{line}");
    let client = &start(true);
    let url = |url: &str| json!({ "type": "image_url", "image_url": { "url": url } });
    let line = refused(client, url("https://example.com/a.png"));
    assert!(line.contains("this server fetches nothing"), "{line}");
    let line = refused(client, url("data:image/png;base64,AAAA"));
    assert!(line.contains("not a readable image"), "{line}");
    // Images that exceed the context cause the same error as text.
    let body = json!({ "messages": [{ "role": "user", "content": vec![part("wide"); 100] }] });
    let (status, answer) = client.post("/v1/chat/completions", &body);
    assert_eq!((status, &answer["error"]["type"]), (400, &json!("exceed_context_size_error")));
}
