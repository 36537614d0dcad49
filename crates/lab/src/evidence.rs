//! Evidence that kernels are right on this machine: the conformance suites, as a report.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};
use std::time::Instant;

use kvant_backend::Backend;
use kvant_codec::DType;
use kvant_codec::random::Random;
use kvant_conformance::{CPU_SETS, Coverage, DeviceUnderTest, OPS, suites};
use kvant_linear::{Activations, LinearError, Products, quantize_weights};
use serde_json::{Value, json};

use crate::device::{Visitor, open};
use crate::subject::Settings;

/// One suite on one device.
#[derive(Debug, Clone, PartialEq)]
pub struct Trial {
    /// The device: a kernel set of the CPU, or a GPU.
    pub device: String,
    /// The suite: an op, or an aspect of it.
    pub suite: String,
    /// What came of it.
    pub outcome: Outcome,
    /// Seconds that it took.
    pub seconds: f64,
}

/// What came of a suite.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// All cases hold; the text says which were left out, if any.
    Pass(Option<String>),
    /// The first wrong value, or another fault.
    Fail(String),
    /// Why the suite cannot run here.
    Blocked(String),
}

/// GPUs whose suites run where they are present.
const GPUS: [&str; 2] = ["cuda:0", "wgpu:0"];
/// Threads of CPU devices: work is divided.
const THREADS: usize = 2;

/// Returns the number of trials of [`evidence`].
pub fn n_trials() -> usize {
    (CPU_SETS.len() + GPUS.len()) * OPS.len() + FLOAT_BOUNDS.len()
}

/// Runs every suite on every kernel set of this CPU and on its GPUs, and passes each trial to
/// `report`: minutes of work.
pub fn evidence(report: &mut dyn FnMut(&Trial)) -> Vec<Trial> {
    let cpus = CPU_SETS.map(|set| (set.name, "cpu", Some(set.isa)));
    let devices = cpus.into_iter().chain(GPUS.map(|gpu| (gpu, gpu, None)));
    let mut trials = Vec::new();
    let mut keep = |trial: Trial| {
        report(&trial);
        trials.push(trial);
    };
    for (name, device, isa) in devices {
        let settings = Settings { device: device.to_owned(), isa, threads: THREADS };
        if let Err(reason) = open(&settings, AllSuites { name, keep: &mut keep }) {
            for op in OPS {
                let outcome = Outcome::Blocked(reason.clone());
                keep(Trial { device: name.to_owned(), suite: (*op).to_owned(), outcome, seconds: 0.0 });
            }
        }
    }
    for (dtype, bound) in FLOAT_BOUNDS {
        let started = Instant::now();
        let outcome = caught(|| float_error(dtype, bound)).unwrap_or_else(Outcome::Fail);
        let (device, suite) = ("cpu-scalar".to_owned(), format!("gemv_quantized {dtype}"));
        keep(Trial { device, suite, outcome, seconds: started.elapsed().as_secs_f64() });
    }
    trials
}

/// Returns the report in JSON.
pub fn to_json(trials: &[Trial]) -> Value {
    let count = |is: fn(&Outcome) -> bool| trials.iter().filter(|trial| is(&trial.outcome)).count();
    let line = |Trial { device, suite, outcome, seconds }: &Trial| {
        let (status, reason) = match outcome {
            Outcome::Pass(skipped) => ("pass", skipped.as_deref()),
            Outcome::Fail(reason) => ("fail", Some(reason.as_str())),
            Outcome::Blocked(reason) => ("blocked", Some(reason.as_str())),
        };
        json!({ "device": device, "suite": suite, "status": status, "reason": reason, "seconds": seconds })
    };
    json!({
        "pass": count(|outcome| matches!(outcome, Outcome::Pass(_))),
        "fail": count(|outcome| matches!(outcome, Outcome::Fail(_))),
        "blocked": count(|outcome| matches!(outcome, Outcome::Blocked(_))),
        "trials": trials.iter().map(line).collect::<Vec<_>>(),
    })
}

/// Runs all suites on a device.
struct AllSuites<'a> {
    name: &'static str,
    keep: &'a mut dyn FnMut(Trial),
}

impl Visitor for AllSuites<'_> {
    const COVERAGE: Coverage = Coverage::Each;

    fn visit<B: Backend>(self, device: &DeviceUnderTest<B>) -> Result<(), String> {
        for suite in suites::<B>() {
            let started = Instant::now();
            let outcome = match caught(|| (suite.run)(device)) {
                Ok(skipped) => Outcome::Pass(skipped.reason()),
                Err(reason) => Outcome::Fail(reason),
            };
            let (device, suite) = (self.name.to_owned(), suite.op.to_owned());
            (self.keep)(Trial { device, suite, outcome, seconds: started.elapsed().as_secs_f64() });
        }
        Ok(())
    }
}

/// Runs `work`; the error is the first line of its panic.
fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| ()));
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    panic::set_hook(hook);
    result.map_err(|panic| text_of(&*panic).lines().next().unwrap_or_default().to_owned())
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or(panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a message")
}

/// The largest error of a product with float activations, relative to the root mean square of the
/// exact results.
const FLOAT_BOUNDS: [(DType, f64); 2] = [(DType::Q4_0, 2e-4), (DType::Q8_0, 1e-4)];

/// Compares products with float activations with sums in f64 over the decoded weights.
fn float_error(dtype: DType, bound: f64) -> Outcome {
    const SHAPE: [usize; 2] = [257, 4096];
    const ROWS: usize = 3;
    let [n_out, n_in] = SHAPE;
    let gaussian = |seed, n, sigma| {
        let mut values = vec![0.0; n];
        Random::new(seed).fill_gaussian(&mut values, sigma);
        values
    };
    let (weights, x) = (gaussian(1, n_out * n_in, 0.02), gaussian(2, ROWS * n_in, 1.0));
    let run = || -> Result<Outcome, LinearError> {
        let bytes = quantize_weights(dtype, &weights, SHAPE)?;
        let mut w = vec![0.0; n_out * n_in];
        kvant_codec::decode(dtype, &bytes, &mut w)?;
        let products = Products::on_cpu(Activations::Float, Some(THREADS))?;
        let mut y = vec![f32::NAN; ROWS * n_out];
        products.gemv_quantized(&products.load(dtype, SHAPE, bytes)?, &x, &mut y)?;
        let dot = |(w, x): (&[f32], &[f32])| -> f64 {
            w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum()
        };
        let rows = x.chunks_exact(n_in);
        let want: Vec<f64> = rows.flat_map(|x| w.chunks_exact(n_in).map(move |w| dot((w, x)))).collect();
        let rms = (want.iter().map(|v| v * v).sum::<f64>() / want.len() as f64).sqrt();
        let off = |(got, want): (&f32, &f64)| (f64::from(*got) - want).abs() / rms;
        // NaN is no small error.
        let is_right = y.iter().zip(&want).all(|pair| off(pair) <= bound);
        let max = y.iter().zip(&want).map(off).fold(0.0, f64::max);
        let line = format!("error {max:.1e} of the root mean square, bound {bound:.0e}");
        Ok(if is_right { Outcome::Pass(Some(line)) } else { Outcome::Fail(line) })
    };
    run().unwrap_or_else(|error| Outcome::Fail(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_fault_and_the_report_counts_it() {
        assert_eq!(caught(|| 7), Ok(7));
        assert_eq!(
            caught(|| -> u8 { panic!("cpu: project: row 3: got NaN\nmore") }),
            Err("cpu: project: row 3: got NaN".to_owned())
        );
        let trial =
            |outcome| Trial { device: "cpu".to_owned(), suite: "project".to_owned(), outcome, seconds: 0.5 };
        let outcomes =
            [Outcome::Pass(None), Outcome::Fail("NaN".to_owned()), Outcome::Blocked("no AMX".to_owned())];
        let json = to_json(&outcomes.map(trial));
        assert_eq!([&json["pass"], &json["fail"], &json["blocked"]], [1, 1, 1]);
        assert_eq!(
            (&json["trials"][1]["status"], &json["trials"][1]["reason"]),
            (&json!("fail"), &json!("NaN"))
        );
        assert_eq!(json["trials"][0]["reason"], Value::Null);
    }

    #[test]
    fn float_products_keep_their_bound_and_a_smaller_one_fails() {
        for (dtype, bound) in FLOAT_BOUNDS {
            assert!(matches!(float_error(dtype, bound), Outcome::Pass(Some(_))), "{dtype}");
            assert!(matches!(float_error(dtype, 1e-9), Outcome::Fail(_)), "{dtype}");
        }
    }
}
