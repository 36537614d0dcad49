//! The bundled model behind HTTP, as a client sees it.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::client::{Client, options, start};
use kvant::DType;
use serde_json::{Value, json};

pub const QUESTION: &str = "What is the capital of France?";

pub fn chat(question: &str) -> Value {
    json!({ "messages": [{ "role": "user", "content": question }], "temperature": 0 })
}

pub fn with(mut body: Value, more: Value) -> Value {
    let fields = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(fields);
    body
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

/// Returns a prompt of about `n` tokens.
pub fn long(n: usize) -> String {
    (0..n / 7).map(|i| format!("{} is a number. ", i % 97)).collect()
}

#[test]
fn streamed_and_whole_answers_are_equal() {
    let client = start(options());
    let (status, whole) = client.post("/v1/chat/completions", &chat(QUESTION));
    assert_eq!(status, 200, "{whole}");
    assert!(content(&whole).contains("Paris"), "{whole}");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let usage = &whole["usage"];
    assert_eq!(
        usage["total_tokens"].as_u64(),
        Some(usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap())
    );
    let streaming = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let chunks = client.stream("/v1/chat/completions", &with(chat(QUESTION), streaming));
    let text: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, content(&whole));
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let last = chunks.last().unwrap();
    assert_eq!(last["usage"]["completion_tokens"], usage["completion_tokens"]);
    // All but the last token of the prompt were cached.
    let cached = last["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert_eq!(cached.map(|n| n + 1), usage["prompt_tokens"].as_u64());
}

/// For any concurrent requests, and any KV type.
#[test]
fn concurrent_answers_equal_lone_answers() {
    let questions: Vec<String> =
        (0..12).map(|i| format!("{} What is the capital of country {}?", long(40 * i), i % 5)).collect();
    let complete = |client: &Client, question: &str| {
        let body = with(chat(question), json!({ "max_tokens": 12, "ignore_eos": true }));
        let (status, answer) = client.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        content(&answer).to_owned()
    };
    let alone = start(options());
    let expected: Vec<String> = questions.iter().map(|question| complete(&alone, question)).collect();
    let client = start(options());
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            questions.iter().map(|question| scope.spawn(|| complete(&client, question))).collect();
        for (thread, expected) in threads.into_iter().zip(&expected) {
            assert_eq!(thread.join().unwrap(), *expected);
        }
    });
}

#[test]
fn preempted_sequences_give_the_same_answers() {
    let complete = |client: &Client, i: usize| {
        let body = json!({ "prompt": format!("Story {i}:"), "max_tokens": 300, "ignore_eos": true, "temperature": 0 });
        let (status, answer) = client.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let alone = start(options());
    let few = start(kvant_server::Options { kv_budget: 3 << 19, ..options() });
    let expected: Vec<String> = (0..6).map(|i| complete(&alone, i)).collect();
    std::thread::scope(|scope| {
        let few = &few;
        let threads: Vec<_> = (0..6).map(|i| scope.spawn(move || complete(few, i))).collect();
        for (thread, expected) in threads.into_iter().zip(&expected) {
            assert_eq!(thread.join().unwrap(), *expected);
        }
    });
    let metrics = few.get_text("/metrics");
    let parked = metrics.lines().find_map(|line| line.strip_prefix("vllm:num_preemptions_total ")).unwrap();
    assert!(parked.parse::<usize>().unwrap() > 0, "no sequence was preempted");
}

#[test]
fn answers_differ_by_seed_and_equal_seeds_reproduce_them() {
    let client = start(options());
    let body = json!({ "prompt": "The", "n": 4, "max_tokens": 12, "temperature": 1.5, "seed": 5 });
    let texts = |body: &Value| -> Vec<String> {
        let (status, answer) = client.post("/v1/completions", body);
        assert_eq!(status, 200, "{answer}");
        let choices = answer["choices"].as_array().unwrap();
        assert!(choices.iter().enumerate().all(|(i, choice)| choice["index"] == i));
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
    };
    let four = texts(&body);
    assert_eq!(four.len(), 4);
    assert!(four.iter().any(|text| *text != four[0]), "{four:?}");
    assert_eq!(texts(&body), four);
    // The third answer has the third seed.
    assert_eq!(texts(&with(body, json!({ "n": 1, "seed": 7 }))), [four[2].clone()]);
    // Without an explicit seed, answers of a list and of consecutive requests have different seeds.
    let list = json!({ "prompt": ["The", "The", "The"], "n": 2, "max_tokens": 12, "temperature": 1.5 });
    let mut all = [texts(&list), texts(&list)].concat();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 12, "{all:?}");
    let same = texts(&with(list.clone(), json!({ "seed": 5 })));
    assert_eq!([&same[..2], &same[2..4], &same[4..]], [&four[..2]; 3]);
    // The reported seed reproduces an answer.
    for more in [json!({}), json!({ "seed": 5 })] {
        let (_, answers) = client.post("/completion", &with(list.clone(), more));
        let answer = &answers[3];
        let alone = json!({ "prompt": "The", "n": 1, "seed": answer["generation_settings"]["seed"] });
        let (_, again) = client.post("/completion", &with(list.clone(), alone));
        assert_eq!(again["content"], answer["content"], "{answers}");
    }
}

#[test]
fn several_prompts_have_their_answers_in_order() {
    let client = start(options());
    let one = |prompt: Value| {
        let body = json!({ "prompt": prompt, "max_tokens": 6, "temperature": 0 });
        client.post("/v1/completions", &body).1
    };
    let texts = |answer: &Value| -> Vec<Value> {
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].clone()).collect()
    };
    let [first, second] = ["Once upon a time", "The sky is"].map(|prompt| texts(&one(json!(prompt))));
    assert_eq!(texts(&one(json!(["Once upon a time", "The sky is"]))), [first[0].clone(), second[0].clone()]);
    let (_, tokens) = client.post("/tokenize", &json!({ "content": "The sky is", "add_special": true }));
    assert_eq!(texts(&one(tokens["tokens"].clone())), second);
    // The first prompts are answered while the last are still being submitted.
    for _ in 0..5 {
        let many = texts(&one(json!(vec!["The sky is"; 12])));
        assert!(many.len() == 12 && many.iter().all(|text| *text == second[0]));
    }
}

#[test]
fn an_answer_stops_at_its_stop_conditions() {
    let client = start(options());
    let (_, whole) = client.post("/v1/chat/completions", &chat(QUESTION));
    let text = content(&whole);
    let stop = &text[text.find("of").unwrap()..][..6];
    let (_, stopped) = client.post("/v1/chat/completions", &with(chat(QUESTION), json!({ "stop": [stop] })));
    assert_eq!(content(&stopped), &text[..text.find(stop).unwrap()]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let (_, short) = client.post("/v1/chat/completions", &with(chat(QUESTION), json!({ "max_tokens": 2 })));
    assert_eq!(short["choices"][0]["finish_reason"], "length");
    assert_eq!(short["usage"]["completion_tokens"], 2);
    let (_, none) =
        client.post("/v1/chat/completions", &with(chat(QUESTION), json!({ "max_tokens": 0, "n": 2 })));
    assert_eq!((content(&none), &none["usage"]["completion_tokens"]), ("", &json!(0)));
}

#[test]
fn logprobs_belong_to_the_tokens_and_a_bias_shifts_them() {
    let client = start(options());
    let params = json!({ "logprobs": true, "top_logprobs": 3, "max_tokens": 4 });
    let (_, answer) = client.post("/v1/chat/completions", &with(chat(QUESTION), params.clone()));
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 4);
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        // Greedy: the most probable token is generated.
        assert_eq!((top.len(), &top[0]["token"]), (3, &token["token"]));
        assert!(top[0]["logprob"].as_f64() > top[1]["logprob"].as_f64());
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
    }
    let generated = tokens[0]["id"].as_u64().unwrap();
    let bias = with(with(chat(QUESTION), params), json!({ "logit_bias": { generated.to_string(): -100 } }));
    let (_, other) = client.post("/v1/chat/completions", &bias);
    assert_ne!(other["choices"][0]["logprobs"]["content"][0]["id"], generated);
}

#[test]
fn stop_strings_have_no_logprobs() {
    let client = start(options());
    let of = |answer: &Value| {
        let choice = &answer["choices"][0];
        let logprobs = choice["logprobs"]["content"].as_array().unwrap().clone();
        let text = logprobs.iter().map(|token| token["token"].as_str().unwrap()).collect::<String>();
        (text, choice["message"]["content"].as_str().unwrap().to_owned(), logprobs)
    };
    let body = with(chat(QUESTION), json!({ "logprobs": true, "max_tokens": 12, "temperature": 0 }));
    let (whole, content, all) = of(&client.post("/v1/chat/completions", &body).1);
    assert_eq!(whole, content);
    // From within a token of the middle to the end of the next one.
    let middle = all.iter().position(|token| token["token"].as_str().unwrap().len() > 2).unwrap().max(1);
    let stop: String = all[middle..middle + 2].iter().map(|token| token["token"].as_str().unwrap()).collect();
    let body = with(body, json!({ "stop": stop[1..] }));
    let (text, content, logprobs) = of(&client.post("/v1/chat/completions", &body).1);
    assert!(text.starts_with(&content) && text.len() < content.len() + stop.len(), "{text:?} {content:?}");
    assert_eq!(logprobs, all[..=middle]);
    let chunks = client.stream("/v1/chat/completions", &with(body, json!({ "stream": true })));
    let streamed = chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(streamed.flatten().cloned().collect::<Vec<_>>(), logprobs);
}

#[test]
fn structured_output_matches_its_format() {
    let client = start(options());
    let schema = json!({
        "type": "object",
        "properties": { "city": { "type": "string", "maxLength": 8 }, "size": { "enum": ["small", "large"] } },
        "required": ["city", "size"],
        "additionalProperties": false,
    });
    for seed in 0..6 {
        let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
        let hot = json!({ "temperature": 2.0, "top_k": 0, "seed": seed, "max_tokens": 120 });
        let body = with(with(chat(QUESTION), hot), json!({ "response_format": format }));
        let (status, answer) = client.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let value: Value = serde_json::from_str(content(&answer)).unwrap_or_else(|_| panic!("{answer}"));
        assert!(value["city"].as_str().unwrap().chars().count() <= 8, "{value}");
        assert!(["small", "large"].contains(&value["size"].as_str().unwrap()), "{value}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }
    let regex = with(chat(QUESTION), json!({ "guided_regex": "[a-c]{3}-[0-9]{2}" }));
    let (_, answer) = client.post("/v1/chat/completions", &regex);
    let text = content(&answer).as_bytes();
    assert!(text.len() == 6 && text[3] == b'-' && text[..3].iter().all(|c| b"abc".contains(c)), "{answer}");
    let choice = with(chat(QUESTION), json!({ "guided_choice": ["yes", "no"], "n": 2 }));
    let (_, answer) = client.post("/v1/chat/completions", &choice);
    for choice in answer["choices"].as_array().unwrap() {
        assert!(["yes", "no"].contains(&choice["message"]["content"].as_str().unwrap()), "{answer}");
    }
    let unknown = json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": { "type": "object", "uniqueItems": 5, "if": {} } } } });
    let (status, error) = client.post("/v1/chat/completions", &with(chat(QUESTION), unknown));
    assert_eq!(status, 400, "{error}");
}

#[test]
fn a_prefix_is_cached_per_api_key() {
    let keys = vec!["one".to_owned(), "two".to_owned()];
    let client = start(kvant_server::Options { api_keys: keys, ..options() });
    let shared = long(600);
    let cached_tokens = |key: &str, question: &str| {
        let body = with(chat(&format!("{shared}{question}")), json!({ "max_tokens": 1 }));
        let (status, answer) = client.with_key(key).post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached_tokens("one", "What is it?"), 0);
    assert!(cached_tokens("one", "Why is it?") >= 512);
    // No key observes what others have cached.
    assert_eq!(cached_tokens("two", "What is it?"), 0);
    let (status, error) = client.with_key("three").post("/v1/chat/completions", &chat(QUESTION));
    assert_eq!((status, &error["error"]["type"]), (401, &json!("authentication_error")));
    assert_eq!(client.get("/health").0, 200);
}

#[test]
fn branches_of_prompts_are_cached_to_the_token() {
    let begin = long(900);
    let complete = |client: &Client, end: &str| {
        let prompt = format!("{begin}{end}");
        let body = json!({ "prompt": prompt, "max_tokens": 6, "ignore_eos": true, "temperature": 0 });
        let (status, answer) = client.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let tokens = |name: &str| answer["usage"][name].as_u64().unwrap();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (answer["choices"][0]["text"].clone(), tokens("prompt_tokens") - cached)
    };
    let ends = ["Then who came?", "After that all went home.", "So what? said the bird."];
    let alone = ends.map(|end| complete(&start(options()), end));
    let whole = alone.iter().map(|(_, read)| *read).max().unwrap();
    // Concurrent and sequential requests: only the second one, which reveals the branch, reads more
    // than its own suffix.
    let together = start(options());
    let together = std::thread::scope(|scope| {
        let threads = ends.map(|end| scope.spawn(|| complete(&together, end)));
        threads.map(|thread| thread.join().unwrap())
    });
    let after = start(options());
    let after = ends.map(|end| complete(&after, end));
    for ((alone, together), after) in alone.iter().zip(&together).zip(&after) {
        assert_eq!((&together.0, &after.0), (&alone.0, &alone.0));
    }
    let reads = |answers: &[(Value, u64); 3]| answers.iter().map(|(_, read)| *read).sum::<u64>();
    assert!(reads(&together) < whole + 40, "{together:?} of {whole}");
    assert!(after[1].1 < 512 + 20 && after[2].1 < 20, "{after:?} of {whole}");
}

#[test]
fn another_kv_type_answers_in_fewer_bytes() {
    let client = start(options());
    let bytes = |kv: &str| {
        let body = with(chat(&long(900)), json!({ "kv_type": kv, "max_tokens": 2 }));
        let (status, answer) = client.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        (answer["kv"]["bytes"].as_u64().unwrap(), answer["kv"]["bytes_f16"].as_u64().unwrap())
    };
    let (f16, as_f16) = bytes("f16");
    assert_eq!(f16, as_f16);
    assert!(2 * bytes("turbo3").0 < f16);
    let body = with(chat(QUESTION), json!({ "kv_type": "q9" }));
    assert_eq!(client.post("/v1/chat/completions", &body).0, 400);
}

#[test]
fn invalid_requests_are_rejected_with_one_line() {
    let client = start(kvant_server::Options { n_ctx: Some(128), ..options() });
    for (path, body, words) in [
        ("/v1/chat/completions", json!({}), "messages"),
        ("/v1/chat/completions", json!({ "messages": [] }), "messages"),
        ("/v1/chat/completions", json!({ "messages": [{ "content": "x" }] }), "role"),
        ("/v1/chat/completions", with(chat("x"), json!({ "temperature": "hot" })), "temperature"),
        ("/v1/chat/completions", with(chat("x"), json!({ "top_p": 7 })), "top_p"),
        ("/v1/chat/completions", with(chat("x"), json!({ "n": 0 })), "n:"),
        ("/v1/chat/completions", with(chat("x"), json!({ "n": 100_000 })), "n:"),
        ("/v1/chat/completions", with(chat("x"), json!({ "logit_bias": { "99999999": 1 } })), "logit_bias"),
        ("/v1/chat/completions", with(chat("x"), json!({ "top_logprobs": 3 })), "logprobs"),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] }),
            "image_url",
        ),
        ("/v1/completions", json!({}), "prompt"),
        ("/v1/completions", json!({ "prompt": [] }), "prompt"),
        ("/v1/completions", json!({ "prompt": [99_999_999] }), "prompt"),
        ("/v1/completions", json!({ "prompt": { "a": 1 } }), "prompt"),
        (
            "/v1/completions",
            json!({ "prompt": vec!["x"; 65] }),
            "at most 64 texts (as many as may wait: --queue)",
        ),
        ("/v1/embeddings", json!({ "input": vec![""; 1_000_000] }), "at most 2048 texts"),
        ("/v1/completions", json!({ "prompt": "x", "max_tokens": -7 }), "max_tokens"),
        ("/detokenize", json!({ "tokens": [99_999_999] }), "tokens"),
    ] {
        let (status, error) = client.post(path, &body);
        let message = error["error"]["message"].as_str().unwrap_or_default();
        assert!(
            status == 400 && message.contains(words) && !message.contains('\n'),
            "{body}: {status} {error}"
        );
    }
    // A conversation that is too long is not truncated.
    let (status, error) = client.post("/v1/chat/completions", &chat(&long(400)));
    let error = &error["error"];
    assert_eq!(
        (status, &error["type"], &error["n_ctx"]),
        (400, &json!("exceed_context_size_error"), &json!(128))
    );
    assert!(error["n_prompt_tokens"].as_u64().unwrap() > 128);
    // One that reaches the limit ends.
    let (_, full) = client.post("/v1/completions", &json!({ "prompt": "x", "ignore_eos": true }));
    assert_eq!(full["choices"][0]["finish_reason"], "length");
    assert_eq!(full["usage"]["total_tokens"], 129);
    assert_eq!(client.get("/nothing").0, 404);
    assert_eq!(client.post("/health", &json!({})).0, 405);
    for raw in ["{", "[1]", "\"x\"", "", "{\"messages\": \"x\"}"] {
        assert_eq!(client.post_text("/v1/chat/completions", raw).0, 400, "{raw}");
    }
}

#[test]
fn a_disconnected_client_frees_its_resources() {
    let client = start(options());
    for stream in [true, false] {
        let body = with(chat(&long(1500)), json!({ "stream": stream, "ignore_eos": true }));
        let mut connection = client.send("/v1/chat/completions", &body);
        connection.flush().unwrap();
        client.wait_for("/kv", |kv| kv["running"] == 1);
        drop(connection);
        let gone = Instant::now();
        client.wait_for("/kv", |kv| kv["running"] == 0);
        assert!(gone.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn a_full_queue_returns_a_retry_time() {
    let client = start(kvant_server::Options { n_running: 1, n_waiting: 1, ..options() });
    let slow = with(chat("Tell me a story."), json!({ "ignore_eos": true, "stream": true }));
    let first = client.send("/v1/chat/completions", &slow);
    client.wait_for("/kv", |kv| kv["running"] == 1);
    let second = client.send("/v1/chat/completions", &slow);
    client.wait_for("/kv", |kv| kv["waiting"] == 1);
    let (status, headers, error) = client.post_headers("/v1/chat/completions", &slow);
    assert_eq!((status, &error["error"]["type"]), (429, &json!("rate_limit_error")), "{error}");
    assert!(headers.to_ascii_lowercase().contains("retry-after: "), "{headers}");
    assert!(client.get_text("/metrics").contains("kvant:requests_refused_total 1"));
    drop((first, second));
}

#[test]
fn health_models_metrics_and_kv_are_reported() {
    let client = start(options());
    assert_eq!(client.get("/health"), (200, json!({ "status": "ok" })));
    let (_, models) = client.get("/v1/models");
    assert_eq!(models["data"][0]["id"], "pocket");
    assert_eq!(client.get("/v1/models/pocket").0, 200);
    assert_eq!(client.get("/v1/models/other").0, 404);
    client.post("/v1/chat/completions", &chat(QUESTION));
    let metrics = client.get_text("/metrics");
    for line in [
        "llamacpp:tokens_predicted_total 7",
        "vllm:generation_tokens_total 7",
        "vllm:time_to_first_token_seconds_count 1",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    client.wait_for("/kv", |kv| kv["running"] == 0 && kv["idle"] == 1);
    let (_, kv) = client.get("/kv");
    assert_eq!(kv["types"], json!([DType::Turbo3.name(), DType::Turbo3.name()]));
    let (_, text) = client.post("/apply-template", &chat(QUESTION));
    assert!(text["prompt"].as_str().unwrap().contains(QUESTION));
    let (_, text) = client.post("/tokenize", &json!({ "content": "Hello world", "with_pieces": true }));
    let pieces: String =
        text["tokens"].as_array().unwrap().iter().map(|t| t["piece"].as_str().unwrap()).collect();
    assert_eq!(pieces, "Hello world");
    assert!(client.get_text("/").contains("<title>"));
}

#[test]
fn anthropic_requests_have_anthropic_responses() {
    let client = start(options());
    let request = json!({ "model": "any", "max_tokens": 40, "temperature": 0, "system": [{ "type": "text", "text": "x-anthropic-billing-header: 17" }], "messages": [{ "role": "user", "content": [{ "type": "text", "text": QUESTION }] }] });
    let (status, answer) = client.post("/v1/messages", &request);
    assert_eq!(status, 200, "{answer}");
    assert_eq!((&answer["type"], &answer["stop_reason"]), (&json!("message"), &json!("end_turn")));
    let text = answer["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("Paris"), "{answer}");
    let events = client.events("/v1/messages", &with(request.clone(), json!({ "stream": true })));
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    assert!(events.iter().all(|(name, data)| data["type"] == **name));
    let streamed: String = events.iter().filter_map(|(_, data)| data["delta"]["text"].as_str()).collect();
    assert_eq!(streamed, text);
    // The prompt is cached by now, and both ends of a stream report it.
    let usage_of = |at: usize, usage: &Value| {
        assert!(usage["cache_read_input_tokens"].as_u64().unwrap() > 0, "{at}: {usage}");
        [usage["input_tokens"].clone(), usage["cache_read_input_tokens"].clone()]
    };
    let ends =
        [usage_of(0, &events[0].1["message"]["usage"]), usage_of(1, &events[events.len() - 2].1["usage"])];
    assert_eq!(ends[0], ends[1]);
    let (_, count) = client.post("/v1/messages/count_tokens", &request);
    let usage = &answer["usage"];
    assert_eq!(count["input_tokens"], usage["input_tokens"]);
    // A call, and its result.
    let tool = json!({ "name": "clock", "input_schema": { "type": "object", "properties": {}, "additionalProperties": false } });
    let forced = json!({ "tools": [tool], "tool_choice": { "type": "any", "disable_parallel_tool_use": true }, "max_tokens": 100 });
    let (_, called) = client.post("/v1/messages", &with(request.clone(), forced));
    assert_eq!(called["stop_reason"], "tool_use", "{called}");
    let made = called["content"].as_array().unwrap().last().unwrap();
    assert_eq!(
        (&made["type"], &made["name"], &made["input"]),
        (&json!("tool_use"), &json!("clock"), &json!({}))
    );
    let history = json!({ "tools": [tool], "messages": [
        { "role": "user", "content": QUESTION },
        { "role": "assistant", "content": called["content"] },
        { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": made["id"], "content": "noon" }] },
    ] });
    assert_eq!(client.post("/v1/messages", &with(request.clone(), history)).0, 200);
    let (status, error) = client.post("/v1/messages", &json!({ "messages": [] }));
    assert_eq!((status, &error["type"]), (400, &json!("error")));
}

#[test]
fn the_responses_api_streams_its_events() {
    let client = start(options());
    let request = json!({ "model": "any", "input": QUESTION, "temperature": 0, "max_output_tokens": 40 });
    let (status, answer) = client.post("/v1/responses", &request);
    assert_eq!(status, 200, "{answer}");
    assert_eq!((&answer["object"], &answer["status"]), (&json!("response"), &json!("completed")));
    assert!(answer["id"].as_str().unwrap().starts_with("resp_"), "{answer}");
    let text = answer["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("Paris"), "{answer}");
    let events = client.events("/v1/responses", &with(request.clone(), json!({ "stream": true })));
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..3], ["response.created", "response.in_progress", "response.output_item.added"]);
    assert_eq!(names[names.len() - 2..], ["response.output_item.done", "response.completed"]);
    assert!(events.iter().enumerate().all(|(i, (_, data))| data["sequence_number"] == i));
    let deltas = events.iter().filter(|(name, _)| name == "response.output_text.delta");
    assert_eq!(deltas.filter_map(|(_, data)| data["delta"].as_str()).collect::<String>(), text);
    assert_eq!(events.last().unwrap().1["response"]["output"][0]["content"], answer["output"][0]["content"]);
    let tool = json!({ "type": "function", "name": "clock", "parameters": { "type": "object", "properties": {}, "additionalProperties": false } });
    let forced = json!({ "tools": [tool], "tool_choice": "required", "parallel_tool_calls": false, "max_output_tokens": 100 });
    let (_, called) = client.post("/v1/responses", &with(request.clone(), forced));
    let call = &called["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("clock")));
    assert_eq!(serde_json::from_str::<Value>(call["arguments"].as_str().unwrap()).unwrap(), json!({}));
    let history = json!({ "tools": [tool], "instructions": "Be brief.", "input": [
        { "role": "user", "content": [{ "type": "input_text", "text": QUESTION }] },
        call,
        { "type": "function_call_output", "call_id": call["call_id"], "output": "noon" },
    ] });
    let (status, answer) = client.post("/v1/responses", &with(request.clone(), history));
    assert_eq!(status, 200, "{answer}");
    let (_, cut) = client.post("/v1/responses", &with(request, json!({ "max_output_tokens": 2 })));
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    assert_eq!(client.post("/v1/responses", &json!({ "previous_response_id": "x", "input": "x" })).0, 400);
}
