//! Scratch memory of matmul.

use super::experts::scratch::ExpertScratch;
use super::forms::Forms;
use super::gemm::Workspace;
use super::prefill_precision::PrefillPrecision;
use super::tuning::Tuning;
use crate::host::pool::Pool;
use crate::simd::isa::Isa;

/// Scratch memory of the device, so that a step does not allocate once it has grown.
#[derive(Default)]
pub(crate) struct Scratch {
    pub tuning: Tuning,
    pub prefill_precision: PrefillPrecision,
    /// The normalized input, `[rows, n_in]`.
    pub(super) normed: Vec<f32>,
    /// Gate activations, `[rows, n_ff]`, where gate and up are not fused.
    pub(super) gate: Vec<f32>,
    pub(super) forms: Forms,
    /// One for each thread.
    pub(super) workspaces: Vec<Workspace>,
    pub(super) experts: ExpertScratch,
}

impl Scratch {
    /// Returns empty scratch memory with the tuning of a kernel set.
    pub fn of(isa: Isa) -> Self {
        Self { tuning: Tuning::of(isa), ..Self::default() }
    }
}

/// Returns a workspace for each thread.
pub(super) fn for_threads<'a>(workspaces: &'a mut Vec<Workspace>, pool: &Pool) -> &'a mut [Workspace] {
    if workspaces.is_empty() {
        workspaces.resize(pool.n_threads(), Workspace::EMPTY);
    }
    workspaces
}
