//! What a device has written is what the codec writes, bit for bit.

use kvant_backend::{Backend, Page, Stream};
use kvant_codec::DType;

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
    let case = Case { n_kv_heads: 18, k_head_dim: 32, v_head_dim: 32, ..Case::new(DType::Q8_0, DType::F16) };
    assert_appends(&device, case, &[33, 1]);
}
