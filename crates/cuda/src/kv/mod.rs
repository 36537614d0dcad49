//! The KV tensors of a layer as kernel parameters.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use kvant_backend::{
    BackendError, CountedPage, KvBatchEntry, KvLayer, KvTensor, KvTensorSpec, Result, TILES_PER_BLOCK,
};
use kvant_codec::finite::F16_MAX;
use kvant_codec::tile::{GROUP, SCALE_BYTES, TILE};
use kvant_codec::{Codebook, DType, block32, turbo};

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::rotate::{self, ROTATE_HEADER};
use crate::{Context, CudaPage, DevicePtr, Header};

/// Tiles and their codes, for the kernels that read and write them.
const TILE_HEADER: Header = Header { name: "tile.cuh", text: include_str!("tile.cuh") };

/// Headers of the kernels that process KV tensors, together with [`constants`].
pub(crate) const HEADERS: [Header; 3] = [HALF_HEADER, ROTATE_HEADER, TILE_HEADER];

/// KV heads of one launch; more take several launches. Together with [`MAX_SEQUENCES`], as many as
/// fit the 4 KB that every driver passes to a kernel.
pub(crate) const MAX_HEADS: usize = 24;

/// Sequences of one launch; more take several.
pub(crate) const MAX_SEQUENCES: usize = 16;

/// Bytes of parameters that every driver passes to a kernel.
pub(crate) const MAX_PARAMS: usize = 4096;

/// `Spec` of `tile.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct SpecParams {
    pub dtype: u8,
    pub centres: u8,
    pub dim: u16,
    pub sink_tiles: u16,
    pub tail_tiles: u16,
    pub tile_bytes: u32,
}

impl SpecParams {
    /// The storage format `spec`.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] when a count does not fit.
    pub fn new(op: &'static str, spec: &KvTensorSpec) -> Result<Self> {
        Ok(Self {
            dtype: number(spec.dtype) as u8,
            centres: has_centres(spec).into(),
            dim: short(op, "values of a token", spec.stored_dim())?,
            sink_tiles: short(op, "tiles of the sink", spec.sink_tiles)?,
            tail_tiles: short(op, "tiles of the tail", spec.tail_tiles)?,
            tile_bytes: small(op, "bytes of a tile", spec.main_layout().bytes())?,
        })
    }
}

/// `Offsets` of `tile.cuh`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Offsets {
    main: u32,
    sink: u32,
    tail: u32,
    step_tiles: u32,
}

impl Offsets {
    /// The offsets of `tensor` in the allocations.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] beyond 32 bits.
    ///
    /// # Panics
    /// In builds with checks, when its centre does not follow its tiles, where kernels expect it.
    pub fn new(op: &'static str, tensor: &KvTensor) -> Result<Self> {
        let tiles = || TILES_PER_BLOCK * tensor.spec.main_layout().bytes();
        debug_assert_eq!(tensor.main + tiles(), tensor.centre, "a centre that does not follow the tiles");
        let offset = |bytes| small(op, "bytes of an allocation", bytes);
        Ok(Self {
            main: offset(tensor.main)?,
            sink: offset(tensor.sink)?,
            tail: offset(tensor.tail)?,
            step_tiles: offset(tensor.step_tile_offset)?,
        })
    }
}

/// `Memory` of `tile.cuh`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct MemoryParams {
    blocks: DevicePtr,
    sink: DevicePtr,
    tail: DevicePtr,
    step_tiles: DevicePtr,
}

impl MemoryParams {
    /// The current allocations of `sequence`, in a step whose step tiles begin at `step_tiles`.
    ///
    /// # Errors
    /// When the addresses of the blocks cannot be written to the device.
    pub fn new(cx: &Context, sequence: &KvBatchEntry<'_, CudaPage>, step_tiles: DevicePtr) -> Result<Self> {
        let ptr = |page: Option<&Arc<CountedPage<CudaPage>>>| page.map_or(0, |page| page.ptr());
        Ok(Self {
            blocks: sequence.memory.table().on_device(cx)?,
            sink: ptr(sequence.memory.sink()),
            tail: ptr(sequence.memory.tail()),
            step_tiles: step_tiles + sequence.step_offset as u64,
        })
    }
}

/// Returns the address of the channel scales of `sequence`, in the order of
/// [`ChannelScaleLayout`](kvant_backend::ChannelScaleLayout); null without channel scales.
pub(crate) fn balance(sequence: &KvBatchEntry<'_, CudaPage>) -> DevicePtr {
    sequence.channel_scales.map_or(0, CudaPage::ptr)
}

/// Returns the offset of some values in the channel scales; [`UNSCALED`] without values of that
/// kind.
pub(crate) fn begin(op: &'static str, values: &Range<usize>) -> Result<u32> {
    if values.is_empty() { Ok(UNSCALED) } else { small(op, "channel scales", values.start) }
}

/// Offset of absent channel scales.
const UNSCALED: u32 = u32::MAX;

/// Returns whether a KV tensor stores codes relative to the centres of its blocks. Floats are
/// stored unchanged.
pub(crate) fn has_centres(spec: &KvTensorSpec) -> bool {
    spec.centres && spec.dtype.code().is_some()
}

/// The KV types that kernels read and write: floats first, then blocks of 32, then the turbo types
/// by bits, the trellis types last.
pub(crate) const TYPES: [DType; 10] = DType::KV;

/// Returns the number of one of [`TYPES`] in kernels.
pub(crate) fn number(dtype: DType) -> u32 {
    let index = TYPES.into_iter().position(|known| known == dtype);
    index.unwrap_or_else(|| unreachable!("a KV tensor of {dtype}")) as u32
}

/// Returns the constants of [`HEADERS`] and of the sources that include them.
pub(crate) fn constants() -> Constants {
    let types = TYPES.into_iter().fold(Constants::default(), |constants, dtype| {
        constants.whole(&dtype.name().to_uppercase(), number(dtype) as usize)
    });
    rotate::constants(types)
        .whole("N_TYPES", TYPES.len())
        .whole("MAX_HEADS", MAX_HEADS)
        .whole("TILE", TILE)
        .whole("MAX_SEQUENCES", MAX_SEQUENCES)
        .whole("UNSCALED", UNSCALED as usize)
        .whole("TILES_PER_BLOCK", TILES_PER_BLOCK)
        .whole("SCALE_BYTES", SCALE_BYTES)
        .whole("BLOCK32_DIMS", block32::LEN)
        .whole("TURBO_DIMS", turbo::LEN)
        .whole("MIN_DIMS", block32::LEN)
        .whole("Q8_0_GROUP", group_bytes(DType::Q8_0))
        .whole("TURBO2_GROUP", group_bytes(DType::Turbo2))
        .whole("TURBO3_GROUP", group_bytes(DType::Turbo3))
        .whole("NIBBLES_GROUP", group_bytes(DType::Turbo4))
        .float("HALF_MAX", F16_MAX)
}

/// Returns the bytes of a group of codes of a quantized type.
fn group_bytes(dtype: DType) -> usize {
    dtype.code().map_or(0, |code| GROUP * code.bits / 8)
}

/// The codebooks of turbo2, turbo3 and turbo4.
pub(crate) const BOOKS: [Codebook; 3] = [Codebook::GAUSS2, Codebook::GAUSS3, Codebook::GAUSS4];

/// Converts `count`, the size of something in memory, to the kernels' type.
///
/// # Errors
/// [`BackendError::Unsupported`] beyond 32 bits.
pub(crate) fn small(op: &'static str, what: &'static str, count: usize) -> Result<u32> {
    u32::try_from(count).map_err(|_| BackendError::Unsupported {
        op,
        requested: format!("{count} {what}"),
        has: format!("at most {}", u32::MAX),
    })
}

/// Returns whether sequences of these layers can share launches: the sequences of a step usually
/// have the same layer.
pub(crate) fn is_same(a: &KvLayer, b: &KvLayer) -> bool {
    std::ptr::eq(a, b) || a == b
}

/// As [`small`], in 16 bits.
fn short(op: &'static str, what: &'static str, count: usize) -> Result<u16> {
    u16::try_from(count).map_err(|_| BackendError::Unsupported {
        op,
        requested: format!("{count} {what}"),
        has: format!("at most {}", u16::MAX),
    })
}
