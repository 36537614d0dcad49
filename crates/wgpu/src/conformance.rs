//! The conformance suites on the first adapter: a GPU, or lavapipe, a Vulkan on the CPU (Debian's
//! `mesa-vulkan-drivers`).

use kvant_backend::BackendError;
use kvant_codec::DType;
use kvant_conformance::kv::{Batch, Shape, Tokens};
use kvant_conformance::weights::gaussian;
use kvant_conformance::{Arithmetic, Attention, Coverage, DeviceUnderTest, OPS, suites};

use crate::arena::MAX_SLABS;
use crate::tests::{device, skipped};
use crate::{AttendVariant, CodebookLookup, TypeClass, WgpuDevice};

/// Describes the arithmetic of the kernels on the first adapter; `None` without an adapter.
fn subject() -> Option<DeviceUnderTest<WgpuDevice>> {
    let subject = DeviceUnderTest::new("wgpu", device()?, Arithmetic::EightBit, Attention::Exact);
    Some(subject.with_coverage(Coverage::Each))
}

fn run_suite(op: &str) {
    let Some(subject) = subject() else { return };
    run_suite_on(&subject, op);
}

/// Runs the suite `op`, and prints the cases that it skips.
fn run_suite_on(subject: &DeviceUnderTest<WgpuDevice>, op: &str) {
    let suites = suites();
    let suite = suites.iter().find(|suite| suite.op == op).expect("a suite of this name");
    if let Some(reason) = (suite.run)(subject).reason() {
        skipped(&reason);
    }
}

/// Compares attention of 40 tokens, the last of which are a step of their own, with its equation.
fn attends(subject: &DeviceUnderTest<WgpuDevice>, shape: Shape, rows: usize) -> Result<(), BackendError> {
    let what = || subject.case("attend", format_args!("{shape:?}, {rows} rows"));
    let tokens = Tokens::gaussian(shape, 40, 3);
    let q = gaussian(4, rows * shape.n_heads() * shape.k_head_dim, 1.0);
    let mut batch = Batch::fed(subject, &tokens, 40 - rows, 40)?;
    batch.append(&[rows])?;
    batch.assert_stored_tokens(&what);
    let got = batch.attend(&q, &what)?;
    batch.assert_answers(&q, &got, &what);
    Ok(())
}

#[test]
fn attention_takes_heads_of_up_to_640_values() {
    let Some(subject) = subject() else { return };
    for (k, v, [k_head_dim, v_head_dim], rows) in [
        (DType::Turbo3, DType::Turbo4, [512, 512], 1),
        (DType::Q8_0, DType::Turbo2T, [512, 640], 20),
        (DType::F16, DType::BF16, [640, 416], 1),
    ] {
        attends(&subject, Shape { k_head_dim, v_head_dim, ..Shape::new(k, v) }, rows).unwrap();
    }
    let wider = Shape { k_head_dim: 672, v_head_dim: 128, ..Shape::new(DType::F16, DType::F16) };
    let refused = attends(&subject, wider, 1);
    assert!(matches!(refused, Err(BackendError::Unsupported { op: "attend", .. })), "{refused:?}");
}

/// Rows of which some see one span of tokens and others two, rows whose window begins in the second
/// of three, and heads of more than 128 dims: with the chunks at a time of a GPU and of a CPU, of
/// which the first adapter is one. All give the same bits.
#[test]
fn spans_of_tokens_are_joined() {
    let Some(subject) = subject() else { return };
    let other = WgpuDevice::open_with_other_shapes().unwrap();
    let other = DeviceUnderTest::new("wgpu", other, Arithmetic::EightBit, Attention::Exact);
    let shape = Shape { k_head_dim: 64, v_head_dim: 64, ..Shape::new(DType::Q8_0, DType::Turbo3) };
    let with_sinks = Shape { sinks: Some([1.0, 0.5]), ..shape };
    let windowed = Shape { window: Some(1000), soft_cap: Some(2.0), ..shape };
    let shared_kv =
        Shape { k_head_dim: 96, v_head_dim: 64, shared_kv: true, ..Shape::new(DType::F16, DType::F16) };
    let wide = Shape { k_head_dim: 256, v_head_dim: 256, ..Shape::new(DType::Turbo3, DType::Turbo4) };
    let cases = [(with_sinks, 1034, 20), (windowed, 2100, 9), (shared_kv, 1025, 1), (wide, 700, 3)];
    for (shape, n, rows) in cases {
        let what = || subject.case("attend", format_args!("{shape:?}, {n} tokens, {rows} rows"));
        let tokens = Tokens::gaussian(shape, n, 3);
        let width = shape.n_heads() * shape.k_head_dim;
        let q = gaussian(4, rows * width, 1.0);
        let answers = |subject: &DeviceUnderTest<WgpuDevice>, rows_at_once: usize| {
            let mut batch = Batch::fed(subject, &tokens, n - rows, 512).unwrap();
            batch.append(&[rows_at_once]).unwrap();
            let q = &q[..rows_at_once * width];
            let got = batch.attend(q, &what).unwrap();
            batch.assert_answers(q, &got, &what);
            got
        };
        let (got, alone) = (answers(&subject, rows), answers(&subject, 1));
        assert!(got[..alone.len()] == alone, "{}: the first row has other bits than alone", what());
        assert!(answers(&other, rows) == got, "{}: other bits with other chunks at a time", what());
    }
}

/// Sequences whose blocks lie in four slabs have the bits that they have in one; so has recurrent
/// state.
#[test]
fn pages_lie_in_any_slab() {
    let Some(one_slab) = subject() else { return };
    let with_slabs = |max_slab_bytes| {
        let device = WgpuDevice::open_with_slabs(0, max_slab_bytes).unwrap();
        DeviceUnderTest::new("wgpu", device, Arithmetic::EightBit, Attention::Exact)
    };
    let turbo = Shape { k_head_dim: 64, v_head_dim: 64, ..Shape::new(DType::Turbo3, DType::Turbo4) };
    let shared_kv =
        Shape { k_head_dim: 96, v_head_dim: 64, shared_kv: true, ..Shape::new(DType::F16, DType::F16) };
    for (shape, n, max_slab_bytes) in [(turbo, 1000, 24 << 10), (shared_kv, 500, 40 << 10)] {
        let what = || one_slab.case("attend", format_args!("{shape:?}, {n} tokens"));
        let tokens = Tokens::gaussian(shape, n, 3);
        let q = gaussian(4, 3 * shape.n_heads() * shape.k_head_dim, 1.0);
        let answers = |subject: &DeviceUnderTest<WgpuDevice>| {
            let mut batch = Batch::fed(subject, &tokens, n - 3, 64).unwrap();
            batch.append(&[3]).unwrap();
            batch.assert_stored_tokens(&what);
            let got = batch.attend(&q, &what).unwrap();
            batch.assert_answers(&q, &got, &what);
            (got, subject.device().n_slabs())
        };
        let (want, n_slabs) = answers(&one_slab);
        assert_eq!(n_slabs, 1);
        let (got, n_slabs) = answers(&with_slabs(max_slab_bytes));
        assert!(got == want && n_slabs == MAX_SLABS, "{}: {n_slabs} slabs", what());
    }
    for (op, max_slab_bytes) in [("recur", 400 << 10), ("short_conv", 16 << 10)] {
        let subject = with_slabs(max_slab_bytes).with_coverage(Coverage::Each);
        run_suite_on(&subject, op);
        assert!(subject.device().n_slabs() > 1, "{op}");
    }
}

/// Every look-up that the adapter supports, and threads that read more words and serve more
/// queries.
#[test]
fn every_attention_variant_gives_the_same_bits() {
    let shape = Shape { group: 3, ..Shape::new(DType::Turbo3, DType::Turbo4) };
    let tokens = Tokens::gaussian(shape, 150, 3);
    let q = gaussian(4, 5 * shape.n_heads() * shape.k_head_dim, 1.0);
    let mut first_result = None;
    let variant = |look_ups, queries, words| AttendVariant { look_ups, queries, words };
    let lookups = CodebookLookup::ALL.map(|look_ups| (variant(look_ups, 4, 1), false));
    let select = CodebookLookup::Select;
    let more = [(variant(select, 4, 4), false), (variant(select, 8, 1), false)];
    // With the chunks at a time of a GPU if the adapter is a CPU, and vice versa.
    let others = [variant(CodebookLookup::Shuffle, 4, 1), variant(select, 8, 1), variant(select, 4, 4)];
    let others = others.map(|variant| (variant, true));
    for (variant, has_other_shapes) in lookups.into_iter().chain(more).chain(others) {
        let Some(device) = device() else { return };
        let has_subgroups = device.report().has_subgroups;
        let device = if has_other_shapes { WgpuDevice::open_with_other_shapes().unwrap() } else { device };
        let device = match device.with_attend_variant(&TypeClass::ALL, variant) {
            Ok(device) => device,
            Err(error) => {
                assert!(variant.look_ups.needs_subgroups() && !has_subgroups, "{error}");
                skipped(&error.to_string());
                continue;
            }
        };
        let subject = DeviceUnderTest::new("wgpu", device, Arithmetic::Float, Attention::Exact);
        let what = || subject.case("attend", variant);
        let mut batch = Batch::fed(&subject, &tokens, 145, 100).unwrap();
        batch.append(&[5]).unwrap();
        let got = batch.attend(&q, &what).unwrap();
        batch.assert_answers(&q, &got, &what);
        let first = first_result.get_or_insert_with(|| got.clone());
        assert!(*first == got, "{}: other bits than the first variant", what());
    }
}

#[test]
fn variants_without_kernels_are_rejected() {
    for (queries, words) in [(5, 1), (16, 1), (4, 3), (4, 0)] {
        let Some(device) = device() else { return };
        let variant = AttendVariant { look_ups: CodebookLookup::Select, queries, words };
        let refused = device.with_attend_variant(&[TypeClass::Floats], variant).map(|_| ());
        assert!(matches!(refused, Err(BackendError::Unsupported { op: "attend", .. })), "{refused:?}");
    }
}

/// Defines a test for each suite.
macro_rules! tests {
    ($($op:ident,)*) => {
        $(
            #[test]
            fn $op() {
                run_suite(stringify!($op));
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
    dense_ffn,
    activate,
    situ,
    expert_ffn,
    expert_ffn_types,
    project_each,
    copy_columns,
    gate_rows,
    add_normed,
    layer_norm,
    soft_cap,
    xielu,
    apply,
    mix_streams,
    connect_streams,
    attend_streams,
    gate_streams,
    inject_ngrams,
    scale_by_rms,
    gate_sparsely,
    add,
    scale,
    gate,
    short_conv,
    recur,
    shift_tokens,
    wkv7,
    no_rows,
    rope,
    top_k,
    kv_append,
    kv_append_heads,
    kv_append_chunks,
    rope_append,
    attend_types,
    attend_heads,
    attend_steps,
    attend_capped,
    attend_sinks,
    attend_shared_kv,
    select_tokens,
    attend_selected,
    pool_tokens,
    select_pooled,
    attend_pooled,
    attend_all,
    attend_batch_invariance,
    attend_sizes,
    attend_clipped,
    attend_bad_queries,
    attend_forgotten,
    attend_stages,
}
