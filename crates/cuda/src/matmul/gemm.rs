//! Compiles and launches the GEMMs: `gemm.cu`, and `hopper.cu` on compute capability 9.0.

use std::sync::{PoisonError, RwLock};

use hashbrown::HashMap;
use kvant_codec::DType;

use super::operand::STEP;
use super::{
    EXPERT_TILES_HEADER, HEADERS, MAX_MATRICES, TO_BYTES_HEADER, WEIGHTS_HEADER, constants, number_of,
    skinny_f16,
};
use crate::context::MAX_COUNTERS;
use crate::half::{COPIES_HEADER, HALF_HEADER, WARPGROUP_ARCH, WARPGROUP_HEADER, WARPGROUP_OPTIONS};
use crate::module::Build;
use crate::{Context, CudaError, GpuProperties, Header, KernelId, Launch, Source};

/// Header of the shares of blocks.
pub(super) const STREAM_K_HEADER: Header =
    Header { name: "stream_k.cuh", text: include_str!("stream_k.cuh") };
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
/// Stages of shared memory of `gemm.cu`, and padding between their rows in f16.
const STAGES: u32 = 2;
const PAD: usize = 8;
/// Threads of a multiprocessor with the registers that a tile takes.
const SM_THREADS: u32 = 512;
/// Upper bound of a block's static shared memory.
const STATIC: u32 = 16;
/// What the driver reserves of each block.
const RESERVED: u32 = 1 << 10;
/// What joining the sums of a tile takes, in inputs.
const JOIN_INPUTS: u32 = 256;
/// Maximum rows of `skinny_f16.cu`, which decodes weights for each tile of rows: beyond, on compute
/// capability 9.0, warpgroups take fewer clocks.
const MAX_SKINNY_ROWS: u32 = 128;

/// The tiles of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tiles {
    /// Output features of a tile.
    pub features: u32,
    /// Rows of a tile.
    pub rows: u32,
    /// For 64 inputs of a tile: those of the fullest of shared memory, tensor cores and issue
    /// slots.
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
const SKINNY_TILES: [Tiles; 3] =
    [Tiles::new(256, 64, 832), Tiles::new(256, 32, 540), Tiles::new(128, 32, 270)];
/// Squares: those of experts are the small ones.
const SQUARE_TILES: [Tiles; 2] = [Tiles::new(128, 128, 1024), EXPERT_TILES];
pub(super) const EXPERT_TILES: Tiles = Tiles::new(64, 64, 384);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    /// `gemm.cu`
    Square,
    /// `hopper.cu`
    Hopper,
    /// `skinny_f16.cu`
    Skinny,
}

/// A kernel in one size, for one type of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Variant {
    kernel: Kernel,
    dtype: DType,
    pub tiles: Tiles,
}

impl Variant {
    /// Returns those for weights of a type, the preferred one first.
    fn of(dtype: DType) -> impl Iterator<Item = Self> {
        let skinny: &[Tiles] = if skinny_f16::has(dtype) { &SKINNY_TILES } else { &[] };
        let kernels =
            [(Kernel::Skinny, skinny), (Kernel::Hopper, &HOPPER_TILES), (Kernel::Square, &SQUARE_TILES)];
        kernels
            .into_iter()
            .flat_map(move |(kernel, tiles)| tiles.iter().map(move |&tiles| Self { kernel, dtype, tiles }))
    }

    fn build(&self) -> Build {
        let (source, mut defines) = match self.kernel {
            Kernel::Square => (&GEMM, vec![("SIDE", self.tiles.rows)]),
            Kernel::Hopper => (&HOPPER, vec![("ROWS", self.tiles.rows)]),
            Kernel::Skinny => (&skinny_f16::SOURCE, skinny_f16::defines(self.dtype, self.tiles)),
        };
        defines.push(("TYPE", number_of(self.dtype)));
        Build { source, defines }
    }

    /// Returns whether it is for such products on this device.
    fn is_for(&self, shape: Shape, gpu: &GpuProperties) -> bool {
        let takes = match self.kernel {
            Kernel::Square if shape.expert_tiles.is_some() => self.tiles == EXPERT_TILES,
            Kernel::Square => gpu.arch != WARPGROUP_ARCH,
            Kernel::Hopper => gpu.arch == WARPGROUP_ARCH && shape.expert_tiles.is_none(),
            Kernel::Skinny => shape.rows <= MAX_SKINNY_ROWS && shape.expert_tiles.is_none(),
        };
        takes && self.shared_bytes() + STATIC <= gpu.shared_per_block
    }

    /// Returns the inputs of a step.
    fn step(&self) -> usize {
        if self.kernel == Kernel::Skinny { skinny_f16::step(self.dtype) } else { STEP }
    }

    fn threads(&self) -> u32 {
        match self.kernel {
            Kernel::Square => 2 * self.tiles.rows,
            Kernel::Hopper => HOPPER_THREADS,
            Kernel::Skinny => 2 * self.tiles.features,
        }
    }

    /// Returns the shared memory of a block: as many of `Stage` as the source has stages.
    fn shared_bytes(&self) -> u32 {
        let (stages, pad) = match self.kernel {
            Kernel::Square => (STAGES, PAD),
            Kernel::Hopper => (HOPPER_STAGES, 0),
            Kernel::Skinny => return skinny_f16::shared_bytes(self.dtype, self.tiles),
        };
        stages * (self.tiles.features + self.tiles.rows) * ((STEP + pad) * size_of::<u16>()) as u32
    }

    /// Returns the blocks that a device runs at once.
    fn blocks_at_once(&self, gpu: &GpuProperties) -> u32 {
        let by_memory = (gpu.shared_per_block + RESERVED) / (self.shared_bytes() + RESERVED);
        let of_sm = by_memory.clamp(1, SM_THREADS / self.threads());
        (gpu.n_sms * of_sm).min(MAX_COUNTERS as u32)
    }
}

/// Returns the builds for weights of a type.
pub(super) fn builds(dtype: DType) -> impl Iterator<Item = Build> {
    Variant::of(dtype).map(|variant| variant.build())
}

/// The products of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Output features of each matrix, zeros behind the last one.
    pub n_outs: [u32; MAX_MATRICES],
    pub n_in: u32,
    pub rows: u32,
    /// Tiles of rows, where they are those of experts.
    pub expert_tiles: Option<u32>,
}

impl Shape {
    fn tiles(&self, of: Tiles) -> u32 {
        let row_tiles = self.expert_tiles.unwrap_or(self.rows.div_ceil(of.rows));
        self.n_outs.iter().map(|n| n.div_ceil(of.features)).sum::<u32>() * row_tiles
    }
}

/// The blocks of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    pub variant: Variant,
    pub blocks: u32,
    /// Of the sums of blocks that share tiles.
    pub share_bytes: usize,
}

impl Plan {
    /// Returns the plan with which the steps take the fewest clocks: blocks have equal shares of
    /// them. Tiles of experts, whose number of rows the device alone knows, have a block each.
    pub fn new(dtype: DType, shape: Shape, gpu: &GpuProperties) -> Self {
        let clocks = |variant: &Variant| shape.tiles(variant.tiles) * variant.tiles.clocks;
        let variants = Variant::of(dtype).filter(|variant| variant.is_for(shape, gpu));
        let variant = variants.min_by_key(clocks).expect("a kernel for any device");
        let tiles = shape.tiles(variant.tiles);
        let whole = Self { variant, blocks: tiles, share_bytes: 0 };
        if shape.expert_tiles.is_some() {
            return whole;
        }
        let step = variant.step() as u32;
        let of_tile = shape.n_in.div_ceil(step);
        let steps = tiles * of_tile;
        let blocks = variant.blocks_at_once(gpu).min(steps);
        let is_enough = tiles <= blocks && of_tile <= steps.div_ceil(blocks) + JOIN_INPUTS / step;
        if is_enough || steps.checked_mul(blocks + 1).is_none() {
            return whole;
        }
        // Each has two parts of tiles at most.
        let sums = 2 * blocks * variant.tiles.features * variant.tiles.rows;
        let sums = if tiles.is_multiple_of(blocks) { 0 } else { sums };
        Self { variant, blocks, share_bytes: sums as usize * size_of::<f32>() }
    }

    /// Returns the kernel.
    fn kernel(&self, cx: &Context) -> Result<KernelId, CudaError> {
        let Build { source, defines } = self.variant.build();
        let name = if self.variant.kernel == Kernel::Skinny { "skinny_f16" } else { "gemm" };
        cx.kernel_with(source, &defines, name)
    }

    /// Returns the launch.
    pub fn launch(&self) -> Launch {
        let (threads, shared_bytes) = (self.variant.threads(), self.variant.shared_bytes());
        Launch { shared_bytes, ..Launch::linear(self.blocks, threads) }
    }
}

/// The plans of the products so far, and their kernels: the layers of a model have a few shapes.
#[derive(Default)]
pub(crate) struct GemmPlans(RwLock<HashMap<(DType, Shape), (Plan, KernelId)>>);

impl GemmPlans {
    /// Returns the plan of products, and the kernel.
    ///
    /// # Errors
    /// As [`Context::kernel`].
    pub(super) fn get(
        &self,
        cx: &Context,
        dtype: DType,
        shape: Shape,
    ) -> Result<(Plan, KernelId), CudaError> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner).get(&(dtype, shape)).copied();
        if let Some(known) = known {
            return Ok(known);
        }
        let plan = Plan::new(dtype, shape, cx.gpu().properties());
        let planned = (plan, plan.kernel(cx)?);
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert((dtype, shape), planned);
        Ok(planned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator;

    fn plan(dtype: DType, arch: u32, n_sms: u32, n_out: u32, n_in: u32, rows: u32) -> Plan {
        let n_outs = [n_out, 0, 0, 0];
        let gpu = GpuProperties { n_sms, ..emulator::properties(arch) };
        Plan::new(dtype, Shape { n_outs, n_in, rows, expert_tiles: None }, &gpu)
    }

    #[test]
    fn tiles_fit_the_rows() {
        let tiles = |dtype, arch, rows| {
            let Variant { kernel, tiles, .. } = plan(dtype, arch, 132, 4096, 4096, rows).variant;
            (kernel, tiles.features, tiles.rows)
        };
        let floats = |arch, rows| tiles(DType::F16, arch, rows).2;
        let rows = [17, 32, 33, 64, 65, 128, 129, 256, 257, 512].map(|rows| floats(90, rows));
        assert_eq!(rows, [32, 32, 64, 64, 128, 128, 256, 256, 128, 256]);
        assert_eq!([17, 64, 65, 128, 2048].map(|rows| floats(80, rows)), [64, 64, 128, 128, 128]);
        for (dtype, arch, rows, want) in [
            (DType::Q4_0, 90, 17, (Kernel::Skinny, 256, 32)),
            (DType::Q4_0, 90, 64, (Kernel::Skinny, 256, 64)),
            (DType::Q4_0, 90, 65, (Kernel::Hopper, 128, 128)),
            (DType::Q4_0, 80, 128, (Kernel::Skinny, 256, 64)),
            (DType::Q4_0, 80, 129, (Kernel::Square, 128, 128)),
            // Smaller shared memory.
            (DType::Q4_0, 89, 64, (Kernel::Skinny, 128, 32)),
            (DType::Q6K, 80, 64, (Kernel::Skinny, 256, 32)),
            (DType::TQ4_1S, 80, 64, (Kernel::Square, 64, 64)),
        ] {
            assert_eq!(tiles(dtype, arch, rows), want, "{dtype} {arch} {rows}");
        }
    }

    #[test]
    fn blocks_fill_the_device_however_few_tiles_there_are() {
        let blocks = |arch, n_out, n_in, rows| plan(DType::F16, arch, 132, n_out, n_in, rows).blocks;
        assert_eq!(blocks(90, 4096, 14_336, 64), 132);
        assert_eq!(blocks(90, 128, 256, 64), 1);
        assert_eq!(blocks(90, 128, 1024, 64), 16);
        assert_eq!(blocks(80, 4096, 14_336, 64), 4 * 132);
        // Smaller shared memory.
        assert_eq!(blocks(89, 4096, 14_336, 64), 2 * 132);
        assert_eq!(blocks(89, 4096, 14_336, 128), 132);
    }

    #[test]
    fn only_shared_tiles_take_memory() {
        let bytes = |n_out| plan(DType::F16, 90, 4, n_out, 1024, 64).share_bytes;
        assert_eq!([512, 1024, 128].map(bytes), [0, 0, 2 * 4 * 128 * 64 * 4]);
    }
}
