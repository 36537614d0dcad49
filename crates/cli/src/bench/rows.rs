//! Benchmark results as rows: llama-bench's columns with Kvant's, or the short form for terminals.

use kvant::Model;
use serde_json::{Value, json};

use super::measure::{Sample, Test};
use crate::output::{self, Row};

/// A test and its result.
pub struct Measured<'a> {
    pub name: &'a str,
    pub model: &'a Model,
    pub test: Test,
    pub measured: Sample,
    /// Read bandwidth of the machine in bytes per second, if measured.
    pub bandwidth: Option<f64>,
    pub real_fill: bool,
}

impl Measured<'_> {
    /// Returns the machine-readable row, with stable names.
    pub fn full(&self) -> Row {
        let (device, sample) = (self.model.device(), &self.measured);
        let read = self.bytes_per_token();
        let read_gbs = read.map(|bytes| bytes as f64 * self.mean() / 1e9);
        let share = self.bandwidth.zip(read_gbs).map(|(bandwidth, gbs)| gbs * 1e9 / bandwidth);
        row([
            ("model", self.name.into()),
            ("size", self.model.weight_bytes().into()),
            ("params", self.model.n_params().into()),
            ("backend", device.name.into()),
            ("kernels", device.kernels.into()),
            ("n_threads", device.n_threads.into()),
            ("type_k", sample.type_k.into()),
            ("type_v", sample.type_v.into()),
            ("n_prompt", self.test.n_prompt.into()),
            ("n_gen", self.test.n_gen.into()),
            ("n_depth", self.test.n_depth.into()),
            ("fill", self.fill().into()),
            ("avg_ts", self.mean().into()),
            ("stddev_ts", self.deviation().into()),
            ("samples_ts", json!(sample.tps)),
            ("kv_bytes", sample.kv_bytes.into()),
            ("bytes_per_token", read.map_or(Value::Null, Value::from)),
            ("read_gbs", read_gbs.map_or(Value::Null, Value::from)),
            ("bandwidth_gbs", self.bandwidth.map_or(Value::Null, |b| (b / 1e9).into())),
            ("of_bandwidth", share.map_or(Value::Null, Value::from)),
            ("commit", COMMIT.unwrap_or("unknown").into()),
        ])
    }

    /// Returns the short row: llama-bench's columns.
    pub fn short(&self) -> Row {
        let (device, sample) = (self.model.device(), &self.measured);
        let mut cells = row([
            ("model", self.name.into()),
            ("size", output::bytes(self.model.weight_bytes()).into()),
            ("params", params(self.model.n_params()).into()),
            ("backend", format!("{} {}", device.name, device.kernels).into()),
            ("threads", device.n_threads.into()),
            ("type_k", sample.type_k.into()),
            ("type_v", sample.type_v.into()),
            ("test", self.test.name().into()),
            ("t/s", format!("{:.2} ± {:.2}", self.mean(), self.deviation()).into()),
        ]);
        if let Some(bandwidth) = self.bandwidth {
            let limit = self.bytes_per_token().map_or(String::new(), |bytes| {
                let gbs = bytes as f64 * self.mean() / 1e9;
                format!("{gbs:.1} of {:.1} GB/s ({:.0} %)", bandwidth / 1e9, 100.0 * gbs * 1e9 / bandwidth)
            });
            cells.insert("reads".to_owned(), limit.into());
        }
        cells
    }

    fn fill(&self) -> &'static str {
        match (self.test.n_depth, self.real_fill) {
            (0, _) => "none",
            (_, true) => "real",
            (_, false) => "random",
        }
    }

    /// Returns the bytes that decoding one token reads: the weights and the cache. `None` for
    /// prefill, which reads weights once for many tokens.
    fn bytes_per_token(&self) -> Option<usize> {
        (self.test.n_gen > 0).then(|| self.model.weight_bytes_per_token() + self.measured.kv_bytes)
    }

    fn mean(&self) -> f64 {
        self.measured.tps.iter().sum::<f64>() / self.measured.tps.len() as f64
    }

    /// Returns the sample standard deviation; 0 for a single repetition.
    fn deviation(&self) -> f64 {
        let (mean, n) = (self.mean(), self.measured.tps.len());
        let squares: f64 = self.measured.tps.iter().map(|tps| (tps - mean).powi(2)).sum();
        if n > 1 { (squares / (n - 1) as f64).sqrt() } else { 0.0 }
    }
}

/// Commit that this program was built from; `None` outside a checkout.
pub const COMMIT: Option<&str> = option_env!("KVANT_COMMIT");

fn row<const N: usize>(cells: [(&str, Value); N]) -> Row {
    cells.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Formats a parameter count: `4.63 M`, `1.54 B`.
fn params(n: usize) -> String {
    let n = n as f64;
    if n < 1e9 { format!("{:.2} M", n / 1e6) } else { format!("{:.2} B", n / 1e9) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_parameter_counts_are_formatted() {
        assert_eq!(params(4_630_000), "4.63 M");
        assert_eq!(params(1_543_714_304), "1.54 B");
    }
}
