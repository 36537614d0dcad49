//! Memory layout of the codes of a KV type, and the values they decode to.
//!
//! All coded types are read in *octets*: the eight groups that hold 32 dims of 16 tokens. For keys
//! a group is four dims of 16 tokens; for values the first four groups are four tokens each of 16
//! dims, the other four of the next 16 dims. A block (the dims that share scales) is one octet for
//! q8_0 and q4_0; four, two or one for the turbo types.

use bytemuck::{Pod, Zeroable};
use kvant_codec::tile::high_planes;
use kvant_codec::{ByteBook, Codebook, DType, Levels, Side, Trellis};

use crate::simd::vec16::{Lanes, Op, PairTable};

/// Dims of an octet.
pub(super) const OCTET_DIMS: usize = 32;

/// An octet whose codes are whole bytes.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Expanded(pub(super) [[u8; 64]; 8]);

impl Expanded {
    pub(super) const ZERO: Self = Self([[0; 64]; 8]);

    /// Returns its first four groups and its last four.
    pub(super) fn halves(&mut self) -> [&mut [[u8; 64]; 4]; 2] {
        let [first, last] = self.0.as_chunks_mut().0 else { unreachable!("eight groups") };
        [first, last]
    }
}

/// A coding that kernels are compiled for.
pub(super) trait Codes {
    /// The planes of eight groups.
    type Octet<'a>: Copy;

    /// Quantization loss of the codes on values of variance 1; 0 where scales may be negative.
    const LOSS: f32;
    /// [`Op::LOOKS_UP_64`]
    const LOOKS_UP_64: bool = false;
    /// The values of [`Codes::indices`] in units of the scale, which [`Codes::group`] rounds.
    const BOOK: Option<&'static [f32; 16]> = None;

    /// Returns octet `index` of `planes`, the planes of a block; the high planes, if any, begin at
    /// byte `high`.
    fn octet(planes: &[u8], high: usize, index: usize) -> Self::Octet<'_>;

    /// Returns group `g` of an octet of this side as 64 codes.
    fn group<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize, side: Side) -> L::Ints;

    /// Returns group `g` of an octet of values as 64 indices of [`Codes::BOOK`], or else as codes.
    #[inline(always)]
    fn indices<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize) -> L::Ints {
        Self::group(lanes, octet, g, Side::V)
    }
}

/// Returns eight chunks of `B` bytes, from byte `at` on.
#[inline(always)]
fn eight<const B: usize>(planes: &[u8], at: usize) -> &[[u8; B]; 8] {
    let pieces = planes[at..at + 8 * B].as_chunks().0;
    pieces.try_into().expect("eight pieces")
}

/// q8_0, and any other coding once expanded: code = signed value + 128.
pub(super) struct Whole;

impl Codes for Whole {
    type Octet<'a> = &'a [[u8; 64]; 8];

    const LOSS: f32 = 0.0;

    #[inline(always)]
    fn octet(planes: &[u8], _: usize, index: usize) -> Self::Octet<'_> {
        eight(planes, 512 * index)
    }

    #[inline(always)]
    fn group<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize, _: Side) -> L::Ints {
        lanes.codes_8(&octet[g])
    }
}

/// q4_0: code = signed value + 8.
pub(super) struct Nibbles;

impl Codes for Nibbles {
    type Octet<'a> = &'a [[u8; 32]; 8];

    const LOSS: f32 = 0.0;

    #[inline(always)]
    fn octet(planes: &[u8], _: usize, index: usize) -> Self::Octet<'_> {
        eight(planes, 256 * index)
    }

    #[inline(always)]
    fn group<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize, _: Side) -> L::Ints {
        lanes.codes_4(&octet[g])
    }
}

/// turbo4, looked up in its byte codebook.
pub(super) struct Turbo4;

impl Codes for Turbo4 {
    type Octet<'a> = &'a [[u8; 32]; 8];

    const BOOK: Option<&'static [f32; 16]> = Some(&values(&Codebook::GAUSS4));
    const LOSS: f32 = DType::Turbo4.squared_error() as f32;

    #[inline(always)]
    fn octet(planes: &[u8], _: usize, index: usize) -> Self::Octet<'_> {
        eight(planes, 256 * index)
    }

    #[inline(always)]
    fn group<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize, _: Side) -> L::Ints {
        lanes.look_up(lanes.codes_4(&octet[g]), &TURBO4.bytes)
    }

    #[inline(always)]
    fn indices<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize) -> L::Ints {
        lanes.codes_4(&octet[g])
    }
}

/// turbo3.
pub(super) struct Turbo3;

impl Codes for Turbo3 {
    type Octet<'a> = (&'a [[u8; 16]; 8], &'a [[u8; 8]; 8]);

    const BOOK: Option<&'static [f32; 16]> = Some(&values(&Codebook::GAUSS3));
    const LOSS: f32 = DType::Turbo3.squared_error() as f32;

    #[inline(always)]
    fn octet(planes: &[u8], high: usize, index: usize) -> Self::Octet<'_> {
        // The low planes of all groups of the block come first.
        (eight(planes, 128 * index), eight(planes, high + 64 * index))
    }

    #[inline(always)]
    fn group<L: Lanes>(lanes: L, (low, high): Self::Octet<'_>, g: usize, _: Side) -> L::Ints {
        lanes.look_up_3(&low[g], &high[g], &TURBO3.bytes)
    }

    #[inline(always)]
    fn indices<L: Lanes>(lanes: L, (low, high): Self::Octet<'_>, g: usize) -> L::Ints {
        lanes.codes_3(&low[g], &high[g])
    }
}

/// turbo2.
pub(super) struct Turbo2;

impl Codes for Turbo2 {
    type Octet<'a> = &'a [[u8; 16]; 8];

    const BOOK: Option<&'static [f32; 16]> = Some(&values(&Codebook::GAUSS2));
    const LOSS: f32 = DType::Turbo2.squared_error() as f32;

    #[inline(always)]
    fn octet(planes: &[u8], _: usize, index: usize) -> Self::Octet<'_> {
        eight(planes, 128 * index)
    }

    #[inline(always)]
    fn group<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize, _: Side) -> L::Ints {
        lanes.look_up(lanes.codes_2(&octet[g]), &TURBO2.bytes)
    }

    #[inline(always)]
    fn indices<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize) -> L::Ints {
        lanes.codes_2(&octet[g])
    }
}

/// An octet of a trellis-coded type, and its predecessor in the ring.
///
/// The predecessor of a code is the code at the same position four groups earlier
/// ([`kvant_codec::trellis`]), in this octet or in the one before. Only where the ring closes, at
/// the first octet of a block, it is one dim further on, in the next byte of keys or lane of
/// values.
#[derive(Clone, Copy)]
pub(super) struct Chained<O> {
    own: O,
    before: O,
    is_first: bool,
}

impl<O> Chained<O> {
    /// Returns octet `index` of the `octets` of a block, each of which `octet` returns.
    #[inline(always)]
    fn new(octets: usize, index: usize, octet: impl Fn(usize) -> O) -> Self {
        let before = if index == 0 { octets - 1 } else { index - 1 };
        Self { own: octet(index), before: octet(before), is_first: index == 0 }
    }
}

/// Returns the low plane of group `g` with each code moved one dim further on, to the next code of
/// its lane or from the last one to the next lane.
#[inline(always)]
fn next_low(planes: &[[u8; 16]; 8], g: usize, side: Side) -> [u8; 16] {
    let codes: [u32; 4] = bytemuck::cast(planes[g]);
    let mut next = [0; 4];
    match side {
        Side::K => {
            let before: [u32; 4] = bytemuck::cast(planes[g & 4 | (g + 3) & 3]);
            for i in 0..4 {
                next[i] = codes[i] << 8 | before[i] >> 24;
            }
        }
        Side::V => {
            // The last lane of a quarter is the first of the next quarter, two bits further on.
            const UP: [u32; 4] = [2, 0, 0, 0];
            const STAY: [u32; 4] = [0xfcfc_fcfc, !0, !0, !0];
            for i in 0..4 {
                let moved = codes[(i + 3) % 4];
                next[i] = moved << UP[i] & STAY[i] | moved >> 6 & !STAY[i];
            }
        }
    }
    bytemuck::cast(next)
}

/// Returns the high plane of group `g` moved so.
#[inline(always)]
fn next_high(planes: &[[u8; 8]; 8], g: usize, side: Side) -> [u8; 8] {
    const FIRST_BITS: u64 = 0x1111_1111_1111_1111;
    let codes = u64::from_le_bytes(planes[g]);
    let next = match side {
        Side::K => {
            let before = u64::from_le_bytes(planes[g & 4 | (g + 3) & 3]);
            codes << 1 & !FIRST_BITS | before >> 3 & FIRST_BITS
        }
        Side::V => codes.rotate_left(4),
    };
    next.to_le_bytes()
}

/// turbo3t: turbo3, trellis-coded.
pub(super) struct Turbo3T;

impl Codes for Turbo3T {
    type Octet<'a> = Chained<<Turbo3 as Codes>::Octet<'a>>;

    const LOSS: f32 = DType::Turbo3T.squared_error() as f32;
    const LOOKS_UP_64: bool = true;

    #[inline(always)]
    fn octet(planes: &[u8], high: usize, index: usize) -> Self::Octet<'_> {
        Chained::new(high / 128, index, |index| Turbo3::octet(planes, high, index))
    }

    #[inline(always)]
    fn group<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize, side: Side) -> L::Ints {
        let Chained { own: (low, high), before, is_first } = octet;
        // The first four groups of an octet have their bits below those of their predecessors, the
        // other four above: a group is loaded once for its own codes and as a predecessor.
        if g >= 4 {
            let one = lanes.load_3::<false>(&low[g - 4], &high[g - 4]);
            return lanes.look_up_pairs(one, lanes.load_3::<true>(&low[g], &high[g]), &LATE_TURBO3T);
        }
        let own = lanes.load_3::<false>(&low[g], &high[g]);
        let (low, high) = before;
        let one = if is_first {
            lanes.load_3::<true>(&next_low(low, g + 4, side), &next_high(high, g + 4, side))
        } else {
            lanes.load_3::<true>(&low[g + 4], &high[g + 4])
        };
        lanes.look_up_pairs(own, one, &TURBO3T)
    }
}

/// turbo2t: turbo2, trellis-coded.
pub(super) struct Turbo2T;

impl Codes for Turbo2T {
    type Octet<'a> = Chained<<Turbo2 as Codes>::Octet<'a>>;

    const LOSS: f32 = DType::Turbo2T.squared_error() as f32;
    const LOOKS_UP_64: bool = true;

    #[inline(always)]
    fn octet(planes: &[u8], high: usize, index: usize) -> Self::Octet<'_> {
        Chained::new(planes.len() / 128, index, |index| Turbo2::octet(planes, high, index))
    }

    #[inline(always)]
    fn group<L: Lanes>(lanes: L, octet: Self::Octet<'_>, g: usize, side: Side) -> L::Ints {
        let Chained { own, before, is_first } = octet;
        let earlier = |g| if is_first { next_low(before, g, side) } else { before[g] };
        let one = if g < 4 { earlier(g + 4) } else { own[g - 4] };
        let codes = [lanes.load_2(&own[g]), lanes.load_2(&one), lanes.load_2(&earlier(g))];
        lanes.look_up_triples(codes, &TURBO2T)
    }
}

/// The coding of a KV tensor, for dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coding {
    Whole,
    Nibbles,
    Turbo2,
    Turbo3,
    Turbo4,
    Turbo2T,
    Turbo3T,
}

impl Coding {
    /// Returns the coding of a KV type; `None` for float types.
    pub(super) fn of(dtype: DType) -> Option<Self> {
        let code = dtype.code()?;
        Some(match (&code.levels, code.bits) {
            (Levels::Steps { .. }, 8) => Self::Whole,
            (Levels::Steps { .. }, 4) => Self::Nibbles,
            (Levels::Book(_), 2) => Self::Turbo2,
            (Levels::Book(_), 3) => Self::Turbo3,
            (Levels::Book(_), 4) => Self::Turbo4,
            (Levels::Trellis(_), 2) => Self::Turbo2T,
            (Levels::Trellis(_), 3) => Self::Turbo3T,
            (levels, bits) => unreachable!("codes of {bits} bits for {levels:?}"),
        })
    }
}

/// What the codes of a type decode to: value = (code - bias) · step · scale, within half a step for
/// scalar codebooks.
#[derive(Debug, Clone, Copy)]
pub(super) struct CodeMeaning {
    pub(super) bias: i32,
    pub(super) step: f32,
    /// Byte planes of a query that is multiplied with such keys.
    pub(super) query_planes: usize,
    /// [`Codes::LOSS`]
    pub(super) loss: f32,
}

impl CodeMeaning {
    /// Returns the meaning of a coded type's codes; `None` for float types.
    pub(super) fn of(dtype: DType) -> Option<Self> {
        let code = dtype.code()?;
        let (bias, step, loss) = match (&code.levels, code.bits) {
            (Levels::Steps { zero }, _) => (i32::from(*zero), 1.0, Whole::LOSS),
            (Levels::Book(_), 2) => (128, TURBO2.step, Turbo2::LOSS),
            (Levels::Book(_), 3) => (128, TURBO3.step, Turbo3::LOSS),
            (Levels::Book(_), _) => (128, TURBO4.step, Turbo4::LOSS),
            (Levels::Trellis(_), 2) => (128, Trellis::CENTROID_STEP, Turbo2T::LOSS),
            (Levels::Trellis(_), _) => (128, Trellis::CENTROID_STEP, Turbo3T::LOSS),
        };
        // q8_0 loses so little itself that its queries take two bytes.
        let query_planes = if code.bits == 8 { 2 } else { 1 };
        Some(Self { bias, step, query_planes, loss })
    }
}

const TURBO2: ByteBook = ByteBook::of(&Codebook::GAUSS2);
const TURBO3: ByteBook = ByteBook::of(&Codebook::GAUSS3);
const TURBO4: ByteBook = ByteBook::of(&Codebook::GAUSS4);
static TURBO2T: [u8; 64] = above_128(&Trellis::TURBO2T);
static TURBO3T: PairTable = PairTable::of(above_128(&Trellis::TURBO3T));
/// By the same six bits in the other order: the last three of the sequence above the three before
/// them.
static LATE_TURBO3T: PairTable = {
    let (levels, mut late, mut i) = (above_128(&Trellis::TURBO3T), [0; 64], 0);
    while i < late.len() {
        late[i % 8 * 8 + i / 8] = levels[i];
        i += 1;
    }
    PairTable::of(late)
};

/// Returns the value of each index, and zeros.
const fn values(book: &Codebook) -> [f32; 16] {
    let (mut values, mut i) = ([0.0; 16], 0);
    while i < book.centroids().len() {
        values[i] = book.centroids()[i];
        i += 1;
    }
    values
}

/// Returns levels as unsigned bytes; 128 represents 0.
const fn above_128(trellis: &Trellis) -> [u8; 64] {
    let (levels, mut bytes, mut i) = (trellis.levels(), [0; 64], 0);
    while i < bytes.len() {
        bytes[i] = levels[i] as u8 ^ 128;
        i += 1;
    }
    bytes
}

/// Calls a generic function with the [`Codes`] of a coding.
macro_rules! with_codes {
    ($coding:expr, $C:ident => $body:expr) => {
        match $coding {
            Coding::Whole => {
                type $C = $crate::ops::attend::codes::Whole;
                $body
            }
            Coding::Nibbles => {
                type $C = $crate::ops::attend::codes::Nibbles;
                $body
            }
            Coding::Turbo2 => {
                type $C = $crate::ops::attend::codes::Turbo2;
                $body
            }
            Coding::Turbo3 => {
                type $C = $crate::ops::attend::codes::Turbo3;
                $body
            }
            Coding::Turbo4 => {
                type $C = $crate::ops::attend::codes::Turbo4;
                $body
            }
            Coding::Turbo2T => {
                type $C = $crate::ops::attend::codes::Turbo2T;
                $body
            }
            Coding::Turbo3T => {
                type $C = $crate::ops::attend::codes::Turbo3T;
                $body
            }
        }
    };
}
pub(super) use with_codes;

/// Expands one octet to whole bytes, for kernels that read it more than once.
pub(super) struct Expand<'a> {
    pub(super) coding: Coding,
    /// Planes of the block, and nothing else.
    pub(super) planes: &'a [u8],
    /// Index of the octet within the block.
    pub(super) octet: usize,
    pub(super) side: Side,
    /// Its first four groups and its last four.
    pub(super) out: [&'a mut [[u8; 64]; 4]; 2],
}

impl Op for Expand<'_> {
    type Output = ();

    const LOOKS_UP_64: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        with_codes!(self.coding, C => self.expand::<L, C>(lanes))
    }
}

impl Expand<'_> {
    #[inline(always)]
    fn expand<L: Lanes, C: Codes>(self, lanes: L) {
        let octet = C::octet(self.planes, high_planes(self.planes.len()), self.octet);
        for (half, groups) in self.out.into_iter().enumerate() {
            for (g, out) in groups.iter_mut().enumerate() {
                lanes.store_codes(C::group(lanes, octet, 4 * half + g, self.side), out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::isa::Isa;
    use crate::simd::vec16::run_on;
    use kvant_codec::random::Random;
    use kvant_codec::tile::{SCALE_BYTES, TILE, TileLayout};

    /// Random bytes are a valid tile: every coding must read them as the reference does.
    #[test]
    fn expanded_codes_are_those_of_the_tile() {
        let mut random = Random::new(1);
        for dtype in DType::KV {
            let (Some(coding), Some(meaning)) = (Coding::of(dtype), CodeMeaning::of(dtype)) else { continue };
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
                                let want = row[dim];
                                // Two roundings of a product.
                                let bound = if is_book { 0.5001 * meaning.step } else { 2e-7 * want.abs() };
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
                let mut out = Expanded::ZERO;
                let planes = &tile[block.bytes.clone()][SCALE_BYTES..];
                let side = layout.side();
                let expand = Expand { coding, planes, octet, side, out: out.halves() };
                run_on(isa, expand)?;
                codes.extend_from_slice(out.0.as_flattened());
            }
        }
        Some(codes)
    }
}
