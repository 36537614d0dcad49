//! What tests of images and of audio share.

use std::path::Path;
use std::sync::Arc;

use crate::client::{Client, options, serve_model};
use kvant::{Model, OpenOptions};
use serde_json::{Value, json};

/// Starts a server of the tiny model in a folder, with or without its encoder.
pub fn start(folder: &Path, has_encoder: bool) -> Client {
    let mmproj = has_encoder.then(|| Arc::new(kvant::open_file(folder.join("mmproj.gguf")).unwrap()));
    let open = OpenOptions { n_threads: Some(2), mmproj, ..Default::default() };
    Client::at(serve_model(Model::open_with(folder.join("text.gguf"), open).unwrap(), options()))
}

pub fn text_part(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

pub fn chat(client: &Client, content: Value) -> Value {
    let messages = json!([{ "role": "user", "content": content }]);
    let body = json!({ "messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": true });
    let (status, answer) = client.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{answer}");
    answer
}

/// Returns the message of the error that a part causes.
pub fn refused(client: &Client, part: Value) -> String {
    let body = json!({ "messages": [{ "role": "user", "content": [part, text_part("x")] }] });
    let (status, answer) = client.post("/v1/chat/completions", &body);
    assert_eq!(status, 400, "{answer}");
    answer["error"]["message"].as_str().unwrap().to_owned()
}
