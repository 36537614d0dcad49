//! The conformance suites on the PTX interpreter, and on a GPU where there is one.

use kvant_conformance::{Arithmetic, Attention, Coverage, DeviceUnderTest, OPS, suites};

use crate::emulator::{self, skipped};
use crate::{CudaDevice, attend, matmul};

/// Describes the arithmetic of the kernels.
fn subject(name: &'static str, device: CudaDevice) -> DeviceUnderTest<CudaDevice> {
    let arithmetic = Arithmetic::Halves { from: matmul::MIN_GEMM_ROWS };
    // Prefill chunks with other boundaries may take another kernel.
    DeviceUnderTest::new(name, device, arithmetic, Attention::Halves)
        .with_invariant_rows(attend::INVARIANT_ROWS)
}

/// Returns the interpreter as device under test, restricted to one case per edge size, as it is
/// thousands of times slower than a GPU. `None` without NVRTC.
pub(crate) fn on_emulator(arch: u32) -> Option<DeviceUnderTest<CudaDevice>> {
    Some(subject("cuda-ptx", emulator::device(arch)?).with_coverage(Coverage::Each))
}

/// Environment variable that restricts the GPU to one case per edge size, with the value `each`,
/// instead of all combinations: these compile hundreds of kernels, which takes minutes.
const COVERAGE: &str = "KVANT_CUDA_COVERAGE";

fn coverage() -> Coverage {
    match std::env::var(COVERAGE).ok().as_deref() {
        None => Coverage::Every,
        Some("each") => Coverage::Each,
        Some(other) => panic!("{COVERAGE}: expected each, got {other}"),
    }
}

/// Returns the first GPU as device under test; `None` without a GPU.
fn on_card() -> Option<DeviceUnderTest<CudaDevice>> {
    match CudaDevice::open(0) {
        Ok(device) => Some(subject("cuda", device).with_coverage(coverage())),
        Err(error) => {
            skipped(&error);
            None
        }
    }
}

/// Runs the suite `op`, and prints the cases that it skips.
pub(crate) fn hold(subject: Option<DeviceUnderTest<CudaDevice>>, op: &str) {
    let Some(subject) = subject else { return };
    let suites = suites();
    let suite = suites.iter().find(|suite| suite.op == op).expect("a suite of this name");
    if let Some(reason) = (suite.run)(&subject).reason() {
        skipped(&reason);
    }
}

/// Defines a test for each suite, on the interpreter at a given compute capability, and on the GPU.
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
    dense_ffn: 90,
    activate: 80,
    situ: 90,
    expert_ffn: 80,
    expert_ffn_types: 90,
    project_each: 80,
    copy_columns: 90,
    gate_rows: 90,
    add_normed: 90,
    layer_norm: 90,
    soft_cap: 90,
    xielu: 90,
    apply: 90,
    mix_streams: 90,
    connect_streams: 90,
    attend_streams: 90,
    gate_streams: 90,
    inject_ngrams: 80,
    scale_by_rms: 90,
    gate_sparsely: 90,
    add: 90,
    scale: 90,
    gate: 90,
    short_conv: 90,
    recur: 90,
    shift_tokens: 80,
    wkv7: 80,
    no_rows: 90,
    rope: 90,
    top_k: 90,
    kv_append: 90,
    kv_append_heads: 80,
    kv_append_chunks: 90,
    rope_append: 90,
    attend_types: 80,
    // The smallest shared memory.
    attend_heads: 89,
    attend_steps: 90,
    attend_capped: 80,
    attend_sinks: 90,
    attend_shared_kv: 90,
    select_tokens: 80,
    attend_selected: 80,
    pool_tokens: 80,
    select_pooled: 80,
    attend_pooled: 80,
    // The smallest shared memory.
    attend_all: 89,
    attend_batch_invariance: 90,
    attend_sizes: 80,
    attend_clipped: 80,
    attend_bad_queries: 80,
    attend_forgotten: 80,
    attend_stages: 90,
}
