//! Attention over the compressed KV cache.
//!
//! For query row r at position P = start + r and query head h, with the keys and values of KV head
//! h / g (g = n_heads / n_kv_heads):
//!
//! ```text
//! s_t = scale · q · k_t          t = 0 ..= P
//! out = Σ_t exp(s_t - max s) v_t / Σ_t exp(s_t - max s)
//! ```
//!
//! If the head has a sink s, exp(s - max s) is added to the divisor after all tokens. With a soft
//! cap c, `c tanh(s_t / c)` replaces `s_t`, in a separate pass over the scores of a block.
//!
//! Codes of a KV tensor with centres represent `k_t - c`, c the centre of the block of 128 tokens:
//! `q · c` is added to the scores of the block, or, where all of them lack it, to their maximum, so
//! that it costs nothing per token.
//!
//! Keys of a rotated KV tensor are read rotated: the query is rotated once instead, since rotations
//! preserve inner products. Values of a rotated KV tensor are summed rotated, and the sum is
//! un-rotated once.
//!
//! # Method
//!
//! The scalar kernel evaluates the equation. The vector kernels read tiles in place, 128 tokens (a
//! *block*) at a time:
//!
//! 1. **Scores.** The query is rounded to signed bytes, with one unit per block of dims, and
//!    multiplied with the codes of the keys (codebooks are rounded to bytes too) in integers; one
//!    multiplication per token and block of dims applies the key's scale. Codes are unpacked once
//!    for all queries of the KV head: query heads of the group, and tokens of the batch.
//! 2. **Softmax.** Weights are relative to the maximum of the block, then merged with the state so
//!    far (online softmax, [arXiv 1805.02867](https://arxiv.org/abs/1805.02867); FlashAttention,
//!    [arXiv 2205.14135](https://arxiv.org/abs/2205.14135)). Scores carry a factor log2 e, so that
//!    powers of two serve.
//! 3. **Values.** Weights times scales are rounded to integers of one byte or two ([`weights`]),
//!    relative to the largest of the block, and multiplied with the codes of the values in
//!    integers: one conversion per block and dim.
//!
//! A shared-KV tensor (MLA) is read once: codes unpacked for its values are transposed for the
//! scores ([`mla`]), and the weighted centres are added to the outputs.
//!
//! For many queries, a matrix unit ([`crate::simd::matrix_unit`]) or 2x2 matrix instructions
//! ([`crate::simd::vec128`]) may compute the integer products of steps 1 and 3, with the same bits.
//!
//! Float tiles (f16 sink and tail among them) take steps 1 and 3 in f32. Work is divided over KV
//! heads, blocks of queries and, when those are few, KV splits, merged in token order: results do
//! not depend on the assignment to threads. No intermediate has the size of the cache, and scratch
//! memory is reused between calls.
//!
//! # Error
//!
//! With MAX the largest integer of a byte (127; AVX2 64, so that its 16-bit sums cannot saturate)
//! or of two (32,639; AVX2 32,767), each rounding is off by at most half a unit, as if by a
//! variance of unit²/12:
//!
//! - a query's value by max|q| / MAX / 2, over 128 rotated dims or 32 plain ones. One byte (turbo,
//!   q4_0): for a rotated slice max|q| is about 2.7 σ, so 4e-5 σ² (AVX2 1.5e-4), beside 0.117,
//!   0.035 and 0.0095 that the turbo codecs lose of a key. q8_0 loses so little itself that its
//!   queries take two bytes: 2e-9 σ²;
//! - a codebook's levels by the loss of `ByteBook`: 1e-7, 4e-6, 3e-5 (turbo2, 3, 4);
//! - a weight of two bytes (q8_0, q4_0; AVX2 turbo4 and turbo3t too) by the largest of its block /
//!   MAX / 2. At worst, if every weight of a block of 128 is rounded in the same direction, that
//!   moves the output by 64 / 32,639 = 0.2 % of the largest value; a large weight does not affect
//!   other blocks;
//! - a weight of one byte (the other turbo types) by a unit of the largest / 255 (AVX2 127) at
//!   most, unit²/6 in the mean, up as likely as down: with one large weight w in a block, and the
//!   others anywhere between units, 3.3e-4 w² σ² (AVX2 1.3e-3), a twentieth at most of the loss of
//!   the codes of w's value;
//! - 2^x by 2.5e-7, relative; a soft cap's tanh by 7e-7.
//!
//! The tests check every variant against these variances. A query that is not finite gives an
//! output that is NaN.

use kvant_backend::{AttendParams, BackendError, KvBatchEntry, Result};
use kvant_codec::DType;

use crate::host::page::CpuPage;
use crate::ops::context::KernelContext;
use crate::simd::isa::Isa;
use crate::simd::matrix_unit::NoUnit;
use crate::simd::vec16::with_lanes;

mod accumulate;
mod centre;
mod codes;
mod decode;
mod floats;
#[cfg(target_arch = "aarch64")]
mod i8mm;
mod kernels;
mod matrix_unit;
mod mla;
mod panels;
mod planes;
mod prefetch;
mod query;
mod scalar;
mod score;
pub(crate) mod select;
pub(crate) mod selected;
pub(crate) mod selection;
mod shape;
mod softmax;
mod split;
mod stage;
mod thread_state;
mod unpack;
mod view;
mod weights;

use matrix_unit::UnitPath;
use selection::SelectedRows;
pub(crate) use split::Scratch;
pub(crate) use stage::Stage;

/// The operands of the op. Shapes have been checked.
#[derive(Clone, Copy)]
pub(crate) struct AttendArgs<'a> {
    pub p: &'a AttendParams,
    pub parts: &'a [KvBatchEntry<'a, CpuPage>],
    pub q: &'a [f32],
    /// `[n_heads]`
    pub sinks: Option<&'a [f32]>,
    pub step_tiles: Option<&'a CpuPage>,
    /// The rows that attend, to selected tokens; all rows to all tokens when `None`. Not for the
    /// scalar kernels.
    pub selected: Option<SelectedRows<'a>>,
}

/// See [`kvant_backend::Backend::attend`]. Reads no more of coded tiles than `stage` states, which
/// is everything except in measurements.
///
/// # Errors
/// [`BackendError::Unsupported`] for other stages of the scalar kernels, which have none.
pub(crate) fn attend(
    KernelContext { isa, pool, scratch }: KernelContext<'_, Scratch>,
    stage: Stage,
    args: AttendArgs<'_>,
    out: &mut [f32],
) -> Result<()> {
    macro_rules! run {
        ($lanes:expr, $Path:ty, $proof:expr) => {
            split::attend::<_, $Path>($lanes, $proof, pool, scratch, stage, args, out)
        };
    }
    #[cfg(target_arch = "x86_64")]
    match isa {
        Isa::Amx(amx) => {
            run!(crate::simd::vec16::Zmm(amx.vectors()), UnitPath<crate::simd::amx::Amx>, Some(amx));
            return Ok(());
        }
        #[cfg(any(test, debug_assertions))]
        Isa::Soft(vectors) => {
            run!(
                vectors,
                UnitPath<crate::simd::matrix_unit::EmulatedUnit>,
                Some(crate::simd::matrix_unit::EmulatedUnit)
            );
            return Ok(());
        }
        _ => {}
    }
    #[cfg(target_arch = "aarch64")]
    if let Isa::I8mm(token) = isa {
        run!(crate::simd::vec128::Quads(token), i8mm::I8mmPath, Some(token));
        return Ok(());
    }
    with_lanes!(isa,
        lanes => run!(lanes, UnitPath<NoUnit>, None),
        _ => {
            if stage != Stage::All {
                return Err(BackendError::Unsupported {
                    op: "attend",
                    requested: "stages of the scalar kernels".to_owned(),
                    has: "stages of the vector kernels".to_owned(),
                });
            }
            scalar::attend(pool, args, out)
        }
    );
    Ok(())
}

/// Returns the name of the kernels that read tiles of a KV type, for `kvant doctor`.
pub(crate) fn kernel_name(isa: Isa, dtype: DType) -> String {
    let is_coded = codes::Coding::of(dtype).is_some();
    if let Isa::Amx(_) = isa
        && is_coded
    {
        return format!("attend-{dtype}-avx512vbmi, attend-prompt-{dtype}-amx");
    }
    let isa = isa.of_vectors();
    let set = if is_coded { isa.name_of_byte_products(true) } else { isa.name_of_float_products() };
    format!("attend-{dtype}-{set}")
}
