//! The streams of a layer as kernels see them.

#[cfg(test)]
pub(crate) mod fixture;

use bytemuck::{Pod, Zeroable};
use kvant_backend::{BackendError, Result, Stream, TOKENS_PER_PAGE};
use kvant_codec::finite::F16_MAX;
use kvant_codec::tile::{SCALE_BYTES, TILE};
use kvant_codec::{Codebook, DType, Rotation, Side, TileLayout, block32, turbo};

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::rotate::{self, ROTATE_HEADER};
use crate::{Context, CudaPage, DevicePtr, Header};

/// Tiles and their codes, for the kernels that read and write them.
const TILE_HEADER: Header = Header { name: "tile.cuh", text: include_str!("tile.cuh") };

/// What kernels that work on streams include, with [`constants`].
pub(crate) const HEADERS: [Header; 3] = [HALF_HEADER, ROTATE_HEADER, TILE_HEADER];

/// KV heads of one launch, of one sequence or of several; more take several launches. As many as fit the 4 KB that every
/// driver passes to a kernel.
pub(crate) const MAX_HEADS: usize = 24;

/// `Stream` of `tile.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct StreamParams {
    pages: DevicePtr,
    sink: DevicePtr,
    tail: DevicePtr,
    dtype: u32,
    dim: u32,
    sink_tiles: u32,
    tail_tiles: u32,
    main_end: u32,
    len: u32,
    rotates: u32,
    alpha: f32,
}

impl StreamParams {
    /// The stream as it stands.
    pub fn new(cx: &Context, stream: &Stream<CudaPage>) -> Result<Self> {
        let spec = stream.spec();
        let ptr = |page: Option<&CudaPage>| page.map_or(0, CudaPage::ptr);
        Ok(Self {
            pages: stream.table().on_device(cx)?,
            sink: ptr(stream.sink()),
            tail: ptr(stream.tail()),
            dtype: number(spec.dtype),
            dim: spec.dim() as u32,
            sink_tiles: spec.sink_tiles as u32,
            tail_tiles: spec.tail_tiles as u32,
            main_end: stream.main_end() as u32,
            len: stream.len() as u32,
            rotates: spec.rotates().into(),
            alpha: spec.alpha,
        })
    }
}

/// The number of a KV type in kernels: floats first, then blocks of 32, then the turbo types by bits.
pub(crate) fn number(dtype: DType) -> u32 {
    let index = DType::KV.into_iter().position(|known| known == dtype);
    index.unwrap_or_else(|| unreachable!("a stream of {dtype}")) as u32
}

/// Numbers for [`HEADERS`] and for whoever includes them.
pub(crate) fn constants() -> Constants {
    let types = DType::KV.into_iter().fold(Constants::default(), |constants, dtype| {
        constants.whole(&dtype.name().to_uppercase(), number(dtype) as usize)
    });
    rotate::constants(types)
        .whole("N_TYPES", DType::KV.len())
        .whole("MAX_HEADS", MAX_HEADS)
        .whole("TILE", TILE)
        .whole("TILES_PER_PAGE", TOKENS_PER_PAGE / TILE)
        .whole("SCALE_BYTES", SCALE_BYTES)
        .whole("BLOCK32_DIMS", block32::LEN)
        .whole("TURBO_DIMS", turbo::LEN)
        .whole("Q8_0_GROUP", group_bytes(DType::Q8_0))
        .whole("TURBO2_GROUP", group_bytes(DType::Turbo2))
        .whole("TURBO3_GROUP", group_bytes(DType::Turbo3))
        .whole("NIBBLES_GROUP", group_bytes(DType::Turbo4))
        .whole("ROTATION", Rotation::kv().len())
        .float("HALF_MAX", F16_MAX)
}

/// Bytes of a group of 64 codes of a coded type.
fn group_bytes(dtype: DType) -> usize {
    let layout = TileLayout::new(dtype, Side::K, dtype.block_len()).expect("a block of a KV type");
    (layout.block_bytes() - SCALE_BYTES) / (layout.block_dims() / 4)
}

/// The codebooks of turbo2, turbo3 and turbo4.
pub(crate) const BOOKS: [Codebook; 3] = [Codebook::GAUSS2, Codebook::GAUSS3, Codebook::GAUSS4];

/// `count`, which is a size of something in memory, as kernels take it.
///
/// # Errors
/// [`BackendError::Unsupported`] beyond 32 bits.
pub(crate) fn small(op: &'static str, what: &'static str, count: usize) -> Result<u32> {
    u32::try_from(count).map_err(|_| BackendError::Unsupported {
        op,
        wanted: format!("{count} {what}"),
        has: format!("at most {}", u32::MAX),
    })
}
