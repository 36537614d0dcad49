//! The KV tensors of a layer as kernel parameters.

use kvant_backend::{BackendError, KvBatchEntry, KvTensorSpec, Result};
use kvant_codec::tile::{SCALE_BYTES, TILE};
use kvant_codec::{DType, block32};

use crate::constants::Constants;
use crate::{Part, WgpuPage};

/// The layout of tiles, for the kernels that read and write them.
pub(crate) const TILES: Part = Part { name: "tiles.wgsl", text: include_str!("tiles.wgsl") };

/// The types that kernels read and write: floats first, then blocks of 32, then the turbo types by
/// bits, the trellis types last.
pub(crate) const TYPES: [DType; 10] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Turbo2,
    DType::Turbo3,
    DType::Turbo4,
    DType::Turbo2T,
    DType::Turbo3T,
];

/// The null offset; `NONE` of `tiles.wgsl`.
pub(crate) const NONE: u32 = u32::MAX;

/// Returns the type number of `spec` in kernels.
///
/// # Errors
/// [`BackendError::Unsupported`] for types without kernels.
pub(crate) fn number(op: &'static str, spec: &KvTensorSpec) -> Result<u32> {
    let index = TYPES.into_iter().position(|known| known == spec.dtype);
    index.map(|index| index as u32).ok_or_else(|| BackendError::Unsupported {
        op,
        requested: format!("{} in the cache", spec.dtype),
        has: TYPES.map(DType::name).join(", "),
    })
}

/// Returns the constants of [`TILES`] and of the sources that include it.
pub(crate) fn constants() -> Constants {
    let types = (0..).zip(TYPES).fold(Constants::default(), |constants, (number, dtype)| {
        constants.whole(&dtype.name().to_uppercase(), number)
    });
    types
        .whole("TILE", TILE)
        .whole("SCALE_WORDS", SCALE_BYTES / 4)
        .whole("MIN_DIMS", block32::LEN)
        .float("HALF_UNIT", 1.0 / (1 << 24) as f32)
}

/// Returns whether a KV tensor stores codes relative to the centres of its blocks. Floats are
/// stored unchanged.
pub(crate) fn has_centres(spec: &KvTensorSpec) -> bool {
    spec.centres && spec.dtype.code().is_some()
}

/// Returns the word that begins at byte `at` of a page or of a part of it.
///
/// # Panics
/// Unless `at` is a multiple of 4, as it is for the parts of tiles.
pub(crate) fn word(at: usize) -> u32 {
    assert!(at.is_multiple_of(4), "byte {at} does not begin a word");
    // Within a page, which is shorter than 2^32 words.
    (at / 4) as u32
}

/// Returns the word offset of value `value` of the channel scales of `part`; [`NONE`] without
/// channel scales.
pub(crate) fn balance(part: &KvBatchEntry<'_, WgpuPage>, value: usize) -> u32 {
    part.channel_scales.map_or(NONE, |page| page.address(size_of::<f32>() * value))
}
