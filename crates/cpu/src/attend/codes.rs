//! How the codes of a cache type lie in memory, and what they stand for.
//!
//! All coded types are read in *octets*: the eight groups that hold 32 dims of 16 tokens. For keys a group is four
//! dims of 16 tokens; for values the first four groups are four tokens each of 16 dims, the other four of the next 16
//! dims. A block (the dims that share scales) is one octet for q8_0 and q4_0; four, two or one for the turbo types.

use kvant_codec::tile::high_planes;
use kvant_codec::{ByteBook, Codebook, DType, Levels};

use crate::lanes::{Lanes, Op};

/// Dims of an octet.
pub(super) const OCTET_DIMS: usize = 32;

/// Bytes of an octet whose codes are whole bytes.
pub(super) const EXPANDED_BYTES: usize = 512;

/// A coding that kernels are compiled for.
pub(super) trait Codes {
    /// The planes of eight groups.
    type Octet<'a>: Copy;

    /// Octet `index` of a block's planes; the high planes begin at byte `high`, where there are any.
    fn octet(planes: &[u8], high: usize, index: usize) -> Self::Octet<'_>;

    /// Group `g` of an octet as 64 codes.
    fn group<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize) -> L::Ints;
}

/// Eight pieces of `B` bytes, from byte `at` on.
#[inline(always)]
fn eight<const B: usize>(planes: &[u8], at: usize) -> &[[u8; B]; 8] {
    let pieces = planes[at..at + 8 * B].as_chunks().0;
    pieces.try_into().expect("eight pieces")
}

/// q8_0, and any other coding once expanded: code = signed value + 128.
pub(super) struct Whole;

impl Codes for Whole {
    type Octet<'a> = &'a [[u8; 64]; 8];

    #[inline(always)]
    fn octet(planes: &[u8], _: usize, index: usize) -> Self::Octet<'_> {
        eight(planes, 512 * index)
    }

    #[inline(always)]
    fn group<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize) -> L::Ints {
        lanes.codes_8(&octet[g])
    }
}

/// q4_0: code = signed value + 8.
pub(super) struct Nibbles;

impl Codes for Nibbles {
    type Octet<'a> = &'a [[u8; 32]; 8];

    #[inline(always)]
    fn octet(planes: &[u8], _: usize, index: usize) -> Self::Octet<'_> {
        eight(planes, 256 * index)
    }

    #[inline(always)]
    fn group<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize) -> L::Ints {
        lanes.codes_4(&octet[g])
    }
}

/// turbo4, looked up in the bytes of its codebook.
pub(super) struct Turbo4;

impl Codes for Turbo4 {
    type Octet<'a> = &'a [[u8; 32]; 8];

    #[inline(always)]
    fn octet(planes: &[u8], _: usize, index: usize) -> Self::Octet<'_> {
        eight(planes, 256 * index)
    }

    #[inline(always)]
    fn group<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize) -> L::Ints {
        lanes.look_up(lanes.codes_4(&octet[g]), &TURBO4.bytes)
    }
}

/// turbo3.
pub(super) struct Turbo3;

impl Codes for Turbo3 {
    type Octet<'a> = (&'a [[u8; 16]; 8], &'a [[u8; 8]; 8]);

    #[inline(always)]
    fn octet(planes: &[u8], high: usize, index: usize) -> Self::Octet<'_> {
        // The low planes of all groups of the block come first.
        (eight(planes, 128 * index), eight(planes, high + 64 * index))
    }

    #[inline(always)]
    fn group<L: Lanes>(lanes: L, (low, high): Self::Octet<'_>, g: usize) -> L::Ints {
        lanes.look_up_3(&low[g], &high[g], &TURBO3.bytes)
    }
}

/// turbo2.
pub(super) struct Turbo2;

impl Codes for Turbo2 {
    type Octet<'a> = &'a [[u8; 16]; 8];

    #[inline(always)]
    fn octet(planes: &[u8], _: usize, index: usize) -> Self::Octet<'_> {
        eight(planes, 128 * index)
    }

    #[inline(always)]
    fn group<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize) -> L::Ints {
        lanes.look_up(lanes.codes_2(&octet[g]), &TURBO2.bytes)
    }
}

/// The coding of a stream, to dispatch on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coding {
    Whole,
    Nibbles,
    Turbo2,
    Turbo3,
    Turbo4,
}

impl Coding {
    /// The coding of a cache type; `None` for float types.
    pub(super) fn of(dtype: DType) -> Option<Self> {
        let code = dtype.code()?;
        Some(match (&code.levels, code.bits) {
            (Levels::Steps { .. }, 8) => Self::Whole,
            (Levels::Steps { .. }, 4) => Self::Nibbles,
            (Levels::Book(_), 2) => Self::Turbo2,
            (Levels::Book(_), 3) => Self::Turbo3,
            (Levels::Book(_), 4) => Self::Turbo4,
            (levels, bits) => unreachable!("codes of {bits} bits for {levels:?}"),
        })
    }
}

/// What the codes of a type stand for: value = (code - bias) · step · scale, within half a step for codebooks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Meaning {
    pub(super) bias: i32,
    pub(super) step: f32,
    /// Byte planes of a query that meets such keys.
    pub(super) query_planes: usize,
}

impl Meaning {
    /// The meaning of a coded type's codes; `None` for float types.
    pub(super) fn of(dtype: DType) -> Option<Self> {
        let code = dtype.code()?;
        Some(match (&code.levels, code.bits) {
            // q8_0 loses so little itself that its queries take two bytes.
            (Levels::Steps { zero }, bits) => {
                Self { bias: i32::from(*zero), step: 1.0, query_planes: if bits == 8 { 2 } else { 1 } }
            }
            (Levels::Book(_), 2) => Self::of_book(&TURBO2),
            (Levels::Book(_), 3) => Self::of_book(&TURBO3),
            (Levels::Book(_), _) => Self::of_book(&TURBO4),
        })
    }

    fn of_book(book: &ByteBook) -> Self {
        Self { bias: 128, step: book.step, query_planes: 1 }
    }
}

const TURBO2: ByteBook = ByteBook::of(&Codebook::GAUSS2);
const TURBO3: ByteBook = ByteBook::of(&Codebook::GAUSS3);
const TURBO4: ByteBook = ByteBook::of(&Codebook::GAUSS4);

/// Writes one octet as whole bytes, for kernels that read it more than once.
pub(super) struct Expand<'a> {
    pub(super) coding: Coding,
    /// Planes of the block, and nothing else.
    pub(super) planes: &'a [u8],
    /// Which octet of the block.
    pub(super) octet: usize,
    pub(super) out: &'a mut [u8; EXPANDED_BYTES],
}

impl Op for Expand<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        match self.coding {
            Coding::Whole => self.expand::<L, Whole>(lanes),
            Coding::Nibbles => self.expand::<L, Nibbles>(lanes),
            Coding::Turbo2 => self.expand::<L, Turbo2>(lanes),
            Coding::Turbo3 => self.expand::<L, Turbo3>(lanes),
            Coding::Turbo4 => self.expand::<L, Turbo4>(lanes),
        }
    }
}

impl Expand<'_> {
    #[inline(always)]
    fn expand<L: Lanes, C: Codes>(self, lanes: L) {
        let octet = C::octet(self.planes, high_planes(self.planes.len()), self.octet);
        let (groups, _) = self.out.as_chunks_mut();
        for (g, out) in groups.iter_mut().enumerate() {
            lanes.store_codes(C::group(lanes, octet, g), out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::lanes::run_on;
    use kvant_codec::random::Random;
    use kvant_codec::tile::{SCALE_BYTES, Side, TILE, TileLayout};

    /// Random bytes are a valid tile: every coding must read them as the reference does.
    #[test]
    fn expanded_codes_are_those_of_the_tile() {
        let mut random = Random::new(1);
        for dtype in DType::KV {
            let (Some(coding), Some(meaning)) = (Coding::of(dtype), Meaning::of(dtype)) else { continue };
            for side in [Side::K, Side::V] {
                let layout = TileLayout::new(dtype, side, 224).unwrap();
                let mut tile: Vec<u8> = (0..layout.bytes()).map(|_| random.bits() as u8).collect();
                for block in layout.blocks() {
                    tile[block.bytes][..SCALE_BYTES].as_chunks_mut().0.fill(half::f16::ONE.to_le_bytes());
                }
                for isa in Isa::available() {
                    let codes = expand_all(isa, coding, layout, &tile);
                    let Some(codes) = codes else { continue };
                    for slot in 0..TILE {
                        let mut row = vec![f32::NAN; layout.dim()];
                        layout.get(&tile, slot, &mut row);
                        for block in layout.blocks() {
                            for dim in block.dims.clone() {
                                let (g, j) = layout.place(slot, dim - block.dims.start);
                                let code = codes[64 * (block.dims.start / 4 + g) + j];
                                let got = (i32::from(code) - meaning.bias) as f32 * meaning.step;
                                let is_book = matches!(dtype.code().unwrap().levels, Levels::Book(_));
                                let bound = if is_book { 0.5001 * meaning.step } else { 0.0 };
                                let want = row[dim];
                                assert!(
                                    (got - want).abs() <= bound,
                                    "{isa:?} {dtype} {slot} {dim}: {got} {want}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    fn expand_all(isa: Isa, coding: Coding, layout: TileLayout, tile: &[u8]) -> Option<Vec<u8>> {
        let mut codes = Vec::new();
        for block in layout.blocks() {
            for octet in 0..block.dims.len() / OCTET_DIMS {
                let mut out = [0; EXPANDED_BYTES];
                let planes = &tile[block.bytes.clone()][SCALE_BYTES..];
                let expand = Expand { coding, planes, octet, out: &mut out };
                run_on(isa, expand)?;
                codes.extend_from_slice(&out);
            }
        }
        Some(codes)
    }
}
