//! The devices of this machine. A new device is a line in [`trials`].

use std::sync::Arc;

use kvant_backend::Backend;
use kvant_codec::DType;
use kvant_conformance::{Arithmetic, Attention, Coverage, DeviceUnderTest, OPS, Suite, suites};
use kvant_cpu::{CpuDevice, Isa};
use libtest_mimic::{Completion, Trial};

/// Threads of a CPU device: more than one, so that work is divided.
const THREADS: usize = 2;

/// The kernel sets of CPUs, with their arithmetic of GEMMs and of attention.
const CPU_SETS: [(&str, &str, Arithmetic, Attention); 10] = [
    ("scalar", "cpu-scalar", Arithmetic::Float, Attention::Exact),
    // Its 16-bit sums must not saturate.
    ("avx2", "cpu-avx2", Arithmetic::EightBit, SHORT_BYTES),
    // A software matrix unit, with these vector kernels.
    ("soft", "cpu-soft", Arithmetic::EightBit, SHORT_BYTES),
    ("avxvnni", "cpu-avxvnni", Arithmetic::EightBit, WHOLE_BYTES),
    ("avx512", "cpu-avx512", Arithmetic::EightBit, WHOLE_BYTES),
    ("avx512vbmi", "cpu-avx512vbmi", Arithmetic::EightBit, WHOLE_BYTES),
    ("amx", "cpu-amx", Arithmetic::EightBit, WHOLE_BYTES),
    ("neon", "cpu-neon", Arithmetic::EightBit, WHOLE_BYTES),
    ("i8mm", "cpu-i8mm", Arithmetic::EightBit, WHOLE_BYTES),
    ("simd128", "cpu-simd128", Arithmetic::EightBit, WHOLE_BYTES),
];
/// V types whose weights may have one byte of 127 steps, and of 255.
const COARSE: [DType; 3] = [DType::Turbo2, DType::Turbo3, DType::Turbo2T];
const TURBO: [DType; 5] = [DType::Turbo2, DType::Turbo3, DType::Turbo4, DType::Turbo2T, DType::Turbo3T];
const SHORT_BYTES: Attention = Attention::Integers { byte: 64.0, split: 8191.0, dithered: (127.0, &COARSE) };
const WHOLE_BYTES: Attention = Attention::Integers { byte: 127.0, split: 32639.0, dithered: (255.0, &TURBO) };

/// Returns a trial per device and op.
pub fn trials() -> Vec<Trial> {
    let available = Isa::available();
    let cpus = CPU_SETS.into_iter().flat_map(|(set, name, arithmetic, attention)| {
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
    let unknown = available.iter().filter(|isa| CPU_SETS.iter().all(|(set, ..)| *set != isa.name()));
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
