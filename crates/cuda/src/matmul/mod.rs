//! Matrix products with weights of any type: `y = W x + bias`.
//!
//! Few rows, quantized weights: `x` as signed bytes with one scale per 32, int8 products. The
//! kernel for one row (GEMV, `gemv.cu`) normalizes and quantizes it on the fly, 2 to 16 rows
//! (`skinny_q8.cu`) come from `quantize.cu`. The gate of a feed-forward layer is fused. Level
//! tables are looked up; the codebooks of tq3_1s and tq4_1s become two bytes. For the rotated types
//! `x` is rotated instead of the weights.
//!
//! # Arithmetic of few rows
//!
//! A row of up to 16 has the same bits whatever rows are beside it: a step that verifies draft
//! tokens gives each the logits that it has alone. Both kernels therefore round at the same places,
//! with intrinsics that compilers do not contract:
//!
//! 1. An input is `x` times the norm's weight; for rotated types a group of 32 is then multiplied
//!    by the signs times the factor, and added in the butterfly's steps 1, 2, 4, 8, 16. The norm's
//!    *factor* comes last (7), so that a group needs no other.
//! 2. The factor is `1 / sqrt(sum / n + eps)`. Squares of four inputs are added by FMAs, of a group
//!    over eight of those by steps of 1, 2, 4; sums of groups `l`, `l + 32`, .. in order, and those
//!    32 as in (6).
//! 3. A group's scale is its largest magnitude times 1 / 127, a code the nearest integer of the
//!    input times 127 times the approximate reciprocal (`to_bytes.cuh`).
//! 4. Codes of a group are multiplied and added as integers, exactly. A constant offset of the
//!    weights' codes (8 in q4_0, 16 in q5_0, 4 in q3_K, 32 in q6_K) is subtracted there too. Only
//!    those of two-byte levels exceed 2^24: the sum is rounded to f32 once.
//! 5. The group's product is added to the sum of its *class* by FMAs, in the order of groups
//!    (`arithmetic.cuh`). The class of group g is g mod 32; where groups share bytes in blocks of
//!    256, half of g mod 64 (of q6_K, where g and g + 2 share them, 2 (g mod 64 / 4) + g mod 2).
//! 6. The 32 classes are added in a binary tree: neighbours at distance 1, then 2, 4, 8, 16.
//! 7. The sum is multiplied by the norm's factor; then the bias, the gate, and what is there.
//!
//! Classes make the order independent of how work is split: a warp of the GEMV has a class in each
//! lane, without any exchange before the end of a row; eight warps of the kernel for more rows have
//! four classes each, and any number of blocks that is a power of two a subtree. Ranges of
//! neighbouring groups instead of residues would need an exchange per step in the GEMV, or other
//! sums for each split.
//!
//! # Other products
//!
//! Few rows, float weights (`skinny_f32.cu`): f32 throughout, by FMAs in one order for any number
//! of rows.
//!
//! More rows (GEMM, `gemm.rs` chooses): tensor cores, with equal shares of a launch's steps for all
//! blocks (`stream_k.cuh`). Weights and inputs are rounded to f16, the inputs times a power of two
//! for each row and weights in f32 or bf16 times one for their matrix, so that none overflows or
//! underflows; sums stay in f32. Up to 64 rows, 128 without warpgroups, decode quantized weights in
//! registers, once per 64 rows (`skinny_f16.cu`); other weights and rotated types, and more rows,
//! go through shared memory, once per 128 rows or 64 (`gemm.cu`), on compute capability 9.0 with
//! warpgroup MMAs, once per 256 rows, 128, 64 or 32 (`hopper.cu`).

use std::sync::LazyLock;

use bytemuck::{NoUninit, Pod, Zeroable};
use kvant_backend::{Activation, BackendError};
use kvant_codec::fields::FieldSpec;
use kvant_codec::{Codebook, DType, LevelTable, Rotation, nf4, tq3t};

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::module::{Build, Header};
use crate::{Context, CudaError, DevicePtr, Launch, Source, gate, rotate};

mod gated;
mod gemm;
mod gemv;
mod layout;
mod operand;
mod skinny_f16;
mod skinny_q8;
pub(crate) use gated::gated_products;
pub(crate) use gemm::GemmPlans;
pub(crate) use layout::{Weights, lay_out_rows, row_bytes, upload};
pub(crate) use operand::Operand;
use operand::{Bytes, Sums, TO_BYTES_HEADER};

/// Headers of kernels that decode weights.
pub(crate) const HEADERS: [Header; 4] = [HALF_HEADER, EXPERT_TILES_HEADER, TO_BYTES_HEADER, WEIGHTS_HEADER];
/// Header of the sums of quantized products.
const ARITHMETIC_HEADER: Header = Header { name: "arithmetic.cuh", text: include_str!("arithmetic.cuh") };
const WEIGHTS_HEADER: Header = Header { name: "weights.cuh", text: include_str!("weights.cuh") };
/// Header of the tiles of slots that share an expert.
pub(crate) const EXPERT_TILES_HEADER: Header =
    Header { name: "expert_tiles.cuh", text: include_str!("expert_tiles.cuh") };
static SKINNY_F32: Source = Source {
    name: "skinny_f32.cu",
    text: include_str!("skinny_f32.cu"),
    headers: &HEADERS,
    constants: skinny_f32_constants,
    options: &[],
};
/// Warps of a block of the kernel for few rows and float weights, and output features of each.
const WARPS: u32 = 8;
const FEATURES: u32 = 2;
/// Matrices of one launch: queries, keys and values, and one more.
const MAX_MATRICES: usize = 4;
/// Rows that its blocks multiply at once: one variant for decoding, one for more.
const ROWS: [u32; 2] = [1, 8];
/// Minimum number of rows for the GEMM, which decodes weights to f16 and rounds inputs to it.
pub(crate) const MIN_GEMM_ROWS: usize = 17;
/// Maximum number of rows whose products do not depend on each other: each has the bits that it has
/// alone.
pub(crate) const INVARIANT_ROWS: usize = MIN_GEMM_ROWS - 1;
/// Slots of a tile of experts.
pub(crate) const EXPERT_ROWS: u32 = gemm::EXPERT_TILES.rows;

/// Types in the order of their numbers in kernels.
pub(crate) const TYPES: [DType; 29] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q2K,
    DType::Q3K,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
    DType::IQ4NL,
    DType::IQ4XS,
    DType::MXFP4,
    DType::NVFP4,
    DType::Q4G128,
    DType::FP8G128,
    DType::NVFP4G256,
    DType::NF4G64,
    DType::FP4G64,
    DType::IQ1,
    DType::IQ2,
    DType::IQ3,
    DType::IQ3X,
    DType::TQ3_1S,
    DType::TQ4_1S,
    DType::TQ3T,
];

/// Returns the constants of `weights.cuh`: the type numbers, the bytes of their blocks without
/// those that move, and levels of codes, as the bits of floats.
pub(crate) fn constants() -> Constants {
    let words = |levels: nf4::Levels| levels.map(|level| level.to_bits() as i32);
    let limits = Constants::default()
        .whole("MAX_MATRICES", MAX_MATRICES)
        .list("NF4_LEVELS", words(nf4::NF4))
        .list("FP4_LEVELS", words(nf4::FP4));
    let types = TYPES.into_iter().zip(0..).fold(limits, |constants, (dtype, number)| {
        let name = dtype.name().to_uppercase();
        let constants = constants.whole(&name, number);
        if dtype.block_len() == 1 {
            return constants;
        }
        constants.whole(&format!("{name}_BYTES"), layout::block_bytes(dtype))
    });
    rotate::constants(types)
}

/// Returns the constants of the kernels for quantized weights.
fn quantized_constants() -> Constants {
    gate::constants(constants())
}

fn skinny_f32_constants() -> Constants {
    constants().whole("WARPS", WARPS as usize).whole("FEATURES", FEATURES as usize)
}

/// Levels of a codebook as `(256 high + low) unit`, or of a table as `high unit`, as the kernels
/// look them up.
#[derive(Debug, Clone, Copy, NoUninit)]
#[repr(C)]
pub(crate) struct Levels {
    high: [u32; 4],
    low: [u32; 4],
    unit: f32,
    signs: u32,
}

/// `MatrixParams` of `weights.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MatrixParams {
    w: DevicePtr,
    bias: DevicePtr,
    y: DevicePtr,
    n_out: u32,
    blocks: u32,
    accumulate: u32,
    unit: f32,
}

/// `MatmulParams` of `weights.cuh`.
#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelParams {
    matrices: [MatrixParams; MAX_MATRICES],
    up: DevicePtr,
    x: DevicePtr,
    norm: DevicePtr,
    inputs: DevicePtr,
    factors: DevicePtr,
    shares: DevicePtr,
    counters: DevicePtr,
    row_bytes: u64,
    n_matrices: u32,
    n_in: u32,
    rows: u32,
    eps: f32,
    book: Levels,
    activation: u32,
    slots_of_row: u32,
    limit: f32,
    splits: u32,
    up_bias: DevicePtr,
    expert_tiles: DevicePtr,
    order: DevicePtr,
    expert_bytes: u64,
}

/// The slots of an expert that share a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotTile {
    /// One: the weights of an expert are read for each of its slots.
    Single,
    /// All, of no more rows than have the bits that they have alone.
    Few,
    /// Up to [`EXPERT_ROWS`].
    Many,
}

/// Assignment of rows to experts, where the weights are those of experts: the rows of the result
/// are then *slots*, pairs of row and expert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertSlots {
    /// Expert, first position in the order of slots, and number of slots of each block of rows,
    /// `[n_expert_tiles, 3]`.
    pub expert_tiles: DevicePtr,
    pub n_expert_tiles: usize,
    /// `[slots]`
    pub order: DevicePtr,
    /// The slots that a tile may have.
    pub tile: SlotTile,
    /// Bytes from one expert's matrix to the next.
    pub expert_bytes: usize,
    /// Maximum number of slots of an expert: the rows.
    pub max_slots: usize,
    /// Slots per row of inputs.
    pub slots_of_row: usize,
}

/// The weights of a product and its output, shapes checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatmulArgs {
    /// `[n_out, n_in]`, of type `dtype`, from [`upload`].
    pub w: DevicePtr,
    /// [`Weights::exponent`]
    pub exponent: i32,
    pub dtype: DType,
    pub n_out: usize,
    /// As `w`: `y = a(w x) (up x)` then, a the activation, without accumulation, where [`has_gate`]
    /// is true.
    pub up: Option<(DevicePtr, Activation)>,
    /// `[n_out]`, or `[n_experts, n_out]` with expert slots.
    pub bias: Option<DevicePtr>,
    /// Bias of `up`, where both have one.
    pub up_bias: Option<DevicePtr>,
    /// `[rows, n_out]`
    pub y: DevicePtr,
    /// Add to `y` instead of overwriting it.
    pub accumulate: bool,
    /// For the matrices of experts, of which `w` (and that of the gate) is the first.
    pub expert_slots: Option<ExpertSlots>,
}

impl MatmulArgs {
    /// The product `y = w x`; the caller may change further fields.
    pub fn new(w: &Weights, dtype: DType, n_out: usize, y: DevicePtr) -> Self {
        let (w, exponent) = (w.ptr(), w.exponent);
        Self {
            w,
            exponent,
            dtype,
            n_out,
            up: None,
            bias: None,
            up_bias: None,
            y,
            accumulate: false,
            expert_slots: None,
        }
    }
}

/// Rejects weights of a type that no kernel reads, for `op`.
pub(crate) fn check_type(op: &'static str, dtype: DType) -> Result<(), BackendError> {
    if TYPES.contains(&dtype) {
        return Ok(());
    }
    let has = TYPES.map(DType::name).join(", ");
    Err(BackendError::Unsupported { op, requested: dtype.to_string(), has })
}

/// Returns the bytes of a matrix `[n_out, n_in]` on the device.
pub(crate) fn matrix_bytes(dtype: DType, [n_out, n_in]: [usize; 2]) -> usize {
    n_out * layout::row_bytes(dtype, n_in)
}

/// Returns the names of the kernels for a weight type, of few and of many rows.
pub(crate) fn kernel_names(dtype: DType) -> &'static str {
    if is_quantized(dtype) {
        "gemv (dp4a), skinny_q8 (s8 mma), skinny_f16 and gemm (f16 mma)"
    } else {
        "skinny_f32, gemm (f16 mma)"
    }
}

/// Returns whether products of `rows` rows of `n_in` inputs with this weight type fuse a gate.
fn has_gate(cx: &Context, dtype: DType, [rows, n_in]: [usize; 2]) -> bool {
    let shared_per_block = cx.gpu().properties().shared_per_block;
    is_quantized(dtype) && rows < MIN_GEMM_ROWS && gemv::block(dtype, n_in, shared_per_block).is_some()
}

/// Returns whether the slots of each of `n_tiles` experts, of 2 to [`INVARIANT_ROWS`] rows, can
/// share a block of the products with its matrix `[n_out, n_in]`.
pub(crate) fn has_slot_tiles(
    cx: &Context,
    dtype: DType,
    [n_out, n_in]: [usize; 2],
    rows: usize,
    n_tiles: usize,
) -> bool {
    if !is_quantized(dtype) {
        return rows <= ROWS[1] as usize;
    }
    let gpu = cx.gpu().properties();
    let plan = skinny_q8::Plan::new(dtype, rows, n_in, gpu);
    gemv::block(dtype, n_in, gpu.shared_per_block).is_some()
        && plan.is_some_and(|plan| plan.has_room([n_out, n_tiles], rows))
}

fn is_quantized(dtype: DType) -> bool {
    let has_levels = nf4::levels(dtype).is_some();
    !has_levels && !matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::FP8G128)
}

/// Returns every variant to compile.
pub(crate) fn builds() -> impl Iterator<Item = Build> {
    let types = TYPES.into_iter().zip(0..).flat_map(|(dtype, number)| {
        let build = |source, defines| Build { source, defines };
        let small_batch = if is_quantized(dtype) {
            let quantized = skinny_q8::ROWS
                .map(|rows| build(&skinny_q8::SOURCE, skinny_q8::defines(dtype, number, rows)));
            [build(&gemv::SOURCE, gemv::defines(dtype, number))]
                .into_iter()
                .chain(quantized)
                .collect::<Vec<_>>()
        } else {
            ROWS.map(|rows| build(&SKINNY_F32, vec![("TYPE", number), ("ROWS", rows)])).into()
        };
        small_batch.into_iter().chain(gemm::builds(dtype))
    });
    types.chain([Build { source: &operand::QUANTIZE, defines: Vec::new() }])
}

impl Levels {
    /// The levels of the types with a codebook or a table.
    pub(crate) fn of(dtype: DType) -> Self {
        static ALL: LazyLock<[Levels; TYPES.len()]> = LazyLock::new(|| TYPES.map(Levels::new));
        ALL[number_of(dtype) as usize]
    }

    fn new(dtype: DType) -> Self {
        match FieldSpec::of(dtype) {
            Some(FieldSpec { table: Some(table), .. }) => Self::of_table(table),
            Some(FieldSpec { trellis: Some(levels), .. }) => Self::of_windows(levels),
            _ => Self::of_book(dtype),
        }
    }

    fn of_table(table: LevelTable) -> Self {
        let mut high = [0; 4];
        for (i, level) in table.levels().iter().enumerate() {
            high[i / 4] |= u32::from(*level as u8) << (i % 4 * 8);
        }
        Self { high, low: [0; 4], unit: table.unit(), signs: 0 }
    }

    /// The levels of windows below 32, of which those above are the mirror image.
    fn of_windows(levels: &[i8; 64]) -> Self {
        let mut words = [[0; 4]; 2];
        for (i, level) in levels[..32].iter().enumerate() {
            words[i / 16][i % 16 / 4] |= u32::from(*level as u8) << (i % 4 * 8);
        }
        let [high, low] = words;
        Self { high, low, unit: tq3t::UNIT, signs: Rotation::tq().before() as u32 }
    }

    fn of_book(dtype: DType) -> Self {
        let book = if dtype == DType::TQ3_1S { Codebook::TQ3 } else { Codebook::GAUSS4 };
        let largest = book.levels().iter().fold(0.0, |max: f32, level| max.max(level.abs()));
        // 127 · 256: both bytes of every level fit.
        let unit = largest / 32_512.0;
        let (mut high, mut low) = ([0; 4], [0; 4]);
        for (i, level) in book.levels().iter().enumerate() {
            let code = (level / unit).round() as i32;
            let byte = (code + 128) >> 8;
            high[i / 4] |= u32::from(byte as u8) << (i % 4 * 8);
            low[i / 4] |= u32::from((code - 256 * byte) as u8) << (i % 4 * 8);
        }
        Self { high, low, unit, signs: Rotation::tq().before() as u32 }
    }
}

/// Multiplies the same inputs with several matrices, those of one type in one launch: the key heads
/// alone are too few to fill a device. [`check_type`] must accept the types.
pub(crate) fn matmuls(cx: &Context, x: &mut Operand, products: &[MatmulArgs]) -> Result<(), CudaError> {
    for (i, first) in products.iter().enumerate() {
        if products[..i].iter().any(|p| p.dtype == first.dtype) {
            continue;
        }
        let alike: Vec<_> = products[i..].iter().filter(|p| p.dtype == first.dtype).collect();
        alike.chunks(MAX_MATRICES).try_for_each(|matrices| launch(cx, x, matrices))?;
    }
    Ok(())
}

/// Multiplies. [`check_type`] must accept the type.
pub(crate) fn matmul(cx: &Context, x: &mut Operand, p: &MatmulArgs) -> Result<(), CudaError> {
    launch(cx, x, &[p])
}

/// Queues the kernel for matrices of one type, a single one with a gate or expert slots.
fn launch(cx: &Context, x: &mut Operand, products: &[&MatmulArgs]) -> Result<(), CudaError> {
    let n_out: usize = products.iter().map(|p| p.n_out).sum();
    if x.rows == 0 || n_out == 0 {
        return Ok(());
    }
    let p = products[0];
    debug_assert!(products.len() == 1 || p.up.is_none() && p.expert_slots.is_none(), "{products:?}");
    let kernel_kind = KernelKind::of(cx, x, p);
    debug_assert!(
        p.up.is_none() || is_quantized(p.dtype) && !matches!(kernel_kind, KernelKind::Gemm),
        "{p:?}"
    );
    let number = number_of(p.dtype);
    let dtype = ("TYPE", number);
    if !matches!(kernel_kind, KernelKind::Gemm) {
        x.apply_gate(cx)?;
    }
    let mut params = params(cx, x, p, kernel_kind)?;
    let mut shares = None;
    let n_sms = cx.gpu().properties().n_sms;
    let row_blocks = |rows: u32| {
        p.expert_slots
            .map_or((x.rows as u32).div_ceil(rows), |expert_slots| expert_slots.n_expert_tiles as u32)
    };
    let blocks = |features: u32| products.iter().map(|p| (p.n_out as u32).div_ceil(features)).sum::<u32>();
    let (kernel, features, grid, threads, shared_bytes) = match kernel_kind {
        KernelKind::Gemv { warps, shared_bytes } => {
            let kernel = cx.kernel_with(&gemv::SOURCE, &gemv::defines(p.dtype, number), "gemv")?;
            let grid = [gemv::blocks(n_sms, row_blocks(1), n_out as u32), row_blocks(1), 1];
            (kernel, 1, grid, 32 * warps, shared_bytes)
        }
        KernelKind::SkinnyQ8(plan) => {
            let kernel = cx.kernel_with(
                &skinny_q8::SOURCE,
                &skinny_q8::defines(p.dtype, number, plan.rows),
                "skinny_q8",
            )?;
            let (tiles, row_blocks) = (blocks(skinny_q8::FEATURES), row_blocks(plan.rows));
            let grid = [plan.blocks(n_sms, tiles, row_blocks), row_blocks, 1];
            params.splits = plan.splits;
            if plan.splits > 1 {
                params.counters = cx.counters()?;
                params.shares = shares.insert(cx.scratch(plan.share_bytes(tiles, row_blocks))?).ptr();
            }
            (kernel, skinny_q8::FEATURES, grid, 32 * skinny_q8::WARPS, plan.shared_bytes)
        }
        KernelKind::SkinnyF32 { rows } => {
            let kernel = cx.kernel_with(&SKINNY_F32, &[dtype, ("ROWS", rows)], "skinny_f32")?;
            let features = WARPS * FEATURES;
            (kernel, features, [blocks(features), row_blocks(rows), 1], 32 * WARPS, 0)
        }
        KernelKind::Gemm => {
            let n_outs = std::array::from_fn(|i| products.get(i).map_or(0, |p| p.n_out as u32));
            let expert_tiles = p.expert_slots.map(|slots| slots.n_expert_tiles as u32);
            let shape = gemm::Shape { n_outs, n_in: params.n_in, rows: params.rows, expert_tiles };
            let (plan, kernel) = cx.gemm_plans().get(cx, p.dtype, shape)?;
            if plan.share_bytes > 0 {
                params.counters = cx.counters()?;
                params.shares = shares.insert(cx.scratch(plan.share_bytes)?).ptr();
            }
            let Launch { grid, block: [threads, ..], shared_bytes } = plan.launch();
            (kernel, plan.variant.tiles.features, grid, threads, shared_bytes)
        }
    };
    params.n_matrices = products.len() as u32;
    for (matrix, p) in params.matrices.iter_mut().zip(products) {
        *matrix = matrix_params(p, features);
    }
    cx.launch(kernel, Launch { grid, block: [threads, 1, 1], shared_bytes }, &params)
}

/// The kernel to launch.
#[derive(Debug, Clone, Copy)]
enum KernelKind {
    /// GEMV: one row, or rows one by one, with quantized weights.
    Gemv {
        warps: u32,
        shared_bytes: u32,
    },
    /// Few rows with quantized weights.
    SkinnyQ8(skinny_q8::Plan),
    /// The same, with float weights.
    SkinnyF32 {
        rows: u32,
    },
    Gemm,
}

impl KernelKind {
    fn of(cx: &Context, x: &Operand, p: &MatmulArgs) -> Self {
        let tile = p.expert_slots.map(|expert_slots| expert_slots.tile);
        let is_gemv = tile.map_or(x.rows == 1, |tile| tile == SlotTile::Single);
        if tile.map_or(x.rows >= MIN_GEMM_ROWS, |tile| tile == SlotTile::Many) {
            return Self::Gemm;
        }
        if !is_quantized(p.dtype) {
            return Self::SkinnyF32 { rows: ROWS[usize::from(!is_gemv)] };
        }
        let gpu = cx.gpu().properties();
        let Some([warps, shared_bytes]) = gemv::block(p.dtype, x.n_in, gpu.shared_per_block) else {
            return Self::Gemm;
        };
        // An expert has a slot of each row at most.
        let rows = p.expert_slots.map_or(x.rows, |expert_slots| expert_slots.max_slots);
        // Rows too long for a block to keep eight take the weights one by one.
        match skinny_q8::Plan::new(p.dtype, rows, x.n_in, gpu).filter(|_| !is_gemv) {
            Some(plan) => Self::SkinnyQ8(plan),
            None => Self::Gemv { warps, shared_bytes },
        }
    }
}

/// Returns the form of inputs in 8 bits for a type of weights.
fn bytes_for(dtype: DType) -> Bytes {
    let sums = match dtype.layout() {
        DType::Q4_0 => Sums::AsStarts { offset: 8 },
        DType::Q5_0 => Sums::AsStarts { offset: 16 },
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K | DType::Q4G128 => Sums::AsFloats,
        DType::Q2K | DType::Q3K | DType::Q6K => Sums::OfHalves,
        _ => Sums::AsStarts { offset: 0 },
    };
    Bytes { rotates: FieldSpec::is_rotated(dtype), sums }
}

/// Returns the number of a supported type in kernels.
pub(crate) fn number_of(dtype: DType) -> u32 {
    TYPES.iter().position(|&known| known == dtype).expect("a type that is supported") as u32
}

fn matrix_params(p: &MatmulArgs, features: u32) -> MatrixParams {
    let n_out = p.n_out as u32;
    MatrixParams {
        w: p.w,
        bias: p.bias.unwrap_or(0),
        y: p.y,
        n_out,
        blocks: n_out.div_ceil(features),
        accumulate: u32::from(p.accumulate),
        unit: 2f32.powi(p.exponent),
    }
}

/// Returns the kernel parameters of this product and those like it, with the inputs in the required
/// form, without the matrices.
fn params(
    cx: &Context,
    x: &mut Operand,
    p: &MatmulArgs,
    kernel_kind: KernelKind,
) -> Result<KernelParams, CudaError> {
    let mut params = KernelParams {
        matrices: Zeroable::zeroed(),
        up: p.up.map_or(0, |(up, _)| up),
        x: x.x,
        norm: 0,
        inputs: 0,
        factors: 0,
        shares: 0,
        counters: 0,
        row_bytes: layout::row_bytes(p.dtype, x.n_in) as u64,
        n_matrices: 0,
        n_in: x.n_in as u32,
        rows: x.rows as u32,
        eps: 0.0,
        book: Levels::of(p.dtype),
        activation: p.up.map_or(0, |(_, activation)| gate::number(activation)),
        slots_of_row: p.expert_slots.map_or(1, |expert_slots| expert_slots.slots_of_row as u32),
        limit: p.up.map_or(0.0, |(_, activation)| activation.limit()),
        splits: 1,
        up_bias: p.up_bias.unwrap_or(0),
        expert_tiles: p.expert_slots.map_or(0, |expert_slots| expert_slots.expert_tiles),
        order: p.expert_slots.map_or(0, |expert_slots| expert_slots.order),
        expert_bytes: p.expert_slots.map_or(0, |expert_slots| expert_slots.expert_bytes as u64),
    };
    match kernel_kind {
        KernelKind::Gemm => {
            let halves = x.halves(cx)?;
            (params.inputs, params.factors) = (halves.halves, halves.factors);
        }
        KernelKind::SkinnyQ8(_) => {
            let quantized = x.quantized(cx, bytes_for(p.dtype))?;
            (params.inputs, params.factors) = (quantized.tiles, quantized.factors);
        }
        KernelKind::SkinnyF32 { .. } => params.x = x.plain(cx)?,
        KernelKind::Gemv { .. } => {
            if let Some(norm) = x.norm {
                (params.norm, params.eps) = (norm.weight, norm.eps);
            }
        }
    }
    Ok(params)
}

#[cfg(test)]
mod batch_invariance;
#[cfg(test)]
mod tests;
