//! The conformance suites on the interpreter of PTX, and by the same code on a card where there is one.

use kvant_conformance::{Arithmetic, Attention, Coverage, OPS, Subject, suites};

use crate::emulator::{self, skipped};
use crate::{CudaDevice, product};

/// What the kernels promise of their numbers.
fn subject(name: &'static str, device: CudaDevice) -> Subject<CudaDevice> {
    let arithmetic = Arithmetic::Halves { from: product::MANY_ROWS };
    // Chunks of a prompt that are cut elsewhere may be walked by another kernel.
    Subject::new(name, device, arithmetic, Attention::Halves).whose_rows_lean_on_each_other()
}

/// The interpreter, which takes thousands of times longer than a card: each edge size once. `None` where there is no NVRTC.
pub(crate) fn on_emulator(arch: u32) -> Option<Subject<CudaDevice>> {
    Some(subject("cuda-ptx", emulator::device(arch)?).with_coverage(Coverage::Each))
}

/// The variable that has a card tried on each edge size once, with the value `each`, where it would be on all of their
/// combinations: these compile hundreds of kernels, which takes minutes.
const COVERAGE: &str = "KVANT_CUDA_COVERAGE";

fn coverage() -> Coverage {
    match std::env::var(COVERAGE).ok().as_deref() {
        None => Coverage::Every,
        Some("each") => Coverage::Each,
        Some(other) => panic!("{COVERAGE}: expected each, got {other}"),
    }
}

/// The first card; `None` where there is none.
fn on_card() -> Option<Subject<CudaDevice>> {
    match CudaDevice::open(0) {
        Ok(device) => Some(subject("cuda", device).with_coverage(coverage())),
        Err(error) => {
            skipped(&error);
            None
        }
    }
}

/// Runs the suite `op`, and says what it leaves out.
pub(crate) fn hold(subject: Option<Subject<CudaDevice>>, op: &str) {
    let Some(subject) = subject else { return };
    let suites = suites();
    let suite = suites.iter().find(|suite| suite.op == op).expect("a suite of this name");
    if let Some(reason) = (suite.run)(&subject).reason() {
        skipped(&reason);
    }
}

/// A test for each suite, on the interpreter as a machine of some compute capability, and on the card.
macro_rules! tests {
    ($($op:ident: $arch:literal,)*) => {
        mod ptx {
            $(
                #[test]
                fn $op() {
                    super::hold(super::on_emulator($arch), stringify!($op));
                }
            )*
        }

        mod card {
            $(
                #[test]
                fn $op() {
                    super::hold(super::on_card(), stringify!($op));
                }
            )*
        }

        #[test]
        fn every_suite_has_its_tests() {
            assert_eq!([$(stringify!($op)),*], OPS);
        }
    };
}

tests! {
    buffers: 80,
    matrix: 80,
    embed: 80,
    project: 80,
    gated_ffn: 90,
    expert_ffn: 80,
    expert_ffn_types: 90,
    project_each: 80,
    copy_columns: 80,
    gate_rows: 80,
    add_normed: 80,
    layer_norm: 80,
    soft_cap: 80,
    scale: 80,
    gate: 80,
    short_conv: 80,
    recur: 90,
    no_rows: 80,
    rope: 90,
    top_k: 80,
    kv_append: 90,
    kv_append_heads: 80,
    kv_append_chunks: 90,
    rope_append: 80,
    attend_types: 80,
    // The least shared memory of all.
    attend_heads: 89,
    attend_steps: 90,
    attend_capped: 80,
    attend_sinks: 80,
    attend_joint: 80,
    attend_company: 80,
    attend_sizes: 80,
    attend_clipped: 80,
    attend_bad_queries: 80,
    attend_forgotten: 80,
    attend_stages: 80,
}
