//! Compiles and launches the GEMMs: `gemm.cu`, and `hopper.cu` on compute capability 9.0.

use super::operand::STEP;
use super::{EXPERT_TILES_HEADER, HEADERS, TO_BYTES_HEADER, WEIGHTS_HEADER, constants};
use crate::context::MAX_COUNTERS;
use crate::half::{COPIES_HEADER, HALF_HEADER, WARPGROUP_ARCH, WARPGROUP_HEADER, WARPGROUP_OPTIONS};
use crate::module::Build;
use crate::{Context, CudaError, Define, GpuProperties, Header, KernelId, Source};

/// Header of the shares of blocks.
const STREAM_K_HEADER: Header = Header { name: "stream_k.cuh", text: include_str!("stream_k.cuh") };
/// The GEMM for compute capability 9.0.
static HOPPER: Source = Source {
    name: "hopper_gemm.cu",
    text: include_str!("hopper.cu"),
    headers: &[
        HALF_HEADER,
        EXPERT_TILES_HEADER,
        TO_BYTES_HEADER,
        WEIGHTS_HEADER,
        STREAM_K_HEADER,
        COPIES_HEADER,
        WARPGROUP_HEADER,
    ],
    constants: || constants().whole("STEP", STEP).whole("STAGES", HOPPER_STAGES as usize),
    options: &WARPGROUP_OPTIONS,
};
static GEMM: Source = Source {
    name: "gemm.cu",
    text: include_str!("gemm.cu"),
    headers: &{
        let [half, expert_tiles, to_bytes, weights] = HEADERS;
        [half, expert_tiles, to_bytes, weights, STREAM_K_HEADER]
    },
    constants: || constants().whole("STEP", STEP).whole("PAD", PAD),
    options: &[],
};

/// Stages of shared memory of the GEMM for compute capability 9.0, and threads of its blocks.
const HOPPER_STAGES: u32 = 4;
const HOPPER_THREADS: u32 = 512;
/// Stages of shared memory of the other, and padding between their rows in f16.
const STAGES: u32 = 2;
const PAD: usize = 8;
/// Threads of a multiprocessor with the registers that a tile takes.
const SM_THREADS: u32 = 512;
/// What the driver reserves of each block.
const RESERVED: u32 = 1 << 10;
/// What joining the sums of a tile takes, in steps.
const JOIN_STEPS: u32 = 4;

/// The tiles of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tiles {
    /// Output features of a tile.
    pub features: u32,
    /// Rows of a tile.
    pub rows: u32,
    /// Of shared memory for a step, more than those of the tensor cores.
    clocks: u32,
}

impl Tiles {
    const fn new(features: u32, rows: u32, clocks: u32) -> Self {
        Self { features, rows, clocks }
    }
}

const HOPPER_TILES: [Tiles; 4] = [
    Tiles::new(128, 256, 1152),
    Tiles::new(128, 128, 640),
    Tiles::new(128, 64, 448),
    Tiles::new(128, 32, 352),
];
/// Squares: those of experts are the small ones.
const TILES: [Tiles; 2] = [Tiles::new(128, 128, 1024), EXPERT_TILES];
pub(super) const EXPERT_TILES: Tiles = Tiles::new(64, 64, 384);

/// The variants of a weight type, whose number is `number`.
pub(super) fn builds(number: u32) -> impl Iterator<Item = Build> {
    let plans = [(true, &HOPPER_TILES[..]), (false, &TILES)];
    plans.into_iter().flat_map(move |(is_hopper, tiles)| {
        tiles.iter().map(move |&tiles| Build {
            source: source(is_hopper),
            defines: defines(number, is_hopper, tiles),
        })
    })
}

fn source(is_hopper: bool) -> &'static Source {
    if is_hopper { &HOPPER } else { &GEMM }
}

fn defines(number: u32, is_hopper: bool, tiles: Tiles) -> Vec<Define> {
    vec![("TYPE", number), (if is_hopper { "ROWS" } else { "SIDE" }, tiles.rows)]
}

/// The products of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape<'a> {
    /// Output features of each matrix.
    pub n_outs: &'a [u32],
    pub n_in: u32,
    pub rows: u32,
    /// Tiles of rows, where they are those of experts.
    pub expert_tiles: Option<u32>,
}

impl Shape<'_> {
    fn tiles(&self, of: Tiles) -> u32 {
        let row_tiles = self.expert_tiles.unwrap_or(self.rows.div_ceil(of.rows));
        self.n_outs.iter().map(|n| n.div_ceil(of.features)).sum::<u32>() * row_tiles
    }
}

/// The blocks of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    pub tiles: Tiles,
    pub is_hopper: bool,
    pub blocks: u32,
    pub shared_bytes: u32,
    /// Of the sums of blocks that share tiles.
    pub share_bytes: usize,
}

impl Plan {
    /// Returns the plan with which the steps take the fewest clocks: blocks have equal shares of
    /// them. Tiles of experts, whose number of rows the device alone knows, have a block each.
    pub fn new(shape: Shape, gpu: &GpuProperties) -> Self {
        let is_hopper = gpu.arch == WARPGROUP_ARCH && shape.expert_tiles.is_none();
        let all: &[Tiles] = match shape.expert_tiles {
            Some(_) => &[EXPERT_TILES],
            None if is_hopper => &HOPPER_TILES,
            None => &TILES,
        };
        let tiles = *all.iter().min_by_key(|&&of| shape.tiles(of) * of.clocks).expect("several kinds");
        let n_tiles = shape.tiles(tiles);
        let plan = Self {
            tiles,
            is_hopper,
            blocks: n_tiles,
            shared_bytes: shared_bytes(is_hopper, tiles),
            share_bytes: 0,
        };
        if shape.expert_tiles.is_some() {
            return plan;
        }
        let at_once = (gpu.n_sms * plan.blocks_of_sm(gpu)).min(MAX_COUNTERS as u32);
        let of_tile = shape.n_in.div_ceil(STEP as u32);
        let shares = at_once.min(n_tiles * of_tile);
        let is_whole = n_tiles <= at_once && of_tile <= (n_tiles * of_tile).div_ceil(shares) + JOIN_STEPS;
        let blocks = if is_whole { n_tiles } else { shares };
        let is_shared = n_tiles % blocks > 0;
        // Each has two parts of tiles at most.
        let sums = 2 * blocks * tiles.features * tiles.rows * u32::from(is_shared);
        Self { blocks, share_bytes: sums as usize * size_of::<f32>(), ..plan }
    }

    /// Returns the threads of a block.
    pub fn threads(&self) -> u32 {
        if self.is_hopper { HOPPER_THREADS } else { 2 * self.tiles.rows }
    }

    fn blocks_of_sm(&self, gpu: &GpuProperties) -> u32 {
        let by_memory = (gpu.shared_per_block + RESERVED) / (self.shared_bytes + RESERVED);
        by_memory.clamp(1, SM_THREADS / self.threads())
    }

    /// Returns the kernel for a weight type, whose number is `number`.
    pub fn kernel(&self, cx: &Context, number: u32) -> Result<KernelId, CudaError> {
        cx.kernel_with(source(self.is_hopper), &defines(number, self.is_hopper, self.tiles), "gemm")
    }
}

/// Returns the shared memory of a block: `Stage` of `gemm.cu` and of `hopper.cu`.
fn shared_bytes(is_hopper: bool, tiles: Tiles) -> u32 {
    let (stages, pad) = if is_hopper { (HOPPER_STAGES, 0) } else { (STAGES, PAD) };
    stages * (tiles.features + tiles.rows) * ((STEP + pad) * size_of::<u16>()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator;

    fn plan(arch: u32, n_sms: u32, n_outs: &[u32], n_in: u32, rows: u32) -> Plan {
        let gpu = GpuProperties { n_sms, ..emulator::properties(arch) };
        Plan::new(Shape { n_outs, n_in, rows, expert_tiles: None }, &gpu)
    }

    #[test]
    fn tiles_fit_the_rows() {
        let rows = |arch, rows| plan(arch, 132, &[4096], 4096, rows).tiles.rows;
        assert_eq!(
            [17, 32, 33, 64, 65, 128, 129, 256, 257, 512].map(|n| rows(90, n)),
            [32, 32, 64, 64, 128, 128, 256, 256, 128, 256]
        );
        assert_eq!([17, 64, 65, 128, 2048].map(|n| rows(80, n)), [64, 64, 128, 128, 128]);
    }

    #[test]
    fn blocks_fill_the_device_however_few_tiles_there_are() {
        let blocks = |arch, n_outs: &[u32], n_in, rows| plan(arch, 132, n_outs, n_in, rows).blocks;
        assert_eq!(blocks(90, &[4096], 14_336, 64), 132);
        assert_eq!(blocks(90, &[128], 256, 64), 1);
        assert_eq!(blocks(90, &[128], 1024, 64), 16);
        assert_eq!(blocks(80, &[4096], 14_336, 64), 4 * 132);
        // Smaller shared memory.
        assert_eq!(blocks(89, &[4096], 14_336, 64), 2 * 132);
        assert_eq!(blocks(89, &[4096], 14_336, 128), 132);
    }

    #[test]
    fn only_shared_tiles_take_memory() {
        let bytes = |n_out| plan(90, 4, &[n_out], 1024, 64).share_bytes;
        assert_eq!([512, 1024, 128].map(bytes), [0, 0, 2 * 4 * 128 * 64 * 4]);
    }
}
