//! Prompts of files with several options: templates for tools, special tokens around texts.

use kvant::gguf::{GgufError, GgufWriter, TensorSink};
use kvant::{Gguf, Model, OpenOptions};
use serde_json::{Value, json};

use crate::client::{Client, options, serve_model};

/// Starts a server of the bundled model with changed metadata.
fn start(change: impl Fn(&mut GgufWriter)) -> Client {
    let file = Model::bundled_file().unwrap();
    let mut writer = GgufWriter::with_meta(file.meta()).unwrap();
    change(&mut writer);
    for info in file.tensors() {
        writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap();
    }
    let mut bytes = Vec::new();
    let copy = |data: &mut TensorSink<'_>| -> Result<(), GgufError> {
        file.tensors().iter().try_for_each(|info| data.bytes(&info.name, &file.data(info)))
    };
    writer.write_to(&mut bytes, copy).unwrap();
    let open = OpenOptions { n_threads: Some(2), ..Default::default() };
    Client::at(serve_model(Model::from_gguf(Gguf::from_bytes(bytes).unwrap(), open).unwrap(), options()))
}

fn post(client: &Client, path: &str, body: &Value) -> Value {
    let (status, answer) = client.post(path, body);
    assert_eq!(status, 200, "{path}: {answer}");
    answer
}

#[test]
fn a_request_with_tools_uses_the_tool_template() {
    // The default template has no tool support: without the other one the tools would be described
    // as text.
    let client = start(|writer| {
        writer.set("tokenizer.chat_template", "usual {{ messages[-1].content }}").unwrap();
        let with_tools = "{{ tools[0].function.name }} {{ messages[-1].content }}";
        writer.set("tokenizer.chat_template.tool_use", with_tools).unwrap();
    });
    let tool =
        json!({ "type": "function", "function": { "name": "look_up", "parameters": { "type": "object" } } });
    let prompt = |more: Value| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        post(&client, "/apply-template", &body)["prompt"].clone()
    };
    assert_eq!(prompt(json!({})), "usual Hi");
    assert_eq!(prompt(json!({ "tools": [] })), "usual Hi");
    assert_eq!(prompt(json!({ "tools": [tool], "tool_choice": "none" })), "usual Hi");
    assert_eq!(prompt(json!({ "tools": [tool] })), "look_up Hi");
    let (_, props) = client.get("/props");
    assert_eq!(props["chat_template"], "usual {{ messages[-1].content }}");
    assert!(props["chat_template_tool_use"].as_str().unwrap().starts_with("{{ tools"), "{props}");
}

#[test]
fn add_eos_applies_to_embedded_texts_and_not_to_prompts() {
    let start_adding = |adds: bool| start(move |w| w.set("tokenizer.ggml.add_eos_token", adds).unwrap());
    let (plain, adds) = (start_adding(false), start_adding(true));
    let more = |path: &str, body: &Value, n: fn(&Value) -> u64| {
        n(&post(&adds, path, body)) - n(&post(&plain, path, body))
    };
    let used = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let messages = json!([{ "role": "user", "content": "So it is" }]);
    let continued = [
        ("/v1/completions", json!({ "prompt": "So it is", "max_tokens": 1 })),
        ("/v1/completions", json!({ "prompt": ["So it is", 5, " so"], "max_tokens": 1 })),
        ("/v1/completions", json!({ "prompt": [5, "So it is"], "max_tokens": 1 })),
        ("/v1/chat/completions", json!({ "messages": messages, "max_tokens": 1 })),
    ];
    for (path, body) in continued {
        assert_eq!(more(path, &body, used), 0, "{path}: {body}");
    }
    let raw = json!({ "model": "pocket", "prompt": "So it is", "raw": true, "stream": false, "options": { "num_predict": 1 } });
    assert_eq!(more("/api/generate", &raw, |answer| answer["prompt_eval_count"].as_u64().unwrap()), 0);
    for (input, n) in [
        (json!("So it is"), 1),
        (json!(["So it is", "So"]), 2),
        (json!([[5, "So it is"]]), 1),
        // A prompt that ends with token ids gets no end token.
        (json!([["So it is", 5]]), 0),
        (json!([5, 6]), 0),
    ] {
        assert_eq!(more("/v1/embeddings", &json!({ "input": input }), used), n, "{input}");
    }
    let tokens = |answer: &Value| answer["tokens"].as_array().unwrap().len() as u64;
    assert_eq!(more("/tokenize", &json!({ "content": "So", "add_special": true }), tokens), 1);
    assert_eq!(more("/tokenize", &json!({ "content": "So" }), tokens), 0);
}
