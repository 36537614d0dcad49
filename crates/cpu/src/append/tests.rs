//! What was appended reads back as the codec says, for every history of appends.

use kvant_backend::Stream;
use kvant_codec::DType;
use kvant_codec::tile::TILE;

use super::fixture::{Case, Filled};
use crate::{CpuPage, Isa};

/// The row of a token as stored: padded, and rotated in a rotated stream.
fn read(stream: &Stream<CpuPage>, token: usize) -> Vec<f32> {
    let tile = stream.tile(token / TILE);
    let bytes = &tile.page.as_bytes()[tile.offset..][..tile.layout.bytes()];
    let mut row = vec![f32::NAN; tile.layout.dim()];
    tile.layout.get(bytes, token % TILE, &mut row);
    row
}

fn assert_holds_what_the_record_says(filled: &Filled, context: &str) {
    let layer = &filled.layer;
    for (streams, rows_of_heads) in [(&layer.k, &filled.keys), (&layer.v, &filled.values)] {
        for (stream, rows) in streams.iter().zip(rows_of_heads) {
            assert_eq!(stream.len(), rows.len());
            for (token, row) in rows.iter().enumerate() {
                assert_eq!(read(stream, token), *row, "{context} token {token}");
            }
        }
    }
}

#[test]
fn streams_hold_what_the_codec_says_after_any_sequence_of_appends() {
    for isa in Isa::available() {
        for dtype in DType::KV {
            for (tail, sink_tiles, extra_tail_tiles, alpha) in
                [(true, 0, 0, 1.0), (true, 1, 2, 1.02), (false, 0, 0, 1.0), (false, 2, 0, 0.9)]
            {
                let case = Case { tail, sink_tiles, extra_tail_tiles, alpha, ..Case::new(dtype, dtype) };
                for chunk in [1, 7, 16, 100] {
                    let case = Case { k_head_dim: 80, v_head_dim: 192, n_kv_heads: 1, ..case };
                    let filled = Filled::gaussian(case, isa, 100, chunk, 5);
                    assert_holds_what_the_record_says(&filled, &format!("{isa:?} {case:?} {chunk}"));
                }
            }
        }
    }
}

#[test]
fn bad_numbers_are_stored_as_the_codec_stores_them() {
    for isa in Isa::available() {
        for dtype in DType::KV {
            let case = Case { n_kv_heads: 1, k_head_dim: 96, v_head_dim: 96, ..Case::new(dtype, dtype) };
            let mut filled = Filled::empty(case);
            let mut x = vec![0.5; 40 * 96];
            x[3] = f32::NAN;
            x[96 + 5] = f32::INFINITY;
            x[20 * 96 + 7] = -1e30;
            x[21 * 96..22 * 96].fill(0.0);
            x[22 * 96..23 * 96].fill(f32::from_bits(1));
            filled.append(isa, &x, &x, 40);
            for stream in filled.layer.k.iter().chain(&filled.layer.v) {
                for token in 0..40 {
                    assert!(
                        read(stream, token).iter().all(|v| v.is_finite()),
                        "{isa:?} {dtype} token {token}"
                    );
                }
                assert!(read(stream, 21).iter().all(|&v| v == 0.0), "{isa:?} {dtype}");
            }
        }
    }
}
