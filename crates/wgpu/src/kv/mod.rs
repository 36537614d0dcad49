//! The streams of a layer as kernels see them.

use kvant_backend::{BackendError, KvPart, Result, StreamSpec};
use kvant_codec::tile::{SCALE_BYTES, TILE};
use kvant_codec::{DType, block32};

use crate::constants::Constants;
use crate::{Part, WgpuPage};

/// How tiles are laid out, for the kernels that read and write them.
pub(crate) const TILES: Part = Part { name: "tiles.wgsl", text: include_str!("tiles.wgsl") };

/// The types that kernels read and write: floats first, then blocks of 32, then the turbo types by bits, those with
/// a memory last.
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

/// What stands for no place in memory; `NONE` of `tiles.wgsl`.
pub(crate) const NONE: u32 = u32::MAX;

/// The number of the type of `spec` in kernels.
///
/// # Errors
/// [`BackendError::Unsupported`] for types that there are no kernels for.
pub(crate) fn number(op: &'static str, spec: &StreamSpec) -> Result<u32> {
    let index = TYPES.into_iter().position(|known| known == spec.dtype);
    index.map(|index| index as u32).ok_or_else(|| BackendError::Unsupported {
        op,
        wanted: format!("{} in the cache", spec.dtype),
        has: TYPES.map(DType::name).join(", "),
    })
}

/// Numbers for [`TILES`] and whoever takes it.
pub(crate) fn constants() -> Constants {
    let types = (0..).zip(TYPES).fold(Constants::default(), |constants, (number, dtype)| {
        constants.whole(&dtype.name().to_uppercase(), number)
    });
    types
        .whole("TILE", TILE)
        .whole("SCALE_WORDS", SCALE_BYTES / 4)
        .whole("LEAST_DIMS", block32::LEN)
        .float("HALF_UNIT", 1.0 / (1 << 24) as f32)
}

/// Whether codes of a stream are of what the centres of their blocks leave. Floats are stored as they are.
pub(crate) fn has_centres(spec: &StreamSpec) -> bool {
    spec.centres && spec.dtype.code().is_some()
}

/// The word that byte `at` begins.
///
/// # Panics
/// Unless one begins there: pages and the parts of tiles do.
pub(crate) fn word(at: usize) -> u32 {
    assert!(at.is_multiple_of(4), "byte {at} begins no word");
    // Within a binding, which is shorter than 2^32 words.
    (at / 4) as u32
}

/// The word at which value `value` of the balance of `part` lies, and nothing where it has none.
pub(crate) fn balance(part: &KvPart<'_, WgpuPage>, value: usize) -> u32 {
    part.balance.map_or(NONE, |page| word(page.at() + size_of::<f32>() * value))
}
