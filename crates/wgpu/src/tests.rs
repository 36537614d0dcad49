//! Tests of recording, counters and errors, which are specific to this device.

use std::sync::Arc;

use kvant_backend::{
    Activation, Backend, BackendError, ExpertWeights, Input, Norm, Output, Result, Router, RouterScores,
    Routing, SharedBytes, TopK, WeightSource,
};
use kvant_codec::DType;

use crate::constants::Constants;
use crate::recording::MAX_WORK;
use crate::{Part, Source, WgpuBuffer, WgpuDevice, WgpuMatrix};

/// Returns the first adapter; without one, prints that the test is skipped and returns `None`.
///
/// # Panics
/// If `KVANT_REQUIRE_WGPU` requires an adapter that cannot be opened.
pub(crate) fn device() -> Option<WgpuDevice> {
    let skip = |error: BackendError| {
        assert!(std::env::var_os("KVANT_REQUIRE_WGPU").is_none(), "{error}");
        skipped(&error.to_string());
    };
    WgpuDevice::open(0).map_err(skip).ok()
}

/// Prints that a test, or a part of it, is skipped and why; `.ci/run` counts these lines.
pub(crate) fn skipped(reason: &str) {
    eprintln!("skipped: {}: {reason}", std::thread::current().name().unwrap_or("a test of wgpu"));
}

/// Returns `y = w norm(x)` of one row.
fn project(
    device: &WgpuDevice,
    x: &WgpuBuffer,
    weight: &WgpuBuffer,
    w: &WgpuMatrix,
    y: &mut WgpuBuffer,
) -> Result<()> {
    let input = Input { x, norm: Some(Norm { weight, eps: 1e-5 }), first_row: 0, rows: 1 };
    device.project(input, &mut [Output { w, bias: None, y, accumulate: false }])
}

#[test]
fn a_step_is_one_submission_and_reads_only_candidates() {
    let Some(device) = device() else { return };
    let (n, vocab) = (64, 5000);
    let matrix = |n_out: usize| {
        let bytes: Vec<u8> = (0..n_out * n).flat_map(|i| ((i % 13) as f32).to_le_bytes()).collect();
        device.upload_tied(WeightSource { dtype: DType::F32, n_out, n_in: n, bytes: bytes.into() }).unwrap()
    };
    let (hidden, head) = (matrix(n), matrix(vocab));
    let mut gain = device.buffer(n).unwrap();
    device.write(&mut gain, &vec![1.0; n]).unwrap();
    let [mut x, mut y, mut logits] = [n, n, vocab].map(|len| device.buffer(len).unwrap());
    device.finish().unwrap();

    let before = device.traffic();
    let mut out = Vec::new();
    device
        .step(true, || {
            device.embed(&hidden, &[7], 1.0, &mut x)?;
            project(&device, &x, &gain, &hidden, &mut y)?;
            project(&device, &y, &gain, &head, &mut logits)?;
            device.top_k(&logits, vocab, &mut [TopK { row: 0, k: 40, out: &mut out }])
        })
        .unwrap();
    let after = device.traffic();
    assert_eq!(out.len(), 40);
    assert_eq!(after.submissions - before.submissions, 1);
    // Two norms, two products, the candidates.
    assert_eq!(after.launches - before.launches, 5);
    // Two slices of the vocabulary, 40 candidates of 8 bytes each.
    assert_eq!(after.from_device - before.from_device, 2 * 40 * 8);
    // A row of the embedding, and the launch parameters at multiples of 256 bytes at most.
    let to_device = after.to_device - before.to_device;
    assert!((4 * n as u64..=4 * n as u64 + 6 * 256).contains(&to_device), "{to_device}");
}

/// More launches than a submission has timestamps for.
#[test]
fn kernels_are_timed_by_name() {
    const N: usize = 2500;
    let Some(device) = device() else { return };
    let mut x = device.buffer(64).unwrap();
    device.write(&mut x, &[1.0; 64]).unwrap();
    if !device.time_kernels(true).unwrap() {
        return skipped("the adapter has no timestamps");
    }
    device.soft_cap(&mut x, 64, 4.0).unwrap();
    (0..N).for_each(|i| device.scale(&mut x, 64, [2.0, 0.5][i % 2]).unwrap());
    let times = device.kernel_times().unwrap();
    let mut launches: Vec<(&str, u64)> =
        times.iter().map(|time| (time.kernel.as_str(), time.launches)).collect();
    launches.sort_unstable();
    assert_eq!(launches, [("scale", N as u64), ("soft_cap", 1)]);
    assert!(times[0].seconds > 0.0 && times[0].seconds >= times[1].seconds, "{times:?}");
    // Timing changes no result, and stops.
    let mut got = [0.0; 64];
    device.read(&x, 0, &mut got).unwrap();
    let want = 4.0 * 0.25_f32.tanh();
    assert!(got.iter().all(|got| (got - want).abs() < 1e-5), "{got:?}");
    device.time_kernels(false).unwrap();
    device.scale(&mut x, 64, 2.0).unwrap();
    assert_eq!(device.kernel_times().unwrap(), []);
}

#[test]
fn a_submission_has_bounded_work() {
    let Some(device) = device() else { return };
    let n = 64;
    let matrix = device.upload_matrix(rows(n, n)).unwrap();
    let [gain, x, mut y] = [n, n, n].map(|len| device.buffer(len).unwrap());
    device.finish().unwrap();
    let mut submissions_after = |work: &[u64]| {
        let before = device.traffic();
        for &work in work {
            device.gpu().count_work([work as usize]);
            project(&device, &x, &gain, &matrix, &mut y).unwrap();
        }
        device.finish().unwrap();
        device.traffic().submissions - before.submissions
    };
    assert_eq!(submissions_after(&[0; 8]), 1);
    assert_eq!(submissions_after(&[MAX_WORK / 2 - 2 * (n * n) as u64; 2]), 1);
    assert_eq!(submissions_after(&[MAX_WORK / 2 + 1; 4]), 4);
    // One launch may have more.
    assert_eq!(submissions_after(&[0, MAX_WORK * 2, 0]), 3);
}

#[test]
fn the_device_starts_before_the_whole_step_is_recorded() {
    let Some(device) = device() else { return };
    let mut x = device.buffer(64).unwrap();
    device.write(&mut x, &[1.0; 64]).unwrap();
    device.finish().unwrap();
    for (launches, submissions) in [(64, 1), (65, 2), (200, 4)] {
        let before = device.traffic();
        (0..launches).try_for_each(|_| device.scale(&mut x, 64, -1.0)).unwrap();
        device.finish().unwrap();
        assert_eq!(device.traffic().since(before).submissions, submissions, "{launches} launches");
    }
    let mut got = [0.0; 64];
    device.read(&x, 0, &mut got).unwrap();
    assert_eq!(got, [-1.0; 64]);
}

#[test]
fn repeated_steps_create_no_buffers_or_bind_groups() {
    let Some(device) = device() else { return };
    let (n, vocab) = (64, 5000);
    let [hidden, head] = [n, vocab].map(|n_out| device.upload_matrix(rows(n_out, n)).unwrap());
    let [gain, mut x, mut y, mut logits] = [n, n, n, vocab].map(|len| device.buffer(len).unwrap());
    let mut created = || {
        let before = device.traffic();
        project(&device, &x, &gain, &hidden, &mut y)?;
        device.gated_ffn(
            Input { x: &y, norm: None, first_row: 0, rows: 1 },
            Activation::Silu,
            &hidden,
            &hidden,
            &mut x,
        )?;
        project(&device, &x, &gain, &head, &mut logits)?;
        device.top_k(&logits, vocab, &mut [TopK { row: 0, k: 40, out: &mut Vec::new() }])?;
        let after = device.traffic();
        Ok::<_, BackendError>([after.groups - before.groups, after.allocations - before.allocations])
    };
    let [groups, allocations] = created().unwrap();
    assert!(groups > 0 && allocations > 0, "{groups}, {allocations}");
    // The parameters of the first step were queued behind the upload of the weights.
    created().unwrap();
    for _ in 0..20 {
        assert_eq!(created().unwrap(), [0, 0]);
    }
    // Unused groups are dropped.
    let n_cached = device.gpu().groups();
    for _ in 0..100 {
        device.read(&y, 0, &mut [0.0]).unwrap();
    }
    assert!(n_cached > 0 && device.gpu().groups() == 0, "{n_cached}");
}

#[test]
fn a_missing_adapter_is_an_error_that_counts_adapters() {
    let Err(BackendError::Failed { device: "wgpu", problem }) = WgpuDevice::open(9999) else {
        panic!("no machine has so many")
    };
    assert!(problem.starts_with("no adapter 9999; this machine has "), "{problem}");
}

#[test]
fn a_shader_that_does_not_compile_is_an_error_with_its_line() {
    static FAULTY: Source = Source {
        parts: &[
            Part { name: "sound.wgsl", text: "fn twice(x: f32) -> f32 {\n    return 2.0 * x;\n}\n" },
            Part {
                name: "faulty.wgsl",
                text: "@compute @workgroup_size(N)\nfn faulty() {\n    let a = nothing;\n}\n",
            },
        ],
        constants: || Constants::default().whole("N", 4),
    };
    let Some(device) = device() else { return };
    let error = BackendError::from(device.gpu().kernel(&FAULTY, "faulty").unwrap_err()).to_string();
    assert!(error.starts_with("wgpu: faulty.wgsl:3: "), "{error}");
    assert!(error.ends_with(": let a = nothing;"), "{error}");
}

#[test]
fn allocations_beyond_the_binding_size_are_rejected() {
    let Some(device) = device() else { return };
    let len = device.gpu().max_binding() / 4 + 1;
    assert!(matches!(device.buffer(len), Err(BackendError::OutOfMemory { .. })));
    assert!(matches!(device.page(4 * len), Err(BackendError::OutOfMemory { .. })));
}

/// Returns rows of `n_in` values, as f32.
fn rows(n_out: usize, n_in: usize) -> WeightSource {
    let value = |i: usize| (i * 37 % 101) as f32 - 50.0;
    let bytes: Vec<u8> = (0..n_out * n_in).flat_map(|i| value(i).to_le_bytes()).collect();
    WeightSource { dtype: DType::F32, n_out, n_in, bytes: bytes.into() }
}

/// Returns the results on `device` of a biased product, of products of the parts of rows, and of
/// experts, for the same rows.
fn products(device: &WgpuDevice) -> Result<Vec<f32>> {
    let (n_out, n_in, n_experts) = (600, 512, 3);
    let buffer = |len: usize| {
        let values: Vec<f32> = (0..len).map(|i| (i % 7) as f32 * 0.125).collect();
        let mut buffer = device.buffer(len)?;
        device.write(&mut buffer, &values)?;
        Ok::<_, BackendError>(buffer)
    };
    let (mut x, bias, mut y) = (buffer(n_experts * n_in)?, buffer(n_out)?, buffer(2 * n_out)?);
    let input = Input { x: &x, norm: None, first_row: 0, rows: 2 };
    let w = device.upload_matrix(rows(n_out, n_in))?;
    device.project(input, &mut [Output { w: &w, bias: Some(&bias), y: &mut y, accumulate: false }])?;
    let mut each = buffer(n_out)?;
    let experts = device.upload_experts(rows(n_out, n_in), n_experts)?;
    device.project_per_expert(&x, 1, &experts, &mut each)?;

    let down = device.upload_experts(rows(n_experts * n_in, n_out / n_experts), n_experts)?;
    let biases = [buffer(n_out)?, buffer(n_out)?, buffer(n_experts * n_in)?];
    let routing = Routing {
        n_used: 2,
        scores: RouterScores::Softmax,
        normalizes: true,
        scale: 1e-3,
        expert_groups: None,
    };
    let weights = ExpertWeights {
        activation: Activation::Silu,
        gate: &experts,
        up: &experts,
        down: &down,
        biases: Some(biases.each_ref()),
    };
    let logits = buffer(3 * n_experts)?;
    let choice = Router { routing, logits: &logits, selection_bias: None, scales: None, chosen: None };
    // Few slots in row order, and enough that they are ordered by expert.
    device.moe_ffn(&mut x, 1, None, choice, weights, None)?;
    device.moe_ffn(&mut x, 3, None, choice, weights, None)?;
    let mut all = vec![0.0; 3 * n_out + 3 * n_in];
    device.read(&y, 0, &mut all[..2 * n_out])?;
    device.read(&each, 0, &mut all[2 * n_out..3 * n_out])?;
    device.read(&x, 0, &mut all[3 * n_out..])?;
    Ok(all)
}

#[test]
fn matrices_beyond_a_binding_are_split_by_rows() {
    let Some(device) = device() else { return };
    let narrow = WgpuDevice::open_within(0, 1 << 20).unwrap();
    assert_eq!(narrow.gpu().max_binding(), 1 << 20);
    let matrix = narrow.upload_matrix(rows(600, 512)).unwrap();
    assert_eq!(matrix.slabs("project").unwrap().len(), 2);
    let (got, want) = (products(&narrow).unwrap(), products(&device).unwrap());
    assert!(got == want && got.iter().all(|y| y.is_finite()), "{got:?}, want {want:?}");
    // A row is never split.
    assert!(matches!(narrow.upload_matrix(rows(1, (1 << 18) + 1)), Err(BackendError::Unsupported { .. })));
}

/// Returns whether `take` drops the rows that it is given.
fn drops_rows<T>(take: impl FnOnce(WeightSource) -> Result<T>) -> (T, bool) {
    let source = rows(40, 64);
    let all = 0..source.bytes.len();
    let owner = Arc::new(source.bytes.to_vec());
    let weak = Arc::downgrade(&owner);
    let bytes = SharedBytes::new(owner, all).expect("all of it");
    let matrix = take(WeightSource { bytes, ..source }).unwrap();
    (matrix, weak.upgrade().is_none())
}

#[test]
fn only_lookup_tables_stay_in_host_memory() {
    let Some(device) = device() else { return };
    let (matrix, is_gone) = drops_rows(|source| device.upload_matrix(source));
    assert!(is_gone, "a matrix is in memory twice");
    assert!(drops_rows(|source| device.upload_experts(source, 2)).1, "experts are in memory twice");
    let (tied, is_gone) = drops_rows(|source| device.upload_tied(source));
    assert!(!is_gone);
    let mut out = device.buffer(64).unwrap();
    device.embed(&tied, &[39], 1.0, &mut out).unwrap();
    let refused = device.embed(&matrix, &[39], 1.0, &mut out);
    assert!(matches!(refused, Err(BackendError::Unsupported { op: "embed", .. })), "{refused:?}");
}

#[test]
fn probing_free_memory_releases_its_allocations() {
    let Some(device) = device() else { return };
    let gpu = device.gpu();
    let free = gpu.free_bytes().unwrap();
    assert!(free > 0, "this device has no memory");
    device.buffer(1 << 20).unwrap();
    device.finish().unwrap();
    // Shared memory has no measurable bound.
    assert_eq!(device.free_bytes().unwrap().is_some(), device.report().has_own_memory);
    let slab = gpu.max_binding().min(4 << 30) / 64 * 64;
    assert_eq!(device.max_page_bytes(), Some(4 * slab));
}
