//! Several residual streams (AltUp, hyper-connections, attention to streams), and sparse
//! feed-forward layers beside the first of these (Gemma 3n).

use kvant_backend::{Activation, StreamMixing};

use super::{Keys, PER_LAYER};
use crate::ModelError;
use crate::family::Family;

/// Largest number of residual streams.
const MAX_STREAMS: usize = 16;
/// Most iterations that mix streams: several times those of any model.
const MAX_ITERATIONS: usize = 100;

/// The residual streams of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ResidualStreams {
    /// One.
    One,
    /// Several, of which a layer processes the first and predicts the others (AltUp).
    Alternating {
        /// Number of streams.
        n: usize,
    },
    /// Several, which every sublayer reads and writes by gates (hyper-connections).
    Connected {
        /// Number of streams.
        n: usize,
        /// Added to the gates of what a sublayer reads.
        eps: f32,
        /// Added to the gates of what it writes.
        write_eps: f32,
        /// Factor on these.
        magnitude: f32,
        /// What a stream keeps of all.
        mixing: StreamMixing,
    },
    /// Several, which every sublayer reads by gates of each value, and writes by gates of each
    /// stream (gated residual).
    Gated {
        /// Number of streams.
        n: usize,
        /// Rank of the projection to the gates of what it reads.
        rank: usize,
    },
    /// Several, to which every sublayer attends: those of earlier blocks of layers, and the current
    /// one.
    Attended {
        /// Number of streams behind the last layer.
        n: usize,
        /// Layers of a block. The token mixer of its first layer begins a stream.
        per_block: usize,
    },
}

impl ResidualStreams {
    /// Returns the number of streams.
    pub fn n(self) -> usize {
        match self {
            Self::One => 1,
            Self::Alternating { n }
            | Self::Connected { n, .. }
            | Self::Gated { n, .. }
            | Self::Attended { n, .. } => n,
        }
    }

    /// Returns whether every sublayer reads all streams.
    pub fn are_read_by_sublayers(self) -> bool {
        matches!(self, Self::Connected { .. } | Self::Gated { .. } | Self::Attended { .. })
    }
}

/// Reads the residual streams: one, unless the file has alternating updates, or the family
/// hyper-connections or attention to streams.
pub(super) fn read(keys: &Keys, family: &Family, n_layers: usize) -> Result<ResidualStreams, ModelError> {
    const PER_BLOCK: &str = "attn_res.block_size";
    const ALTERNATING: &str = "altup.num_inputs";
    const CONNECTED: &str = "hyper_connection.count";
    const RANK: &str = "hyper_connection.low_rank";
    const ITERATIONS: &str = "hyper_connection.sinkhorn_iterations";
    if family.connects_streams {
        let n = read_count(keys, CONNECTED)?;
        if keys.has(RANK) {
            return Ok(ResidualStreams::Gated { n, rank: keys.size(RANK)? });
        }
        let eps = keys.float("hyper_connection.epsilon")?;
        return Ok(match keys.count(ITERATIONS)? {
            0 => {
                let (magnitude, mixing) = (keys.float("hyper_connection.magnitude")?, StreamMixing::None);
                ResidualStreams::Connected { n, eps, write_eps: eps, magnitude, mixing }
            }
            iterations if iterations <= MAX_ITERATIONS => {
                let mixing = StreamMixing::Sinkhorn { iterations };
                ResidualStreams::Connected { n, eps, write_eps: 0.0, magnitude: 2.0, mixing }
            }
            iterations => return Err(keys.bad(ITERATIONS, &format!("at most {MAX_ITERATIONS}"), iterations)),
        });
    }
    if family.attends_streams {
        let per_block = keys.gguf.meta().get::<u32>(&keys.key(PER_BLOCK))? as usize;
        return Ok(match per_block {
            0 => ResidualStreams::One,
            _ => ResidualStreams::Attended { n: 1 + n_layers.div_ceil(per_block), per_block },
        });
    }
    if !keys.has(ALTERNATING) {
        return Ok(ResidualStreams::One);
    }
    keys.refuse("altup.active_idx", "alternating updates of another stream than the first")?;
    let n = read_count(keys, ALTERNATING)?;
    keys.size(PER_LAYER)?;
    Ok(ResidualStreams::Alternating { n })
}

fn read_count(keys: &Keys, key: &str) -> Result<usize, ModelError> {
    match keys.size(key)? {
        n if (2..=MAX_STREAMS).contains(&n) => Ok(n),
        n => Err(keys.bad(key, &format!("2 to {MAX_STREAMS} streams"), n)),
    }
}

/// Reads by how many standard deviations a value of each feed-forward layer's gate must exceed
/// their mean; `None` for layers that use all, which files call minus infinity.
pub(super) fn read_sparsity(
    keys: &Keys,
    family: &Family,
    n_layers: usize,
) -> Result<Vec<Option<f32>>, ModelError> {
    const SCALE: &str = "activation_sparsity_scale";
    let Some(all) = keys.gguf.meta().find::<Vec<f32>>(&keys.key(SCALE))? else {
        return Ok(vec![None; n_layers]);
    };
    if all.len() < n_layers {
        return Err(keys.bad(SCALE, &format!("{n_layers} layers"), all.len()));
    }
    if let Some(bad) = all.iter().find(|x| x.is_nan() || **x == f32::INFINITY) {
        return Err(keys.bad(SCALE, "finite numbers, or minus infinity", bad));
    }
    let sparse: Vec<_> = all.into_iter().take(n_layers).map(|x| Some(x).filter(|x| x.is_finite())).collect();
    if sparse.iter().any(Option::is_some) && (family.activation != Activation::Gelu || family.ungated) {
        let what = format!("sparse activations other than GELU ({})", keys.key(SCALE));
        return Err(ModelError::Unsupported { what });
    }
    Ok(sparse)
}
