//! What a device has written is what the CPU's scalar code writes, bit for bit.

use kvant_backend::{Backend, Heads, Norm, Pairing, Rope, RopeParams};
use kvant_codec::DType;
use kvant_codec::random::Random;

use crate::kv::fixture::{Case, Step, Twins, buffer, bytes_of, cpu};
use crate::{CudaDevice, emulator};

/// Every byte of the memory of a sequence.
fn assert_same_memory(device: &CudaDevice, twins: &Twins, what: &dyn Fn() -> String) {
    let (sizes, cpu) = (twins.host.sizes(), cpu());
    let mut pages = vec![];
    for (got, want) in twins.device.blocks().iter().zip(twins.host.blocks()) {
        pages.push(("a block", sizes.block, got.as_ref(), want.as_ref()));
    }
    pages.push(("the sink", sizes.sink, twins.device.sink(), twins.host.sink()));
    pages.push(("the tail", sizes.tail, twins.device.tail(), twins.host.tail()));
    assert_eq!(twins.device.pages().count(), twins.host.pages().count());
    for (name, n_bytes, got, want) in pages {
        let (Some(got), Some(want)) = (got, want) else { continue };
        let (got, want) = (bytes_of(device, got, n_bytes), bytes_of(&cpu, want, n_bytes));
        let wrong = got.iter().zip(&want).position(|(a, b)| a != b);
        assert!(wrong.is_none(), "{}: {name}, byte {wrong:?} of {n_bytes}", what());
    }
}

fn assert_same_band(device: &CudaDevice, step: &Step, what: &dyn Fn() -> String) {
    let got = bytes_of(device, &step.device, step.band_bytes);
    let wrong = got.iter().zip(&bytes_of(&cpu(), &step.host, step.band_bytes)).position(|(a, b)| a != b);
    assert!(wrong.is_none(), "{}: band, byte {wrong:?}", what());
}

fn assert_appends(device: &CudaDevice, case: Case, steps: &[usize]) {
    let mut twins = Twins::new(case, 3);
    for &rows in steps {
        let step = twins.append(device, rows);
        let what = || format!("{case:?} after {} tokens, {rows} of them new", twins.len());
        assert_same_memory(device, &twins, &what);
        assert_same_band(device, &step, &what);
    }
}

#[test]
fn tiles_are_those_of_the_cpu_for_every_type() {
    let Some(device) = emulator::device(80) else { return };
    for dtype in DType::KV {
        assert_appends(&device, Case { n_kv_heads: 1, ..Case::new(dtype, dtype) }, &[5, 1, 27, 1, 16, 20]);
    }
}

#[test]
fn sinks_tails_and_scaled_streams_are_kept_as_planned() {
    let Some(device) = emulator::device(80) else { return };
    let case = Case::new(DType::Turbo3, DType::Q4_0);
    assert_appends(&device, Case { sink_tiles: 1, alpha: 1.02, ..case }, &[3, 20, 17, 1, 9]);
    assert_appends(&device, Case { tail_tiles: 9, n_kv_heads: 1, ..case }, &[100, 33, 1, 60, 200]);
    // Without a tail, tokens are put between those that are there.
    assert_appends(&device, Case { tail_tiles: 0, n_kv_heads: 1, ..case }, &[3, 1, 13, 2]);
    let turbos = Case { tail_tiles: 0, sink_tiles: 1, ..Case::new(DType::Turbo4, DType::Turbo2) };
    assert_appends(&device, turbos, &[7, 10, 1]);
}

#[test]
fn heads_of_every_size_are_padded_and_cut() {
    let Some(device) = emulator::device(90) else { return };
    for (k_head_dim, v_head_dim) in [(64, 80), (192, 96), (16, 256), (96, 64), (128, 192)] {
        let case = Case { k_head_dim, v_head_dim, n_kv_heads: 1, ..Case::new(DType::Turbo3, DType::Q8_0) };
        assert_appends(&device, case, &[40]);
        assert_appends(&device, Case { k: DType::F16, v: DType::Turbo4, ..case }, &[40]);
        let no_tail = Case { k: DType::Turbo2, v: DType::Turbo3, tail_tiles: 0, ..case };
        assert_appends(&device, no_tail, &[9, 3]);
    }
}

#[test]
fn more_heads_than_a_launch_takes_take_several() {
    let Some(device) = emulator::device(80) else { return };
    let case = Case { n_kv_heads: 26, k_head_dim: 32, v_head_dim: 32, ..Case::new(DType::Q8_0, DType::F16) };
    assert_appends(&device, case, &[33, 1]);
}

/// More sequences than a launch takes, of two layers, each with a number of rows of its own; more tiles than travel with a
/// launch.
#[test]
fn sequences_append_together_what_each_appends_alone() {
    let Some(device) = emulator::device(80) else { return };
    let small =
        Case { n_kv_heads: 1, k_head_dim: 32, v_head_dim: 32, ..Case::new(DType::Turbo3, DType::Q8_0) };
    let other = Case { k: DType::F16, sink_tiles: 1, ..small };
    let mut twins: Vec<_> = (0..20).map(|i| Twins::new(if i < 17 { small } else { other }, i)).collect();
    for step in 0..4 {
        let ns: Vec<_> = (0..20).map(|i| [1 + 7 * i, 1, 20 - i, 1][step]).collect();
        let step = Step::append(&device, &mut twins.iter_mut().collect::<Vec<_>>(), &ns);
        for (i, twins) in twins.iter().enumerate() {
            assert_same_memory(&device, twins, &|| format!("sequence {i} after {} tokens", twins.len()));
        }
        assert_same_band(&device, &step, &|| "together".to_owned());
    }
}

/// Whatever the chunks, all bytes are the same. (Of whole tiles: what no token lies in yet may hold anything.)
#[test]
fn memory_does_not_depend_on_how_tokens_were_fed() {
    let Some(device) = emulator::device(80) else { return };
    for dtype in [DType::Turbo3, DType::Q8_0, DType::F32] {
        let case = Case { n_kv_heads: 1, k_head_dim: 64, sink_tiles: 1, ..Case::new(dtype, dtype) };
        let bytes = |chunk| {
            let mut twins = Twins::new(case, 9);
            twins.fill(&device, 160, chunk);
            let pages = twins.device.pages().map(|page| bytes_of(&device, page, usize::MAX));
            pages.collect::<Vec<_>>()
        };
        let one_by_one = bytes(1);
        for chunk in [5, 16, 160] {
            assert!(bytes(chunk) == one_by_one, "{dtype} in chunks of {chunk}");
        }
    }
}

/// Keys and queries turned on their way, and by themselves before.
fn assert_turns(device: &CudaDevice, case: Case, params: RopeParams, has_norms: bool) {
    let mut random = Random::new(5);
    let mut gaussian = |len: usize| {
        let mut values = vec![0.0; len];
        random.fill_gaussian(&mut values, 2.0);
        values
    };
    let [mut fused, mut apart] = [(); 2].map(|()| [Twins::new(case, 3), Twins::new(case, 3)]);
    let Case { n_kv_heads, group, k_head_dim: dim, v_head_dim, .. } = case;
    let [q_heads, k_heads] = [n_kv_heads * group, n_kv_heads].map(|n| Heads { n, dim });
    let weights = [(); 2].map(|()| buffer(device, &gaussian(dim)));
    let [q_norm, k_norm] = weights.each_ref().map(|weight| has_norms.then_some(Norm { weight, eps: 1e-6 }));
    for ns in [[5, 1], [28, 3], [1, 1], [17, 40]] {
        let rows = ns.iter().sum::<usize>();
        let angles = buffer(device, &gaussian((rows * params.n_rot).max(1)));
        let (q_values, k_values) = (gaussian(rows * q_heads.n * dim), gaussian(rows * k_heads.n * dim));
        let (mut q, mut k) = (buffer(device, &q_values), buffer(device, &k_values));
        let v = buffer(device, &gaussian(rows * n_kv_heads * v_head_dim));
        let rope = Rope { params, angles: &angles, q_heads, k_heads, q_norm, k_norm };
        let mut step = Step::reserve(device, &mut fused.iter_mut().collect::<Vec<_>>(), &ns);
        let mut parts: Vec<_> = fused.iter_mut().map(Twins::on_device).collect();
        device.rope_append(&mut parts, &rope, &mut q, &mut k, &v, Some(&mut step.device)).unwrap();
        let mut turned = vec![f32::NAN; q_values.len()];
        device.read(&q, 0, &mut turned).unwrap();
        let band = bytes_of(device, &step.device, step.band_bytes);

        let (mut q, mut k) = (buffer(device, &q_values), buffer(device, &k_values));
        device.rope(&mut q, rows, q_heads, q_norm, params, &angles).unwrap();
        device.rope(&mut k, rows, k_heads, k_norm, params, &angles).unwrap();
        let mut step = Step::reserve(device, &mut apart.iter_mut().collect::<Vec<_>>(), &ns);
        let mut parts: Vec<_> = apart.iter_mut().map(Twins::on_device).collect();
        device.kv_append(&mut parts, &k, &v, Some(&mut step.device)).unwrap();
        let mut want = vec![f32::NAN; q_values.len()];
        device.read(&q, 0, &mut want).unwrap();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&turned), bits(&want), "queries of {case:?}, {params:?}");
        assert!(band == bytes_of(device, &step.device, step.band_bytes), "band of {case:?}, {params:?}");
    }
    for (fused, apart) in fused.iter().zip(&apart) {
        let pages = |twins: &Twins| -> Vec<Vec<u8>> {
            twins.device.pages().map(|page| bytes_of(device, page, usize::MAX)).collect()
        };
        assert!(pages(fused) == pages(apart), "memory of {case:?}, {params:?}");
    }
}

/// Heads turned whole, in part and not at all, in both orders, with and without norms, of several sizes and types.
#[test]
fn keys_and_queries_turned_on_the_way_are_those_turned_before() {
    let Some(device) = emulator::device(80) else { return };
    let case = Case { group: 2, n_kv_heads: 1, ..Case::new(DType::Turbo3, DType::Turbo3) };
    let halves = |n_rot| RopeParams { pairing: Pairing::Halves, n_rot };
    let pairs = |n_rot| RopeParams { pairing: Pairing::Interleaved, n_rot };
    assert_turns(&device, case, halves(128), true);
    assert_turns(&device, Case { k_head_dim: 96, v_head_dim: 64, k: DType::F16, ..case }, pairs(64), true);
    let wide = Case { k_head_dim: 256, v_head_dim: 32, k: DType::Q8_0, ..case };
    assert_turns(&device, wide, halves(192), false);
    assert_turns(&device, Case { k: DType::Turbo4, tail_tiles: 0, ..case }, pairs(128), false);
    assert_turns(&device, Case { k_head_dim: 64, sink_tiles: 1, ..case }, halves(0), true);
}
