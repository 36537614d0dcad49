//! The devices that this machine may have. A new one is a line in [`trials`].

use std::sync::Arc;

use kvant_backend::Backend;
use kvant_conformance::{Arithmetic, OPS, Subject, Suite, suites};
use kvant_cpu::{CpuDevice, Isa};
use libtest_mimic::{Completion, Trial};

/// Threads of a CPU device: more than one, so that work is shared out.
const THREADS: usize = 2;

/// The kernel sets of CPUs, and how each multiplies coded weights.
const CPU_SETS: [(&str, &str, Arithmetic); 4] = [
    ("scalar", "cpu-scalar", Arithmetic::Float),
    ("avx2", "cpu-avx2", Arithmetic::EightBit),
    ("avxvnni", "cpu-avxvnni", Arithmetic::EightBit),
    ("avx512", "cpu-avx512", Arithmetic::EightBit),
];

/// What is known to be wrong, until it is mended: device, op and reason. Ignored and counted, never passed.
const KNOWN_FAULTS: [(&str, &str, &str); 3] = [
    ("cpu-avx2", "no_rows", PANICS_ON_NO_ROWS),
    ("cpu-avxvnni", "no_rows", PANICS_ON_NO_ROWS),
    ("cpu-avx512", "no_rows", PANICS_ON_NO_ROWS),
];
const PANICS_ON_NO_ROWS: &str =
    "products from panels panic on no rows: no tile is filled, then tiles of 8 are asked for";

/// A trial for each device and op.
pub fn trials() -> Vec<Trial> {
    let available = Isa::available();
    let cpus = CPU_SETS.into_iter().flat_map(|(set, name, arithmetic)| {
        match available.iter().find(|isa| isa.name() == set) {
            Some(&isa) => present(name, arithmetic, CpuDevice::new(isa, THREADS)),
            None => absent(name, &format!("this CPU has no {set}")),
        }
    });
    let unknown = available.iter().filter(|isa| CPU_SETS.iter().all(|(set, ..)| *set != isa.name()));
    let unknown: Vec<_> = unknown.map(|isa| isa.name()).collect();
    assert!(unknown.is_empty(), "kernel sets that no suite runs: {unknown:?}");
    cpus.collect()
}

/// Every suite on `device`.
fn present<B: Backend>(name: &'static str, arithmetic: Arithmetic, device: B) -> Vec<Trial> {
    let subject = Arc::new(Subject::new(name, device, arithmetic));
    let trial = |suite: Suite<B>| {
        let fault = KNOWN_FAULTS.into_iter().find(|(device, op, _)| (*device, *op) == (name, suite.op));
        if let Some((.., reason)) = fault {
            return ignored(name, suite.op, reason);
        }
        let subject = subject.clone();
        Trial::test(format!("{name}::{}", suite.op), move || {
            (suite.run)(&subject);
            Ok(())
        })
    };
    suites().into_iter().map(trial).collect()
}

/// Every suite ignored because of `reason`.
fn absent(name: &'static str, reason: &str) -> Vec<Trial> {
    OPS.into_iter().map(|op| ignored(name, op, reason)).collect()
}

/// A trial that does not run because of `reason`, and says so in the way that `.ci/run` counts.
fn ignored(name: &str, op: &str, reason: &str) -> Trial {
    let (trial, reason) = (format!("{name}::{op}"), reason.to_owned());
    Trial::ignorable_test(trial.clone(), move || {
        eprintln!("skipped: {trial}: {reason}");
        Ok(Completion::ignored_with(reason))
    })
}
