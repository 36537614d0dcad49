//! The kernels of attention and the variants that they are compiled in.

use std::sync::Arc;

use kvant_backend::{KvTensorSpec, Result, TILES_PER_BLOCK, TOKENS_PER_BLOCK};
#[cfg(test)]
use kvant_codec::DType;
use kvant_codec::tile::Side;
use kvant_codec::{Codebook, Rotation, Trellis, block32, trellis};

use super::list::TENSOR_WORDS;
#[cfg(test)]
use super::variants::MAX_SLOTS;
use super::variants::{AttendVariant, CodebookLookup};
use super::{OP, SPAN};
use crate::constants::Constants;
use crate::elementwise::MATH;
use crate::kv::{TILES, has_centres, number};
use crate::shader::Kernel;
use crate::{Gpu, Part, Source, kv};

/// Values of a partial result besides its sums of values: maximum and sum of the weights.
pub const SUMS: usize = 2;
/// Threads of a workgroup that prepares queries or outputs.
const THREADS: usize = 128;
/// Maximum dims that each of these threads sums.
const MAX_DIMS_PER_THREAD: usize = 5;
/// Maximum stored head size.
pub const MAX_DIMS: usize = MAX_DIMS_PER_THREAD * THREADS;

/// Chunks that a workgroup of a GPU takes at a time, times the queries of its job: their scores
/// fill half of the memory that every adapter has for a workgroup. On a CPU, threads of other
/// chunks take turns.
const MAX_CHUNK_QUERIES: usize = 16;
/// Numbers of a variant.
const N_NUMBERS: usize = 9;

const LIST: Part = Part { name: "list.wgsl", text: include_str!("list.wgsl") };
const READ: Part = Part { name: "read.wgsl", text: include_str!("read.wgsl") };
const ATTEND: Part = Part { name: "attend.wgsl", text: include_str!("attend.wgsl") };

/// Prologue and epilogue of attention.
pub(crate) static PROLOGUE_EPILOGUE: Source = Source {
    parts: &[
        MATH,
        TILES,
        LIST,
        Part { name: "rotation.wgsl", text: include_str!("../kv/rotation.wgsl") },
        Part { name: "prologue_epilogue.wgsl", text: include_str!("prologue_epilogue.wgsl") },
    ],
    constants: prologue_epilogue_constants,
};

/// A source of attention with these look-ups.
macro_rules! source {
    ($file:literal) => {
        Source {
            parts: &[
                MATH,
                TILES,
                LIST,
                Part { name: $file, text: include_str!(concat!("lookup/", $file)) },
                READ,
                ATTEND,
            ],
            constants,
        }
    };
}

static CONSTANT: Source = source!("constant.wgsl");
static TABLE: Source = source!("table.wgsl");
static SELECT: Source = source!("select.wgsl");
static SHUFFLE: Source = source!("shuffle.wgsl");

/// Parts of attention that can be left out, to measure their cost.
pub(crate) const STAGES: [&str; 5] =
    ["no codes", "no look-ups", "look-ups of keys", "look-ups of values", "attention"];

fn source(look_ups: CodebookLookup) -> &'static Source {
    match look_ups {
        CodebookLookup::Constant => &CONSTANT,
        CodebookLookup::Table => &TABLE,
        CodebookLookup::Select => &SELECT,
        CodebookLookup::Shuffle => &SHUFFLE,
    }
}

/// A kernel variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelKind {
    /// The type numbers of keys and of values.
    types: [u32; 2],
    is_shared_kv: bool,
    has_centres: bool,
    /// Size of a value in units of 128 dims.
    dim_chunks: u32,
}

impl KernelKind {
    /// The variant for KV tensors of keys and of values.
    ///
    /// # Errors
    /// [`Unsupported`](kvant_backend::BackendError::Unsupported) for types without kernels.
    pub fn new([keys, values]: [&KvTensorSpec; 2]) -> Result<Self> {
        Ok(Self {
            types: [number(OP, keys)?, number(OP, values)?],
            is_shared_kv: keys.side == Side::V,
            has_centres: has_centres(keys),
            dim_chunks: values.stored_value_dim().div_ceil(TOKENS_PER_BLOCK) as u32,
        })
    }
}

/// Returns the kernel for KV tensors of `kind` and jobs of `slots` queries.
pub fn variant_kernel(
    gpu: &Gpu,
    kind: KernelKind,
    variant: AttendVariant,
    slots: usize,
    stage: usize,
) -> Result<Arc<Kernel>> {
    let chunks = if gpu.is_software() { 1 } else { MAX_CHUNK_QUERIES / slots };
    let variant_numbers = variant_numbers(kind, [variant.words, slots, chunks], stage);
    let key = variant_numbers.map(|(_, number)| number);
    Ok(gpu.variant(source(variant.look_ups), "attend", &key, || constants_of(variant_numbers))?)
}

/// Returns the constants of a variant: words per thread, queries of a job, chunks at a time.
fn variant_numbers(
    kind: KernelKind,
    [words, slots, chunks]: [usize; 3],
    stage: usize,
) -> [(&'static str, u32); N_NUMBERS] {
    let [k, v] = kind.types;
    [
        ("K_TYPE", k),
        ("V_TYPE", v),
        ("IS_SHARED_KV", kind.is_shared_kv.into()),
        ("HAS_CENTRES", kind.has_centres.into()),
        ("DIM_CHUNKS", kind.dim_chunks),
        ("QUADS", (slots / 4) as u32),
        ("WORDS", words as u32),
        ("CHUNKS", chunks as u32),
        ("STAGE", stage as u32),
    ]
}

fn constants_of(variant_numbers: [(&'static str, u32); N_NUMBERS]) -> Constants {
    variant_numbers.into_iter().fold(Constants::default(), |all, (name, n)| all.whole(name, n as usize))
}

/// Returns the kernels that prepare queries and join spans.
pub fn prologue_epilogue(gpu: &Gpu) -> Result<[Arc<Kernel>; 2]> {
    Ok([gpu.kernel(&PROLOGUE_EPILOGUE, "prepare_queries")?, gpu.kernel(&PROLOGUE_EPILOGUE, "combine_spans")?])
}

fn prologue_epilogue_constants() -> Constants {
    let masks = Rotation::kv(128);
    let words = |mask: u128| [0, 32, 64, 96].map(|by| (mask >> by) as u32);
    let with_factors = [128, 64, 32].into_iter().fold(shared(), |constants, n: usize| {
        constants.float(&format!("FACTOR_{n}"), (1.0 / (n as f64).sqrt()) as f32)
    });
    with_factors
        .vector("SIGNS_BEFORE", words(masks.before()))
        .vector("SIGNS_AFTER", words(masks.after()))
        .whole("THREADS", THREADS)
        .whole("MAX_DIMS_PER_THREAD", MAX_DIMS_PER_THREAD)
        .whole("MAX_DIMS", MAX_DIMS)
}

fn constants() -> Constants {
    let books = [Codebook::GAUSS2, Codebook::GAUSS3, Codebook::GAUSS4];
    let centroids = books.iter().flat_map(|book| book.centroids().iter().copied().chain([0.0; 16]).take(16));
    let trellis_levels = [Trellis::TURBO2T, Trellis::TURBO3T]
        .into_iter()
        .flat_map(|trellis| trellis.levels().map(|level| f32::from(level) * Trellis::CENTROID_STEP));
    let magnitudes = books.iter().flat_map(|book| {
        let centroids = book.centroids();
        (0..)
            .zip(&centroids[centroids.len() / 2..])
            .map(|(i, level)| (format!("TURBO{}_{i}", book.bits()), *level))
    });
    let with_magnitudes = magnitudes.fold(shared(), |constants, (name, level)| constants.float(&name, level));
    with_magnitudes
        .floats("CENTROIDS", &centroids.collect::<Vec<_>>())
        .whole("TRELLIS_WINDOWS", trellis::LEVELS)
        .floats("TRELLIS_LEVELS", &trellis_levels.collect::<Vec<_>>())
        .float("Q8_0_ZERO", block32::Q8_0_ZERO.into())
        .float("Q4_0_ZERO", block32::Q4_0_ZERO.into())
        .float("MIN_F32", f32::MIN)
        .whole("NO_CODES", 0)
        .whole("ONLY_KEYS", 2)
        .whole("ONLY_VALUES", 3)
        .whole("WHOLE", STAGES.len() - 1)
        .whole("TILES_PER_BLOCK", TILES_PER_BLOCK)
}

/// Returns the constants of all sources.
fn shared() -> Constants {
    kv::constants()
        .whole("TOKENS", TOKENS_PER_BLOCK)
        .whole("TENSOR_WORDS", TENSOR_WORDS)
        .whole("SUMS", SUMS)
        .whole("CHUNKS_PER_SPAN", SPAN / TOKENS_PER_BLOCK)
}

/// Returns all sources of attention and their constants: every attention variant, and every type of
/// keys and of values.
#[cfg(test)]
pub(crate) fn variants() -> Vec<(&'static Source, Constants)> {
    let kind = |dtypes: [DType; 2], is_shared_kv, dim_chunks| {
        let types =
            dtypes.map(|dtype| kv::TYPES.into_iter().position(|known| known == dtype).unwrap() as u32);
        KernelKind { types, is_shared_kv, has_centres: dtypes[0].code().is_some(), dim_chunks }
    };
    let lookup_variants =
        CodebookLookup::ALL.into_iter().flat_map(|look_ups| [(look_ups, 1, 4), (look_ups, 4, MAX_SLOTS)]);
    let chunk_variants = lookup_variants
        .flat_map(|variant| [1, MAX_CHUNK_QUERIES / variant.2].map(|chunks| (variant, chunks)));
    let sources = chunk_variants.flat_map(|((look_ups, words, slots), chunks)| {
        let kinds = kv::TYPES.map(|dtype| kind([dtype; 2], false, 1));
        let shared_kv = [kind([DType::Turbo3; 2], true, 5), kind([DType::F16; 2], true, 4)];
        let all = kinds.into_iter().chain(shared_kv);
        all.map(move |kind| {
            let variant_numbers = variant_numbers(kind, [words, slots, chunks], STAGES.len() - 1);
            (source(look_ups), constants_of(variant_numbers))
        })
    });
    sources.collect()
}
