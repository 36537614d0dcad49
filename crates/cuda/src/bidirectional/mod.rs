//! Bidirectional attention without a cache, of vision, audio and text encoders, with tensor cores.
//!
//! The first kernel rounds queries (times the scale), keys and values to f16, tile by tile of 64
//! rows of a window and a head, and pads both; a power of two of each tile brings its largest value
//! to 2^14 .. 2^15, so that none overflows, and those that lose digits are below 2^-28 of it. In
//! the second, a block of four warps takes a tile of queries and walks over the keys and values of
//! the window, two steps of which are in shared memory, with an online softmax (arXiv 1805.02867)
//! and sums in f32, as in FlashAttention (arXiv 2205.14135).
//!
//! A row's result depends on its own window alone. With h = 2^-11, a score is off by (2 h + h²)
//! Σ |q k| and weights and values by h each; the conformance suite derives the bound.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{BackendError, BidirectionalParams};

use crate::constants::Constants;
use crate::half::{COPIES_HEADER, HALF_HEADER};
use crate::module::Build;
use crate::soft_cap::SOFT_CAP_HEADER;
use crate::{Context, CudaBuffer, DevicePtr, Launch, Source};

/// The kernels of this op.
static SOURCE: Source = Source {
    name: "bidirectional.cu",
    text: include_str!("bidirectional.cu"),
    headers: &[HALF_HEADER, COPIES_HEADER, SOFT_CAP_HEADER],
    constants,
    options: &[],
};

/// Rows of a tile.
const TILE: usize = 64;
/// Warps of a block, which processes one tile.
const WARPS: usize = 4;

fn constants() -> Constants {
    let log2_e = std::f32::consts::LOG2_E;
    Constants::default().whole("TILE", TILE).whole("WARPS", WARPS).float("LOG2_E", log2_e)
}

/// A build: the stored values of a head, and the keys of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Variant {
    dim: usize,
    keys: usize,
}

/// The builds. Heads of other sizes are padded to the next one: a few values of a head cost less
/// than a compilation. Steps are as long as 99 KB of shared memory allow.
const VARIANTS: [Variant; 7] = [
    Variant { dim: 32, keys: 64 },
    Variant { dim: 64, keys: 64 },
    Variant { dim: 80, keys: 64 },
    Variant { dim: 96, keys: 64 },
    Variant { dim: 128, keys: 64 },
    Variant { dim: 192, keys: 32 },
    Variant { dim: 256, keys: 16 },
];

impl Variant {
    /// Returns the build for heads of `dim` values.
    fn of(dim: usize) -> Result<Self, BackendError> {
        let largest = VARIANTS[VARIANTS.len() - 1].dim;
        VARIANTS.into_iter().find(|variant| dim <= variant.dim).ok_or_else(|| {
            let (requested, has) = (format!("heads of {dim} values"), format!("heads of up to {largest}"));
            BackendError::Unsupported { op: "attend_all", requested, has }
        })
    }

    fn defines(self) -> [crate::Define; 2] {
        [("DIM", self.dim as u32), ("KEYS", self.keys as u32)]
    }

    /// Bytes of a stored row: see `STRIDE` of the kernel.
    fn row_bytes(self) -> usize {
        2 * (self.dim + 8)
    }

    /// Bytes of the queries, and of two steps of keys and values.
    fn shared_bytes(self) -> usize {
        (TILE + 4 * self.keys) * self.row_bytes()
    }
}

/// Returns the builds of this op.
pub(crate) fn builds() -> impl Iterator<Item = Build> {
    VARIANTS.into_iter().map(|variant| Build { source: &SOURCE, defines: variant.defines().to_vec() })
}

/// `Window` of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Window {
    first_row: u32,
    first_tile: u32,
    rows: u32,
    unused: u32,
}

/// Returns the window of each tile, given the rows of the windows.
fn windows_of_tiles(windows: &[usize]) -> Vec<Window> {
    let (mut tiles, mut first_row) = (Vec::new(), 0);
    for &rows in windows {
        let first_tile = tiles.len() as u32;
        let window = Window { first_row, first_tile, rows: rows as u32, unused: 0 };
        tiles.extend(std::iter::repeat_n(window, rows.div_ceil(TILE)));
        first_row += rows as u32;
    }
    tiles
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Tiles {
    rows: DevicePtr,
    units: DevicePtr,
    windows: DevicePtr,
    n: u32,
    n_heads: u32,
    n_kv_heads: u32,
    dim: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PrepareParams {
    tiles: Tiles,
    qkv: [DevicePtr; 3],
    scale: f32,
    unused: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct AttendParams {
    tiles: Tiles,
    bias: DevicePtr,
    out: DevicePtr,
    longest: u32,
    reach: u32,
}

/// Attends over the rows of each window. The caller has checked the shapes.
///
/// # Errors
/// Heads of more values than the kernels have; a failure of the device.
pub(crate) fn attend(
    cx: &Context,
    params: &BidirectionalParams,
    windows: &[usize],
    bias: Option<&CudaBuffer>,
    qkv: [&CudaBuffer; 3],
    out: &mut CudaBuffer,
) -> Result<(), BackendError> {
    let BidirectionalParams { heads, n_kv_heads, scale, reach } = *params;
    let variant = Variant::of(heads.dim)?;
    let of_tiles = windows_of_tiles(windows);
    if of_tiles.is_empty() || heads.n == 0 {
        return Ok(());
    }
    let n_all = heads.n + 2 * n_kv_heads;
    let n_tiles = n_all * of_tiles.len();
    let rows = cx.scratch(n_tiles * TILE * variant.row_bytes())?;
    let units = cx.scratch(n_tiles * size_of::<f32>())?;
    let on_device = cx.scratch(of_tiles.len() * size_of::<Window>())?;
    cx.gpu().write(on_device.ptr(), bytemuck::cast_slice(&of_tiles))?;
    let tiles = Tiles {
        rows: rows.ptr(),
        units: units.ptr(),
        windows: on_device.ptr(),
        n: of_tiles.len() as u32,
        n_heads: heads.n as u32,
        n_kv_heads: n_kv_heads as u32,
        dim: heads.dim as u32,
    };
    let defines = variant.defines();
    let launch = |n_heads: usize, shared_bytes: usize| Launch {
        grid: [of_tiles.len() as u32, n_heads as u32, 1],
        block: [32 * WARPS as u32, 1, 1],
        shared_bytes: shared_bytes as u32,
    };
    let scale = scale * std::f32::consts::LOG2_E;
    let prepare = PrepareParams { tiles, qkv: qkv.map(CudaBuffer::ptr), scale, unused: 0 };
    cx.launch(cx.kernel_with(&SOURCE, &defines, "prepare")?, launch(n_all, 0), &prepare)?;
    let longest = windows.iter().copied().max().unwrap_or(0);
    // Sums of a row and a reach stay below 2^31.
    let reach = reach.map_or(longest, |reach| reach.min(longest)) as u32;
    let bias = bias.map_or(0, CudaBuffer::ptr);
    let params = AttendParams { tiles, bias, out: out.ptr(), longest: longest as u32, reach };
    let kernel = cx.kernel_with(&SOURCE, &defines, "attend")?;
    Ok(cx.launch(kernel, launch(heads.n, variant.shared_bytes()), &params)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_know_their_windows() {
        let window = |first_row, first_tile, rows| Window { first_row, first_tile, rows, unused: 0 };
        let (long, short) = (window(0, 0, 65), window(65, 2, 1));
        assert_eq!(windows_of_tiles(&[65, 0, 1]), [long, long, short]);
        assert_eq!(windows_of_tiles(&[]), []);
    }

    #[test]
    fn every_head_has_a_build_that_fits_the_smallest_shared_memory() {
        let dim = |dim| Variant::of(dim).map(|variant| variant.dim);
        assert_eq!([1, 32, 33, 72, 80, 129, 256].map(|n| dim(n).unwrap()), [32, 32, 64, 80, 80, 192, 256]);
        let error = dim(257).unwrap_err().to_string();
        assert!(error.contains("heads of 257 values"), "{error}");
        assert!(VARIANTS.iter().all(|variant| variant.shared_bytes() <= 99 << 10));
    }
}
