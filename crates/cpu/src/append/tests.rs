//! What was appended reads back as the codec says, for every history of appends.

use kvant_backend::Place;
use kvant_codec::tile::TILE;
use kvant_codec::{DType, Side};

use super::fixture::{Case, Filled};
use crate::Isa;

/// Every token that is stored, in each form that it is stored in.
fn assert_holds_what_the_record_says(filled: &Filled, context: &str) {
    let len = filled.len();
    let sides = [(&filled.layer.k, &filled.keys), (&filled.layer.v, &filled.values)];
    for (stream, record) in sides.into_iter().flat_map(|(streams, records)| streams.iter().zip(records)) {
        let coded = stream.spec.coded_tiles(len);
        for token in 0..len {
            let place = stream.spec.place(token / TILE, coded);
            let tile = filled.memory.tile(stream, place);
            let bytes = &tile.page.as_bytes()[tile.offset..][..tile.layout.bytes()];
            let mut row = vec![f32::NAN; tile.layout.dim()];
            tile.layout.get(bytes, token % TILE, &mut row);
            let want = if matches!(place, Place::Main(_)) { &record.main } else { &record.sixteen };
            assert_eq!(row, want[token], "{context} token {token}");
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
                for chunk in [1, 7, 16, 200] {
                    let case = Case { k_head_dim: 80, v_head_dim: 192, n_kv_heads: 1, ..case };
                    let filled = Filled::gaussian(case, isa, 200, chunk, 5);
                    assert_holds_what_the_record_says(&filled, &format!("{isa:?} {case:?} {chunk}"));
                }
            }
        }
    }
}

/// Whatever the chunks, all bytes are the same.
#[test]
fn memory_does_not_depend_on_how_tokens_were_fed() {
    for isa in Isa::available() {
        for dtype in DType::KV {
            let case = Case { k_head_dim: 64, sink_tiles: 1, n_kv_heads: 1, ..Case::new(dtype, dtype) };
            let bytes = |chunk| {
                let filled = Filled::gaussian(case, isa, 608, chunk, 9);
                let pages = filled.memory.pages().map(|page| page.as_bytes().to_vec());
                pages.collect::<Vec<_>>()
            };
            let one_by_one = bytes(1);
            for chunk in [5, 16, 100, 608] {
                assert!(bytes(chunk) == one_by_one, "{isa:?} {dtype} in chunks of {chunk}");
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
            let mut x = vec![0.5; 60 * 96];
            x[3] = f32::NAN;
            x[96 + 5] = f32::INFINITY;
            x[20 * 96 + 7] = -1e30;
            x[21 * 96..22 * 96].fill(0.0);
            x[22 * 96..23 * 96].fill(f32::from_bits(1));
            filled.append(isa, &x, &x, 60);
            assert_holds_what_the_record_says(&filled, &format!("{isa:?} {dtype}"));
            for (record, spec) in
                [(&filled.keys[0], case.spec(Side::K)), (&filled.values[0], case.spec(Side::V))]
            {
                assert_eq!(record.main.len(), 60);
                assert!(record.main.iter().flatten().all(|v| v.is_finite()), "{isa:?} {spec:?}");
                assert!(record.main[21].iter().all(|&v| v == 0.0), "{isa:?} {spec:?}");
            }
        }
    }
}
