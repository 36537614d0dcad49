//! What a device has written is what the codec writes, bit for bit.

use kvant_backend::{Backend, Heads, KvLayer, Norm, Page, Pairing, Rope, RopeParams, Stream};
use kvant_codec::DType;
use kvant_codec::random::Random;

use crate::kv::fixture::{Case, HostPage, Twins};
use crate::{CudaDevice, CudaPage, emulator};

fn assert_same_tiles(
    device: &CudaDevice,
    on_device: &Stream<CudaPage>,
    on_host: &Stream<HostPage>,
    what: &dyn Fn() -> String,
) {
    assert_eq!((on_device.len(), on_device.main_end()), (on_host.len(), on_host.main_end()));
    for index in 0..on_host.n_tiles() {
        let (got, want) = (on_device.tile(index), on_host.tile(index));
        let mut page = vec![0; got.page.n_bytes()];
        device.read_page(got.page, &mut page).unwrap();
        let got = &page[got.offset..][..got.layout.bytes()];
        let want = &want.page.0[want.offset..][..want.layout.bytes()];
        let wrong = got.iter().zip(want).position(|(a, b)| a != b);
        assert!(wrong.is_none(), "{}: tile {index}, byte {wrong:?}", what());
    }
}

fn assert_appends(device: &CudaDevice, case: Case, steps: &[usize]) {
    let mut twins = Twins::new(device, case, 3);
    for &rows in steps {
        twins.append(device, rows);
        let streams = twins.device.k.iter().chain(&twins.device.v);
        for (stream, host) in streams.zip(twins.host.k.iter().chain(&twins.host.v)) {
            assert_same_tiles(device, stream, host, &|| format!("{case:?} after {} tokens", host.len()));
        }
    }
}

#[test]
fn tiles_are_those_of_the_codec_for_every_type() {
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
    // Without a tail, tokens are put between those that are there.
    assert_appends(&device, Case { has_tail: false, n_kv_heads: 1, ..case }, &[3, 1, 13, 2]);
    let turbos = Case { has_tail: false, ..Case::new(DType::Turbo4, DType::Turbo2) };
    assert_appends(&device, turbos, &[7, 10, 1]);
}

#[test]
fn heads_of_every_size_are_padded_and_cut() {
    let Some(device) = emulator::device(90) else { return };
    for (k_head_dim, v_head_dim) in [(64, 80), (192, 96), (16, 256)] {
        let case = Case { k_head_dim, v_head_dim, n_kv_heads: 1, ..Case::new(DType::Turbo3, DType::Q8_0) };
        assert_appends(&device, case, &[40]);
        assert_appends(&device, Case { k: DType::F16, v: DType::Turbo4, ..case }, &[40]);
    }
}

#[test]
fn more_heads_than_a_launch_takes_take_several() {
    let Some(device) = emulator::device(80) else { return };
    let case = Case { n_kv_heads: 26, k_head_dim: 32, v_head_dim: 32, ..Case::new(DType::Q8_0, DType::F16) };
    assert_appends(&device, case, &[33, 1]);
}

/// Keys and queries turned on their way, and by themselves before.
fn assert_turns(device: &CudaDevice, case: Case, params: RopeParams, has_norms: bool) {
    let mut random = Random::new(5);
    let mut gaussian = |len: usize| {
        let mut values = vec![0.0; len];
        random.fill_gaussian(&mut values, 2.0);
        let mut buffer = device.buffer(len).unwrap();
        device.write(&mut buffer, &values).unwrap();
        (buffer, values)
    };
    let [mut fused, mut apart] = [(); 2].map(|()| Twins::new(device, case, 3).device);
    let Case { n_kv_heads, group, k_head_dim: dim, v_head_dim, .. } = case;
    let [q_heads, k_heads] = [n_kv_heads * group, n_kv_heads].map(|n| Heads { n, dim });
    let weights = [gaussian(dim).0, gaussian(dim).0];
    let [q_norm, k_norm] = weights.each_ref().map(|weight| has_norms.then_some(Norm { weight, eps: 1e-6 }));
    for rows in [5, 28, 1, 17, 16, 1, 40] {
        let angles = gaussian((rows * params.n_rot).max(1)).0;
        let (mut q, q_values) = gaussian(rows * q_heads.n * dim);
        let (mut k, k_values) = gaussian(rows * k_heads.n * dim);
        let v = gaussian(rows * n_kv_heads * v_head_dim).0;
        for layer in [&mut fused, &mut apart] {
            for stream in layer.k.iter_mut().chain(&mut layer.v) {
                stream.reserve(rows, &mut |bytes| device.page(bytes)).unwrap();
            }
        }
        let rope = Rope { params, angles: &angles, q_heads, k_heads, q_norm, k_norm };
        device.rope_append(&mut fused, &rope, &mut q, &mut k, &v, 0..rows).unwrap();
        let mut turned = vec![f32::NAN; q_values.len()];
        device.read(&q, 0, &mut turned).unwrap();

        device.write(&mut q, &q_values).unwrap();
        device.write(&mut k, &k_values).unwrap();
        device.rope(&mut q, 0..rows, q_heads, q_norm, params, &angles).unwrap();
        device.rope(&mut k, 0..rows, k_heads, k_norm, params, &angles).unwrap();
        device.kv_append(&mut apart, &k, &v, 0..rows).unwrap();
        let mut want = vec![f32::NAN; q_values.len()];
        device.read(&q, 0, &mut want).unwrap();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&turned), bits(&want), "queries of {case:?}, {params:?}");
    }
    let pages = |layer: &KvLayer<CudaPage>| -> Vec<Vec<u8>> {
        let streams = layer.k.iter().chain(&layer.v);
        let tiles = streams.flat_map(|stream| (0..stream.n_tiles()).map(|index| stream.tile(index)));
        let bytes = tiles.map(|tile| {
            let mut page = vec![0; tile.page.n_bytes()];
            device.read_page(tile.page, &mut page).unwrap();
            page[tile.offset..][..tile.layout.bytes()].to_vec()
        });
        bytes.collect()
    };
    assert!(pages(&fused) == pages(&apart), "tiles of {case:?}, {params:?}");
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
    assert_turns(
        &device,
        Case { k_head_dim: 256, v_head_dim: 32, k: DType::Q8_0, ..case },
        halves(192),
        false,
    );
    assert_turns(&device, Case { k: DType::Turbo4, has_tail: false, ..case }, pairs(128), false);
    assert_turns(&device, Case { k_head_dim: 64, sink_tiles: 1, ..case }, halves(0), true);
}
