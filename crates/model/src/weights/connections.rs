//! Weights of how sublayers read and write several residual streams; the [decoder](crate::Decoder)
//! has the equations.

use kvant_backend::Backend;
use kvant_codec::DType;

use super::Loader;
use crate::{Config, ModelError, ResidualStreams};

/// How a sublayer, or the final norm, reads several residual streams, and what it writes.
pub(crate) enum Connection<B: Backend> {
    /// By gates (hyper-connections).
    Gates(StreamGates<B>),
    /// By gates of each value (gated residual).
    Gated(GatedStreamWeights<B>),
    /// By attention to them.
    Scores(StreamScores<B>),
}

/// Gates of each value that a sublayer reads of all residual streams, and of each stream that it
/// writes.
pub(crate) struct GatedStreamWeights<B: Backend> {
    /// Norm of each stream, `[n_embd]`, divided by their number.
    pub(crate) norms: Vec<B::Buffer>,
    /// All of them, `[n, n_embd]`.
    pub(crate) all_norms: B::Buffer,
    /// Low-rank gates of what is read, of each stream, `[rank, n_embd]`.
    pub(crate) down: Vec<B::Matrix>,
    /// `[n * n_embd, rank]`
    pub(crate) up: B::Matrix,
    /// Gates of what is written, of each stream, `[n, n_embd]`; empty before the final norm.
    pub(crate) writes: Vec<B::Matrix>,
}

/// Gates of what a sublayer reads of all residual streams, and of what it writes to each.
pub(crate) struct StreamGates<B: Backend> {
    /// Projection of each stream, `[n_products, n_embd]`: with rows for what is written and mixed,
    /// or for reading alone.
    pub(crate) parts: Vec<B::Matrix>,
    /// A scale for reading, for writing and for mixing, then their bases.
    pub(crate) numbers: B::Buffer,
    /// Whether it writes: all but the last, before the final norm, do.
    pub(crate) is_written: bool,
}

/// Attention of a sublayer to the residual streams there are.
pub(crate) struct StreamScores<B: Backend> {
    /// Scores of a normalized stream, `[n_embd]`.
    pub(crate) scores: B::Buffer,
    /// Number of streams that it reads, the current one last.
    pub(crate) n: usize,
    /// Whether it adds to the current stream; otherwise it begins a new one.
    pub(crate) continues: bool,
}

impl<B: Backend> Loader<'_, B> {
    /// Loads the connections of the token mixer and of the feed-forward layer of layer `index`, if
    /// the model has several streams that each reads.
    pub(super) fn connections(
        &mut self,
        c: &Config,
        index: usize,
    ) -> Result<Option<[Connection<B>; 2]>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        match c.streams {
            ResidualStreams::One | ResidualStreams::Alternating { .. } => Ok(None),
            ResidualStreams::Connected { .. } => {
                let [mixer, ffn] = ["hc_attn", "hc_ffn"].map(|of| self.stream_gates(c, &name(of), true));
                Ok(Some([mixer?, ffn?]))
            }
            ResidualStreams::Gated { n, rank } => {
                let of = |of| self.gated_streams(c, &name(of), [n, rank], true);
                let [mixer, ffn] = ["hc_attn", "hc_ffn"].map(of);
                Ok(Some([mixer?, ffn?]))
            }
            ResidualStreams::Attended { per_block, .. } => {
                let (n_before, continues) = (index.div_ceil(per_block), !index.is_multiple_of(per_block));
                let mixer = self.stream_scores(c, &name("attn_res_score"), n_before + 1, continues)?;
                let ffn = self.stream_scores(c, &name("ffn_res_score"), index / per_block + 2, true)?;
                Ok(Some([mixer, ffn]))
            }
        }
    }

    /// Loads the connection of the final norm, if the model has such streams.
    pub(super) fn last_connection(&mut self, c: &Config) -> Result<Option<Connection<B>>, ModelError> {
        match c.streams {
            ResidualStreams::One | ResidualStreams::Alternating { .. } => Ok(None),
            ResidualStreams::Connected { .. } => self.stream_gates(c, "output_hc", false).map(Some),
            ResidualStreams::Gated { n, rank } => {
                self.gated_streams(c, "output_hc", [n, rank], false).map(Some)
            }
            ResidualStreams::Attended { n, .. } => {
                self.stream_scores(c, "output_res_score", n, true).map(Some)
            }
        }
    }

    /// Loads the gates whose tensors' names start with `name`.
    fn stream_gates(
        &mut self,
        c: &Config,
        name: &str,
        is_written: bool,
    ) -> Result<Connection<B>, ModelError> {
        let ResidualStreams::Connected { n, mixing, .. } = c.streams else {
            unreachable!("connections belong to connected streams")
        };
        let (n_embd, n_products) = (c.n_embd, mixing.n_products(n, is_written));
        let of = |part| format!("{name}_{part}.weight");
        let rows = self.values(&of("fn"), &[n * n_embd, n_products])?;
        let part = |i: usize| {
            let columns = rows.chunks_exact(n * n_embd).flat_map(|row| &row[i * n_embd..][..n_embd]);
            self.small(&columns.copied().collect::<Vec<_>>(), n_embd, DType::F32)
        };
        let parts = (0..n).map(part).collect::<Result<_, _>>()?;
        let mut numbers = self.values(&of("scale"), &[mixing.n_scales(is_written)])?;
        numbers.extend(self.values(&of("base"), &[n_products])?);
        Ok(Connection::Gates(StreamGates { parts, numbers: self.upload(&numbers)?, is_written }))
    }

    /// Loads gated reading of n streams, whose tensors' names start with `name`.
    fn gated_streams(
        &mut self,
        c: &Config,
        name: &str,
        [n, rank]: [usize; 2],
        is_written: bool,
    ) -> Result<Connection<B>, ModelError> {
        let of = |part| format!("{name}_{part}.weight");
        let mut norms = self.per_stream(&of("norm"), n, c.n_embd)?;
        // The mean of the streams, and the divisor of all products.
        norms.iter_mut().for_each(|norm| *norm /= n as f32);
        let of_stream = |norm: &[f32]| self.upload(norm);
        Ok(Connection::Gated(GatedStreamWeights {
            norms: norms.chunks_exact(c.n_embd).map(of_stream).collect::<Result<_, _>>()?,
            all_norms: self.upload(&norms)?,
            down: self.beside_each_other(&of("down"), n, c.n_embd, rank)?,
            up: self.matrix(&of("up"), rank, n * c.n_embd)?,
            writes: match is_written {
                true => self.beside_each_other(&of("inject"), n, c.n_embd, n)?,
                false => Vec::new(),
            },
        }))
    }

    /// Loads vectors of `width` values of n streams, which files have as one or as rows.
    pub(super) fn per_stream(&mut self, name: &str, n: usize, width: usize) -> Result<Vec<f32>, ModelError> {
        let (flat, apart) = ([n * width], [width, n]);
        let is_flat = self.gguf.tensor(name)?.info.shape.len() == 1;
        self.values(name, if is_flat { &flat } else { &apart })
    }

    /// Loads the attention of this name to n streams.
    fn stream_scores(
        &mut self,
        c: &Config,
        name: &str,
        n: usize,
        continues: bool,
    ) -> Result<Connection<B>, ModelError> {
        let scores = self.vector(&format!("{name}.weight"), c.n_embd)?;
        Ok(Connection::Scores(StreamScores { scores, n, continues }))
    }
}
