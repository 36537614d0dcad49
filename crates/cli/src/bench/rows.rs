//! Benchmark results as rows: llama-bench's columns with Kvant's, or the short form for terminals.

use kvant::Model;
use serde_json::{Value, json};

use super::measure::{Outcome, Sample, Test};
use crate::output::{self, Row};

/// A test and its result.
pub struct Measured<'a> {
    pub name: &'a str,
    pub model: &'a Model,
    pub test: Test,
    pub type_k: &'static str,
    pub type_v: &'static str,
    pub outcome: Outcome,
    /// Whether some test of the table has several sequences.
    pub is_batched: bool,
    /// Read bandwidth of the machine in bytes per second, if measured.
    pub bandwidth: Option<f64>,
    pub real_fill: bool,
}

impl Measured<'_> {
    /// Returns the machine-readable row, with stable names.
    pub fn full(&self) -> Row {
        let (device, sample) = (self.model.device(), self.sample());
        let read = sample.and_then(|sample| self.bytes_per_token(sample));
        let read_gbs = read.zip(sample).map(|(bytes, sample)| bytes as f64 * sample.mean() / 1e9);
        let share = self.bandwidth.zip(read_gbs).map(|(bandwidth, gbs)| gbs * 1e9 / bandwidth);
        let n_fit = match self.outcome {
            Outcome::Measured(_) => None,
            Outcome::TooLarge { n_fit } => Some(n_fit),
        };
        let mean = sample.map(Sample::mean);
        row([
            ("model", self.name.into()),
            ("size", self.model.weight_bytes().into()),
            ("params", self.model.n_params().into()),
            ("backend", device.name.into()),
            ("kernels", device.kernels.into()),
            ("n_threads", device.n_threads.into()),
            ("type_k", self.type_k.into()),
            ("type_v", self.type_v.into()),
            ("n_prompt", self.test.n_prompt.into()),
            ("n_gen", self.test.n_gen.into()),
            ("n_depth", self.test.n_depth.into()),
            ("n_parallel", self.test.n_parallel.into()),
            ("fill", self.fill().into()),
            ("avg_ts", json!(mean)),
            ("stddev_ts", json!(sample.map(Sample::deviation))),
            ("samples_ts", json!(sample.map(|sample| &sample.tps))),
            ("avg_ts_per_sequence", json!(mean.map(|mean| mean / self.test.n_parallel as f64))),
            ("n_fit", json!(n_fit)),
            ("kv_bytes", json!(sample.map(|sample| sample.kv_bytes))),
            ("bytes_per_token", json!(read)),
            ("read_gbs", json!(read_gbs)),
            ("bandwidth_gbs", json!(self.bandwidth.map(|b| b / 1e9))),
            ("of_bandwidth", json!(share)),
            ("commit", COMMIT.unwrap_or("unknown").into()),
        ])
    }

    /// Returns the short row: llama-bench's columns.
    pub fn short(&self) -> Row {
        let device = self.model.device();
        let mut cells = row([
            ("model", self.name.into()),
            ("size", output::bytes(self.model.weight_bytes()).into()),
            ("params", params(self.model.n_params()).into()),
            ("backend", format!("{} {}", device.name, device.kernels).into()),
            ("threads", device.n_threads.into()),
            ("type_k", self.type_k.into()),
            ("type_v", self.type_v.into()),
            ("test", self.test.name().into()),
            ("t/s", self.speed().into()),
        ]);
        if self.is_batched {
            let of = |cell: &dyn Fn(&Sample) -> String| self.sample().map_or(String::new(), cell);
            let per_sequence =
                |sample: &Sample| format!("{:.2}", sample.mean() / self.test.n_parallel as f64);
            cells.insert("t/s per sequence".to_owned(), of(&per_sequence).into());
            cells.insert("KV".to_owned(), of(&|sample| output::bytes(sample.kv_bytes)).into());
        }
        if let Some(bandwidth) = self.bandwidth {
            let limit = self.sample().and_then(|sample| {
                let gbs = self.bytes_per_token(sample)? as f64 * sample.mean() / 1e9;
                let share = 100.0 * gbs * 1e9 / bandwidth;
                Some(format!("{gbs:.1} of {:.1} GB/s ({share:.0} %)", bandwidth / 1e9))
            });
            cells.insert("reads".to_owned(), limit.unwrap_or_default().into());
        }
        cells
    }

    fn sample(&self) -> Option<&Sample> {
        match &self.outcome {
            Outcome::Measured(sample) => Some(sample),
            Outcome::TooLarge { .. } => None,
        }
    }

    /// Returns `12.34 ± 0.56`, or how many sequences fit.
    fn speed(&self) -> String {
        match &self.outcome {
            Outcome::Measured(sample) => format!("{:.2} ± {:.2}", sample.mean(), sample.deviation()),
            Outcome::TooLarge { n_fit } => format!("too large: {n_fit} fit"),
        }
    }

    fn fill(&self) -> &'static str {
        match (self.test.n_depth, self.real_fill) {
            (0, _) => "none",
            (_, true) => "real",
            (_, false) => "random",
        }
    }

    /// Returns the bytes read per decoded token: its share of the weights, and its cache. `None`
    /// for prefill, which reads weights once for many tokens.
    fn bytes_per_token(&self, sample: &Sample) -> Option<usize> {
        let of_step = self.model.weight_bytes_per_token() + sample.kv_bytes;
        (self.test.n_gen > 0).then(|| of_step / self.test.n_parallel)
    }
}

impl Sample {
    /// Returns the mean tokens per second.
    fn mean(&self) -> f64 {
        self.tps.iter().sum::<f64>() / self.tps.len() as f64
    }

    /// Returns the sample standard deviation; 0 for a single repetition.
    fn deviation(&self) -> f64 {
        let (mean, n) = (self.mean(), self.tps.len());
        let squares: f64 = self.tps.iter().map(|tps| (tps - mean).powi(2)).sum();
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
