//! Prometheus metrics, under the names of llama.cpp's server and vLLM.

use std::sync::Mutex;

use kvant::TOKENS_PER_BLOCK;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::status::Status;

/// Label of `vllm:cache_config_info`: a name and a count.
type KvBlockLabel = (&'static str, u64);

/// Metrics of all models. See the [module](self).
#[derive(Debug)]
pub(crate) struct Metrics {
    pub prompt_tokens: Counter,
    pub cached_tokens: Counter,
    pub looked_up_tokens: Counter,
    pub generated_tokens: Counter,
    pub steps: Counter,
    pub finished: Counter,
    pub cancelled: Counter,
    pub preempted: Counter,
    pub refused: Counter,
    pub kv_fetched_bytes: Counter,
    pub kv_fetch_failures: Counter,
    pub first_token: Histogram,
    pub next_token: Histogram,
    pub whole_answer: Histogram,
    pub guard_error: Histogram,
    pub guard_noise: Histogram,
    pub guard_broken: Counter,
    running: Gauge,
    waiting: Gauge,
    parked_now: Gauge,
    kv_bytes: Gauge,
    kv_ram_bytes: Gauge,
    kv_disk_bytes: Gauge,
    kv_usage: Gauge<f64, std::sync::atomic::AtomicU64>,
    kv_blocks: Family<[KvBlockLabel; 2], Gauge>,
    registry: Mutex<Registry>,
}

/// Returns a histogram whose bounds double.
fn doubling(first: f64, n: u16) -> Histogram {
    Histogram::new((0..n).map(move |i| first * f64::from(1u32 << i)))
}

impl Metrics {
    pub fn new() -> Self {
        let metrics = Self {
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            looked_up_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            steps: Counter::default(),
            finished: Counter::default(),
            cancelled: Counter::default(),
            preempted: Counter::default(),
            refused: Counter::default(),
            kv_fetched_bytes: Counter::default(),
            kv_fetch_failures: Counter::default(),
            first_token: doubling(0.002, 16),
            next_token: doubling(0.001, 14),
            whole_answer: doubling(0.02, 16),
            guard_error: doubling(1.0 / 1024.0, 12),
            guard_noise: doubling(1.0 / 16.0, 12),
            guard_broken: Counter::default(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            parked_now: Gauge::default(),
            kv_bytes: Gauge::default(),
            kv_ram_bytes: Gauge::default(),
            kv_disk_bytes: Gauge::default(),
            kv_usage: Gauge::default(),
            kv_blocks: Family::default(),
            registry: Mutex::new(Registry::default()),
        };
        metrics.name();
        metrics
    }

    fn name(&self) {
        let mut registry = self.registry.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut counter =
            |name: &str, help: &str, counter: &Counter| registry.register(name, help, counter.clone());
        for family in ["llamacpp", "vllm"] {
            counter(&format!("{family}:prompt_tokens"), "Prompt tokens processed", &self.prompt_tokens);
        }
        counter("llamacpp:prompt_tokens_cached", "Prompt tokens from the prefix cache", &self.cached_tokens);
        counter("llamacpp:tokens_predicted", "Generated tokens", &self.generated_tokens);
        counter("vllm:generation_tokens", "Generated tokens", &self.generated_tokens);
        counter("llamacpp:n_decode", "Forward passes of the model", &self.steps);
        counter("vllm:prefix_cache_hits", "Prompt tokens from the prefix cache", &self.cached_tokens);
        counter("vllm:prefix_cache_queries", "Prompt tokens looked up there", &self.looked_up_tokens);
        counter("vllm:request_success", "Completed answers", &self.finished);
        counter("kvant:requests_cancelled", "Requests cancelled by clients", &self.cancelled);
        counter("kvant:requests_refused", "Requests refused for lack of room", &self.refused);
        counter("kvant:kv_fetched_bytes", "Bytes of KV caches from prefill workers", &self.kv_fetched_bytes);
        let help = "KV caches that could not be fetched: the prompt was read here";
        counter("kvant:kv_fetch_failures", help, &self.kv_fetch_failures);
        counter("vllm:num_preemptions", "Preemptions", &self.preempted);
        let help = "KV heads with a score error beyond what their type promised";
        counter("kvant:kv_guard_broken", help, &self.guard_broken);
        let mut gauge = |name: &str, help: &str, gauge: &Gauge| registry.register(name, help, gauge.clone());
        gauge("llamacpp:requests_processing", "Running answers", &self.running);
        gauge("vllm:num_requests_running", "Running answers", &self.running);
        gauge("llamacpp:requests_deferred", "Queued answers", &self.waiting);
        gauge("vllm:num_requests_waiting", "Queued answers", &self.waiting);
        gauge("kvant:requests_parked", "Preempted answers", &self.parked_now);
        gauge("kvant:kv_bytes", "Bytes of all KV caches, shared blocks once", &self.kv_bytes);
        gauge("kvant:kv_ram_bytes", "Bytes of conversations offloaded to host memory", &self.kv_ram_bytes);
        gauge("kvant:kv_disk_bytes", "Bytes of conversations offloaded to files", &self.kv_disk_bytes);
        for name in ["llamacpp:kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"] {
            registry.register(name, "Used share of the KV cache budget", self.kv_usage.clone());
        }
        let config = "Tokens per KV block, and blocks of the first model's share of the budget";
        registry.register("vllm:cache_config_info", config, self.kv_blocks.clone());
        let mut histogram =
            |name: &str, help: &str, of: &Histogram| registry.register(name, help, of.clone());
        histogram("vllm:time_to_first_token_seconds", "Time to first token (TTFT)", &self.first_token);
        histogram("vllm:inter_token_latency_seconds", "Inter-token latency (ITL)", &self.next_token);
        histogram("vllm:e2e_request_latency_seconds", "End-to-end latency of an answer", &self.whole_answer);
        let help = "Relative error of a KV head's attention over codes";
        histogram("kvant:kv_guard_error_ratio", help, &self.guard_error);
        let help = "Variance of a KV head's score error, relative to the promised one";
        histogram("kvant:kv_guard_noise_ratio", help, &self.guard_noise);
    }

    /// Sets the KV blocks that routers divide prompts and budgets by.
    pub fn set_kv_blocks(&self, n_blocks: u64) {
        let labels = [("block_size", TOKENS_PER_BLOCK as u64), ("num_gpu_blocks", n_blocks)];
        self.kv_blocks.get_or_create(&labels).set(1);
    }

    /// Returns all metrics in OpenMetrics' text format.
    pub fn text(&self, status: &Status) -> String {
        let counts = status.counts;
        self.running.set((counts.prefill + counts.decode) as i64);
        self.waiting.set(counts.waiting as i64);
        self.parked_now.set(counts.preempted as i64);
        self.kv_bytes.set(status.kv_bytes as i64);
        self.kv_ram_bytes.set(status.store.ram as i64);
        self.kv_disk_bytes.set(status.store.disk as i64);
        self.kv_usage.set(status.kv_bytes as f64 / status.budget.max(1) as f64);
        let mut text = String::new();
        let registry = self.registry.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Writing to a string does not fail.
        _ = encode(&mut text, &registry);
        text
    }
}

/// Converts OpenMetrics text to Prometheus' older format, where a counter has the same name in all
/// lines and no line marks the end.
pub(crate) fn to_prometheus_text(text: &str) -> String {
    let is_counter = |name: &str| text.contains(&format!("# TYPE {name} counter\n"));
    let mut lines = String::with_capacity(text.len());
    for line in text.lines().filter(|line| *line != "# EOF") {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", kind @ ("TYPE" | "HELP"), name, rest] if is_counter(name) => {
                lines += &format!("# {kind} {name}_total {rest}\n");
            }
            _ => lines = lines + line + "\n",
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_scrapers_find_each_counter_by_the_name_of_its_type() {
        let text = Metrics::new().text(&Status::default());
        let older = to_prometheus_text(&text);
        assert!(text.ends_with("# EOF\n") && !older.contains("# EOF"));
        assert!(older.contains("# TYPE llamacpp:prompt_tokens_total counter\n"), "{older}");
        assert!(older.contains("# HELP llamacpp:prompt_tokens_total Prompt"), "{older}");
        assert!(older.contains("# TYPE llamacpp:requests_processing gauge\n"), "{older}");
        for line in older.lines().filter(|line| !line.starts_with('#')) {
            assert!(text.contains(line), "{line}");
        }
    }
}
