//! Sampling parameters of requests: every API applies them, and each answer has its own sampler
//! state.

use crate::client::{Client, options, start};
use kvant_server::Options;
use serde_json::{Value, json};

fn with(mut body: Value, more: &Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn complete(client: &Client, body: &Value) -> Value {
    let (status, answer) = client.post("/completion", body);
    assert_eq!(status, 200, "{body}: {answer}");
    answer
}

/// Returns a request whose only filter is top-k of 5.
fn plain() -> Value {
    json!({ "prompt": "Once upon a time", "n_predict": 1, "temperature": 1, "top_k": 5, "top_p": 1, "min_p": 0, "seed": 3 })
}

/// Returns the sampling probabilities of a token, in descending order.
fn probabilities(client: &Client, more: &Value) -> Vec<f64> {
    let body = with(with(plain(), &json!({ "n_probs": 100, "post_sampling_probs": true })), more);
    let answer = complete(client, &body);
    let top = answer["completion_probabilities"][0]["top_probs"].as_array().unwrap();
    top.iter().map(|token| token["prob"].as_f64().unwrap()).collect()
}

fn assert_law(got: &[f64], want: &[f64]) {
    let is_close =
        got.len() == want.len() && got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-4);
    assert!(is_close, "{got:?}, not {want:?}");
}

#[test]
fn every_sampler_of_llama_cpp_changes_the_probabilities() {
    let client = start(options());
    let usual = probabilities(&client, &json!({}));
    assert!(usual.len() == 5 && (usual.iter().sum::<f64>() - 1.0).abs() < 1e-4, "{usual:?}");
    for off in [
        json!({ "typical_p": 1, "top_n_sigma": -1, "xtc_probability": 0, "dynatemp_range": 0, "dry_multiplier": 0, "mirostat": 0 }),
        json!({ "xtc_probability": 1, "xtc_threshold": 0.6 }),
        json!({ "mirostat_tau": -3, "dry_base": 0, "dynatemp_exponent": -1 }),
    ] {
        assert_eq!(probabilities(&client, &off), usual, "{off}");
    }
    assert_law(&probabilities(&client, &json!({ "typical_p": 0 })), &[1.0]);
    assert_law(&probabilities(&client, &json!({ "top_n_sigma": 1e-6 })), &[1.0]);
    // From the second token on, as the first is above the threshold.
    let threshold = (usual[1] + usual[2]) / 2.0;
    let left: f64 = usual[1..].iter().sum();
    let without_first: Vec<f64> = usual[1..].iter().map(|p| p / left).collect();
    assert_law(
        &probabilities(&client, &json!({ "xtc_probability": 1, "xtc_threshold": threshold })),
        &without_first,
    );
    // Temperature 1.5 at any entropy.
    let flat: Vec<f64> = usual.iter().map(|p| p.powf(1.0 / 1.5)).collect();
    let flat: Vec<f64> = flat.iter().map(|p| p / flat.iter().sum::<f64>()).collect();
    assert_law(&probabilities(&client, &json!({ "dynatemp_range": 0.5, "dynatemp_exponent": 0 })), &flat);
    // Mirostat uses no top-k.
    assert_law(&probabilities(&client, &json!({ "mirostat": 2, "mirostat_tau": 0 })), &[1.0]);
    for version in [1, 2] {
        let many = probabilities(&client, &json!({ "mirostat": version, "mirostat_tau": 20 }));
        assert!(many.len() > 5, "{version}: {many:?}");
    }
}

/// Returns how much DRY lowers the logit of c in token ids where b occurs twice and was followed by
/// c.
fn lowered(client: &Client, middle: &str, more: &Value) -> f64 {
    let token = |text: &str| {
        let (_, tokens) = client.post("/tokenize", &json!({ "content": text }));
        assert_eq!(tokens["tokens"].as_array().unwrap().len(), 1, "{tokens}");
        tokens["tokens"][0].as_u64().unwrap()
    };
    let (a, b, c) = (token("the"), token(middle), token("and"));
    let odds = |multiplier: f64| {
        let settings = json!({ "prompt": [a, b, c, a, b], "logit_bias": [[c, 20.0]], "dry_multiplier": multiplier, "top_k": 0 });
        let likeliest = probabilities(client, &with(settings, more))[0];
        (likeliest / (1.0 - likeliest)).ln()
    };
    odds(0.0) - odds(5.0)
}

#[test]
fn dry_lowers_what_repeats_the_prompt_and_stops_at_its_breakers() {
    let client = start(options());
    let lowered = |middle: &str, more: Value| lowered(&client, middle, &more);
    let is = |got: f64, want: f64| assert!((got - want).abs() < 0.05, "{got}, not {want}");
    is(lowered("of", json!({})), 5.0);
    is(lowered("of", json!({ "dry_allowed_length": 1 })), 5.0 * 1.75);
    is(lowered("of", json!({ "dry_allowed_length": 1, "dry_base": 1.25 })), 5.0 * 1.25);
    is(lowered("of", json!({ "dry_allowed_length": 3 })), 0.0);
    is(lowered("of", json!({ "dry_penalty_last_n": 4 })), 0.0);
    is(lowered("of", json!({ "dry_penalty_last_n": -1 })), 5.0);
    is(lowered("of", json!({ "dry_sequence_breakers": ["f"] })), 0.0);
    // Breakers of two tokens.
    is(lowered("of", json!({ "dry_sequence_breakers": ["heo"] })), 0.0);
    is(lowered("of", json!({ "dry_sequence_breakers": ["hexo"] })), 5.0);
    // The default breakers, and none.
    is(lowered(":", json!({})), 0.0);
    is(lowered(":", json!({ "dry_sequence_breakers": [] })), 5.0);
}

#[test]
fn every_api_with_samplers_applies_them() {
    let client = start(options());
    let messages = json!([{ "role": "user", "content": "Tell me of the sea." }]);
    let chat = |more: Value| {
        let body = json!({ "messages": messages, "max_tokens": 12, "temperature": 1.5, "seed": 1 });
        let (status, answer) = client.post("/v1/chat/completions", &with(body, &more));
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["message"]["content"].clone()
    };
    let text = |more: Value| {
        let body = json!({ "prompt": "The sea", "max_tokens": 12, "temperature": 1.5, "seed": 1 });
        let (status, answer) = client.post("/v1/completions", &with(body, &more));
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].clone()
    };
    let ollama = |path: &str, body: Value, more: Value| {
        let options = with(json!({ "num_predict": 12, "temperature": 1.5, "seed": 1 }), &more);
        let (status, answer) =
            client.post(path, &with(body, &json!({ "options": options, "stream": false })));
        assert_eq!(status, 200, "{answer}");
        answer.get("response").cloned().unwrap_or(answer["message"]["content"].clone())
    };
    // Mirostat with tau 0 selects the most probable token at any temperature, and typical-p 0 the
    // first of the most typical ones.
    let sure = || json!({ "mirostat": 2, "mirostat_tau": 0, "mirostat_eta": 0 });
    let greedy = || json!({ "temperature": 0 });
    let typical = |seed: i32| json!({ "typical_p": 0, "seed": seed });
    let apis: [&dyn Fn(Value) -> Value; 4] =
        [&chat, &text, &|more| ollama("/api/chat", json!({ "messages": messages }), more), &|more| {
            ollama("/api/generate", json!({ "prompt": "Tell me of the sea." }), more)
        }];
    for (index, generate) in apis.into_iter().enumerate() {
        let likeliest = generate(greedy());
        assert_eq!(generate(sure()), likeliest, "{index}");
        assert_ne!(generate(json!({})), likeliest, "{index}");
        assert_eq!(generate(typical(1)), generate(typical(2)), "{index}");
        // XTC removes all probable tokens but the last, also at temperature 0.
        assert_ne!(
            generate(with(greedy(), &json!({ "xtc_probability": 1, "xtc_threshold": 0, "min_p": 0.01 }))),
            likeliest
        );
    }
}

#[test]
fn invalid_sampler_settings_are_rejected_by_name() {
    let client = start(options());
    for (field, value, words) in [
        ("typical_p", json!(1.5), "from 0 to 1"),
        ("typical_p", json!("much"), "a number"),
        ("xtc_probability", json!(-0.1), "from 0 to 1"),
        ("xtc_threshold", json!(7), "from 0 to 1"),
        ("dry_multiplier", json!(-1), "from 0 up"),
        ("dry_base", json!(0.5), "from 1 up"),
        ("dry_allowed_length", json!(-2), "from 0 up"),
        ("dry_penalty_last_n", json!(1.5), "a whole number"),
        ("dry_sequence_breakers", json!("\n"), "a list of texts"),
        ("dry_sequence_breakers", json!(["\n", ""]), "1 to 256 bytes"),
        ("dry_sequence_breakers", json!(["x".repeat(257)]), "1 to 256 bytes"),
        ("dry_sequence_breakers", json!(vec!["x"; 65]), "at most 64"),
        ("mirostat", json!(3), "0, 1 or 2"),
        ("mirostat", json!(true), "0, 1 or 2"),
        ("mirostat_tau", json!(-1), "from 0 up"),
        ("mirostat_eta", json!(-1), "from 0 up"),
        ("dynatemp_range", json!(-1), "from 0 up"),
        ("dynatemp_exponent", json!(-1), "from 0 up"),
        ("tfs_z", json!(0.5), "not supported"),
        ("adaptive_target", json!(0.5), "not supported"),
    ] {
        // Every sampler is enabled, so that all settings are validated.
        let on = json!({ "xtc_probability": 0.1, "dry_multiplier": 1, "mirostat": 1, "dynatemp_range": 1 });
        let more = with(on, &json!({ field: value }));
        let options = json!({ "model": "pocket", "prompt": "x", "options": more });
        for (path, body) in [("/completion", with(plain(), &more)), ("/api/generate", options)] {
            let (status, error) = client.post(path, &body);
            let message = error.to_string();
            assert!(
                status == 400 && message.contains(field) && message.contains(words),
                "{path}, {more}: {error}"
            );
        }
    }
}

#[test]
fn generation_settings_report_the_request() {
    let client = start(options());
    let params = json!({
        "typical_p": 0.5, "top_n_sigma": 2.0, "xtc_probability": 0.25, "xtc_threshold": 0.125, "dry_multiplier": 0.75, "dry_base": 1.5,
        "dry_allowed_length": 3, "dry_penalty_last_n": -1, "dry_sequence_breakers": ["!"], "dynatemp_range": 0.5,
        "dynatemp_exponent": 2.0, "mirostat": 1, "mirostat_tau": 4.0, "mirostat_eta": 0.5, "repeat_last_n": -1,
    });
    let settings = complete(&client, &with(plain(), &params))["generation_settings"].clone();
    for (name, value) in params.as_object().unwrap() {
        assert_eq!(&settings[name], value, "{name}");
    }
    let usual = &client.get("/props").1["default_generation_settings"]["params"];
    // Defaults of llama.cpp's documentation.
    for (name, value) in [
        ("typical_p", json!(1.0)),
        ("top_n_sigma", json!(-1.0)),
        ("xtc_probability", json!(0.0)),
        ("dry_multiplier", json!(0.0)),
        ("dry_base", json!(1.75)),
        ("dry_allowed_length", json!(2)),
        ("dry_penalty_last_n", json!(64)),
        ("dynatemp_range", json!(0.0)),
        ("dynatemp_exponent", json!(1.0)),
        ("mirostat", json!(0)),
        ("mirostat_tau", json!(5.0)),
    ] {
        assert_eq!(usual[name], value, "{name}");
    }
}

/// Returns the parameters of all samplers that depend on earlier tokens.
fn with_state() -> Vec<Value> {
    let dry_and_xtc = json!({ "dry_multiplier": 0.4, "dry_penalty_last_n": -1, "xtc_probability": 0.3 });
    let mirostat = |version: i32| json!({ "mirostat": version, "mirostat_tau": 2.5, "mirostat_eta": 0.5 });
    vec![dry_and_xtc.clone(), mirostat(1), with(mirostat(2), &dry_and_xtc)]
}

#[test]
fn each_answer_of_a_request_has_its_own_sampler_state() {
    let client = start(options());
    let texts = |seed: usize, n: usize, more: &Value| -> Vec<Value> {
        let body = json!({ "prompt": "One two three one two", "max_tokens": 60, "ignore_eos": true, "n": n, "seed": seed });
        let (status, answer) = client.post("/v1/completions", &with(body, more));
        assert_eq!(status, 200, "{answer}");
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].clone()).collect()
    };
    for more in with_state() {
        let alone: Vec<Value> = (5..8).map(|seed| texts(seed, 1, &more).remove(0)).collect();
        assert_eq!(texts(5, 3, &more), alone, "{more}");
        assert_ne!(alone[0], alone[1]);
    }
}

/// Draft tokens are accepted during sampling, and preempted requests resume with their state.
#[test]
fn drafts_and_preemption_keep_the_sampler_state() {
    let body = |i: usize, more: &Value| {
        let body = json!({ "prompt": format!("Story {i}: one two three, one two three, one"), "n_predict": 250, "ignore_eos": true, "seed": i });
        with(body, more)
    };
    let plain = start(Options { draft_max: Some(0), ..options() });
    let few = start(Options { kv_budget: 3 << 19, draft_max: Some(4), ..options() });
    let bodies: Vec<Value> = (0..6).map(|i| body(i, &with_state()[i % 3])).collect();
    let expected: Vec<Value> = bodies.iter().map(|body| complete(&plain, body)).collect();
    assert!(expected.iter().all(|answer| answer["timings"]["draft_n"].as_u64().unwrap_or(0) == 0));
    let alone = complete(&few, &bodies[0]);
    assert!(alone["timings"]["draft_n"].as_u64().unwrap() > 0, "{}", alone["timings"]);
    assert_eq!(alone["content"], expected[0]["content"]);
    std::thread::scope(|scope| {
        let threads: Vec<_> = bodies.iter().map(|body| scope.spawn(|| complete(&few, body))).collect();
        for (thread, expected) in threads.into_iter().zip(&expected) {
            assert_eq!(thread.join().unwrap()["content"], expected["content"]);
        }
    });
    let metrics = few.get_text("/metrics");
    let parked = metrics.lines().find_map(|line| line.strip_prefix("vllm:num_preemptions_total ")).unwrap();
    assert!(parked.parse::<usize>().unwrap() > 0, "no sequence was preempted");
}
