//! Several residual streams that every sublayer reads and writes, by gates (hyper-connections,
//! arXiv 2409.19606), as Hunyuan 4 and DeepSeek-V4 have them.
//!
//! ```text
//! h[i] = e                                             e: the token's embedding
//! p = W concat(h) / rms(concat(h))                     of each sublayer
//! x = Σ_i in[i] h[i],  in[i] = sigmoid(s_in p[i] + b[i]) + eps
//! h[i] = h[i] + out[i] f(norm(x)),  out[i] = magnitude sigmoid(s_out p[n + i] + b[n + i]) + eps
//! h[i] = Σ_j mix[j, i] h[j] + out[i] f(norm(x))            in DeepSeek-V4, whose out has no eps
//! y = Σ_i in[i] h[i]                                   behind the last layer, as before a sublayer
//! ```
//!
//! A sublayer adds to x, as to a single residual stream: `f = (x + f) - x`. So the streams that it
//! leaves are linear combinations of those before and of what it made of x, which is behind them in
//! one buffer `[n + 1, rows, n_embd]`.

use std::mem;

use kvant_backend::{Backend, BackendError, HyperConnections, Input, Output, Streams};

use super::{Activations, Decoder, StepContext};
use crate::weights::{Connection, Layer, StreamGates};
use crate::{ModelError, ResidualStreams};

/// Returns the connections of a layer's token mixer and of its feed-forward layer.
pub(super) fn connections_of<B: Backend>(layer: &Layer<B>) -> [Option<&Connection<B>>; 2] {
    layer.connections.as_ref().map_or([None; 2], |connections| connections.each_ref().map(Some))
}

impl<B: Backend> Decoder<B> {
    /// Copies the embeddings of `rows` tokens to the streams that there are before the first layer:
    /// all, or the first where sublayers begin the others.
    pub(super) fn fill_streams(
        &self,
        backend: &B,
        rows: usize,
        act: &mut Activations<B>,
    ) -> Result<(), BackendError> {
        let (x, len) = (&act.x, rows * self.config.n_embd);
        let n = match self.config.streams {
            ResidualStreams::Attended { .. } => 1,
            all => all.n(),
        };
        (0..n).try_for_each(|i| backend.copy(x, 0, &mut act.streams, i * len, len))
    }

    /// Runs a sublayer on what it reads of the streams, and writes to them; on the only one without
    /// connections.
    pub(super) fn connect<'a, 's>(
        &self,
        step: &mut StepContext<'a, 's, B>,
        connection: Option<&Connection<B>>,
        sublayer: impl FnOnce(&mut StepContext<'a, 's, B>) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let Some(connection) = connection else { return sublayer(step) };
        self.read_streams(step, connection)?;
        sublayer(step)?;
        match connection {
            Connection::Gates(_) | Connection::Gated(_) => Ok(self.write_streams(step, connection)?),
            Connection::Scores(scores) => Ok(self.continue_stream(step, scores)?),
        }
    }

    /// Makes the residual stream that a sublayer reads, or the final norm, and computes what the
    /// sublayer writes.
    pub(super) fn read_streams(
        &self,
        step: &mut StepContext<'_, '_, B>,
        connection: &Connection<B>,
    ) -> Result<(), ModelError> {
        match connection {
            Connection::Gates(gates) => self.gate_streams(step, gates),
            Connection::Gated(weights) => Ok(self.read_gated_streams(step, weights)?),
            Connection::Scores(scores) => Ok(self.attend_streams(step, scores)?),
        }
    }

    /// Writes what a sublayer added to the streams, by its gates.
    fn write_streams(
        &self,
        step: &mut StepContext<'_, '_, B>,
        connection: &Connection<B>,
    ) -> Result<(), BackendError> {
        let (backend, rows, n, width) =
            (step.backend, step.rows, self.config.streams.n(), self.config.n_embd);
        let Activations { x, streams, predictions, coefs, .. } = &mut *step.act;
        let len = rows * width;
        // What the sublayer made of what it read, which precedes it if it was no combination of
        // streams.
        let n_in = if matches!(connection, Connection::Gated(_)) { n + 2 } else { n + 1 };
        backend.copy(x, 0, streams, (n_in - 1) * len, len)?;
        backend.mix_streams(coefs, streams, rows, Streams { n_in, n_out: n, width }, predictions)?;
        mem::swap(streams, predictions);
        Ok(())
    }

    /// Reads the streams by gates.
    fn gate_streams(
        &self,
        step: &mut StepContext<'_, '_, B>,
        StreamGates { parts, numbers, is_written }: &StreamGates<B>,
    ) -> Result<(), ModelError> {
        let (backend, rows, width) = (step.backend, step.rows, self.config.n_embd);
        let ResidualStreams::Connected { n, eps, write_eps, magnitude, mixing } = self.config.streams else {
            unreachable!("connections belong to connected streams")
        };
        let Activations { x, streams, modalities: products, reads, coefs, .. } = &mut *step.act;
        for (i, w) in parts.iter().enumerate() {
            let input = Input { x: &*streams, norm: None, first_row: i * rows, rows };
            let output = Output { w, bias: None, y: &mut *products, accumulate: i > 0 };
            backend.project(input, &mut [output])?;
        }
        let norm_eps = self.config.norm_eps;
        let connections = HyperConnections { n, width, numbers, norm_eps, eps, write_eps, magnitude, mixing };
        backend.connect_streams(connections, products, streams, rows, reads, is_written.then_some(coefs))?;
        Ok(backend.mix_streams(reads, streams, rows, Streams { n_in: n, n_out: 1, width }, x)?)
    }
}
