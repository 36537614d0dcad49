//! The conformance suites on the first adapter that there is: a card, or lavapipe, a Vulkan on the CPU (Debian's
//! `mesa-vulkan-drivers`).

use kvant_conformance::{Arithmetic, Attention, Coverage, OPS, Subject, suites};

use crate::WgpuDevice;
use crate::tests::{device, skipped};

/// What the kernels promise of their numbers, on the first adapter; `None` where there is none.
fn subject() -> Option<Subject<WgpuDevice>> {
    let subject = Subject::new("wgpu", device()?, Arithmetic::Float, Attention::Exact);
    Some(subject.with_coverage(Coverage::Each))
}

/// Runs the suite `op`, and says what it leaves out.
fn hold(op: &str) {
    let Some(subject) = subject() else { return };
    let suites = suites();
    let suite = suites.iter().find(|suite| suite.op == op).expect("a suite of this name");
    if let Some(reason) = (suite.run)(&subject).reason() {
        skipped(&reason);
    }
}

/// A test for each suite.
macro_rules! tests {
    ($($op:ident,)*) => {
        $(
            #[test]
            fn $op() {
                hold(stringify!($op));
            }
        )*

        #[test]
        fn every_suite_has_its_test() {
            assert_eq!([$(stringify!($op)),*], OPS);
        }
    };
}

tests! {
    buffers,
    matrix,
    embed,
    project,
    gated_ffn,
    expert_ffn,
    expert_ffn_types,
    project_each,
    copy_columns,
    gate_rows,
    add_normed,
    layer_norm,
    soft_cap,
    scale,
    gate,
    short_conv,
    delta_rule,
    no_rows,
    rope,
    top_k,
    kv_append,
    rope_append,
    attend_types,
    attend_heads,
    attend_steps,
    attend_capped,
    attend_sinks,
    attend_joint,
    attend_company,
    attend_sizes,
    attend_clipped,
    attend_bad_queries,
    attend_forgotten,
    attend_stages,
}
