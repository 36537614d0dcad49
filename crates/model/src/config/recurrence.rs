//! Which layers keep a state instead of keys and values, and what they do with it.

use kvant_backend::{ConvForm, KeySharing, ShortConv, StateHeads};

use super::Keys;
use crate::ModelError;
use crate::family::{Family, RecurrenceRule};

/// What a recurrent layer does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Recurrence {
    /// A short convolution, gated before and behind.
    ShortConv(ShortConv),
    /// Heads that keep a matrix each, on what a short convolution makes of queries, keys and values.
    Heads {
        /// Of all their channels.
        conv: ShortConv,
        /// How many, and their sizes.
        heads: StateHeads,
        /// What they write.
        kind: StateKind,
        /// Added to squares before roots are divided by: of keys, and in the norm of what they give.
        eps: f32,
    },
}

/// What heads that keep a matrix write to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateKind {
    /// What the gated delta rule says. What each head gives is normalised, and then gated.
    Delta,
    /// What a state space does. What heads give is gated, and then those that share keys are normalised together.
    Space,
}

impl Recurrence {
    /// The convolution that comes first.
    pub fn conv(&self) -> ShortConv {
        match *self {
            Self::ShortConv(conv) | Self::Heads { conv, .. } => conv,
        }
    }

    /// The heads, where there are some.
    pub fn heads(&self) -> Option<StateHeads> {
        match *self {
            Self::ShortConv(_) => None,
            Self::Heads { heads, .. } => Some(heads),
        }
    }

    /// Values of what it gives for a row.
    pub fn n_out(&self) -> usize {
        match *self {
            Self::ShortConv(conv) => conv.channels,
            Self::Heads { heads, .. } => heads.n_out(),
        }
    }

    /// f32 values of its states, in the order in which it uses them.
    pub fn states(self) -> impl Iterator<Item = usize> {
        [Some(self.conv().n_state()), self.heads().map(|heads| heads.n_state())].into_iter().flatten()
    }
}

/// Recurrent layers among others.
pub(super) struct Recurrences {
    /// What they do.
    each: Option<Recurrence>,
    /// Which layers are some.
    layers: Vec<bool>,
}

impl Recurrences {
    /// What layer `index` does, where it is one.
    pub fn of_layer(&self, index: usize) -> Option<Recurrence> {
        self.each.filter(|_| self.layers[index])
    }
}

/// Reads and checks what a file says of recurrent layers; `without_heads` are those without KV heads.
pub(super) fn read(
    keys: &Keys,
    family: &Family,
    n_embd: usize,
    without_heads: Vec<bool>,
) -> Result<Recurrences, ModelError> {
    match family.recurrence {
        None => Ok(Recurrences { each: None, layers: without_heads }),
        Some(RecurrenceRule::ShortConv) => {
            let taps = read_taps(keys, "shortconv.l_cache")?;
            let conv = ShortConv { channels: n_embd, taps, form: ConvForm::Gated };
            Ok(Recurrences { each: Some(Recurrence::ShortConv(conv)), layers: without_heads })
        }
        Some(RecurrenceRule::Delta { sharing }) => Ok(Recurrences {
            each: Some(read_heads(keys, StateKind::Delta, sharing)?),
            layers: read_pattern(keys, without_heads.len())?,
        }),
        Some(RecurrenceRule::Space { is_beside }) => {
            let each = read_heads(keys, StateKind::Space, KeySharing::Grouped)?;
            let layers = without_heads.into_iter().map(|is| is || is_beside).collect();
            Ok(Recurrences { each: Some(each), layers })
        }
    }
}

/// Which layers have no keys and values: those that the file names, or all but every so many.
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

/// Heads that keep a matrix. Files have them under the names of state space models: heads of values are the rank of their time step,
/// and those of keys groups.
fn read_heads(keys: &Keys, kind: StateKind, sharing: KeySharing) -> Result<Recurrence, ModelError> {
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
    for (key, dim) in [(SIZE, k_dim), (INNER, v_dim)] {
        if dim % StateHeads::COLUMNS != 0 || dim > StateHeads::MOST_DIMS {
            let what = format!("heads of a multiple of 16 up to {}", StateHeads::MOST_DIMS);
            return Err(keys.bad(key, &what, dim));
        }
    }
    let eps = keys.float("attention.layer_norm_rms_epsilon")?;
    let heads = StateHeads { n_k_heads, n_v_heads, k_dim, v_dim, sharing };
    // Rows of the tensors; what is more than they hold is refused before anything is made for it.
    let stored: u128 = keys.gguf.tensors().iter().map(|info| info.elements() as u128).sum();
    if heads.n_qkv() as u128 > stored {
        return Err(keys.bad(INNER, &format!("heads that {stored} values in tensors suffice for"), inner));
    }
    let conv = ShortConv {
        channels: heads.n_qkv(),
        taps: read_taps(keys, "ssm.conv_kernel")?,
        form: ConvForm::Silu,
    };
    Ok(Recurrence::Heads { conv, heads, kind, eps })
}

/// The rows that each result of a convolution is made of.
fn read_taps(keys: &Keys, key: &str) -> Result<usize, ModelError> {
    let taps = keys.size(key)?;
    if (2..=ShortConv::MOST_TAPS).contains(&taps) {
        return Ok(taps);
    }
    Err(keys.bad(key, &format!("a kernel of 2 to {}", ShortConv::MOST_TAPS), taps))
}
