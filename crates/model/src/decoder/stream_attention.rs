//! Residual streams that every sublayer attends to, as Kimi K3 has them.
//!
//! ```text
//! x = Σ_j p[j] h[j],  p = softmax(w · norm(h[j]))      of each sublayer: its scores w
//! h[n] = h[n] + f(norm(x))                             n: the current stream
//! y = Σ_j p[j] h[j]                                    behind the last layer, as before a sublayer
//! ```
//!
//! The first stream is the token's embedding. The token mixer of the first layer of each block
//! begins a new one, `h[n + 1] = f(norm(x))`, and leaves the others as they are.
//!
//! A sublayer adds to x, as to a single residual stream: `f = (x + f) - x`. So the current stream
//! is a linear combination of all and of what the sublayer made of x, which is behind them in one
//! buffer `[n + 1, rows, n_embd]`.

use kvant_backend::{Backend, BackendError, StreamAttention, Streams};

use super::{Activations, Decoder, StepContext};
use crate::weights::StreamScores;

impl<B: Backend> Decoder<B> {
    /// Makes the residual stream that a sublayer reads, or the final norm, and computes what the
    /// sublayer leaves.
    pub(super) fn attend_streams(
        &self,
        step: &mut StepContext<'_, '_, B>,
        &StreamScores { ref scores, n, continues }: &StreamScores<B>,
    ) -> Result<(), BackendError> {
        let (backend, rows) = (step.backend, step.rows);
        let Activations { x, streams, reads, coefs, .. } = &mut *step.act;
        let attention = StreamAttention { n, scores, norm_eps: self.config.norm_eps, continues };
        backend.attend_streams(attention, streams, rows, reads, Some(coefs))?;
        backend.mix_streams(reads, streams, rows, Streams { n_in: n, n_out: 1, width: self.config.n_embd }, x)
    }

    /// Continues the current stream by what a sublayer added, or begins one.
    pub(super) fn continue_stream(
        &self,
        step: &mut StepContext<'_, '_, B>,
        &StreamScores { n, continues, .. }: &StreamScores<B>,
    ) -> Result<(), BackendError> {
        let (backend, rows, width) = (step.backend, step.rows, self.config.n_embd);
        let Activations { x, streams, predictions, coefs, .. } = &mut *step.act;
        let len = rows * width;
        backend.copy(x, 0, streams, n * len, len)?;
        backend.mix_streams(coefs, streams, rows, Streams { n_in: n + 1, n_out: 1, width }, predictions)?;
        let current = if continues { n - 1 } else { n };
        backend.copy(predictions, 0, streams, current * len, len)
    }
}
