//! The devices of this machine. A new device is a line in [`trials`].

use std::sync::Arc;

use kvant_backend::Backend;
use kvant_conformance::{CPU_SETS, Coverage, CpuSet, DeviceUnderTest, OPS, Suite, suites};
use kvant_cpu::{CpuDevice, Isa};
use libtest_mimic::{Completion, Trial};

/// Threads of a CPU device: more than one, so that work is divided.
const THREADS: usize = 2;

/// Returns a trial per device and op.
pub fn trials() -> Vec<Trial> {
    let available = Isa::available();
    let cpus = CPU_SETS.into_iter().flat_map(|CpuSet { isa: set, name, arithmetic, attention }| {
        match available.iter().find(|isa| isa.name() == set) {
            Some(&isa) => {
                let device = CpuDevice::new(isa, THREADS).unwrap();
                // All combinations on the most common set and on the best one of this CPU.
                let is_run = set == "avx2" || available.last() == Some(&isa);
                let coverage = if is_run { Coverage::Every } else { Coverage::Each };
                present(DeviceUnderTest::new(name, device, arithmetic, attention).with_coverage(coverage))
            }
            None => absent(name, &format!("this CPU has no {set}")),
        }
    });
    let unknown = available.iter().filter(|isa| CpuSet::of(isa.name()).is_none());
    let unknown: Vec<_> = unknown.map(|isa| isa.name()).collect();
    assert!(unknown.is_empty(), "kernel sets that no suite runs: {unknown:?}");
    cpus.collect()
}

/// Returns every suite on a device.
fn present<B: Backend>(subject: DeviceUnderTest<B>) -> Vec<Trial> {
    let subject = Arc::new(subject);
    let trial = |suite: Suite<B>| {
        let (subject, trial) = (subject.clone(), format!("{}::{}", subject.name(), suite.op));
        Trial::ignorable_test(trial.clone(), move || {
            let outcome = (suite.run)(&subject);
            let Some(reason) = outcome.reason() else { return Ok(Completion::Completed) };
            let skipped = skipped(&trial, reason);
            // All requested cases have run, unless some were rejected.
            Ok(if outcome.has_refused() { skipped } else { Completion::Completed })
        })
    };
    suites().into_iter().map(trial).collect()
}

/// Returns every suite, ignored because of `reason`.
fn absent(name: &'static str, reason: &str) -> Vec<Trial> {
    let ignored = |op| {
        let (trial, reason) = (format!("{name}::{op}"), reason.to_owned());
        Trial::ignorable_test(trial.clone(), move || Ok(skipped(&trial, reason)))
    };
    OPS.iter().map(ignored).collect()
}

/// Marks a trial as incomplete because of `reason`, in the format that `.ci/run` counts.
fn skipped(trial: &str, reason: String) -> Completion {
    eprintln!("skipped: {trial}: {reason}");
    Completion::ignored_with(reason)
}
