//! Recurrent layers: which layers hold a state instead of K and V, and their kind.

use kvant_backend::{ConvForm, Gate, Heads, KeySharing, ShortConv, StateHeads};

use super::Keys;
use crate::ModelError;
use crate::family::{Family, RecurrentFamily};

/// Kind of a recurrent layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RecurrentMixer {
    /// A short convolution, gated before and after.
    ShortConv(ShortConv),
    /// Linear attention: heads with a matrix state each, whose queries, keys and values pass a
    /// short convolution.
    Heads {
        /// The convolution over all channels.
        conv: ShortConv,
        /// Number and sizes of the heads.
        heads: StateHeads,
        /// Update rule of the state.
        kind: StateKind,
        /// Epsilon of the output norm and, except by Kimi's rule, of the L2 norm of keys.
        eps: f32,
        /// Bound of decays, if they have one.
        bound: Option<DecayBound>,
        /// The gates of the output.
        gate: Gate,
    },
}

/// Bound of the decays of states.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecayBound {
    /// Lower bound of the logarithm of a decay.
    pub log: f32,
    /// Whether the file has the negatives of the rates.
    pub negates_rates: bool,
}

/// Update rule of a matrix state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateKind {
    /// Gated delta rule. The output of each head is normalized, then gated.
    Delta,
    /// Kimi's delta rule: a decay for each key dim. The output of each head is normalized, then
    /// gated.
    KimiDelta,
    /// Mamba-2 state space (SSD). The output is gated, then normalized per group of heads with
    /// shared keys.
    Space,
}

impl RecurrentMixer {
    /// Returns the convolution.
    pub fn conv(&self) -> ShortConv {
        match *self {
            Self::ShortConv(conv) | Self::Heads { conv, .. } => conv,
        }
    }

    /// Returns the heads, if the layer has any.
    pub fn heads(&self) -> Option<StateHeads> {
        match *self {
            Self::ShortConv(_) => None,
            Self::Heads { heads, .. } => Some(heads),
        }
    }

    /// Returns the output values per token.
    pub fn n_out(&self) -> usize {
        match *self {
            Self::ShortConv(conv) => conv.channels,
            Self::Heads { heads, .. } => heads.n_out(),
        }
    }

    /// Returns the width of a token's queries, as much as of its keys and values, if each has a
    /// projection of its own; 0 otherwise.
    pub fn separate_width(&self) -> usize {
        match *self {
            Self::Heads { heads, kind: StateKind::KimiDelta, .. } => heads.n_out(),
            _ => 0,
        }
    }

    /// Returns the step sizes per token.
    pub fn n_steps(&self) -> usize {
        match *self {
            Self::ShortConv(_) => 0,
            Self::Heads { heads, kind: StateKind::KimiDelta, .. } => heads.n_v_heads * heads.k_dim,
            Self::Heads { heads, .. } => heads.n_v_heads,
        }
    }

    /// Returns the f32 values of each state, in order of use.
    pub fn states(self) -> impl Iterator<Item = usize> {
        [Some(self.conv().n_state()), self.heads().map(|heads| heads.n_state())].into_iter().flatten()
    }
}

/// The recurrent layers of a model.
pub(super) struct RecurrentLayers {
    /// Kind of these layers.
    each: Option<RecurrentMixer>,
    /// Heads of RWKV-7, which are in all layers.
    wkv: Option<Heads>,
    /// Which layers are recurrent.
    layers: Vec<bool>,
}

impl RecurrentLayers {
    /// Returns the kind of layer `index`, if it is recurrent.
    pub fn of_layer(&self, index: usize) -> Option<RecurrentMixer> {
        self.each.filter(|_| self.layers[index])
    }

    /// Returns the heads of RWKV-7 in each layer.
    pub fn wkv(&self) -> Option<Heads> {
        self.wkv
    }

    /// Returns whether layer `index` is recurrent.
    pub fn has(&self, index: usize) -> bool {
        self.wkv.is_some() || self.of_layer(index).is_some()
    }
}

/// Reads and checks the keys of recurrent layers; `without_heads` are the layers without KV heads.
pub(super) fn read(
    keys: &Keys,
    family: &Family,
    n_embd: usize,
    without_heads: Vec<bool>,
) -> Result<RecurrentLayers, ModelError> {
    let (each, layers) = match family.recurrence {
        None => (None, without_heads),
        Some(RecurrentFamily::ShortConv) => {
            let taps = read_taps(keys, "shortconv.l_cache")?;
            let conv = ShortConv { channels: n_embd, taps, form: ConvForm::Gated };
            (Some(RecurrentMixer::ShortConv(conv)), without_heads)
        }
        Some(RecurrentFamily::GatedDeltaNet { sharing, gate }) => {
            let each = read_heads(keys, StateKind::Delta, sharing, gate)?;
            (Some(each), read_pattern(keys, without_heads.len())?)
        }
        Some(RecurrentFamily::KimiDelta { negates_bounded }) => {
            (Some(read_kimi_heads(keys, without_heads.len(), negates_bounded)?), without_heads)
        }
        Some(RecurrentFamily::Wkv7) => {
            let wkv = Some(read_wkv(keys, n_embd)?);
            return Ok(RecurrentLayers { each: None, wkv, layers: without_heads });
        }
        Some(RecurrentFamily::Mamba2 { is_beside }) => {
            let each = read_heads(keys, StateKind::Space, KeySharing::Grouped, Gate::Silu)?;
            (Some(each), without_heads.into_iter().map(|is| is || is_beside).collect())
        }
    };
    Ok(RecurrentLayers { each, wkv: None, layers })
}

/// Reads the heads of RWKV-7, which together are as wide as the residual stream.
fn read_wkv(keys: &Keys, n_embd: usize) -> Result<Heads, ModelError> {
    const DIM: &str = "wkv.head_size";
    const SHIFTS: &str = "token_shift_count";
    let dim = keys.size(DIM)?;
    check_dim(keys, DIM, dim)?;
    if !n_embd.is_multiple_of(dim) {
        return Err(keys.bad(DIM, &format!("a divisor of the hidden size {n_embd}"), dim));
    }
    match keys.size_or(SHIFTS, 2)? {
        2 => Ok(Heads { n: n_embd / dim, dim }),
        n => Err(keys.bad(SHIFTS, "2, of the token mixer and of the feed-forward layer", n)),
    }
}

/// Reads which layers are recurrent: those that the file names, or all except the last of each
/// period.
fn read_pattern(keys: &Keys, n_layers: usize) -> Result<Vec<bool>, ModelError> {
    const NAMED: &str = "attention.recurrent_layers";
    if !keys.has(NAMED) {
        let every = keys.size_or("full_attention_interval", 4)?;
        return Ok((1..=n_layers).map(|layer| layer % every != 0).collect());
    }
    let mut layers: Vec<bool> = keys.gguf.meta().get(&keys.key(NAMED))?;
    if layers.len() < n_layers {
        return Err(keys.bad(NAMED, &format!("{n_layers} layers"), layers.len()));
    }
    layers.truncate(n_layers);
    Ok(layers)
}

/// Reads the heads with matrix states. Files use the names of state space models: value heads are
/// `time_step_rank`, key heads are groups.
fn read_heads(
    keys: &Keys,
    kind: StateKind,
    sharing: KeySharing,
    gate: Gate,
) -> Result<RecurrentMixer, ModelError> {
    const SIZE: &str = "ssm.state_size";
    const HEADS: &str = "ssm.time_step_rank";
    const INNER: &str = "ssm.inner_size";
    let [k_dim, n_k_heads, n_v_heads] = [keys.size(SIZE)?, keys.size("ssm.group_count")?, keys.size(HEADS)?];
    if n_v_heads % n_k_heads != 0 {
        return Err(keys.bad(HEADS, &format!("a multiple of the {n_k_heads} key heads"), n_v_heads));
    }
    let inner = keys.size(INNER)?;
    if inner % n_v_heads != 0 {
        return Err(keys.bad(INNER, &format!("a multiple of the {n_v_heads} value heads"), inner));
    }
    let v_dim = inner / n_v_heads;
    check_dim(keys, SIZE, k_dim)?;
    check_dim(keys, INNER, v_dim)?;
    let heads = StateHeads { n_k_heads, n_v_heads, k_dim, v_dim, sharing };
    check_size(keys, INNER, heads)?;
    mixer(keys, heads, kind, None, gate)
}

/// Reads the heads of Kimi's rule: as many as attention has.
fn read_kimi_heads(keys: &Keys, n_layers: usize, negates_rates: bool) -> Result<RecurrentMixer, ModelError> {
    const DIM: &str = "kda.head_dim";
    let n = keys.size_of("attention.head_count", &vec![true; n_layers])?;
    let dim = keys.size(DIM)?;
    check_dim(keys, DIM, dim)?;
    let sharing = KeySharing::Grouped;
    let heads = StateHeads { n_k_heads: n, n_v_heads: n, k_dim: dim, v_dim: dim, sharing };
    check_size(keys, DIM, heads)?;
    let bound = read_bound(keys)?.map(|log| DecayBound { log, negates_rates });
    mixer(keys, heads, StateKind::KimiDelta, bound, Gate::Sigmoid)
}

/// Reads the lower bound of the logarithm of a decay, if the file has a bound that applies.
fn read_bound(keys: &Keys) -> Result<Option<f32>, ModelError> {
    const BOUND: &str = "kda.gate_lower_bound";
    if !keys.has(BOUND) || !keys.flag_or("kda.safe_gate", true)? {
        return Ok(None);
    }
    match keys.gguf.meta().get::<f32>(&keys.key(BOUND))? {
        bound if bound.is_finite() && bound < 0.0 => Ok(Some(bound)),
        bound => Err(keys.bad(BOUND, "a negative number", bound)),
    }
}

fn check_dim(keys: &Keys, key: &str, dim: usize) -> Result<(), ModelError> {
    if dim.is_multiple_of(StateHeads::COLUMNS) && dim <= StateHeads::MAX_K_DIM {
        return Ok(());
    }
    let what = format!("heads of a multiple of 16 up to {}", StateHeads::MAX_K_DIM);
    Err(keys.bad(key, &what, dim))
}

/// Bounds heads, whose size is that of `key`, by the tensors' rows before any allocation.
fn check_size(keys: &Keys, key: &str, heads: StateHeads) -> Result<(), ModelError> {
    let stored: u128 = keys.gguf.tensors().iter().map(|info| info.elements() as u128).sum();
    if heads.n_qkv() as u128 <= stored {
        return Ok(());
    }
    Err(keys.bad(key, &format!("heads that {stored} values in tensors suffice for"), keys.size(key)?))
}

/// Returns the layer with these heads.
fn mixer(
    keys: &Keys,
    heads: StateHeads,
    kind: StateKind,
    bound: Option<DecayBound>,
    gate: Gate,
) -> Result<RecurrentMixer, ModelError> {
    let eps = keys.float("attention.layer_norm_rms_epsilon")?;
    let conv = ShortConv {
        channels: heads.n_qkv(),
        taps: read_taps(keys, "ssm.conv_kernel")?,
        form: ConvForm::Silu,
    };
    Ok(RecurrentMixer::Heads { conv, heads, kind, eps, bound, gate })
}

/// Reads the kernel size (taps) of a convolution.
fn read_taps(keys: &Keys, key: &str) -> Result<usize, ModelError> {
    let taps = keys.size(key)?;
    if (2..=ShortConv::MAX_TAPS).contains(&taps) {
        return Ok(taps);
    }
    Err(keys.bad(key, &format!("a kernel of 2 to {}", ShortConv::MAX_TAPS), taps))
}
