//! Embeddings in the APIs of OpenAI, llama.cpp and ollama, and reranking.

use crate::client::{Client, options, serve_model, start};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kvant::gguf::{GgufError, GgufWriter, Value as GgufValue};
use kvant::{EmbedOptions, Gguf, Model, OpenOptions, Pooling};
use kvant_server::Options;
use serde_json::{Value, json};

/// Returns more texts than are in progress at once, of many lengths.
fn texts() -> Vec<String> {
    (0..70).map(|i| format!("Text {i}: {}", "a cat sleeps on the mat, ".repeat(i * i % 41))).collect()
}

/// Returns the embeddings by the library, with the KV types of the server.
fn expected(texts: &[String], pooling: Option<Pooling>) -> Vec<Vec<f32>> {
    let model = Model::bundled(OpenOptions { n_threads: Some(2), ..Default::default() }).unwrap();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    model.embed(&texts, &EmbedOptions { pooling, kv: options().kv, ..Default::default() }).unwrap()
}

fn numbers(value: &Value) -> Vec<f32> {
    let numbers = value.as_array().unwrap_or_else(|| panic!("{value}"));
    numbers.iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

fn post(client: &Client, path: &str, body: &Value) -> Value {
    let (status, answer) = client.post(path, body);
    assert_eq!(status, 200, "{answer}");
    answer
}

fn embeddings(client: &Client, input: &Value) -> Vec<Vec<f32>> {
    let answer = post(client, "/v1/embeddings", &json!({ "input": input, "model": "any" }));
    let items = answer["data"].as_array().unwrap();
    assert!(items.iter().enumerate().all(|(i, item)| item["index"] == i && item["object"] == "embedding"));
    items.iter().map(|item| numbers(&item["embedding"])).collect()
}

#[test]
fn a_list_of_texts_has_the_embeddings_of_the_library() {
    let (client, texts) = (start(options()), texts());
    let expected = expected(&texts, None);
    assert_eq!(embeddings(&client, &json!(texts)), expected);
    assert_eq!(embeddings(&client, &json!(texts[3])), expected[3..4]);
    // As token ids, one text and several.
    let tokens = |text: &String| {
        let body = json!({ "content": text, "add_special": true });
        post(&client, "/tokenize", &body)["tokens"].clone()
    };
    assert_eq!(embeddings(&client, &tokens(&texts[5])), expected[5..6]);
    // In parts, as multimodal models accept them.
    let (first, rest) = texts[3].split_at(4);
    let part = |text: &str| json!({ "type": "text", "text": text });
    assert_eq!(embeddings(&client, &json!({ "content": [part(first), part(rest)] })), expected[3..4]);
    let several: Vec<Value> = texts[..3].iter().map(tokens).collect();
    assert_eq!(embeddings(&client, &json!(several)), expected[..3]);
    let answer = post(&client, "/v1/embeddings", &json!({ "input": several, "encoding_format": "base64" }));
    let n: usize = several.iter().map(|tokens| tokens.as_array().unwrap().len()).sum();
    assert_eq!(answer["usage"], json!({ "prompt_tokens": n, "total_tokens": n }));
    for (item, expected) in answer["data"].as_array().unwrap().iter().zip(&expected) {
        let bytes = STANDARD.decode(item["embedding"].as_str().unwrap()).unwrap();
        let values: Vec<f32> =
            bytes.as_chunks::<4>().0.iter().map(|&value| f32::from_le_bytes(value)).collect();
        assert_eq!(values, *expected);
    }
    // No request continues such a text, so it is not cached.
    let kv = client.get("/kv").1;
    assert_eq!((&kv["idle"], &kv["running"]), (&json!(0), &json!(0)), "{kv}");
}

#[test]
fn other_apis_return_the_same_embeddings() {
    let (client, texts) = (start(options()), &texts()[..3]);
    let expected = expected(texts, None);
    let native = post(&client, "/embedding", &json!({ "content": texts }));
    let ollama = post(&client, "/api/embed", &json!({ "model": "pocket:latest", "input": texts }));
    assert!(ollama["prompt_eval_count"].as_u64().unwrap() > 3, "{ollama}");
    for (index, expected) in expected.iter().enumerate() {
        assert_eq!(native[index]["index"], index);
        assert_eq!(numbers(&native[index]["embedding"][0]), *expected);
        assert_eq!(numbers(&ollama["embeddings"][index]), *expected);
        let one = post(&client, "/api/embeddings", &json!({ "model": "pocket", "prompt": texts[index] }));
        assert_eq!(numbers(&one["embedding"]), *expected);
    }
    // Without normalization the direction is the same.
    let raw = post(&client, "/embeddings", &json!({ "input": texts[0], "embd_normalize": -1 }));
    let raw = numbers(&raw[0]["embedding"][0]);
    let length = raw.iter().map(|value| value * value).sum::<f32>().sqrt();
    assert!((length - 1.0).abs() > 0.1, "{length}");
    assert!(raw.iter().zip(&expected[0]).all(|(raw, unit)| (raw / length - unit).abs() < 1e-6));
}

#[test]
fn pooling_kv_type_and_dimensions_are_options() {
    let texts = &texts()[..2];
    let client = start(Options { pooling: Some(Pooling::Mean), ..options() });
    let mean = expected(texts, Some(Pooling::Mean));
    assert_eq!(embeddings(&client, &json!(texts)), mean);
    assert_ne!(mean, expected(texts, Some(Pooling::Last)));
    let few = post(&client, "/v1/embeddings", &json!({ "input": texts[1], "dimensions": 8 }));
    let few = numbers(&few["data"][0]["embedding"]);
    let length = mean[1][..8].iter().map(|value| value * value).sum::<f32>().sqrt();
    assert!(few.len() == 8 && few.iter().zip(&mean[1]).all(|(few, all)| (few - all / length).abs() < 1e-6));
    let finer = post(&client, "/v1/embeddings", &json!({ "input": texts[1], "kv_type": "f32" }));
    let finer = numbers(&finer["data"][0]["embedding"]);
    let cosine: f32 = finer.iter().zip(&mean[1]).map(|(a, b)| a * b).sum();
    assert!(finer != mean[1] && cosine > 0.99, "{cosine}");
}

/// Texts are read beside an answer and with memory for few of them: the results do not change.
#[test]
fn embeddings_and_answers_are_batch_invariant() {
    let texts = texts();
    let expected = expected(&texts, Some(Pooling::Mean));
    let options = || Options { pooling: Some(Pooling::Mean), n_waiting: 200, ..options() };
    let story = json!({ "prompt": "Once", "max_tokens": 200, "ignore_eos": true, "temperature": 0 });
    let generate = |client: &Client| post(client, "/v1/completions", &story)["choices"][0]["text"].clone();
    let alone = generate(&start(options()));
    for kv_budget in [256 << 20, 3 << 19] {
        let client = start(Options { kv_budget, ..options() });
        std::thread::scope(|scope| {
            let stories: Vec<_> = (0..3).map(|_| scope.spawn(|| generate(&client))).collect();
            let vectors = [(); 2].map(|()| scope.spawn(|| embeddings(&client, &json!(texts))));
            vectors
                .into_iter()
                .for_each(|vectors| assert!(vectors.join().unwrap() == expected, "{kv_budget}"));
            stories.into_iter().for_each(|story| assert_eq!(story.join().unwrap(), alone, "{kv_budget}"));
        });
    }
}

/// Turns the bundled model into a reranker: two rows of its table form the scoring head.
fn scorer() -> Model {
    let file = Model::bundled_file().unwrap();
    let table = file.tensor("token_embd.weight").unwrap();
    let (n_embd, rows) = (table.info.shape[0], table.info.shape[1]);
    let head = &table.bytes[..2 * table.bytes.len() / rows];
    let mut writer = GgufWriter::with_meta(file.meta()).unwrap();
    writer.set("qwen3.pooling_type", GgufValue::U32(4)).unwrap();
    writer.set("tokenizer.chat_template.rerank", "<|im_start|>{query}? {document}<|im_end|>").unwrap();
    for info in file.tensors() {
        writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap();
    }
    writer.add_tensor("cls.output.weight", &[n_embd, 2], table.info.dtype).unwrap();
    let mut bytes = Vec::new();
    writer
        .write_to::<GgufError>(&mut bytes, |data| {
            file.tensors().iter().try_for_each(|info| data.bytes(&info.name, &file.data(info)))?;
            data.bytes("cls.output.weight", head)
        })
        .unwrap();
    let options = OpenOptions { n_threads: Some(2), ..Default::default() };
    Model::from_gguf(Gguf::from_bytes(bytes).unwrap(), options).unwrap()
}

#[test]
fn reranked_documents_have_the_scores_of_the_library() {
    let model = scorer();
    let documents = &texts()[..40];
    let borrowed: Vec<&str> = documents.iter().map(String::as_str).collect();
    let expected = model.rerank("Which text", &borrowed, &options().kv).unwrap();
    let client = Client::at(serve_model(model, options()));
    let body = json!({ "query": "Which text", "documents": documents, "return_documents": true });
    let answer = post(&client, "/v1/rerank", &body);
    let results = answer["results"].as_array().unwrap();
    let scores: Vec<f32> =
        results.iter().map(|result| result["relevance_score"].as_f64().unwrap() as f32).collect();
    assert!(
        results.len() == 40 && scores.is_sorted_by(|a, b| a >= b) && scores[0] > scores[39],
        "{scores:?}"
    );
    for (result, score) in results.iter().zip(&scores) {
        let index = result["index"].as_u64().unwrap() as usize;
        assert_eq!((*score, &result["document"]["text"]), (expected[index], &json!(documents[index])));
    }
    assert_eq!(answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]);
    // TEI's format, limited to the best.
    let few = post(&client, "/rerank", &json!({ "query": "Which text", "texts": documents, "top_n": 3 }));
    let of = |results: &Value, name: &str| {
        results.as_array().unwrap().iter().map(|r| r[name].clone()).collect::<Vec<_>>()
    };
    assert_eq!(of(&few, "index"), of(&answer["results"], "index")[..3]);
    assert_eq!(of(&few, "score"), of(&answer["results"], "relevance_score")[..3]);
    for (body, why) in [
        (json!({ "documents": ["x"] }), "query: expected a text, got nothing"),
        (json!({ "query": "x" }), "documents: expected a list of texts"),
        (json!({ "query": "x", "documents": [] }), "documents: expected a list of texts"),
        (json!({ "query": "x", "documents": [1] }), "documents: expected a list of texts"),
    ] {
        let (status, answer) = client.post("/v1/rerank", &body);
        assert!(status == 400 && answer.to_string().contains(why), "{answer}");
    }
    // A model that is no reranker reports that, and a reranker has no embeddings.
    let (status, answer) = start(options()).post("/v1/rerank", &json!({ "query": "x", "documents": ["y"] }));
    assert!(status == 400 && answer.to_string().contains("one that scores documents"), "{answer}");
    let (status, answer) = client.post("/v1/embeddings", &json!({ "input": "x" }));
    assert!(status == 400 && answer.to_string().contains("rank: this model scores texts"), "{answer}");
}

#[test]
fn invalid_embedding_fields_are_rejected_by_name() {
    let client = start(Options { n_ctx: Some(64), ..options() });
    let refused = [
        ("/v1/embeddings", json!({}), "input: expected a text"),
        ("/v1/embeddings", json!({ "input": [] }), "at least one"),
        (
            "/v1/embeddings",
            json!({ "input": { "content": [{ "type": "image_url" }] } }),
            "parts of text, got image_url",
        ),
        (
            "/v1/embeddings",
            json!({ "input": "x", "encoding_format": "int8" }),
            "encoding_format: expected float or base64",
        ),
        ("/v1/embeddings", json!({ "input": "x", "dimensions": 0 }), "dimensions: expected 1 to"),
        ("/v1/embeddings", json!({ "input": "x", "dimensions": 1_000_000 }), "dimensions: expected 1 to"),
        (
            "/v1/embeddings",
            json!({ "input": ["x", "many words ".repeat(100)] }),
            "exceeds the available context size (64",
        ),
        ("/v1/embeddings", json!({ "input": [[4_000_000_000u32]] }), "numbers of tokens in the vocabulary"),
        ("/v1/embeddings", json!({ "input": "x", "kv_type": "q9" }), "kv_type"),
        ("/embedding", json!({ "content": "x", "embd_normalize": 1 }), "embd_normalize: expected 2"),
        ("/api/embeddings", json!({ "prompt": 3 }), "prompt: expected a text"),
        (
            "/api/embed",
            json!({ "model": "another", "input": "x", "dimensions": true }),
            "dimensions: expected",
        ),
    ];
    for (path, body, why) in refused {
        let (status, answer) = client.post(path, &body);
        assert!(status == 400 && answer.to_string().contains(why), "{path} {body}: {answer}");
    }
}

/// A tiny text encoder.
fn encoder(name: &str) -> Model {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/encoders").join(name);
    Model::open_with(folder, OpenOptions { n_threads: Some(2), ..Default::default() }).unwrap()
}

#[test]
fn text_encoders_embed_and_refuse_to_generate() {
    let (model, texts) = (encoder("bert"), texts());
    let borrowed: Vec<&str> = texts.iter().map(String::as_str).collect();
    let expected = model.embed(&borrowed, &EmbedOptions::default()).unwrap();
    let client = Client::at(serve_model(model, options()));
    assert_eq!(embeddings(&client, &json!(texts)), expected);
    let answer = post(&client, "/api/embed", &json!({ "input": texts[..2], "model": "any" }));
    assert_eq!(numbers(&answer["embeddings"][1]), expected[1]);
    // Positions, and a text without words, which models that generate refuse.
    let models = post_get(&client, "/v1/models");
    assert_eq!(models["data"][0]["max_model_len"], 150);
    let n_read = || prompt_tokens(&client);
    let before = n_read();
    // [CLS] and [SEP].
    assert_eq!(embeddings(&client, &json!(""))[0].len(), 32);
    assert_eq!(n_read() - before, 2);
    for (path, body) in [
        ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "x" }] })),
        ("/v1/completions", json!({ "prompt": "x" })),
        ("/v1/responses", json!({ "input": "x" })),
        ("/v1/messages", json!({ "messages": [{ "role": "user", "content": "x" }], "max_tokens": 2 })),
        ("/completion", json!({ "prompt": "x" })),
        ("/infill", json!({ "input_prefix": "x", "input_suffix": "y" })),
        ("/api/generate", json!({ "prompt": "x", "stream": false })),
        ("/api/chat", json!({ "messages": [{ "role": "user", "content": "x" }], "stream": false })),
    ] {
        let (status, answer) = client.post(path, &body);
        let why = "a text encoder ('bert'), which embeds or ranks texts and generates none";
        assert!(status == 400 && answer.to_string().contains(why), "{path}: {status} {answer}");
    }
    let (status, answer) = client.post("/v1/rerank", &json!({ "query": "x", "documents": ["y"] }));
    assert!(status == 400 && answer.to_string().contains("one that scores documents"), "{answer}");
}

/// Returns the prompt tokens that the server has counted.
fn prompt_tokens(client: &Client) -> u64 {
    let metrics = client.get_text("/metrics");
    let count = metrics.lines().find_map(|line| line.strip_prefix("vllm:prompt_tokens_total ")).unwrap();
    count.parse().unwrap()
}

fn post_get(client: &Client, path: &str) -> Value {
    let (status, answer) = client.get(path);
    assert_eq!(status, 200, "{answer}");
    answer
}

#[test]
fn products_behind_pooling_are_applied_by_the_server() {
    let (model, texts) = (encoder("gemma-embedding"), texts());
    let borrowed: Vec<&str> = texts.iter().map(String::as_str).collect();
    let expected = model.embed(&borrowed, &EmbedOptions::default()).unwrap();
    let client = Client::at(serve_model(model, options()));
    assert_eq!(embeddings(&client, &json!(texts)), expected);
}

#[test]
fn cross_encoders_rerank_as_the_library() {
    ["bert-ranker", "modern-bert-ranker"].into_iter().for_each(reranks_as_the_library);
}

fn reranks_as_the_library(name: &str) {
    let model = encoder(name);
    let documents = &texts()[..40];
    let borrowed: Vec<&str> = documents.iter().map(String::as_str).collect();
    let expected = model.rerank("Which text", &borrowed, &options().kv).unwrap();
    let client = Client::at(serve_model(model, options()));
    let answer = post(&client, "/v1/rerank", &json!({ "query": "Which text", "documents": documents }));
    for result in answer["results"].as_array().unwrap() {
        let index = result["index"].as_u64().unwrap() as usize;
        assert_eq!(result["relevance_score"].as_f64().unwrap() as f32, expected[index]);
    }
}
