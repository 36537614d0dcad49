//! Tests of the tile layout and its contents.

use super::*;
use crate::random::Random;
use crate::{decode, encode};

const SIDES: [Side; 2] = [Side::K, Side::V];

fn rows(dim: usize, seed: u64) -> Vec<Vec<f32>> {
    let mut random = Random::new(seed);
    (0..TILE)
        .map(|_| {
            let mut row = vec![0.0; dim];
            random.fill_gaussian(&mut row, 1.0);
            row
        })
        .collect()
}

fn filled(layout: &TileLayout, rows: &[Vec<f32>]) -> Vec<u8> {
    let mut tile = vec![0; layout.bytes()];
    rows.iter().enumerate().for_each(|(slot, row)| layout.put(&mut tile, slot, row));
    tile
}

fn got(layout: &TileLayout, tile: &[u8], slot: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; layout.dim()];
    layout.get(tile, slot, &mut out);
    out
}

#[test]
fn sizes_are_exact() {
    for (dtype, head_dim, dim, bytes) in [
        (DType::F32, 128, 128, 8192),
        (DType::F16, 128, 128, 4096),
        (DType::BF16, 80, 80, 2560),
        (DType::Q8_0, 128, 128, 2176),
        (DType::Q8_0, 80, 96, 1632),
        (DType::Q4_0, 128, 128, 1152),
        (DType::Turbo2, 128, 128, 544),
        (DType::Turbo3, 128, 128, 800),
        (DType::Turbo3, 64, 64, 416),
        (DType::Turbo3, 80, 96, 416 + 224),
        (DType::Turbo3, 96, 96, 416 + 224),
        (DType::Turbo3, 112, 128, 800),
        (DType::Turbo3, 160, 160, 800 + 224),
        (DType::Turbo3, 192, 192, 800 + 416),
        (DType::Turbo2, 64, 64, 288),
        (DType::Turbo4, 128, 128, 1056),
        (DType::Turbo4, 576, 576, 4 * 1056 + 544),
    ] {
        assert_eq!(padded_dim(dtype, head_dim), Ok(dim));
        for side in SIDES {
            let layout = TileLayout::new(dtype, side, dim).unwrap();
            assert_eq!(layout.bytes(), bytes, "{dtype} {head_dim}");
            let blocks: Vec<TileBlock> = layout.blocks().collect();
            let ends = blocks.last().map_or((dim, bytes), |last| (last.dims.end, last.bytes.end));
            assert_eq!(ends, (dim, bytes), "{dtype} {head_dim}");
        }
    }
}

#[test]
fn wrong_formats_and_dims_are_refused() {
    assert!(matches!(padded_dim(DType::Q4K, 128), Err(CodecError::NotKv { .. })));
    assert!(matches!(TileLayout::new(DType::Q5_0, Side::K, 128), Err(CodecError::NotKv { .. })));
    for dim in [0, 16, 130] {
        assert_eq!(
            TileLayout::new(DType::Turbo3, Side::K, dim),
            Err(CodecError::TileDim { dtype: DType::Turbo3, step: 32, got: dim })
        );
    }
}

/// Returns the scale and indices of a slice of a rotated row.
fn coded_slice(book: &impl Book, y: &[f32]) -> (f16, Vec<u8>) {
    fn of<const N: usize>(book: &impl Book, y: &[f32]) -> (f16, Vec<u8>) {
        let coded = turbo::encode_rotated::<N>(book, y.try_into().unwrap());
        (coded.scale, coded.indices.to_vec())
    }
    match y.len() {
        128 => of::<128>(book, y),
        64 => of::<64>(book, y),
        32 => of::<32>(book, y),
        n => unreachable!("a slice of {n}"),
    }
}

/// Encodes and decodes the padded, rotated row slice by slice.
fn through_the_codec(dtype: DType, row: &[f32]) -> Vec<f32> {
    fn turbo(book: &impl Book, y: &[f32]) -> Vec<f32> {
        fn back<const N: usize>(book: &impl Book, y: &[f32]) -> Vec<f32> {
            let (scale, indices) = coded_slice(book, y);
            let indices = indices.try_into().unwrap();
            turbo::decode_rotated::<N>(book, &turbo::CodedSlice { scale, indices }).to_vec()
        }
        match y.len() {
            128 => back::<128>(book, y),
            64 => back::<64>(book, y),
            _ => back::<32>(book, y),
        }
    }
    let slices = slices(row.len(), 128).map(|slice| &row[slice]);
    match dtype.code().map(|code| &code.levels) {
        Some(Levels::Book(book)) => slices.flat_map(|y| turbo(book, y)).collect(),
        Some(Levels::Trellis(trellis)) => slices.flat_map(|y| turbo(trellis, y)).collect(),
        _ => {
            let mut bytes = vec![0; dtype.row_bytes(row.len()).unwrap()];
            encode(dtype, row, &mut bytes).unwrap();
            let mut back = vec![0.0; row.len()];
            decode(dtype, &bytes, &mut back).unwrap();
            back
        }
    }
}

#[test]
fn slices_follow_the_binary_digits_of_the_row_size() {
    for (dim, widths) in [
        (32, vec![32]),
        (64, vec![64]),
        (96, vec![64, 32]),
        (128, vec![128]),
        (192, vec![128, 64]),
        (224, vec![128, 64, 32]),
        (576, vec![128, 128, 128, 128, 64]),
    ] {
        let got: Vec<Range<usize>> = slices(dim, 128).collect();
        assert!(got.iter().map(Range::len).eq(widths), "{dim}: {got:?}");
        assert!(got.windows(2).all(|pair| pair[0].end == pair[1].start));
    }
    assert_eq!(slices(96, 32).count(), 3);
    assert_eq!(slices(0, 128).count(), 0);
}

#[test]
fn a_row_decodes_as_its_block_format_does_bit_for_bit() {
    for dtype in DType::KV {
        for head_dim in [16, 64, 80, 96, 128, 192, 256] {
            let dim = padded_dim(dtype, head_dim).unwrap();
            let rotates = dtype.code().is_some();
            let heads = rows(head_dim, 7);
            let prepared: Vec<Vec<f32>> = heads
                .iter()
                .map(|x| {
                    let mut row = vec![f32::NAN; dim];
                    prepare_row(rotates, x, &mut row);
                    row
                })
                .collect();
            for side in SIDES {
                let layout = TileLayout::new(dtype, side, dim).unwrap();
                let tile = filled(&layout, &prepared);
                for (slot, row) in prepared.iter().enumerate() {
                    let want = through_the_codec(dtype, row);
                    assert_eq!(got(&layout, &tile, slot), want, "{dtype} {side:?} {head_dim} slot {slot}");
                }
            }
        }
    }
}

/// Spells out the layout of the module's table value by value, sharing no code with the module.
#[test]
fn bits_lie_where_the_table_states() {
    let rows = rows(256, 3);
    let rows_96: Vec<Vec<f32>> = rows.iter().map(|row| row[..96].to_vec()).collect();
    for (dtype, bits, blocks) in [
        (DType::Q8_0, 8, &[32; 8][..]),
        (DType::Q4_0, 4, &[32; 8]),
        (DType::Turbo2, 2, &[128; 2]),
        (DType::Turbo3, 3, &[128; 2]),
        (DType::Turbo4, 4, &[128; 2]),
        (DType::Turbo2T, 2, &[128; 2]),
        (DType::Turbo3T, 3, &[128; 2]),
        (DType::Turbo2T, 2, &[64, 32]),
        (DType::Turbo3T, 3, &[64, 32]),
        (DType::Turbo2, 2, &[64, 32]),
        (DType::Turbo3, 3, &[64, 32]),
        (DType::Turbo4, 4, &[64, 32]),
    ] {
        let dim: usize = blocks.iter().sum();
        let rows = if dim == 96 { &rows_96 } else { &rows };
        for side in SIDES {
            let layout = TileLayout::new(dtype, side, dim).unwrap();
            let tile = filled(&layout, rows);
            for (slot, row) in rows.iter().enumerate() {
                let (mut row, mut tile) = (&row[..], &tile[..]);
                for &block in blocks {
                    let (x, bytes);
                    (x, row) = row.split_at(block);
                    (bytes, tile) = tile.split_at(32 + 16 * block * bits / 8);
                    let (scale, codes) = code(dtype, x);
                    assert_eq!(bytes[2 * slot..2 * slot + 2], scale.to_le_bytes());
                    let planes = &bytes[32..];
                    for (dim, &want) in codes.iter().enumerate() {
                        let (g, j) = if side == Side::K {
                            (dim / 4, 4 * slot + dim % 4)
                        } else {
                            (4 * (dim / 16) + slot / 4, 4 * (dim % 16) + slot % 4)
                        };
                        let bit = |byte: usize, at: usize| planes[byte] >> at & 1;
                        let mut have = 0;
                        for k in 0..bits {
                            have |= match bits {
                                8 => bit(64 * g + j, k),
                                4 => bit(32 * g + j % 32, 4 * (j / 32) + k),
                                3 if k == 2 => bit(4 * block + 8 * g + j / 8, j % 8),
                                _ => bit(16 * g + j % 16, 2 * (j / 16) + k),
                            } << k;
                        }
                        assert_eq!(have, want, "{dtype} {side:?} slot {slot} dim {dim}");
                    }
                }
            }
        }
    }
}

fn code(dtype: DType, x: &[f32]) -> (f16, Vec<u8>) {
    match &dtype.code().unwrap().levels {
        Levels::Book(book) => return coded_slice(book, x),
        Levels::Trellis(trellis) => return coded_slice(trellis, x),
        Levels::Steps { .. } => {}
    }
    let x = x.try_into().unwrap();
    let coded = match dtype {
        DType::Q8_0 => block32::encode_q8_0(x),
        _ => block32::encode_centred(x, 8),
    };
    (coded.scale, coded.codes.to_vec())
}

#[test]
fn floats_lie_dim_major_for_k_and_token_major_for_v() {
    for (side, at) in [(Side::K, 3 * 16 + 5), (Side::V, 5 * 48 + 3)] {
        let layout = TileLayout::new(DType::F16, side, 48).unwrap();
        let mut tile = vec![0; layout.bytes()];
        let mut row = vec![0.0; 48];
        row[3] = 1.0;
        layout.put(&mut tile, 5, &row);
        assert_eq!(tile[2 * at..2 * at + 2], f16::ONE.to_le_bytes());
        assert_eq!(tile.iter().filter(|&&b| b != 0).count(), 1);
    }
}

#[test]
fn put_touches_its_own_slot_only() {
    for dtype in DType::KV {
        for side in SIDES {
            let layout = TileLayout::new(dtype, side, 128).unwrap();
            let mut tile = filled(&layout, &rows(128, 1));
            let before: Vec<_> = (0..TILE).map(|slot| got(&layout, &tile, slot)).collect();
            let new = &rows(128, 2)[0];
            layout.put(&mut tile, 6, new);
            for slot in (0..TILE).filter(|&s| s != 6) {
                assert_eq!(got(&layout, &tile, slot), before[slot], "{dtype} {side:?} slot {slot}");
            }
            assert_ne!(got(&layout, &tile, 6), before[6]);
            let mut fresh = vec![0xff; layout.bytes()];
            layout.put(&mut fresh, 6, new);
            assert_eq!(got(&layout, &fresh, 6), got(&layout, &tile, 6), "{dtype} depends on old bits");
        }
    }
}

#[test]
fn decoding_and_encoding_again_gives_the_same_tile() {
    for dtype in DType::KV {
        for side in SIDES {
            let layout = TileLayout::new(dtype, side, 256).unwrap();
            let tile = filled(&layout, &rows(256, 11));
            let decoded: Vec<_> = (0..TILE).map(|slot| got(&layout, &tile, slot)).collect();
            assert_eq!(filled(&layout, &decoded), tile, "{dtype} {side:?}");
        }
    }
}

#[test]
fn zeroed_tiles_and_non_finite_rows_decode_to_finite_numbers() {
    let mut bad = vec![0.0; 128];
    (bad[0], bad[1], bad[2], bad[3]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX);
    for dtype in DType::KV {
        for side in SIDES {
            let layout = TileLayout::new(dtype, side, 128).unwrap();
            let mut tile = vec![0; layout.bytes()];
            assert!(got(&layout, &tile, 9).iter().all(|&v| v == 0.0), "{dtype}");
            layout.put(&mut tile, 0, &bad);
            assert!(got(&layout, &tile, 0).iter().all(|v| v.is_finite()), "{dtype}");
        }
    }
}

#[test]
fn restore_undoes_prepare() {
    for (rotates, dim) in [(false, 96), (true, 96), (true, 128)] {
        let x = &rows(80, 5)[0];
        let (mut row, mut back) = (vec![f32::NAN; dim], vec![0.0; 80]);
        prepare_row(rotates, x, &mut row);
        let norm = |v: &[f32]| v.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>();
        assert!((norm(&row) / norm(x) - 1.0).abs() <= 1e-5, "padding leaks energy");
        restore_row(rotates, &mut row, &mut back);
        for (b, x) in back.iter().zip(x) {
            assert!((b - x).abs() <= 1e-5, "{b} {x}");
        }
    }
}

/// Devices multiply codes with scales in f16.
#[test]
fn codes_of_clamped_values_decode_within_f16() {
    const DIM: usize = 128;
    let spike = |at: usize, x: f32| (0..DIM).map(|i| if i % 32 == at { x } else { 1.0 }).collect::<Vec<_>>();
    let mut inputs = vec![vec![f32::MAX; DIM], vec![f32::MIN; DIM]];
    // From 65,500.25 on, f16 would round the scale of q8_0 up to 516.
    for x in [65500.0, 65500.25, 65500.3, 65503.0, 65504.0, 1e30] {
        inputs.extend([spike(0, x), spike(31, -x), (0..DIM).map(|i| [x, -x][i % 2]).collect()]);
    }
    let mut random = Random::new(4);
    inputs.extend((0..50).map(|_| {
        let mut x = vec![0.0; DIM];
        random.fill_gaussian(&mut x, 1e5);
        x
    }));
    for dtype in DType::KV.into_iter().filter(|dtype| dtype.code().is_some()) {
        let layout = TileLayout::new(dtype, Side::K, DIM).unwrap();
        let mut tile = vec![0; layout.bytes()];
        for x in &inputs {
            layout.put(&mut tile, 3, x);
            let max = got(&layout, &tile, 3).into_iter().fold(0.0, |max: f32, v| max.max(v.abs()));
            assert!(max > 0.0 && max <= F16_MAX, "{dtype}: {max} from {:?}", &x[..4]);
        }
    }
}
