//! A matrix for each slice of a row, such as its heads: `y[r, i] = W[i] x[r, i]`.
//!
//! Runs on the kernels of experts: every row is routed to every matrix, each with its own slice.
//! Results are ordered slice by slice; rows are reassembled at the end.

use kvant_backend::BackendError;

use super::scratch::ExpertScratch;
use super::{Biased, CpuExperts, MoeStage, grow, tile_positions};
use crate::ops::context::KernelContext;
use crate::ops::matmul::product::Operand;
use crate::ops::matmul::scratch::{Scratch, for_threads};

/// Computes `y` `[rows, n, n_out]` from `x` `[rows, n, n_in]`.
///
/// # Errors
/// [`BackendError::OutOfMemory`] where matrices have to be packed.
pub(crate) fn project_each(
    KernelContext { isa, pool, scratch }: KernelContext<'_, Scratch>,
    w: &CpuExperts,
    x: &[f32],
    y: &mut [f32],
) -> Result<(), BackendError> {
    let Scratch { tuning, normed, forms, workspaces, experts: own, .. } = scratch;
    let ExpertScratch { routes, tiles, picked, hidden, .. } = own;
    let (n, any) = (w.matrices.len(), w.any());
    let (n_in, n_out) = (any.n_in, any.n_out);
    let rows = x.len() / (n * n_in);
    routes.route_slices(rows, n);
    let tiles = tile_positions(isa, tiles, &routes.groups);
    let stage = MoeStage { isa, pool, tuning: *tuning, groups: &routes.groups, tiles };
    stage.pick(forms, [w, w], Operand { x, n_in, norm: None }, &routes.rows, normed, picked);
    let laid_out = w.packed(isa, pool, 0..n)?;
    let biased = Biased { laid_out: laid_out.as_deref(), ..Biased::new(w, None) };
    grow(hidden, y.len());
    let outputs = &mut hidden[..y.len()];
    stage.project_slots(forms, for_threads(workspaces, pool), picked, biased, None, outputs);
    if n_out > 0 {
        for (part, outputs) in routes.rows.iter().zip(outputs.chunks_exact(n_out)) {
            y[*part as usize * n_out..][..n_out].copy_from_slice(outputs);
        }
    }
    Ok(())
}
