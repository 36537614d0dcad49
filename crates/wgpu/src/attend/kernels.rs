//! The kernels of attention and the variants that they are compiled in.

use std::sync::Arc;

use kvant_backend::{KvTensorSpec, Result, TILES_PER_BLOCK, TOKENS_PER_BLOCK};
#[cfg(test)]
use kvant_codec::DType;
use kvant_codec::tile::Side;
use kvant_codec::{Codebook, Rotation, Trellis, block32, trellis};

use super::list::TENSOR_WORDS;
use super::variants::CodebookLookup;
#[cfg(test)]
use super::variants::MAX_SLOTS;
use super::{OP, SPAN};
#[cfg(test)]
use crate::arena::MAX_SLABS;
use crate::constants::Constants;
use crate::elementwise::MATH;
use crate::kv::{TILES, has_centres, number};
use crate::shader::Kernel;
use crate::slabs::Access;
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

const LIST: Part = Part { name: "list.wgsl", text: include_str!("list.wgsl") };
const READ: Part = Part { name: "read.wgsl", text: include_str!("read.wgsl") };
const ATTEND: Part = Part { name: "attend.wgsl", text: include_str!("attend.wgsl") };

/// Prologue and epilogue of attention.
static PROLOGUE_EPILOGUE: Source = Source {
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

/// A variant of the kernel of attention.
#[derive(Debug, Clone, Copy)]
pub struct KernelVariant {
    pub kind: KernelKind,
    /// Words that a thread reads of each chunk.
    pub words: usize,
    /// Queries of a job.
    pub slots: usize,
    /// Chunks that a workgroup takes at a time.
    pub chunks: usize,
    pub n_slabs: usize,
    /// The number of the stage in [`STAGES`].
    pub stage: usize,
}

impl KernelVariant {
    fn numbers(self) -> [(&'static str, usize); 9] {
        let [k, v] = self.kind.types;
        [
            ("K_TYPE", k as usize),
            ("V_TYPE", v as usize),
            ("IS_SHARED_KV", self.kind.is_shared_kv.into()),
            ("HAS_CENTRES", self.kind.has_centres.into()),
            ("DIM_CHUNKS", self.kind.dim_chunks as usize),
            ("QUADS", self.slots / 4),
            ("WORDS", self.words),
            ("CHUNKS", self.chunks),
            ("STAGE", self.stage),
        ]
    }

    fn constants(self) -> Constants {
        let constants = Constants::default().slabs(self.n_slabs, Access::Read);
        self.numbers().into_iter().fold(constants, |all, (name, number)| all.whole(name, number))
    }
}

/// Returns the number of chunks that a workgroup takes at a time, for jobs of `slots` queries.
pub fn chunks_at_a_time(gpu: &Gpu, slots: usize) -> usize {
    if gpu.is_software() { 1 } else { MAX_CHUNK_QUERIES / slots }
}

/// Returns a variant of the kernel, with these look-ups.
pub fn variant_kernel(gpu: &Gpu, look_ups: CodebookLookup, variant: KernelVariant) -> Result<Arc<Kernel>> {
    let numbers = variant.numbers().map(|(_, number)| number as u32);
    let key: Vec<u32> = numbers.into_iter().chain([variant.n_slabs as u32]).collect();
    Ok(gpu.variant(source(look_ups), "attend", &key, || variant.constants())?)
}

/// Returns the kernels that prepare queries and join spans.
pub fn prologue_epilogue(gpu: &Gpu, n_slabs: usize) -> Result<[Arc<Kernel>; 2]> {
    let kernel = |name| {
        let constants = || Constants::default().slabs(n_slabs, Access::Read);
        gpu.variant(&PROLOGUE_EPILOGUE, name, &[n_slabs as u32], constants)
    };
    Ok([kernel("prepare_queries")?, kernel("combine_spans")?])
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
/// keys and of values; prologue and epilogue, and some variants, with all slabs too.
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
    let stage = STAGES.len() - 1;
    let sources = chunk_variants.flat_map(|((look_ups, words, slots), chunks)| {
        let kinds = kv::TYPES.map(|dtype| (kind([dtype; 2], false, 1), 1));
        let shared_kv = [kind([DType::Turbo3; 2], true, 5), kind([DType::F16; 2], true, 4)];
        let all = kinds.into_iter().chain(shared_kv.map(|kind| (kind, MAX_SLABS)));
        all.map(move |(kind, n_slabs)| {
            let variant = KernelVariant { kind, words, slots, chunks, n_slabs, stage };
            (source(look_ups), variant.constants())
        })
    });
    let ends = [1, MAX_SLABS].map(|n| (&PROLOGUE_EPILOGUE, Constants::default().slabs(n, Access::Read)));
    sources.chain(ends).collect()
}
