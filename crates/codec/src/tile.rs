//! The layout of the KV cache: tiles of 16 tokens of one KV head, K or V.
//!
//! A row-by-row block format forces readers to shuffle: a kernel needs a register of codes to
//! multiply with one broadcast query word, and adjacent scales. The cache therefore stores the
//! *same* scales and indices as the block formats in the order below, and [`TileLayout::put`] and
//! [`TileLayout::get`] are the reference for every kernel.
//!
//! # Layout
//!
//! Float formats (f32, f16, bf16; little endian, no scales):
//!
//! ```text
//! K   [dim][16 tokens]        V   [16 tokens][dim]
//! ```
//!
//! Coded formats: the dims are divided into blocks, stored consecutively: 32 dims each for q8_0 and
//! q4_0; for turbo as many blocks of 128 as fit, then one of 64 and one of 32 where they fit (heads
//! of 64 are one block of 64, heads of 80 and 96 one of 64 and one of 32, heads of 192 one of 128
//! and one of 64). Each block:
//!
//! ```text
//! scales   16 × f16, one per token                                  32 bytes
//! planes   dims/4 groups of 64 codes
//! ```
//!
//! A group holds 64 codes; code j of group g is
//!
//! ```text
//! K   token t = j / 4, dim 4g + j mod 4                     one token per 32-bit lane, dims within
//! V   g = 4r + q: dim 16r + j / 4, token 4q + j mod 4       one dim per lane, tokens within
//! ```
//!
//! and the group's codes are stored in planes:
//!
//! | code | bytes per group | position of code j |
//! |---|---|---|
//! | 8 bits (q8_0) | 64 | byte j, signed code + 128 |
//! | 4 bits (q4_0, turbo4) | 32 | byte j mod 32; low nibble for j < 32, high nibble for j >= 32 |
//! | 2 bits (turbo2, turbo2t) | 16 | byte j mod 16, bits 2·(j / 16) |
//! | 3 bits (turbo3, turbo3t) | 16 + 8 | low bits as 2-bit plane; high bit: bit j of a u64 |
//!
//! turbo3 and turbo3t store the low planes of all groups of the block first, then the high planes.
//!
//! | format | bytes per block of 16 tokens and 128, 64, 32 dims |
//! |---|---|
//! | q8_0 | 544 (32 dims) |
//! | q4_0 | 288 (32 dims) |
//! | turbo2, turbo2t | 544, 288, 160 |
//! | turbo3, turbo3t | 800, 416, 224 |
//! | turbo4 | 1,056, 544, 288 |
//!
//! # Rotation
//!
//! Tiles store rows unchanged. Rotation is a property of a *KV tensor* (K or V of one head of one
//! layer): the f16 tail of a turbo3 tensor holds rotated rows too. [`prepare_row`] pads and rotates
//! a row before it is written, [`restore_row`] undoes both; inner products need no inverse
//! rotation, since query and keys are both rotated.
//!
//! A zeroed tile decodes to zeros in every format except q8_0 and q4_0, where it decodes to minus
//! zero: the scale is 0 and code 0 is negative.

use std::ops::Range;

use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};

use crate::finite::{F16_MAX, clamp, to_f16};
use crate::turbo::Book;
use crate::{CodecError, DType, KvCode, Levels, Rotation, block32, dtype, turbo};

/// Tokens per tile.
pub const TILE: usize = 16;

/// Codes per group.
pub const GROUP: usize = 64;

/// Bytes of the scales at the head of each coded block: one f16 per token.
pub const SCALE_BYTES: usize = 32;

/// Keys or values: their tiles are read along different axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Side {
    /// Keys: attention sums over dims, tokens map to lanes.
    K,
    /// Values: attention sums over tokens, dims map to lanes.
    V,
}

/// Returns the values per row after padding a head of `head_dim` for `dtype`: the next multiple of
/// 32, or of 16 for the float formats.
///
/// # Errors
/// [`CodecError::NotKv`] for a format that the cache does not support.
#[inline]
pub fn padded_dim(dtype: DType, head_dim: usize) -> Result<usize, CodecError> {
    Ok(head_dim.next_multiple_of(dim_step(dtype)?))
}

/// Returns the padding granularity of rows: the narrowest block.
fn dim_step(dtype: DType) -> Result<usize, CodecError> {
    match dtype.code() {
        Some(_) => Ok(MIN_DIMS),
        None if dtype.is_kv() => Ok(16),
        None => Err(CodecError::NotKv { dtype, known: dtype::list(&DType::KV) }),
    }
}

/// Dims of the narrowest block.
pub const MIN_DIMS: usize = 32;

/// Divides `dim` values, a multiple of 32, into slices of at most `max_width` (a power of two): as
/// many of `max_width` as fit, then smaller powers of two down to 32, where they fit.
pub fn slices(dim: usize, max_width: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let width = move |first: usize| {
        let mut width = max_width;
        while width > MIN_DIMS && width > dim - first {
            width /= 2;
        }
        width
    };
    let next =
        move |slice: &Range<usize>| Some(slice.end..slice.end + width(slice.end)).filter(|s| s.end <= dim);
    std::iter::successors(next(&(0..0)), next)
}

/// Rotates the slices of `row` `[dim]` by [`Rotation::kv`], or back.
fn rotate(row: &mut [f32], apply: fn(&Rotation, &mut [f32])) {
    assert!(row.len().is_multiple_of(MIN_DIMS), "{} values are no whole slices", row.len());
    for slice in slices(row.len(), turbo::LEN) {
        apply(&Rotation::kv(slice.len()), &mut row[slice]);
    }
}

/// Pads `x` `[head_dim]` with zeros to `out` `[dim]` and, for a rotated KV tensor, rotates each
/// slice.
///
/// Non-finite numbers are replaced first (NaN by 0, the rest by ±65,504), so that none of them
/// spoils its slice.
///
/// # Panics
/// If `out` is shorter than `x`, or not a whole number of slices.
pub fn prepare_row(rotates: bool, x: &[f32], out: &mut [f32]) {
    let (head, padding) = out.split_at_mut(x.len());
    head.iter_mut().zip(x).for_each(|(o, &v)| *o = clamp(v, F16_MAX));
    padding.fill(0.0);
    if rotates {
        rotate(out, Rotation::forward);
    }
}

/// Pads a query `[head_dim]` with zeros to `out` `[dim]` and rotates it like the keys. Non-finite
/// numbers are kept.
///
/// # Panics
/// As [`prepare_row`].
pub fn prepare_query(rotates: bool, x: &[f32], out: &mut [f32]) {
    let (head, padding) = out.split_at_mut(x.len());
    head.copy_from_slice(x);
    padding.fill(0.0);
    if rotates {
        rotate(out, Rotation::forward);
    }
}

/// Inverse of [`prepare_row`]: un-rotates `y` `[dim]` in place and copies its first `[head_dim]`
/// values to `out`.
///
/// # Panics
/// If `y` is shorter than `out`, or not a whole number of slices.
pub fn restore_row(rotates: bool, y: &mut [f32], out: &mut [f32]) {
    if rotates {
        rotate(y, Rotation::inverse);
    }
    out.copy_from_slice(&y[..out.len()]);
}

/// Writes the mean of `rows` `[dim]`, summed in order, to `out` in f16: the *centre* that is
/// subtracted from rows before they are coded.
pub fn put_centre<'a>(rows: impl ExactSizeIterator<Item = &'a [f32]>, out: &mut [u8]) {
    let (out, _) = out.as_chunks_mut();
    let mut sum = vec![0.0f32; out.len()];
    let by = 1.0 / rows.len().max(1) as f32;
    rows.for_each(|row| sum.iter_mut().zip(row).for_each(|(sum, v)| *sum += v));
    out.iter_mut().zip(sum).for_each(|(out, sum)| *out = to_f16(sum * by).to_le_bytes());
}

/// Returns the values of a centre, `[dim]` in f16.
pub fn centre(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|&c| f16::from_le_bytes(c).to_f32())
}

/// A block of dims of a coded tile that share scales: 16 scales, one per token, then the planes of
/// their codes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileBlock {
    /// The dims.
    pub dims: Range<usize>,
    /// Its bytes within the tile.
    pub bytes: Range<usize>,
}

/// The layout of one tile: format, side and values per row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TileLayout {
    dtype: DType,
    side: Side,
    dim: usize,
}

impl TileLayout {
    /// Describes a tile of rows of `dim` values, as [`padded_dim`] returns them.
    ///
    /// # Errors
    /// [`CodecError::NotKv`] for a format that the cache does not support, [`CodecError::TileDim`]
    /// unless `dim` is a positive multiple of the format's step.
    pub fn new(dtype: DType, side: Side, dim: usize) -> Result<Self, CodecError> {
        let step = dim_step(dtype)?;
        if dim == 0 || !dim.is_multiple_of(step) {
            return Err(CodecError::TileDim { dtype, step, got: dim });
        }
        Ok(Self { dtype, side, dim })
    }

    /// Returns the format.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the side: keys or values.
    pub const fn side(&self) -> Side {
        self.side
    }

    /// Returns the values per row, padding included.
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// Returns the blocks of a coded tile, in order; none for the float formats.
    pub fn blocks(&self) -> impl Iterator<Item = TileBlock> + Clone {
        let max_dims = self.dtype.code().map_or(usize::MAX, KvCode::max_dims);
        let dim = if max_dims == usize::MAX { 0 } else { self.dim };
        let layout = *self;
        slices(dim, max_dims).scan(0, move |at, dims| {
            let first = *at;
            *at += layout.block_bytes(dims.len());
            Some(TileBlock { dims, bytes: first..*at })
        })
    }

    /// Returns the bytes of a block of 16 tokens and `dims` dims, scales included.
    const fn block_bytes(&self, dims: usize) -> usize {
        match self.dtype.code() {
            Some(code) => SCALE_BYTES + dims * code.bits / 8 * TILE,
            None => dims * self.dtype.block_bytes() * TILE,
        }
    }

    /// Returns the bytes of the tile.
    pub const fn bytes(&self) -> usize {
        let scales = match self.dtype.code() {
            Some(code) => {
                let (max_dims, rest) = (code.max_dims(), self.dim % code.max_dims());
                // One block for each binary digit of the remainder.
                SCALE_BYTES * (self.dim / max_dims + (rest / MIN_DIMS).count_ones() as usize)
            }
            None => 0,
        };
        match self.dtype.code() {
            Some(code) => scales + self.dim * code.bits / 8 * TILE,
            None => self.block_bytes(self.dim),
        }
    }

    /// Returns the position of a code within its block: `(group, j)`, for the value of dim `dim`
    /// (within the block) of the token in `slot`.
    pub const fn place(&self, slot: usize, dim: usize) -> (usize, usize) {
        match self.side {
            Side::K => (dim / 4, 4 * slot + dim % 4),
            Side::V => (dim / 16 * 4 + slot / 4, 4 * (dim % 16) + slot % 4),
        }
    }

    /// Writes the row of one token `[dim]` (padded and, for a rotated KV tensor, rotated) into
    /// `slot` and leaves the bits of other slots unchanged. Values are coded exactly as in the
    /// block format.
    ///
    /// # Panics
    /// Unless `tile` has [`TileLayout::bytes`] bytes, `row` has [`TileLayout::dim`] values and
    /// `slot` is below 16.
    pub fn put(&self, tile: &mut [u8], slot: usize, row: &[f32]) {
        self.check(tile.len(), slot, row.len());
        match self.dtype {
            DType::F32 => self.put_floats(tile, slot, row, |v| clamp(v, f32::MAX).to_le_bytes()),
            DType::F16 => self.put_floats(tile, slot, row, |v| to_f16(v).to_le_bytes()),
            DType::BF16 => self.put_floats(tile, slot, row, |v| {
                bf16::from_f32(clamp(v, self.dtype.max_abs())).to_le_bytes()
            }),
            _ => {
                for block in self.blocks() {
                    self.put_block(&mut tile[block.bytes], slot, &row[block.dims]);
                }
            }
        }
    }

    /// Reads the row of the token in `slot` into `out` `[dim]`, in the domain of
    /// [`TileLayout::put`]: still rotated.
    ///
    /// # Panics
    /// As [`TileLayout::put`].
    pub fn get(&self, tile: &[u8], slot: usize, out: &mut [f32]) {
        self.check(tile.len(), slot, out.len());
        match self.dtype {
            DType::F32 => self.get_floats(tile, slot, out, f32::from_le_bytes),
            DType::F16 if self.side == Side::V => self.get_halves(tile, slot, out),
            DType::F16 => self.get_floats(tile, slot, out, |b| f16::from_le_bytes(b).to_f32()),
            DType::BF16 => self.get_floats(tile, slot, out, |b| bf16::from_le_bytes(b).to_f32()),
            _ => {
                for block in self.blocks() {
                    self.get_block(&tile[block.bytes], slot, &mut out[block.dims]);
                }
            }
        }
    }

    /// Encodes one row of a block.
    fn put_block(&self, block: &mut [u8], slot: usize, x: &[f32]) {
        match self.code() {
            KvCode { bits, levels: Levels::Steps { .. } } => {
                let x = x.try_into().expect("blocks of 32 dims");
                let coded = if *bits == 8 {
                    block32::encode_q8_0(x)
                } else {
                    block32::encode_centred(x, block32::Q4_0_ZERO)
                };
                self.put_codes(block, slot, coded.scale, &coded.codes);
            }
            KvCode { levels: Levels::Book(book), .. } => self.put_slice(book, block, slot, x),
            KvCode { levels: Levels::Trellis(trellis), .. } => self.put_slice(trellis, block, slot, x),
        }
    }

    fn put_slice(&self, book: &impl Book, block: &mut [u8], slot: usize, x: &[f32]) {
        match x.len() {
            128 => self.put_turbo::<128>(book, block, slot, x),
            64 => self.put_turbo::<64>(book, block, slot, x),
            _ => self.put_turbo::<32>(book, block, slot, x),
        }
    }

    fn put_turbo<const N: usize>(&self, book: &impl Book, block: &mut [u8], slot: usize, x: &[f32]) {
        let coded = turbo::encode_rotated::<N>(book, x.try_into().expect("a slice"));
        self.put_codes(block, slot, coded.scale, &coded.indices);
    }

    fn put_codes(&self, block: &mut [u8], slot: usize, scale: f16, codes: &[u8]) {
        block[2 * slot..2 * slot + 2].copy_from_slice(&scale.to_le_bytes());
        for (dim, &code) in codes.iter().enumerate() {
            self.set_code(&mut block[SCALE_BYTES..], slot, dim, code);
        }
    }

    /// Decodes one row of a block.
    fn get_block(&self, block: &[u8], slot: usize, x: &mut [f32]) {
        let scale = f16::from_le_bytes([block[2 * slot], block[2 * slot + 1]]);
        match &self.code().levels {
            Levels::Steps { zero } => {
                let (mut codes, scale) = ([0; 32], scale.to_f32());
                self.get_codes(&block[SCALE_BYTES..], slot, &mut codes);
                for (x, code) in x.iter_mut().zip(codes) {
                    *x = f32::from(i16::from(code) - i16::from(*zero)) * scale;
                }
            }
            Levels::Book(book) => self.get_slice(book, block, slot, scale, x),
            Levels::Trellis(trellis) => self.get_slice(trellis, block, slot, scale, x),
        }
    }

    fn get_slice(&self, book: &impl Book, block: &[u8], slot: usize, scale: f16, x: &mut [f32]) {
        match x.len() {
            128 => self.get_turbo::<128>(book, block, slot, scale, x),
            64 => self.get_turbo::<64>(book, block, slot, scale, x),
            _ => self.get_turbo::<32>(book, block, slot, scale, x),
        }
    }

    fn get_turbo<const N: usize>(
        &self,
        book: &impl Book,
        block: &[u8],
        slot: usize,
        scale: f16,
        x: &mut [f32],
    ) {
        let mut indices = [0; N];
        self.get_codes(&block[SCALE_BYTES..], slot, &mut indices);
        x.copy_from_slice(&turbo::decode_rotated::<N>(book, &turbo::CodedSlice { scale, indices }));
    }

    fn check(&self, bytes: usize, slot: usize, dim: usize) {
        assert!(bytes == self.bytes(), "{self:?} takes {} bytes, not {bytes}", self.bytes());
        assert!(slot < TILE, "slot {slot} of {TILE}");
        assert!(dim == self.dim, "{self:?}: a row of {dim} values");
    }

    fn code(&self) -> &'static KvCode {
        self.dtype.code().expect("float tiles have no codes")
    }

    /// Returns the index of a value in a float tile.
    fn float_at(&self, slot: usize, dim: usize) -> usize {
        match self.side {
            Side::K => dim * TILE + slot,
            Side::V => slot * self.dim + dim,
        }
    }

    /// Reads a row of f16 values, which are next to each other, many at a time.
    fn get_halves(&self, tile: &[u8], slot: usize, out: &mut [f32]) {
        let (halves, _) = tile.as_chunks::<2>();
        let row = &halves[self.float_at(slot, 0)..][..self.dim];
        let mut some = [f16::ZERO; 64];
        for (bytes, out) in row.chunks(some.len()).zip(out.chunks_mut(some.len())) {
            let some = &mut some[..bytes.len()];
            some.iter_mut().zip(bytes).for_each(|(half, bytes)| *half = f16::from_le_bytes(*bytes));
            some.convert_to_f32_slice(out);
        }
    }

    fn put_floats<const B: usize>(
        &self,
        tile: &mut [u8],
        slot: usize,
        row: &[f32],
        to: impl Fn(f32) -> [u8; B],
    ) {
        let (floats, _) = tile.as_chunks_mut::<B>();
        for (dim, &v) in row.iter().enumerate() {
            floats[self.float_at(slot, dim)] = to(v);
        }
    }

    fn get_floats<const B: usize>(
        &self,
        tile: &[u8],
        slot: usize,
        out: &mut [f32],
        from: impl Fn([u8; B]) -> f32,
    ) {
        let (floats, _) = tile.as_chunks::<B>();
        for (dim, v) in out.iter_mut().enumerate() {
            *v = from(floats[self.float_at(slot, dim)]);
        }
    }

    /// Sets one code in the planes of a block.
    fn set_code(&self, planes: &mut [u8], slot: usize, dim: usize, code: u8) {
        let (g, j) = self.place(slot, dim);
        match self.code().bits {
            8 => planes[64 * g + j] = code,
            4 => set_bits(&mut planes[32 * g + j % 32], 4 * (j / 32), 4, code),
            2 => set_bits(&mut planes[16 * g + j % 16], 2 * (j / 16), 2, code),
            3 => {
                let high = high_planes(planes.len());
                set_bits(&mut planes[16 * g + j % 16], 2 * (j / 16), 2, code & 3);
                set_bits(&mut planes[high + 8 * g + j / 8], j % 8, 1, code >> 2);
            }
            bits => unreachable!("no codes of {bits} bits"),
        }
    }

    /// Reads the codes of one row from the planes of a block.
    fn get_codes(&self, planes: &[u8], slot: usize, codes: &mut [u8]) {
        match self.code().bits {
            8 => self.get_codes_of::<8>(planes, slot, codes),
            4 => self.get_codes_of::<4>(planes, slot, codes),
            3 => self.get_codes_of::<3>(planes, slot, codes),
            2 => self.get_codes_of::<2>(planes, slot, codes),
            bits => unreachable!("no codes of {bits} bits"),
        }
    }

    /// The same, where the number of bits is a constant. The places are those of
    /// [`TileLayout::place`].
    fn get_codes_of<const BITS: usize>(&self, planes: &[u8], slot: usize, codes: &mut [u8]) {
        let (low, high) = planes.split_at(if BITS == 3 { high_planes(planes.len()) } else { planes.len() });
        let bytes = if BITS == 3 { 16 } else { 8 * BITS };
        let (each, next, first) = match self.side {
            Side::K => (4, 1, 4 * slot),
            Side::V => (16, 4, slot % 4),
        };
        for (i, codes) in codes.chunks_exact_mut(each).enumerate() {
            let g = if self.side == Side::K { i } else { 4 * i + slot / 4 };
            let low = &low[bytes * g..][..bytes];
            for (k, code) in codes.iter_mut().enumerate() {
                let j = first + next * k;
                *code = match BITS {
                    8 => low[j],
                    4 => low[j % 32] >> (4 * (j / 32)) & 15,
                    _ => low[j % 16] >> (2 * (j / 16)) & 3,
                };
                if BITS == 3 {
                    *code |= (high[8 * g + j / 8] >> (j % 8) & 1) << 2;
                }
            }
        }
    }
}

/// Returns the offset of the high planes in a block of 3-bit codes whose planes take `bytes`: 16 of
/// a group's 24 bytes precede them.
pub const fn high_planes(bytes: usize) -> usize {
    bytes / 3 * 2
}

/// Replaces `width` bits of `byte` from bit `at`.
fn set_bits(byte: &mut u8, at: usize, width: usize, value: u8) {
    let mask = ((1u16 << width) - 1) as u8;
    *byte = (*byte & !(mask << at)) | value << at;
}

#[cfg(test)]
mod tests;
