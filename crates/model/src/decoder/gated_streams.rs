//! Residual streams that every sublayer reads by gates of each value, and writes by gates of each
//! stream, as Qwen4-Exp has them.
//!
//! ```text
//! c = concat(norm_i(h[i])) / n                         of each sublayer
//! x = Σ_i σ(W_up silu(W_down c))[i] * c[i]
//! h[i] = h[i] + 2 σ(W_inject c)[i] f(x)
//! y = Σ_i σ(W_up silu(W_down c))[i] * c[i]             behind the last layer, without another norm
//! ```
//!
//! A sublayer adds to x, as to a single residual stream: `f = (x + f) - x`. So the streams that it
//! leaves are linear combinations of those before, of x, and of what it made of x, which are behind
//! them in one buffer `[n + 2, rows, n_embd]`.

use kvant_backend::{Backend, BackendError, Gate, GatedStreams, Input, Matrix as _, Norm, Output};

use super::mla::output;
use super::{Activations, Decoder, StepContext};
use crate::ResidualStreams;
use crate::weights::GatedStreamWeights;

/// Gates of what a sublayer reads.
pub(super) struct GatedActivations<B: Backend> {
    /// Their low-rank inputs, before and after SiLU, `[rows, rank]`.
    low: [B::Buffer; 2],
    /// `[rows, n_streams, n_embd]`; of n-grams, their keys.
    pub(super) gates: B::Buffer,
}

impl<B: Backend> GatedActivations<B> {
    /// Allocates buffers for such streams, if the model has them.
    pub(super) fn new(
        streams: ResidualStreams,
        n_embd: usize,
        buffer: impl Fn(usize) -> Result<B::Buffer, BackendError>,
    ) -> Result<Self, BackendError> {
        let (n, rank) = match streams {
            ResidualStreams::Gated { n, rank } => (n, rank),
            _ => (0, 0),
        };
        Ok(Self { low: [buffer(rank)?, buffer(rank)?], gates: buffer(n * n_embd)? })
    }
}

impl<B: Backend> Decoder<B> {
    /// Makes the residual stream that a sublayer reads, or the output of the model, and computes
    /// what the sublayer writes.
    pub(super) fn read_gated_streams(
        &self,
        step: &mut StepContext<'_, '_, B>,
        weights: &GatedStreamWeights<B>,
    ) -> Result<(), BackendError> {
        let (backend, rows, width) = (step.backend, step.rows, self.config.n_embd);
        let GatedStreamWeights { norms, all_norms, down, up, writes } = weights;
        let Activations { x, streams, modalities: products, gated, coefs, .. } = &mut *step.act;
        let GatedActivations { low: [low, gates_of_low], gates } = gated;
        for (i, (w, weight)) in down.iter().zip(norms).enumerate() {
            let norm = Some(Norm { weight, eps: self.config.norm_eps });
            let input = Input { x: &*streams, norm, first_row: i * rows, rows };
            let accumulate = i > 0;
            let low = Output { w, bias: None, y: &mut *low, accumulate };
            match writes.get(i) {
                Some(w) => {
                    let products = Output { w, bias: None, y: &mut *products, accumulate };
                    backend.project(input, &mut [low, products])?;
                }
                None => backend.project(input, &mut [low])?,
            }
        }
        let n_low = rows * up.n_in();
        backend.copy(low, 0, gates_of_low, 0, n_low)?;
        backend.gate(low, n_low, gates_of_low, Gate::Sigmoid)?;
        let input = Input { x: &*low, norm: None, first_row: 0, rows };
        backend.project(input, &mut [output(up, gates)])?;
        let (n, is_written) = (down.len(), !writes.is_empty());
        let of = GatedStreams { n, width, norms: all_norms, norm_eps: self.config.norm_eps, gates, products };
        backend.gate_streams(of, streams, rows, x, is_written.then_some(coefs))?;
        // What was read is behind the streams.
        match is_written {
            true => backend.copy(x, 0, streams, n * rows * width, rows * width),
            false => Ok(()),
        }
    }
}
