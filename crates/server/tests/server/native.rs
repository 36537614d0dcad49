//! llama.cpp's API and OpenAI's completions: prompt logprobs, `/completion`, `/infill`, `/metrics`.

use std::sync::Arc;

use crate::client::{Client, options, start, start_with};
use kvant::{Model, OpenOptions, SamplerParams};
use kvant_server::{Options, ServerSampling};
use serde_json::{Value, json};

const PROMPT: &str = "The capital of France is Paris. The capital of Spain is";

fn close(a: &Value, b: &Value) -> bool {
    matches!((a.as_f64(), b.as_f64()), (Some(a), Some(b)) if (a - b).abs() < 1e-4)
}

/// The prompt's logprobs do not depend on what the cache holds.
#[test]
fn prompt_logprobs_equal_those_of_generation() {
    let client = start(options());
    // 60 tokens: enough, and no longer than one step with scores.
    let complete = |more: Value| {
        let mut body =
            json!({ "prompt": PROMPT, "echo": true, "logprobs": 2, "max_tokens": 1, "temperature": 0 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = client.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0].clone()
    };
    let first = complete(json!({}));
    assert!(first["text"].as_str().unwrap().starts_with(PROMPT), "{first}");
    let logprobs = &first["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    assert!(
        tokens.len() > 8 && logprobs["token_logprobs"][0].is_null() && logprobs["top_logprobs"][0].is_null()
    );
    assert!(logprobs["token_logprobs"].as_array().unwrap()[1..].iter().all(|l| l.as_f64().unwrap() <= 0.0));
    // Equal, although the whole prompt is cached now.
    let again = complete(json!({}));
    assert_eq!(again["logprobs"], first["logprobs"]);
    // Each prompt token has the logprob of its generation after the earlier tokens.
    let (_, ids) = client.post("/tokenize", &json!({ "content": PROMPT, "add_special": true }));
    let ids = ids["tokens"].as_array().unwrap();
    for at in [1, ids.len() / 2, ids.len() - 1] {
        let forced = json!({ ids[at].to_string(): 100 });
        let body = json!({ "prompt": ids[..at], "logprobs": 1, "max_tokens": 1, "temperature": 0, "logit_bias": forced });
        let (_, generated) = client.post("/v1/completions", &body);
        let generated = &generated["choices"][0]["logprobs"]["token_logprobs"][0];
        assert!(
            close(generated, &logprobs["token_logprobs"][at]),
            "{at}: {generated} {}",
            logprobs["token_logprobs"][at]
        );
    }
    // Without tokens to generate there is only the prompt.
    let none = complete(json!({ "max_tokens": 0 }));
    assert_eq!(none["text"], PROMPT);
    assert_eq!(none["logprobs"]["tokens"].as_array().unwrap().len(), ids.len());
}

#[test]
fn echo_returns_the_prompt_before_each_answer() {
    let client = start(options());
    let body = |more: Value| {
        let mut body =
            json!({ "prompt": ["One two", "Red blue"], "n": 2, "echo": true, "max_tokens": 4, "seed": 3 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let (_, whole) = client.post("/v1/completions", &body(json!({})));
    let texts: Vec<&str> =
        whole["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert!(texts[..2].iter().all(|text| text.starts_with("One two")), "{texts:?}");
    assert!(texts[2..].iter().all(|text| text.starts_with("Red blue")), "{texts:?}");
    for more in [json!({ "stream": true }), json!({ "stream": true, "logprobs": 1 })] {
        let mut streamed = vec![String::new(); 4];
        let mut n_scored = 0;
        for chunk in client.stream("/v1/completions", &body(more)) {
            let choice = &chunk["choices"][0];
            streamed[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
            n_scored += choice["logprobs"]["tokens"].as_array().map_or(0, Vec::len);
        }
        assert_eq!(streamed, texts);
        assert!(n_scored == 0 || n_scored > 4 * 4, "{n_scored}");
    }
}

/// Steps with scores have at most 64 tokens, and blocks are shared at multiples of 512 tokens.
#[test]
fn a_long_prompt_is_scored_whole_beside_decode() {
    let client = start(Options { kv_budget: 64 << 20, ..options() });
    let text: String = (0..150).map(|i| format!("{} is a number. ", i % 97)).collect();
    let body = json!({ "prompt": text, "echo": true, "logprobs": 0, "max_tokens": 0 });
    let (_, alone) = client.post("/v1/completions", &body);
    let streaming = json!({ "prompt": "x", "ignore_eos": true, "stream": true, "max_tokens": 400 });
    let other = client.send("/v1/completions", &streaming);
    client.wait_for("/kv", |kv| kv["running"] == 1);
    let (_, beside) = client.post("/v1/completions", &body);
    drop(other);
    let logprobs = |answer: &Value| answer["choices"][0]["logprobs"].clone();
    assert_eq!(logprobs(&alone), logprobs(&beside));
    let n = logprobs(&alone)["tokens"].as_array().unwrap().len();
    assert!(n > 600 && alone["usage"]["prompt_tokens"] == n, "{n}");
    let sum =
        logprobs(&alone)["token_logprobs"].as_array().unwrap().iter().flat_map(Value::as_f64).sum::<f64>();
    assert!(sum / (n as f64) > -6.0, "{sum} for {n}");
}

fn native(client: &Client, body: &Value) -> Value {
    let (status, answer) = client.post("/completion", body);
    assert_eq!(status, 200, "{answer}");
    answer
}

/// The recommended sampling defaults of a model do not apply to greedy decoding.
#[test]
fn greedy_requests_ignore_the_recommended_sampling() {
    let usual = SamplerParams { top_k: 7, repeat_penalty: 1.5, ..Default::default() };
    let drawing = ServerSampling { usual, greedy: SamplerParams::default() };
    let client = start(Options { sampling: drawing, ..options() });
    let penalty = |more: Value| {
        let mut body = json!({ "prompt": "Once upon a time", "n_predict": 1 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        native(&client, &body)["generation_settings"]["repeat_penalty"].clone()
    };
    for (more, want) in [
        (json!({}), 1.5),
        (json!({ "temperature": 0.5 }), 1.5),
        (json!({ "temperature": 0 }), 1.0),
        (json!({ "temperature": -1 }), 1.0),
        (json!({ "temperature": 0, "repeat_penalty": 1.25 }), 1.25),
    ] {
        assert_eq!(penalty(more.clone()), want, "{more}");
    }
    assert_eq!(client.get("/props").1["default_generation_settings"]["params"]["repeat_penalty"], 1.5);
}

#[test]
fn a_native_completion_has_all_fields_of_llama_cpp() {
    let client = start(options());
    let request = json!({ "prompt": "Once upon a time", "n_predict": 6, "temperature": 0, "n_probs": 3, "return_tokens": true, "seed": 7 });
    let whole = native(&client, &request);
    assert_eq!((&whole["stop"], &whole["tokens_predicted"]), (&json!(true), &json!(6)));
    assert_eq!((&whole["stop_type"], &whole["truncated"]), (&json!("limit"), &json!(false)));
    assert_eq!(whole["tokens"].as_array().unwrap().len(), 6);
    let probabilities = whole["completion_probabilities"].as_array().unwrap();
    assert!(probabilities.len() == 6 && probabilities.iter().all(|p| p["top_logprobs"][0]["id"] == p["id"]));
    let settings = &whole["generation_settings"];
    assert_eq!((&settings["n_predict"], &settings["seed"]), (&json!(6), &json!(7)));
    assert!(whole["prompt"].as_str().unwrap().ends_with("Once upon a time"), "{whole}");
    // A stream has the same content, one token at a time, and ends with all fields.
    let mut streamed = request.clone();
    streamed["stream"] = true.into();
    let pieces: Vec<Value> = client.events_without_end("/completion", &streamed);
    let text: String = pieces.iter().map(|piece| piece["content"].as_str().unwrap()).collect();
    assert_eq!(text, whole["content"]);
    let (last, deltas) = pieces.split_last().unwrap();
    assert!(
        deltas.iter().all(|piece| piece["stop"] == false && piece["tokens"].as_array().unwrap().len() == 1)
    );
    assert_eq!((&last["stop"], &last["generation_settings"]["n_predict"]), (&json!(true), &json!(6)));
    // Requested fields only.
    let mut few = request.clone();
    few["response_fields"] = json!(["content", "generation_settings/n_predict"]);
    assert_eq!(
        native(&client, &few),
        json!({ "content": whole["content"], "generation_settings/n_predict": 6 })
    );
    // Probabilities of the sampling distribution.
    let mut after = with_sampling(&request);
    let sampled = native(&client, &after);
    for token in sampled["completion_probabilities"].as_array().unwrap() {
        let top = token["top_probs"].as_array().unwrap();
        let sum: f64 = top.iter().map(|top| top["prob"].as_f64().unwrap()).sum();
        assert!(top.len() == 3 && (sum - 1.0).abs() < 1e-5, "three candidates remain: {token}");
        assert!(top.iter().any(|top| top["id"] == token["id"] && top["prob"] == token["prob"]), "{token}");
    }
    after["temperature"] = 0.into();
    let sure = &native(&client, &after)["completion_probabilities"][0];
    assert_eq!((&sure["prob"], sure["top_probs"].as_array().unwrap().len()), (&json!(1.0), 1));
    // The reported stop string.
    let text = whole["content"].as_str().unwrap();
    let word = text.split_whitespace().nth(1).unwrap();
    let stopped =
        native(&client, &json!({ "prompt": "Once upon a time", "temperature": 0, "stop": ["\u{1}", word] }));
    assert_eq!((&stopped["stop_type"], &stopped["stopping_word"]), (&json!("word"), &json!(word)));
}

/// A stop string withholds tokens, which are reported all the same.
#[test]
fn token_ids_of_prompt_and_answer_are_returned() {
    let client = start(options());
    let params =
        json!({ "return_token_ids": true, "max_tokens": 12, "temperature": 0, "stop": ["of the nothing"] });
    let with = |mut body: Value, more: &[(&str, Value)]| {
        body.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
        more.iter().for_each(|(name, value)| body[*name] = value.clone());
        body
    };
    let ids = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let chat = json!({ "messages": [{ "role": "user", "content": "What is the capital of France?" }] });
    let (_, text) = client.post("/apply-template", &chat);
    let parsed = json!({ "content": text["prompt"], "add_special": false });
    let (_, tokens) = client.post("/tokenize", &parsed);
    let (_, whole) = client.post("/v1/chat/completions", &with(chat.clone(), &[]));
    let prompt = ids(&whole["prompt_token_ids"]);
    assert!(
        prompt.ends_with(&ids(&tokens["tokens"])) && whole["usage"]["prompt_tokens"] == prompt.len(),
        "{whole}"
    );
    let generated = ids(&whole["choices"][0]["token_ids"]);
    assert_eq!(whole["usage"]["completion_tokens"], generated.len());
    let pieces = client.stream("/v1/chat/completions", &with(chat, &[("stream", true.into())]));
    let of_prompt: Vec<Value> = pieces.iter().flat_map(|piece| ids(&piece["prompt_token_ids"])).collect();
    let streamed: Vec<Value> =
        pieces.iter().flat_map(|piece| ids(&piece["choices"][0]["token_ids"])).collect();
    assert_eq!((of_prompt, streamed), (prompt, generated));
    let request = json!({ "prompt": ["The sky is", "It"], "n": 2 });
    let (_, whole) = client.post("/v1/completions", &with(request.clone(), &[]));
    let pieces = client.stream("/v1/completions", &with(request, &[("stream", true.into())]));
    for choice in whole["choices"].as_array().unwrap() {
        let own =
            || pieces.iter().map(|piece| &piece["choices"][0]).filter(|own| own["index"] == choice["index"]);
        for name in ["prompt_token_ids", "token_ids"] {
            let streamed: Vec<Value> = own().flat_map(|own| ids(&own[name])).collect();
            assert!(!streamed.is_empty());
            assert_eq!(streamed, ids(&choice[name]), "{name}");
        }
    }
    let plain = client.post("/v1/completions", &json!({ "prompt": "It", "max_tokens": 1 })).1;
    assert!(plain["choices"][0]["prompt_token_ids"].is_null() && plain["choices"][0]["token_ids"].is_null());
}

fn with_sampling(body: &Value) -> Value {
    let mut body = body.clone();
    (body["post_sampling_probs"], body["temperature"]) = (true.into(), 1.5.into());
    (body["top_k"], body["top_p"], body["min_p"]) = (3.into(), 1.into(), 0.into());
    body
}

#[test]
fn an_answer_matches_its_gbnf_grammar() {
    let client = start(options());
    let grammar = "root ::= \"(\" (pair | root) \")\"\npair ::= [a-c]{2} (\",\" pair)?";
    for seed in 0..4 {
        let request =
            json!({ "prompt": "x", "grammar": grammar, "temperature": 2.0, "seed": seed, "n_predict": 200 });
        let answer = native(&client, &request);
        let text = answer["content"].as_str().unwrap();
        let inner = text.trim_start_matches('(');
        let depth = text.len() - inner.len();
        let pairs = inner.trim_end_matches(')');
        if answer["stop_type"] == "eos" {
            assert!(depth > 0 && inner.len() - pairs.len() == depth, "{text}");
            let is_pair = |pair: &str| pair.len() == 2 && pair.bytes().all(|b| (b'a'..=b'c').contains(&b));
            assert!(pairs.split(',').all(is_pair), "{text}");
        } else {
            assert!(!text.contains(|c: char| !"(),abc".contains(c)), "{text}");
        }
    }
    let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "grammar": "root ::= \"a\"{5,5}", "max_tokens": 9 });
    let (_, answer) = client.post("/v1/chat/completions", &chat);
    assert_eq!(answer["choices"][0]["message"]["content"], "aaaaa");
}

/// The template prints `reasoning_effort` and `enable_thinking`.
#[test]
fn enable_thinking_of_the_request_overrides_defaults() {
    let template = "{{ messages[0].content }}|{{ reasoning_effort }}|{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}";
    let open = |thinks: Option<bool>| {
        let open = OpenOptions {
            chat_template: Some(template.to_owned()),
            n_threads: Some(1),
            ..Default::default()
        };
        Client::at(start_with(open, Options { enable_thinking: thinks, ..options() }))
    };
    let render = |client: &Client, more: Value| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = client.post("/apply-template", &body);
        assert_eq!(status, 200, "{answer}");
        answer["prompt"].as_str().unwrap().to_lowercase()
    };
    let (plain, thinking) = (open(None), open(Some(true)));
    assert_eq!((render(&plain, json!({})), render(&thinking, json!({}))), ("hi||".into(), "hi||true".into()));
    for (more, expected) in [
        (json!({ "enable_thinking": false }), "hi||false"),
        (json!({ "reasoning_effort": "none" }), "hi||false"),
        (json!({ "reasoning_effort": "low" }), "hi|low|true"),
        (json!({ "thinking_budget_tokens": 0 }), "hi||false"),
        (
            json!({ "chat_template_kwargs": { "enable_thinking": false }, "enable_thinking": true }),
            "hi||false",
        ),
    ] {
        assert_eq!(render(&thinking, more.clone()), expected, "{more}");
    }
    let (status, error) = plain.post(
        "/apply-template",
        &json!({ "messages": [{ "role": "user", "content": "Hi" }], "enable_thinking": "yes" }),
    );
    assert!(
        status == 400 && error["error"]["message"].as_str().unwrap().contains("enable_thinking"),
        "{error}"
    );
}

/// Options with a template that starts every answer with reasoning.
fn always_reasoning() -> OpenOptions<'static> {
    let template = "{{ messages[0].content }}{# </think> #}<think>";
    OpenOptions { chat_template: Some(template.to_owned()), n_threads: Some(1), ..Default::default() }
}

#[test]
fn reasoning_ends_at_its_budget() {
    let client = |thinking_budget| {
        let drawing = SamplerParams::greedy().into();
        Client::at(start_with(
            always_reasoning(),
            Options { thinking_budget, sampling: drawing, ..options() },
        ))
    };
    let (free, bounded) = (client(None), client(Some(3)));
    let (_, end) = free.post("/tokenize", &json!({ "content": "</think>" }));
    let end = end["tokens"].as_array().unwrap().clone();
    let messages = json!([{ "role": "user", "content": "Once upon a time" }]);
    let complete = |client: &Client, more: Value| {
        let mut body =
            json!({ "messages": messages, "max_tokens": 24, "ignore_eos": true, "return_token_ids": true });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = client.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let choice = &answer["choices"][0];
        (choice["token_ids"].as_array().unwrap().clone(), choice["message"].clone())
    };
    let (unbounded, message) = complete(&free, json!({}));
    assert!(unbounded.len() == 24 && message["content"] == "", "{message}");
    for (client, more, budget) in [
        (&free, json!({ "thinking_budget_tokens": 5 }), Some(5)),
        (&free, json!({ "reasoning_budget_tokens": 0 }), Some(0)),
        (&bounded, json!({}), Some(3)),
        (&bounded, json!({ "thinking_token_budget": 4 }), Some(4)),
        (&bounded, json!({ "thinking_budget_tokens": -1 }), None),
        // With changes to logits, and probabilities after them.
        (
            &bounded,
            json!({ "presence_penalty": 1e-6, "logprobs": true, "post_sampling_probs": true }),
            Some(3),
        ),
    ] {
        let (tokens, message) = complete(client, more.clone());
        let n = budget.unwrap_or(24);
        assert_eq!(tokens[..n], unbounded[..n], "{more}");
        if let Some(n) = budget {
            assert_eq!(tokens[n..n + end.len()], end, "{more}");
            assert_ne!(message["content"], "", "{more}");
            assert_eq!(message["reasoning_content"].is_string(), n > 0, "{more}: {message}");
        }
    }
    let reasoning = complete(&free, json!({ "thinking_budget_tokens": 5 })).1["reasoning_content"].clone();
    let thinking = json!({ "type": "enabled", "budget_tokens": 5 });
    let (_, answer) =
        free.post("/v1/messages", &json!({ "messages": messages, "max_tokens": 24, "thinking": thinking }));
    assert_eq!(answer["content"][0]["thinking"], reasoning, "{answer}");
    // Reasoning tokens include the end mark.
    let body = json!({ "messages": messages, "max_tokens": 24, "thinking_budget_tokens": 5 });
    let (_, answer) = free.post("/v1/chat/completions", &body);
    let counted = &answer["usage"]["completion_tokens_details"]["reasoning_tokens"];
    assert_eq!(*counted, json!(5 + end.len()), "{answer}");
}

#[test]
fn a_constraint_applies_after_reasoning_only() {
    let client =
        Client::at(start_with(always_reasoning(), Options { thinking_budget: Some(3), ..options() }));
    let schema = json!({
        "type": "object",
        "properties": { "a": { "enum": [7] } },
        "required": ["a"],
        "additionalProperties": false,
    });
    let messages = json!([{ "role": "user", "content": "Once upon a time" }]);
    let format = json!({ "type": "json_schema", "json_schema": { "schema": schema } });
    let (_, answer) =
        client.post("/v1/chat/completions", &json!({ "messages": messages, "response_format": format }));
    let of_schema = &answer["choices"][0]["message"];
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": schema } });
    let (_, answer) = client.post(
        "/v1/chat/completions",
        &json!({ "messages": messages, "tools": [tool], "tool_choice": "required" }),
    );
    let of_call = &answer["choices"][0]["message"];
    for (message, text) in
        [(of_schema, &of_schema["content"]), (of_call, &of_call["tool_calls"][0]["function"]["arguments"])]
    {
        assert!(message["reasoning_content"].is_string(), "{message}");
        let value: Option<Value> = text.as_str().and_then(|text| serde_json::from_str(text).ok());
        assert_eq!(value, Some(json!({ "a": 7 })), "{message}");
    }
}

#[test]
fn prompts_are_texts_token_ids_and_mixed_lists() {
    let client = start(options());
    let (_, tokens) = client.post("/tokenize", &json!({ "content": "The sky is", "add_special": true }));
    let ids = tokens["tokens"].as_array().unwrap();
    let content = |prompt: Value| {
        let answer = native(&client, &json!({ "prompt": prompt, "n_predict": 4, "temperature": 0 }));
        match answer {
            Value::Array(all) => all.iter().map(|answer| answer["content"].clone()).collect(),
            one => vec![one["content"].clone()],
        }
    };
    let text = content(json!("The sky is"));
    assert_eq!(content(json!(ids)), text);
    assert_eq!(
        content(json!([ids, "The sky is", { "prompt_string": "The sky is" }])),
        [&text[..]; 3].concat()
    );
    let mut mixed = ids[..ids.len() - 1].to_vec();
    let (_, last) = client.post("/tokenize", &json!({ "content": " is" }));
    let is_one = last["tokens"].as_array().unwrap().len() == 1 && last["tokens"][0] == ids[ids.len() - 1];
    mixed.push(json!(" is"));
    assert!(!is_one || content(json!(mixed)) == text);
    for (body, words) in [
        (json!({ "prompt": { "prompt_string": "x", "multimodal_data": ["AAAA"] } }), "multimodal_data"),
        (json!({ "prompt": [1, true] }), "prompt"),
        (json!({ "prompt": [1, 99_999_999] }), "prompt"),
        (json!({ "prompt": "x", "tfs_z": 0.5 }), "tfs_z"),
        (json!({ "prompt": "x", "grammar": "root ::= (" }), "line 1"),
        (json!({ "prompt": "x", "grammar": "root ::= \"a\"", "guided_regex": "a" }), "two output"),
    ] {
        let (status, error) = client.post("/completion", &body);
        let message = error["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains(words), "{body}: {error}");
    }
    // Neutral values change nothing.
    let off = json!({ "prompt": "x", "n_predict": 1, "mirostat": 0, "typical_p": 1.0, "top_n_sigma": -1, "xtc_probability": 0 });
    native(&client, &off);
    let (status, error) = client.post("/infill", &json!({ "input_prefix": "a", "input_suffix": "b" }));
    assert!(
        status == 400 && error["error"]["message"].as_str().unwrap().contains("fill-in-the-middle"),
        "{error}"
    );
}

#[test]
fn prefill_progress_is_reported_from_the_start() {
    let client = start(options());
    let text: String = (0..200).map(|i| format!("{} is a number. ", i % 97)).collect();
    let request = json!({ "prompt": text, "n_predict": 1, "stream": true, "return_progress": true, "timings_per_token": true });
    for known in [false, true] {
        let pieces = client.events_without_end("/completion", &request);
        let progress: Vec<&Value> =
            pieces.iter().filter(|piece| piece["prompt_progress"].is_object()).collect();
        let (first, last) = (&progress[0]["prompt_progress"], &progress.last().unwrap()["prompt_progress"]);
        assert_eq!(first["cache"], first["processed"]);
        assert_eq!(first["cache"].as_u64().unwrap() > 0, known);
        assert_eq!(last["processed"], last["total"]);
        assert_eq!(
            (&progress[0]["timings"]["prompt_n"], &progress[0]["timings"]["prompt_ms"]),
            (&json!(0), &json!(0.0))
        );
    }
}

#[test]
fn metrics_are_served_in_the_requested_format() {
    let client = start(options());
    native(&client, &json!({ "prompt": "x", "n_predict": 2 }));
    let old = client.get_text("/metrics");
    assert!(
        old.contains("# TYPE llamacpp:tokens_predicted_total counter") && !old.contains("# EOF"),
        "{old}"
    );
    let (_, count) = client.post(
        "/v1/chat/completions/input_tokens",
        &json!({ "messages": [{ "role": "user", "content": "Hello" }] }),
    );
    assert!(count["input_tokens"].as_u64().unwrap() > 1, "{count}");
}

#[test]
fn a_kv_guard_reports_comparisons_if_it_is_on() {
    let count = |client: &Client, name: &str| -> u64 {
        let metrics = client.get_text("/metrics");
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)).expect("the metric");
        line.trim().parse().unwrap()
    };
    let names = ["error_ratio", "noise_ratio"].map(|name| format!("kvant:kv_guard_{name}_count"));
    for kv_guard in [false, true] {
        let open = OpenOptions { n_threads: Some(2), kv_guard, ..Default::default() };
        let client = Client::at(start_with(open, options()));
        // 32 steps per comparison, after the f16 window and 64 tokens more.
        native(&client, &json!({ "prompt": "x", "n_predict": 200, "ignore_eos": true }));
        for name in &names {
            assert_eq!(count(&client, name) > 0, kv_guard, "{name}");
        }
        assert_eq!(count(&client, "kvant:kv_guard_broken_total"), 0, "the bundled model is sound");
    }
}

#[test]
fn anthropic_responses_name_the_stop_sequence() {
    let client = start(options());
    let question = json!([{ "role": "user", "content": "What is the capital of France?" }]);
    let request = json!({ "max_tokens": 40, "temperature": 0, "stop_sequences": ["zzz", "capital"], "messages": question });
    let (_, answer) = client.post("/v1/messages", &request);
    assert_eq!(
        (&answer["stop_reason"], &answer["stop_sequence"]),
        (&json!("stop_sequence"), &json!("capital")),
        "{answer}"
    );
}

/// Returns JSON lines.
fn lines(client: &Client, path: &str, body: &Value) -> Vec<Value> {
    let (status, text) = client.post_text(path, &body.to_string());
    assert_eq!(status, 200, "{text}");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn ollama_responses_are_json_lines() {
    let client = start(options());
    let still = json!({ "temperature": 0, "num_predict": 30 });
    let request = json!({ "model": "pocket:latest", "options": still, "messages": [{ "role": "user", "content": "What is the capital of France?" }] });
    let answers = lines(&client, "/api/chat", &request);
    let (last, deltas) = answers.split_last().unwrap();
    let text: String = deltas.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert!(text.contains("Paris") && deltas.iter().all(|line| line["done"] == false), "{answers:?}");
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("stop")));
    assert!(last["eval_count"].as_u64().unwrap() > 3 && last["prompt_eval_count"].as_u64().unwrap() > 5);
    let mut whole = request.clone();
    whole["stream"] = false.into();
    let (_, answer) = client.post("/api/chat", &whole);
    assert_eq!((&answer["message"]["content"], &answer["done"]), (&json!(text), &json!(true)));
    // The same question without a conversation, and raw text.
    let (_, answer) = client.post(
        "/api/generate",
        &json!({ "prompt": "What is the capital of France?", "options": still, "stream": false }),
    );
    assert_eq!(answer["response"], text);
    let raw = json!({ "prompt": "Once upon a time", "raw": true, "options": still });
    let raw_text: String =
        lines(&client, "/api/generate", &raw).iter().map(|line| line["response"].as_str().unwrap()).collect();
    let native = native(&client, &json!({ "prompt": "Once upon a time", "n_predict": 30, "temperature": 0 }));
    assert_eq!(native["content"], raw_text);
    // Structured output, and a call.
    let schema = json!({ "type": "object", "properties": { "a": { "type": "boolean" } }, "required": ["a"], "additionalProperties": false });
    let mut formed = whole.clone();
    formed["format"] = schema;
    let (_, answer) = client.post("/api/chat", &formed);
    let value: Value = serde_json::from_str(answer["message"]["content"].as_str().unwrap()).unwrap();
    assert!(value["a"].is_boolean(), "{answer}");
    let history = json!({ "stream": false, "options": still, "messages": [
        { "role": "user", "content": "What time is it?" },
        { "role": "assistant", "content": "", "tool_calls": [{ "function": { "name": "clock", "arguments": { "zone": "UTC" } } }] },
        { "role": "tool", "tool_name": "clock", "content": "noon" },
    ] });
    assert_eq!(client.post("/api/chat", &history).0, 200);
    // Models, version and model information.
    assert_eq!(client.get("/api/tags").1["models"][0]["name"], "pocket");
    assert!(client.get("/api/version").1["version"].is_string());
    let (_, shown) = client.post("/api/show", &json!({ "model": "pocket" }));
    assert!(shown["model_info"]["general.parameter_count"].as_u64().unwrap() > 1000, "{shown}");
    assert_eq!(client.post("/api/chat", &json!({ "model": "pocket" })).1["done_reason"], "load");
    // Invalid messages and calls.
    for message in [json!([null, null]), json!(5), json!("a"), json!({ "tool_calls": [5] })] {
        let (status, error) = client.post("/api/chat", &json!({ "messages": [message] }));
        assert!(status == 400 && error["error"].is_string(), "{message}: {status} {error}");
    }
    for calls in [
        json!([5]),
        json!([{ "function": "clock" }]),
        json!([[]]),
        json!([{ "function": { "arguments": 5 } }]),
    ] {
        let assistant = json!({ "role": "assistant", "content": "", "tool_calls": calls });
        let user = json!({ "role": "user", "content": "Why?" });
        for (path, limit) in [("/api/chat", "options"), ("/v1/chat/completions", "max_tokens")] {
            let limits = if limit == "options" { json!({ "num_predict": 1 }) } else { json!(1) };
            let (status, text) = client
                .post_text(path, &json!({ "messages": [user, assistant, user], limit: limits }).to_string());
            assert!(status == 200 || status == 400, "{path} {calls}: {status} {text}");
        }
    }
    let (status, error) = client.post("/api/generate", &json!({ "prompt": 5 }));
    assert!(status == 400 && error["error"].as_str().unwrap().contains("prompt"), "{error}");
}

#[test]
fn tokenizer_info_matches_vllm() {
    let client = start(options());
    let tokens = |body: Value| client.post("/tokenize", &body).1["tokens"].as_array().cloned().unwrap();
    let bare = tokens(json!({ "prompt": "The sky is", "add_special_tokens": false }));
    assert_eq!(bare, tokens(json!({ "content": "The sky is" })));
    let (_, info) = client.get("/tokenizer_info");
    assert_eq!(info["tokenizer_class"], "gpt2", "{info}");
    let end = tokens(json!({ "prompt": info["eos_token"], "add_special_tokens": false }));
    assert_eq!(end.len(), 1, "{info}");
    let whole = tokens(json!({ "prompt": "The sky is" }));
    assert_eq!(whole.len(), bare.len() + usize::from(info["add_bos_token"] == true), "{info}");
    assert_eq!(client.post("/detokenize", &json!({ "tokens": bare })).1["prompt"], "The sky is");
    // Special tokens are restored too.
    let written = format!("The sky{}is", info["eos_token"].as_str().unwrap());
    let special = tokens(json!({ "content": written }));
    assert!(special.contains(&end[0]), "{special:?}");
    assert_eq!(client.post("/detokenize", &json!({ "tokens": special })).1["content"], written);
}

/// Alone and in a batch, with random sampling and with a constraint: answers with draft tokens
/// equal those without, and `timings` reports the drafts.
#[test]
fn draft_tokens_change_no_answer() {
    let client = |draft_max, draft| {
        Client::at(start_with(
            OpenOptions { draft, ..Default::default() },
            Options { draft_max, ..options() },
        ))
    };
    let draft = || Some(Arc::new(Model::bundled_file().unwrap()));
    let clients = [client(Some(0), None), client(None, None), client(None, draft())];
    let list = "one two three four five six seven, ".repeat(8);
    let form = json!({ "type": "array", "items": { "type": "string", "enum": ["red", "green"] }, "minItems": 12, "maxItems": 12 });
    for body in [
        json!({ "prompt": list, "n_predict": 80, "temperature": 0, "ignore_eos": true }),
        json!({ "prompt": list, "n_predict": 80, "temperature": 1.5, "seed": 4, "ignore_eos": true }),
        json!({ "prompt": [list, "Once upon a time", list], "n_predict": 60, "temperature": 0, "ignore_eos": true }),
        json!({ "prompt": "Colours: ", "n_predict": 120, "temperature": 0.5, "seed": 2, "json_schema": form }),
    ] {
        let [plain, default, drafted] = clients.each_ref().map(|client| {
            let (status, answer) = client.post("/completion", &body);
            assert_eq!(status, 200, "{answer}");
            answer.as_array().cloned().unwrap_or_else(|| vec![answer])
        });
        let texts = |answers: &[Value]| answers.iter().map(|one| one["content"].clone()).collect::<Vec<_>>();
        assert!(plain.iter().all(|one| one["timings"].get("draft_n").is_none()));
        for drafted in [default, drafted] {
            assert_eq!(texts(&drafted), texts(&plain), "{body}");
            let count =
                |name: &str| drafted.iter().filter_map(|one| one["timings"][name].as_u64()).sum::<u64>();
            let (read, accepted) = (count("draft_n"), count("draft_n_accepted"));
            assert!(accepted <= read, "{accepted} of {read}");
            assert!(accepted > 0 || body["temperature"] == 1.5, "{body}: no draft token of {read} accepted");
        }
    }
}
