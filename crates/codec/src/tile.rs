//! The layout of the KV cache: tiles of 16 tokens of one KV head, K or V.
//!
//! A row-by-row block format makes a reader shuffle: it wants one register of codes that meets one broadcast query
//! word, and it wants scales side by side. So the cache stores the *same* scales and indices as the block formats in
//! this order, and [`TileLayout::put`] and [`TileLayout::get`] are the reference that every kernel is held to.
//!
//! # Layout
//!
//! Float formats (f32, f16, bf16; little endian, no scales):
//!
//! ```text
//! K   [dim][16 tokens]        V   [16 tokens][dim]
//! ```
//!
//! Coded formats: the dims are cut into blocks (turbo: 128 dims, q8_0 and q4_0: 32), stored one after the other.
//! Each block:
//!
//! ```text
//! scales   16 × f16, one per token                                  32 bytes
//! planes   dims/4 groups of 64 codes
//! ```
//!
//! A group holds 64 codes; code j of group g is
//!
//! ```text
//! K   token t = j / 4, dim 4g + j mod 4                             dims run inside a 32-bit lane, one lane per token
//! V   g = 4r + q: dim 16r + j / 4, token 4q + j mod 4               tokens run inside the lane, one lane per dim
//! ```
//!
//! and the group's codes lie in planes:
//!
//! | code | bytes per group | where code j is |
//! |---|---|---|
//! | 8 bits (q8_0) | 64 | byte j, signed code + 128 |
//! | 4 bits (q4_0, turbo4) | 32 | byte j mod 32; low nibble for j < 32, high nibble for j >= 32 |
//! | 2 bits (turbo2) | 16 | byte j mod 16, bits 2·(j / 16) |
//! | 3 bits (turbo3) | 16 + 8 | low two bits as the 2-bit plane; high bit: bit j of a little-endian u64 |
//!
//! turbo3 stores the low planes of all 32 groups of the block first, then the 32 high planes.
//!
//! | format | bytes per block of 16 tokens | dims per block |
//! |---|---|---|
//! | q8_0 | 544 | 32 |
//! | q4_0 | 288 | 32 |
//! | turbo2 | 544 | 128 |
//! | turbo3 | 800 | 128 |
//! | turbo4 | 1,056 | 128 |
//!
//! # Rotation
//!
//! Tiles store rows as they come. Whether a *stream* (one side of one head of one layer) is rotated is a property of
//! the stream: the f16 tail of a turbo3 stream holds rotated rows too. [`prepare_row`] pads and rotates a row when it
//! is written, [`restore_row`] undoes that; inner products need no undoing, since a rotated query meets rotated keys.
//!
//! A zeroed tile decodes to zeros in every format except q8_0 and q4_0, where it decodes to minus zero: their scale
//! is 0 and their code is not the one of zero.

use half::{bf16, f16};

use crate::finite::{F16_MAX, clamp, to_f16};
use crate::{Codebook, CodecError, DType, Rotation, block32, dtype, turbo};

/// Tokens per tile.
pub const TILE: usize = 16;

/// Codes per group.
pub const GROUP: usize = 64;

/// Bytes of the scales at the head of each coded block: one f16 per token.
pub const SCALE_BYTES: usize = 32;

/// Keys or values: they differ in which way a tile is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Side {
    /// Keys: dims are summed over, tokens lie in lanes.
    K,
    /// Values: tokens are summed over, dims lie in lanes.
    V,
}

/// Values per row after padding a head of `head_dim` for `dtype`: the next multiple of 128 for turbo, 32 for q8_0
/// and q4_0, 16 for the float formats.
///
/// # Errors
/// [`CodecError::NotKv`] for a format that the cache cannot hold.
pub fn padded_dim(dtype: DType, head_dim: usize) -> Result<usize, CodecError> {
    Ok(head_dim.next_multiple_of(dim_step(dtype)?))
}

/// Rows are padded to a multiple of this.
fn dim_step(dtype: DType) -> Result<usize, CodecError> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(16),
        _ if dtype.is_kv() => Ok(dtype.block_len()),
        _ => Err(CodecError::NotKv { dtype, known: dtype::list(&DType::KV) }),
    }
}

/// Pads `x` `[head_dim]` with zeros to `out` `[dim]` and, for a rotated stream, rotates each slice.
///
/// Bad numbers are brought into range first (NaN 0, the rest ±65,504), so one of them cannot spoil its slice.
///
/// # Panics
/// If `out` is shorter than `x`, or not a whole number of rotation slices.
pub fn prepare_row(rotation: Option<&Rotation>, x: &[f32], out: &mut [f32]) {
    let (head, padding) = out.split_at_mut(x.len());
    head.iter_mut().zip(x).for_each(|(o, &v)| *o = clamp(v, F16_MAX));
    padding.fill(0.0);
    if let Some(rotation) = rotation {
        rotation.forward(out);
    }
}

/// Undoes [`prepare_row`]: un-rotates `y` `[dim]` in place and copies its first `[head_dim]` values to `out`.
///
/// # Panics
/// If `y` is shorter than `out`, or not a whole number of rotation slices.
pub fn restore_row(rotation: Option<&Rotation>, y: &mut [f32], out: &mut [f32]) {
    if let Some(rotation) = rotation {
        rotation.inverse(y);
    }
    out.copy_from_slice(&y[..out.len()]);
}

/// How one tile is laid out: format, side and values per row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TileLayout {
    dtype: DType,
    side: Side,
    dim: usize,
}

impl TileLayout {
    /// A tile of rows of `dim` values, as [`padded_dim`] gives them.
    ///
    /// # Errors
    /// [`CodecError::NotKv`] for a format that the cache cannot hold, [`CodecError::TileDim`] unless `dim` is a
    /// positive multiple of the format's step.
    pub fn new(dtype: DType, side: Side, dim: usize) -> Result<Self, CodecError> {
        let step = dim_step(dtype)?;
        if dim == 0 || !dim.is_multiple_of(step) {
            return Err(CodecError::TileDim { dtype, step, got: dim });
        }
        Ok(Self { dtype, side, dim })
    }

    /// The format.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Keys or values.
    pub const fn side(&self) -> Side {
        self.side
    }

    /// Values per row, padding included.
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// Dims that share a scale: 128 for turbo, 32 for q8_0 and q4_0, all of them for the float formats.
    pub const fn block_dims(&self) -> usize {
        match self.dtype {
            DType::F32 | DType::F16 | DType::BF16 => self.dim,
            _ => self.dtype.block_len(),
        }
    }

    /// Blocks per tile; 1 for the float formats.
    pub const fn n_blocks(&self) -> usize {
        self.dim / self.block_dims()
    }

    /// Bytes of one block of 16 tokens, scales included.
    pub const fn block_bytes(&self) -> usize {
        match self.dtype {
            // Coded formats keep exactly the bytes of their block format, in another order.
            DType::F32 | DType::F16 | DType::BF16 => self.dim * self.dtype.block_bytes() * TILE,
            _ => self.dtype.block_bytes() * TILE,
        }
    }

    /// Bytes of the tile.
    pub const fn bytes(&self) -> usize {
        self.n_blocks() * self.block_bytes()
    }

    /// Whether rows of this format are coded in the rotated domain.
    pub const fn rotates(&self) -> bool {
        self.dtype.is_turbo()
    }

    /// Where a code lies within its block: `(group, j)`, for the value of dim `dim` (within the block) of the token
    /// in `slot`.
    pub const fn place(&self, slot: usize, dim: usize) -> (usize, usize) {
        match self.side {
            Side::K => (dim / 4, 4 * slot + dim % 4),
            Side::V => (dim / 16 * 4 + slot / 4, 4 * (dim % 16) + slot % 4),
        }
    }

    /// Writes the row of one token `[dim]` (padded and, in a rotated stream, rotated) into `slot`, touching no other
    /// slot's bits. Values are coded exactly as in the block format.
    ///
    /// # Panics
    /// Unless `tile` has [`TileLayout::bytes`] bytes, `row` has [`TileLayout::dim`] values and `slot` is below 16.
    pub fn put(&self, tile: &mut [u8], slot: usize, row: &[f32]) {
        self.check(tile.len(), slot, row.len());
        match self.dtype {
            DType::F32 => self.put_floats(tile, slot, row, |v| clamp(v, f32::MAX).to_le_bytes()),
            DType::F16 => self.put_floats(tile, slot, row, |v| to_f16(v).to_le_bytes()),
            DType::BF16 => self.put_floats(tile, slot, row, |v| {
                bf16::from_f32(clamp(v, self.dtype.max_abs())).to_le_bytes()
            }),
            DType::Q8_0 => self.put_coded(tile, slot, row, |x| {
                let coded = block32::encode_q8_0(x);
                (coded.scale, coded.codes)
            }),
            DType::Q4_0 => self.put_coded(tile, slot, row, |x| {
                let coded = block32::encode_centred(x, block32::Q4_0_ZERO);
                (coded.scale, coded.codes)
            }),
            _ => self.put_coded(tile, slot, row, |y| {
                let coded = turbo::encode_rotated(&self.codebook(), y);
                (coded.scale, coded.indices)
            }),
        }
    }

    /// Reads the row of the token in `slot` into `out` `[dim]`, in the domain it was put.
    ///
    /// # Panics
    /// As [`TileLayout::put`].
    pub fn get(&self, tile: &[u8], slot: usize, out: &mut [f32]) {
        self.check(tile.len(), slot, out.len());
        match self.dtype {
            DType::F32 => self.get_floats(tile, slot, out, f32::from_le_bytes),
            DType::F16 => self.get_floats(tile, slot, out, |b| f16::from_le_bytes(b).to_f32()),
            DType::BF16 => self.get_floats(tile, slot, out, |b| bf16::from_le_bytes(b).to_f32()),
            DType::Q8_0 => self.get_coded(tile, slot, out, |scale, codes| {
                block32::Coded { scale, codes }.decode(block32::Q8_0_ZERO)
            }),
            DType::Q4_0 => self.get_coded(tile, slot, out, |scale, codes| {
                block32::Coded { scale, codes }.decode(block32::Q4_0_ZERO)
            }),
            _ => self.get_coded(tile, slot, out, |scale, indices| {
                turbo::decode_rotated(&self.codebook(), &turbo::Coded { scale, indices })
            }),
        }
    }

    fn check(&self, bytes: usize, slot: usize, dim: usize) {
        assert!(bytes == self.bytes(), "{self:?} takes {} bytes, not {bytes}", self.bytes());
        assert!(slot < TILE, "slot {slot} of {TILE}");
        assert!(dim == self.dim, "{self:?}: a row of {dim} values");
    }

    fn codebook(&self) -> Codebook {
        turbo::codebook(self.dtype).expect("a KV format that is neither float nor block32 is turbo")
    }

    /// The index of a float among the tile's floats.
    fn float_at(&self, slot: usize, dim: usize) -> usize {
        match self.side {
            Side::K => dim * TILE + slot,
            Side::V => slot * self.dim + dim,
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

    fn put_coded<const N: usize>(
        &self,
        tile: &mut [u8],
        slot: usize,
        row: &[f32],
        code: impl Fn(&[f32; N]) -> (f16, [u8; N]),
    ) {
        for (block, x) in tile.chunks_exact_mut(self.block_bytes()).zip(row.as_chunks().0) {
            let (scale, codes) = code(x);
            block[2 * slot..2 * slot + 2].copy_from_slice(&scale.to_le_bytes());
            for (dim, &c) in codes.iter().enumerate() {
                self.set_code(&mut block[SCALE_BYTES..], slot, dim, c);
            }
        }
    }

    fn get_coded<const N: usize>(
        &self,
        tile: &[u8],
        slot: usize,
        out: &mut [f32],
        decode: impl Fn(f16, [u8; N]) -> [f32; N],
    ) {
        for (block, x) in tile.chunks_exact(self.block_bytes()).zip(out.as_chunks_mut().0) {
            let scale = f16::from_le_bytes([block[2 * slot], block[2 * slot + 1]]);
            *x = decode(scale, std::array::from_fn(|dim| self.code(&block[SCALE_BYTES..], slot, dim)));
        }
    }

    /// Sets one code in the planes of a block.
    fn set_code(&self, planes: &mut [u8], slot: usize, dim: usize, code: u8) {
        let (g, j) = self.place(slot, dim);
        match self.dtype {
            DType::Q8_0 => planes[64 * g + j] = code,
            DType::Q4_0 | DType::Turbo4 => set_bits(&mut planes[32 * g + j % 32], 4 * (j / 32), 4, code),
            DType::Turbo2 => set_bits(&mut planes[16 * g + j % 16], 2 * (j / 16), 2, code),
            DType::Turbo3 => {
                set_bits(&mut planes[16 * g + j % 16], 2 * (j / 16), 2, code & 3);
                set_bits(&mut planes[TURBO3_HIGH + 8 * g + j / 8], j % 8, 1, code >> 2);
            }
            _ => unreachable!("{self:?} has no codes"),
        }
    }

    /// Reads one code from the planes of a block.
    fn code(&self, planes: &[u8], slot: usize, dim: usize) -> u8 {
        let (g, j) = self.place(slot, dim);
        match self.dtype {
            DType::Q8_0 => planes[64 * g + j],
            DType::Q4_0 | DType::Turbo4 => planes[32 * g + j % 32] >> (4 * (j / 32)) & 15,
            DType::Turbo2 => planes[16 * g + j % 16] >> (2 * (j / 16)) & 3,
            DType::Turbo3 => {
                let low = planes[16 * g + j % 16] >> (2 * (j / 16)) & 3;
                let high = planes[TURBO3_HIGH + 8 * g + j / 8] >> (j % 8) & 1;
                high << 2 | low
            }
            _ => unreachable!("{self:?} has no codes"),
        }
    }
}

/// Where the high planes of a turbo3 block begin, after the low planes of its 32 groups.
const TURBO3_HIGH: usize = 512;

/// Replaces `width` bits of `byte` from bit `at`.
fn set_bits(byte: &mut u8, at: usize, width: usize, value: u8) {
    let mask = ((1u16 << width) - 1) as u8;
    *byte = (*byte & !(mask << at)) | value << at;
}

#[cfg(test)]
mod tests {
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
            (DType::Turbo3, 64, 128, 800),
            (DType::Turbo3, 192, 256, 1600),
            (DType::Turbo4, 128, 128, 1056),
            (DType::Turbo4, 576, 640, 5280),
        ] {
            assert_eq!(padded_dim(dtype, head_dim), Ok(dim));
            for side in SIDES {
                assert_eq!(TileLayout::new(dtype, side, dim).unwrap().bytes(), bytes, "{dtype} {head_dim}");
            }
        }
    }

    #[test]
    fn wrong_formats_and_dims_are_refused() {
        assert!(matches!(padded_dim(DType::Q4K, 128), Err(CodecError::NotKv { .. })));
        assert!(matches!(TileLayout::new(DType::Q5_0, Side::K, 128), Err(CodecError::NotKv { .. })));
        for dim in [0, 64, 130] {
            assert_eq!(
                TileLayout::new(DType::Turbo3, Side::K, dim),
                Err(CodecError::TileDim { dtype: DType::Turbo3, step: 128, got: dim })
            );
        }
    }

    #[test]
    fn a_row_decodes_as_its_block_format_does_bit_for_bit() {
        for dtype in DType::KV {
            for head_dim in [64, 80, 96, 128, 192, 256] {
                let dim = padded_dim(dtype, head_dim).unwrap();
                let rotation = Rotation::kv();
                let rotation = dtype.is_turbo().then_some(&rotation);
                let heads = rows(head_dim, 7);
                let prepared: Vec<Vec<f32>> = heads
                    .iter()
                    .map(|x| {
                        let mut row = vec![f32::NAN; dim];
                        prepare_row(rotation, x, &mut row);
                        row
                    })
                    .collect();
                for side in SIDES {
                    let layout = TileLayout::new(dtype, side, dim).unwrap();
                    let tile = filled(&layout, &prepared);
                    for (slot, x) in heads.iter().enumerate() {
                        let mut padded = x.clone();
                        padded.resize(dim, 0.0);
                        let mut bytes = vec![0; dtype.row_bytes(dim).unwrap()];
                        encode(dtype, &padded, &mut bytes).unwrap();
                        let mut want = vec![0.0; dim];
                        decode(dtype, &bytes, &mut want).unwrap();
                        let mut restored = vec![0.0; head_dim];
                        restore_row(rotation, &mut got(&layout, &tile, slot), &mut restored);
                        assert_eq!(restored, want[..head_dim], "{dtype} {side:?} {head_dim} slot {slot}");
                    }
                }
            }
        }
    }

    /// The layout of the module's table, spelled out value by value with no code shared with the module.
    #[test]
    fn bits_lie_where_the_table_says() {
        let rows = rows(256, 3);
        for (dtype, bits, block) in [
            (DType::Q8_0, 8, 32),
            (DType::Q4_0, 4, 32),
            (DType::Turbo2, 2, 128),
            (DType::Turbo3, 3, 128),
            (DType::Turbo4, 4, 128),
        ] {
            for side in SIDES {
                let layout = TileLayout::new(dtype, side, 256).unwrap();
                let tile = filled(&layout, &rows);
                for (slot, row) in rows.iter().enumerate() {
                    for (b, x) in row.chunks(block).enumerate() {
                        let bytes = &tile[b * layout.block_bytes()..(b + 1) * layout.block_bytes()];
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
                                    3 if k == 2 => bit(512 + 8 * g + j / 8, j % 8),
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
        if let Some(book) = turbo::codebook(dtype) {
            let coded = turbo::encode_rotated(&book, x.try_into().unwrap());
            return (coded.scale, coded.indices.to_vec());
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
    fn zeroed_tiles_and_bad_rows_decode_to_finite_numbers() {
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
        for (rotation, dim) in [(None, 96), (Some(Rotation::kv()), 128)] {
            let x = &rows(80, 5)[0];
            let (mut row, mut back) = (vec![f32::NAN; dim], vec![0.0; 80]);
            prepare_row(rotation.as_ref(), x, &mut row);
            let norm = |v: &[f32]| v.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>();
            assert!((norm(&row) / norm(x) - 1.0).abs() <= 1e-5, "padding leaks energy");
            restore_row(rotation.as_ref(), &mut row, &mut back);
            for (b, x) in back.iter().zip(x) {
                assert!((b - x).abs() <= 1e-5, "{b} {x}");
            }
        }
    }
}
