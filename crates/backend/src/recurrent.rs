//! What the ops of recurrent layers are told, and the shapes that every device asks of them.

use crate::device::{Buffer, Page, Result};
use crate::{BackendError, StatePart};

/// A short convolution over the rows of a sequence, channel by channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConv {
    /// Channels.
    pub channels: usize,
    /// Rows that each result is made of, the youngest its own; from 2 to [`ShortConv::MOST_TAPS`].
    pub taps: usize,
    /// What enters and leaves.
    pub form: ConvForm,
}

/// What enters a short convolution and what becomes of what it gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConvForm {
    /// Rows of b, c and x one after the other: `b x` enters, and what leaves is multiplied by c (LFM2, arXiv 2511.23404).
    Gated,
    /// Rows enter as they are, and what leaves goes through SiLU.
    Silu,
}

impl ShortConv {
    /// The most rows that a result is made of.
    pub const MOST_TAPS: usize = 8;

    /// Values of a row that enters.
    pub fn n_in(&self) -> usize {
        match self.form {
            ConvForm::Gated => 3 * self.channels,
            ConvForm::Silu => self.channels,
        }
    }

    /// Values of the state: what entered of the rows before, the oldest first, `[taps - 1, channels]`.
    pub fn n_state(&self) -> usize {
        self.taps.saturating_sub(1) * self.channels
    }
}

/// Heads that keep a matrix each, which every row changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateHeads {
    /// Heads of keys and of queries.
    pub n_k_heads: usize,
    /// Heads of values; a multiple of `n_k_heads`.
    pub n_v_heads: usize,
    /// Values of a key, and of a query; a multiple of [`StateHeads::COLUMNS`], at most [`StateHeads::MOST_DIMS`].
    pub k_dim: usize,
    /// Values of a value; a multiple of [`StateHeads::COLUMNS`].
    pub v_dim: usize,
    /// Which value heads share the keys of a key head.
    pub sharing: KeySharing,
}

/// Which value heads share the keys of a key head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeySharing {
    /// Neighbours.
    Grouped,
    /// Those that are as many heads apart as there are key heads.
    Tiled,
}

impl StateHeads {
    /// Columns of a state that lie together.
    pub const COLUMNS: usize = 16;
    /// The largest key.
    pub const MOST_DIMS: usize = 256;

    /// Values of a row of queries, keys and values.
    pub fn n_qkv(&self) -> usize {
        2 * self.n_k_heads * self.k_dim + self.n_out()
    }

    /// Values of a row of results.
    pub fn n_out(&self) -> usize {
        self.n_v_heads * self.v_dim
    }

    /// Values of the state, `[n_v_heads, v_dim / 16, k_dim, 16]`.
    pub fn n_state(&self) -> usize {
        self.n_v_heads * self.k_dim * self.v_dim
    }

    /// The key head of a value head.
    pub fn key_head(&self, v_head: usize) -> usize {
        match self.sharing {
            KeySharing::Grouped => v_head / (self.n_v_heads / self.n_k_heads.max(1)).max(1),
            KeySharing::Tiled => v_head % self.n_k_heads.max(1),
        }
    }
}

/// What changes the matrices of [`StateHeads`], and what is read of them; `T` is how a device is told of a buffer.
#[derive(Debug, Clone, Copy)]
pub struct StateInputs<T> {
    /// Queries, keys and values of all heads, one after the other, `[rows, 2 n_k_heads k_dim + n_v_heads v_dim]`.
    pub qkv: T,
    /// How long a step is in time, before the bias and softplus, `[rows, n_v_heads]`.
    pub step: T,
    /// Added to that, `[n_v_heads]`.
    pub bias: T,
    /// Negative: how fast is forgotten in that time, `[n_v_heads]`.
    pub rate: T,
    /// What is written.
    pub rule: StateRule<T>,
}

/// What a row writes to a state.
#[derive(Debug, Clone, Copy)]
pub enum StateRule<T> {
    /// The gated delta rule (arXiv 2412.06464): of a value, what its key does not give yet. Keys and queries have length one.
    Delta {
        /// How much of that, before the logistic function, `[rows, n_v_heads]`.
        write: T,
        /// Added to the square of a key, and of a query, before its root is divided by.
        eps: f32,
    },
    /// A state space (Mamba 2, arXiv 2405.21060): a value, times the length of the step.
    Space {
        /// How much of a value goes past the state, `[n_v_heads]`.
        skip: T,
    },
}

impl<T> StateInputs<T> {
    /// The same of what `f` makes of each buffer.
    pub fn map<U>(self, f: impl Fn(T) -> U) -> StateInputs<U> {
        let Self { qkv, step, bias, rate, rule } = self;
        let rule = match rule {
            StateRule::Delta { write, eps } => StateRule::Delta { write: f(write), eps },
            StateRule::Space { skip } => StateRule::Space { skip: f(skip) },
        };
        StateInputs { qkv: f(qkv), step: f(step), bias: f(bias), rate: f(rate), rule }
    }
}

/// What values are multiplied by, made of a number g for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// The logistic function, `1 / (1 + exp(-g))`.
    Sigmoid,
    /// SiLU, `g / (1 + exp(-g))`.
    Silu,
    /// GELU, as [`Activation::Gelu`](crate::Activation::Gelu).
    Gelu,
    /// ReLU, as [`Activation::Relu`](crate::Activation::Relu).
    Relu,
    /// The number itself, g.
    Plain,
}

/// Checks [`Backend::short_conv`](crate::Backend::short_conv).
///
/// # Errors
/// [`BackendError::Shape`] that names what is off.
pub fn check_short_conv<P: Page, B: Buffer>(
    parts: &[StatePart<'_, P>],
    conv: ShortConv,
    [x, kernel, y]: [&B; 3],
) -> Result<()> {
    const OP: &str = "short_conv";
    let ShortConv { channels, taps, .. } = conv;
    BackendError::check_at_least(OP, "taps", 2, taps)?;
    BackendError::check_at_least(OP, "taps that there may be", taps, ShortConv::MOST_TAPS)?;
    BackendError::check_at_least(OP, "length of the kernel", (taps + 1) * channels, kernel.n_values())?;
    for part in parts {
        let rows = part.rows.range().end;
        BackendError::check_at_least(OP, "length of the input", rows * conv.n_in(), x.n_values())?;
        BackendError::check_at_least(OP, "length of the output", rows * channels, y.n_values())?;
        check_state(OP, part, conv.n_state())?;
    }
    Ok(())
}

/// Checks [`Backend::recur`](crate::Backend::recur).
///
/// # Errors
/// As [`check_short_conv`].
pub fn check_recur<P: Page, B: Buffer>(
    parts: &[StatePart<'_, P>],
    heads: &StateHeads,
    inputs: StateInputs<&B>,
    y: &B,
) -> Result<()> {
    const OP: &str = "recur";
    let &StateHeads { n_k_heads, n_v_heads, k_dim, v_dim, .. } = heads;
    let StateInputs { qkv, step, bias, rate, rule } = inputs;
    BackendError::check_at_least(OP, "key heads", 1, n_k_heads)?;
    BackendError::check(OP, "value heads beyond whole groups", 0, n_v_heads % n_k_heads)?;
    for dim in [k_dim, v_dim] {
        BackendError::check_at_least(OP, "size of a head", StateHeads::COLUMNS, dim)?;
        BackendError::check(OP, "values of a head beyond whole sixteens", 0, dim % StateHeads::COLUMNS)?;
    }
    BackendError::check_at_least(OP, "size that a key may have", k_dim, StateHeads::MOST_DIMS)?;
    let (of_rows, skip) = match rule {
        StateRule::Delta { write, .. } => (Some(write), None),
        StateRule::Space { skip } => (None, Some(skip)),
    };
    for (what, of_head) in [
        ("length of the biases", Some(bias)),
        ("length of the rates", Some(rate)),
        ("length of the skips", skip),
    ] {
        let Some(of_head) = of_head else { continue };
        BackendError::check_at_least(OP, what, n_v_heads, of_head.n_values())?;
    }
    for part in parts {
        let rows = part.rows.range().end;
        BackendError::check_at_least(OP, "length of the input", rows * heads.n_qkv(), qkv.n_values())?;
        for of_rows in [Some(step), of_rows].into_iter().flatten() {
            BackendError::check_at_least(OP, "length of the gates", rows * n_v_heads, of_rows.n_values())?;
        }
        BackendError::check_at_least(OP, "length of the output", rows * heads.n_out(), y.n_values())?;
        check_state(OP, part, heads.n_state())?;
    }
    Ok(())
}

/// Checks [`Backend::gate`](crate::Backend::gate).
///
/// # Errors
/// As [`check_short_conv`].
pub fn check_gate<B: Buffer>(y: &B, len: usize, gates: &B) -> Result<()> {
    const OP: &str = "gate";
    BackendError::check_at_least(OP, "length of the values", len, y.n_values())?;
    BackendError::check_at_least(OP, "length of the gates", len, gates.n_values())
}

fn check_state<P: Page>(op: &'static str, part: &StatePart<'_, P>, n_values: usize) -> Result<()> {
    BackendError::check(op, "values of the state", n_values, part.n_values)?;
    let end = part.offset + n_values * size_of::<f32>();
    BackendError::check_at_least(op, "bytes of the states", end, part.page.n_bytes())
}
