//! The streams of a layer as kernels see them.

#[cfg(test)]
pub(crate) mod fixture;

use bytemuck::{Pod, Zeroable};
use kvant_backend::{BackendError, Result, Stream};
use kvant_codec::{Codebook, DType};

use crate::{Context, CudaPage, DevicePtr, Header};

/// Tiles and their codes, for the kernels that read and write them.
pub(crate) const TILE_HEADER: Header = Header { name: "tile.cuh", text: include_str!("tile.cuh") };

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

/// The number of a KV type in `tile.cuh`.
pub(crate) fn number(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::Q8_0 => 3,
        DType::Q4_0 => 4,
        DType::Turbo2 => 5,
        DType::Turbo3 => 6,
        DType::Turbo4 => 7,
        dtype => unreachable!("a stream of {dtype}"),
    }
}

/// The codebooks of turbo2, turbo3 and turbo4.
pub(crate) const BOOKS: [Codebook; 3] = [Codebook::GAUSS2, Codebook::GAUSS3, Codebook::GAUSS4];

/// A mask of 128 signs in words.
pub(crate) fn words(mask: u128) -> [u32; 4] {
    std::array::from_fn(|i| (mask >> (32 * i)) as u32)
}

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
