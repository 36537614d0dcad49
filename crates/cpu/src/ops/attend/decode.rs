//! Decoding of whole tiles of a shared-KV tensor to rows, as the reference decodes each.

use kvant_codec::DType;
use kvant_codec::tile::{SCALE_BYTES, TILE, TileBlock, high_planes};

use super::codes::{CodeMeaning, Codes, Coding, OCTET_DIMS, with_codes};
use super::floats::{F16, Floats, with_floats};
use super::view::StoredTile;
use crate::simd::vec16::{Lanes, Op};

const LANES: usize = 16;

/// Decodes a tile.
pub(super) struct DecodeRows<'a> {
    pub(super) tile: StoredTile<'a>,
    /// `[tokens, dim]`
    pub(super) out: &'a mut [f32],
}

impl Op for DecodeRows<'_> {
    type Output = ();

    const LOOKS_UP_64: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { tile: StoredTile { layout, bytes, centre }, out } = self;
        let Some(coding) = Coding::of(layout.dtype()) else {
            return with_floats!(layout.dtype(), F, B => {
                for (out, x) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(bytes.as_chunks::<B>().0) {
                    lanes.store(F::load(lanes, x), out);
                }
            });
        };
        let meaning = CodeMeaning::of(layout.dtype()).expect("coded tiles");
        for TileBlock { dims, bytes: place } in layout.blocks() {
            let rows = Rows { out, width: layout.dim(), first: dims.start, n: dims.len() };
            with_codes!(coding, C => decode_block::<L, C>(lanes, meaning, &bytes[place], rows));
        }
        let Some(centre) = centre else { return };
        for row in out.chunks_exact_mut(layout.dim()) {
            for (out, c) in row.as_chunks_mut::<LANES>().0.iter_mut().zip(centre.as_chunks().0) {
                lanes.store(lanes.add(lanes.load(out), F16::load(lanes, c)), out);
            }
        }
    }
}

/// A block of dims of the rows of a tile.
struct Rows<'a> {
    /// `[tokens, width]`
    out: &'a mut [f32],
    width: usize,
    /// The first dim and the number of dims.
    first: usize,
    n: usize,
}

#[inline(always)]
fn decode_block<L: Lanes, C: Codes>(lanes: L, meaning: CodeMeaning, block: &[u8], rows: Rows<'_>) {
    let (scales, planes) = block.split_at(SCALE_BYTES);
    let mut of_tokens = [0.0; TILE];
    lanes.store(lanes.load_f16(scales.try_into().expect("a scale for each token")), &mut of_tokens);
    let (bias, step) = (lanes.splat_i(-meaning.bias), lanes.splat(meaning.step));
    for index in 0..rows.n / OCTET_DIMS {
        let octet = C::octet(planes, high_planes(planes.len()), index);
        for g in 0..8 {
            // Sixteen dims in lanes, four tokens in the bytes of each.
            let codes = C::indices(lanes, octet, g);
            let (dims, tokens) = (rows.first + OCTET_DIMS * index + g / 4 * LANES, g % 4 * 4);
            for byte in 0..4 {
                let code = lanes.shift_right(codes, lanes.splat_i(8 * byte as i32));
                let code = lanes.and_i(code, lanes.splat_i(0xff));
                let value = match C::BOOK {
                    Some(book) => lanes.look_up_floats(code, book),
                    None => lanes.mul(lanes.to_floats(lanes.add_i(code, bias)), step),
                };
                let value = lanes.mul(value, lanes.splat(of_tokens[tokens + byte]));
                let out = &mut rows.out[(tokens + byte) * rows.width + dims..][..LANES];
                lanes.store(value, out.try_into().expect("sixteen dims"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvant_codec::Side;
    use kvant_codec::random::Random;
    use kvant_codec::tile::{TileLayout, centre};

    use super::*;
    use crate::simd::isa::Isa;
    use crate::simd::vec16::run_on;

    /// Random bytes are a valid tile, if its scales are finite: the values are those of its rows.
    #[test]
    fn decoded_tiles_are_their_rows() {
        let mut random = Random::new(2);
        for dtype in DType::KV {
            let layout = TileLayout::new(dtype, Side::V, 224).unwrap();
            let mut bytes: Vec<u8> = (0..layout.bytes()).map(|_| random.bits() as u8).collect();
            let mut halves = |n: usize| -> Vec<u8> {
                let half = |_| half::f16::from_f32(random.gaussian() as f32).to_le_bytes();
                (0..n).flat_map(half).collect()
            };
            match dtype.code() {
                Some(_) => {
                    for block in layout.blocks() {
                        bytes[block.bytes][..SCALE_BYTES].copy_from_slice(&halves(TILE));
                    }
                }
                None => bytes.chunks_exact_mut(2).for_each(|x| x[1] &= 0xbf),
            }
            let offsets = halves(layout.dim());
            for relative_to in [None, dtype.code().map(|_| &offsets[..])] {
                for isa in Isa::available() {
                    let mut out = vec![f32::NAN; TILE * layout.dim()];
                    let tile = StoredTile { layout, bytes: &bytes, centre: relative_to };
                    if run_on(isa, DecodeRows { tile, out: &mut out }).is_none() {
                        continue;
                    }
                    let mut row = vec![0.0; layout.dim()];
                    for (slot, out) in out.chunks_exact(layout.dim()).enumerate() {
                        layout.get(&bytes, slot, &mut row);
                        row.iter_mut()
                            .zip(relative_to.into_iter().flat_map(centre))
                            .for_each(|(v, c)| *v += c);
                        assert_eq!(out, row, "{isa:?} {dtype} {slot}");
                    }
                }
            }
        }
    }
}
