//! What gateways ask of a model server: llm-d's contract (its page "Model Servers", 0.8), by the
//! names of vLLM, which it expects of pods without the label `llm-d.ai/engine-type`.

use serde_json::json;

use crate::client::{Client, options, start};
use crate::http::{chat, with};

/// Returns the type of a metric and its only sample, with its labels.
fn metric(client: &Client, name: &str) -> Metric {
    let text = client.get_text("/metrics");
    let kind = text.lines().find_map(|line| line.strip_prefix(&format!("# TYPE {name} ")));
    let sample = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
    let mut samples = text.lines().filter(sample);
    let (Some(kind), Some(line), None) = (kind, samples.next(), samples.next()) else {
        panic!("{name} has no type, or not one sample: {text}");
    };
    let (labels, value) = line[name.len()..].rsplit_once(' ').unwrap();
    Metric { kind: kind.to_owned(), labels: labels.to_owned(), value: value.parse().unwrap() }
}

struct Metric {
    kind: String,
    labels: String,
    value: f64,
}

/// Asserts that a metric is a gauge of this value, which no label splits.
#[track_caller]
fn assert_gauge(client: &Client, name: &str, value: f64) {
    let metric = metric(client, name);
    assert_eq!((&metric.kind[..], &metric.labels[..], metric.value), ("gauge", "", value), "{name}");
}

#[test]
fn llm_ds_picker_reads_load_and_health() {
    let client = start(kvant_server::Options { n_running: 1, ..options() });
    assert_eq!(client.get("/health").0, 200);
    assert_gauge(&client, "vllm:kv_cache_usage_perc", 0.0);
    let endless = with(chat("Tell me a story."), json!({ "ignore_eos": true, "stream": true }));
    let first = client.send("/v1/chat/completions", &endless);
    client.wait_for("/kv", |kv| kv["running"] == 1 && kv["bytes"].as_u64() > Some(0));
    let second = client.send("/v1/chat/completions", &endless);
    client.wait_for("/kv", |kv| kv["waiting"] == 1);
    assert_gauge(&client, "vllm:num_requests_running", 1.0);
    assert_gauge(&client, "vllm:num_requests_waiting", 1.0);
    let used = metric(&client, "vllm:kv_cache_usage_perc");
    assert!(used.kind == "gauge" && (0.0..1.0).contains(&used.value) && used.value > 0.0, "{}", used.value);
    drop((first, second));
}

#[test]
fn llm_ds_picker_reads_the_size_and_number_of_blocks() {
    let mut counts = Vec::new();
    for factor in [1, 2] {
        let options = options();
        let kv_budget = factor * options.kv_budget;
        let client = start(kvant_server::Options { kv_budget, ..options });
        let blocks = metric(&client, "vllm:cache_config_info");
        assert_eq!((&blocks.kind[..], blocks.value), ("gauge", 1.0));
        let labels = blocks.labels.trim_matches(['{', '}']);
        let count = labels.strip_prefix("block_size=\"128\",num_gpu_blocks=\"");
        counts.push(count.unwrap_or_else(|| panic!("{labels}")).trim_matches('"').parse::<u64>().unwrap());
    }
    let [one, two] = counts[..] else { unreachable!() };
    assert!(one > 0 && (2 * one..=2 * one + 1).contains(&two), "{counts:?}");
}

#[test]
fn two_counters_give_the_share_of_cached_prompt_tokens() {
    let client = start(options());
    let ask = || client.post("/v1/completions", &json!({ "prompt": vec![7; 600], "max_tokens": 1 }));
    ask();
    let counts = || {
        ["vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"]
            .map(|name| metric(&client, name).value)
    };
    assert_eq!(counts(), [0.0, 600.0]);
    client.wait_for("/kv", |kv| kv["idle"] == 1);
    ask();
    let [hits, queries] = counts();
    assert!(queries == 1200.0 && (512.0..600.0).contains(&hits), "{hits} of {queries}");
}
