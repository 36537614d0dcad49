//! Several models, request ids, and web pages of other origins.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::client::{options, start};
use kvant::{DType, KvOptions, Model, OpenOptions, SamplerParams};
use kvant_server::{ModelSpec, OpenedModel, Options};
use serde_json::{Value, json};

/// Returns the bundled model under another name, and a counter of its loads.
fn offer(name: &str, bytes: u64) -> (ModelSpec, Arc<AtomicUsize>) {
    let loads = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&loads);
    let open = move || {
        counted.fetch_add(1, Ordering::Relaxed);
        let model = Model::bundled(OpenOptions { n_threads: Some(1), ..Default::default() });
        let model = model.map_err(|error| error.to_string())?;
        let sampling = SamplerParams { temperature: 0.0, top_k: 7, ..Default::default() }.into();
        Ok(OpenedModel { model, kv: KvOptions::symmetric(DType::Q8_0), sampling })
    };
    (ModelSpec { name: name.to_owned(), bytes, open: Arc::new(open) }, loads)
}

fn request(model: &str) -> Value {
    json!({ "model": model, "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0 })
}

#[test]
fn models_are_loaded_on_demand_and_evicted_for_others() {
    let own = Model::bundled(OpenOptions::default()).unwrap().weight_bytes() as u64;
    let (second, n_second) = offer("second", own);
    let (third, n_third) = offer("third", own);
    let (huge, n_huge) = offer("huge", 100 * own);
    let client = start(Options { others: vec![second, third, huge], weight_budget: 2 * own, ..options() });
    let loads = || [&n_second, &n_third].map(|n| n.load(Ordering::Relaxed));
    let text = |model: &str| {
        let (status, answer) = client.post("/v1/completions", &request(model));
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["model"], model);
        answer["choices"][0]["text"].clone()
    };
    let first = text("pocket");
    assert_eq!(loads(), [0, 0]);
    let (_, models) = client.get("/v1/models");
    let names: Vec<&Value> = models["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(names, ["pocket", "second", "third", "huge"]);
    assert_eq!(models["data"][1]["status"]["value"], "unloaded");
    // The caches differ, the models do not.
    let second = text("second");
    assert_eq!((loads(), text("second")), ([1, 0], second.clone()));
    assert_eq!(client.get("/v1/models/second").1["status"]["value"], "loaded");
    // Each model has its own sampling defaults, which a request overrides.
    let (_, sampled) = client.post(
        "/v1/completions",
        &json!({ "model": "second", "prompt": "Once upon a time", "max_tokens": 6 }),
    );
    assert_eq!(sampled["choices"][0]["text"], second);
    let settings = |model: &str, field: &str| {
        let body = json!({ "model": model, "prompt": "x", "n_predict": 1, "top_p": 0.5 });
        client.post("/completion", &body).1["generation_settings"][field].clone()
    };
    let usual = SamplerParams::default();
    assert_eq!((settings("second", "top_k"), settings("second", "top_p")), (json!(7), json!(0.5)));
    assert_eq!((settings("pocket", "top_k"), settings("pocket", "top_p")), (json!(usual.top_k), json!(0.5)));
    assert_eq!((text("third"), loads()), (second.clone(), [1, 1]));
    assert_eq!(client.get("/v1/models/second").1["status"]["value"], "unloaded");
    assert_eq!((text("second"), loads()), (second, [2, 1]));
    assert_eq!(text("pocket"), first);
    let (status, error) = client.post("/v1/completions", &request("fourth"));
    let message = error["error"]["message"].as_str().unwrap();
    assert!(status == 404 && message.contains("'fourth'") && message.contains("'third'"), "{error}");
    let (status, error) = client.post("/v1/completions", &request("huge"));
    assert_eq!((status, n_huge.load(Ordering::Relaxed)), (503, 0), "{error}");
}

/// Both models are requested at once while only one fits: one waits at most for the other's answer.
#[test]
fn a_model_that_is_in_use_is_not_unloaded() {
    let own = Model::bundled(OpenOptions::default()).unwrap().weight_bytes() as u64;
    let (second, n_second) = offer("second", own);
    let (third, n_third) = offer("third", own);
    let client = start(Options { others: vec![second, third], weight_budget: 2 * own, ..options() });
    let mut slow = request("second");
    (slow["stream"], slow["ignore_eos"], slow["max_tokens"]) = (true.into(), true.into(), 100_000.into());
    let stream = client.send("/v1/completions", &slow);
    client.wait_for("/kv", |kv| kv["running"] == 1);
    let (status, error) = client.post("/v1/completions", &request("third"));
    assert_eq!((status, &error["error"]["type"]), (503, &json!("unavailable_error")), "{error}");
    drop(stream);
    client.wait_for("/kv", |kv| kv["running"] == 0);
    let (status, answer) = client.post("/v1/completions", &request("third"));
    assert_eq!(status, 200, "{answer}");
    assert_eq!([n_second, n_third].map(|n| n.load(Ordering::Relaxed)), [1, 1]);
}

#[test]
fn two_requests_at_once_load_a_model_once() {
    let (second, loads) = offer("second", 1);
    let client = start(Options { others: vec![second], ..options() });
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| client.post("/v1/completions", &request("second")).1["choices"].clone()))
            .collect();
        let answers: Vec<Value> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    });
    assert_eq!(loads.load(Ordering::Relaxed), 1);
}

#[test]
fn a_response_carries_the_request_id() {
    let client = start(options());
    let head = |named: &str| {
        client.raw(&format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{named}Connection: close\r\n\r\n"))
    };
    let name = |head: &str| {
        let line = head.lines().find_map(|line| line.strip_prefix("x-request-id: ")).map(str::to_owned);
        line.unwrap_or_else(|| panic!("{head}"))
    };
    assert_eq!(name(&head("X-Request-Id: mine-17\r\n")), "mine-17");
    let own = name(&head(""));
    assert!(own.starts_with("req_") && own != name(&head("")), "{own}");
    // Ids that could be misread in a log are replaced.
    assert!(name(&head("X-Request-Id: two words\r\n")).starts_with("req_"));
    assert!(name(&head(&format!("X-Request-Id: {}\r\n", "x".repeat(200)))).starts_with("req_"));
    let missing = client
        .raw("POST /nothing HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: lost\r\nConnection: close\r\n\r\n");
    assert!(missing.starts_with("HTTP/1.1 404") && name(&missing) == "lost", "{missing}");
}

#[test]
fn only_pages_of_allowed_origins_may_send_requests() {
    let preflight = |origin: &str| {
        format!(
            "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\nConnection: close\r\n\
             Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n\r\n"
        )
    };
    let get = |origin: &str| {
        format!("GET /health HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\nConnection: close\r\n\r\n")
    };
    const ALLOWED: &str = "access-control-allow-origin: ";
    let closed = start(options());
    let refused = closed.raw(&get("https://chat.example"));
    assert!(refused.starts_with("HTTP/1.1 403") && !refused.contains(ALLOWED), "{refused}");
    assert!(!closed.raw(&preflight("https://chat.example")).contains(ALLOWED));
    let keys = vec!["secret".to_owned()];
    let origins = vec!["https://chat.example".to_owned()];
    let some = start(Options { origins, api_keys: keys, ..options() });
    // A browser's preflight carries no key.
    let head = some.raw(&preflight("https://chat.example"));
    assert!(
        head.starts_with("HTTP/1.1 200") && head.contains("access-control-allow-headers: authorization"),
        "{head}"
    );
    assert!(head.contains("access-control-allow-origin: https://chat.example"), "{head}");
    assert!(!some.raw(&preflight("https://evil.example")).contains(ALLOWED));
    let all = start(Options { origins: vec!["*".to_owned()], ..options() });
    assert!(all.raw(&get("https://evil.example")).contains("access-control-allow-origin: *"));
}

#[test]
fn invalid_origins_and_hosts_are_rejected_by_name() {
    let model = Model::bundled(OpenOptions { n_threads: Some(1), ..Default::default() }).unwrap();
    for origin in ["chat.example", "https://", "https://a/b", "https://*.example"] {
        let options = Options { origins: vec![origin.to_owned()], ..options() };
        let error = kvant_server::serve(model.clone(), options, |_| ()).unwrap_err().to_string();
        assert!(error.contains(origin) && error.lines().count() == 1, "{error}");
    }
    for host in ["", "https://box.example", "box.example:80", "*"] {
        let options = Options { allowed_hosts: vec![host.to_owned()], ..options() };
        let error = kvant_server::serve(model.clone(), options, |_| ()).unwrap_err().to_string();
        assert_eq!(error, format!("expected the name of a host such as box.example, got {host}"));
    }
}
