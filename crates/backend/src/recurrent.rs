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

/// The gated delta rule (arXiv 2412.06464): heads that keep a matrix each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaRule {
    /// Heads of keys and of queries.
    pub n_k_heads: usize,
    /// Heads of values; a multiple of `n_k_heads`.
    pub n_v_heads: usize,
    /// Values of a key, and of a query; a multiple of [`DeltaRule::COLUMNS`], at most [`DeltaRule::MOST_DIMS`].
    pub k_dim: usize,
    /// Values of a value; a multiple of [`DeltaRule::COLUMNS`].
    pub v_dim: usize,
    /// Which value heads share the keys of a key head.
    pub sharing: KeySharing,
    /// Added to the square of a key, and of a query, before its root is divided by.
    pub eps: f32,
}

/// Which value heads share the keys of a key head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeySharing {
    /// Neighbours.
    Grouped,
    /// Those that are as many heads apart as there are key heads.
    Tiled,
}

impl DeltaRule {
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

/// What the gated delta rule reads.
#[derive(Debug)]
pub struct DeltaInputs<'a, Buffer> {
    /// Queries, keys and values of all heads, one after the other, `[rows, 2 n_k_heads k_dim + n_v_heads v_dim]`.
    pub qkv: &'a Buffer,
    /// How much of a value is written, before the logistic function, `[rows, n_v_heads]`.
    pub write: &'a Buffer,
    /// How much is forgotten, before the bias, `[rows, n_v_heads]`.
    pub forget: &'a Buffer,
    /// Added to that, `[n_v_heads]`.
    pub bias: &'a Buffer,
    /// Negative factors on its softplus, `[n_v_heads]`.
    pub rate: &'a Buffer,
}

impl<Buffer> Clone for DeltaInputs<'_, Buffer> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buffer> Copy for DeltaInputs<'_, Buffer> {}

/// What values are multiplied by, made of a number g for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// The logistic function, `1 / (1 + exp(-g))`.
    Sigmoid,
    /// SiLU, `g / (1 + exp(-g))`.
    Silu,
    /// GELU, as [`Activation::Gelu`](crate::Activation::Gelu).
    Gelu,
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
    BackendError::check_at_least(OP, "length of the kernel", taps * channels, kernel.n_values())?;
    for part in parts {
        let rows = part.rows.range().end;
        BackendError::check_at_least(OP, "length of the input", rows * conv.n_in(), x.n_values())?;
        BackendError::check_at_least(OP, "length of the output", rows * channels, y.n_values())?;
        check_state(OP, part, conv.n_state())?;
    }
    Ok(())
}

/// Checks [`Backend::delta_rule`](crate::Backend::delta_rule).
///
/// # Errors
/// As [`check_short_conv`].
pub fn check_delta_rule<P: Page, B: Buffer>(
    parts: &[StatePart<'_, P>],
    rule: &DeltaRule,
    inputs: DeltaInputs<'_, B>,
    y: &B,
) -> Result<()> {
    const OP: &str = "delta_rule";
    let &DeltaRule { n_k_heads, n_v_heads, k_dim, v_dim, .. } = rule;
    let DeltaInputs { qkv, write, forget, bias, rate } = inputs;
    BackendError::check_at_least(OP, "key heads", 1, n_k_heads)?;
    BackendError::check(OP, "value heads beyond whole groups", 0, n_v_heads % n_k_heads)?;
    for dim in [k_dim, v_dim] {
        BackendError::check_at_least(OP, "size of a head", DeltaRule::COLUMNS, dim)?;
        BackendError::check(OP, "values of a head beyond whole sixteens", 0, dim % DeltaRule::COLUMNS)?;
    }
    BackendError::check_at_least(OP, "size that a key may have", k_dim, DeltaRule::MOST_DIMS)?;
    for (what, of_head) in [("length of the biases", bias), ("length of the rates", rate)] {
        BackendError::check_at_least(OP, what, n_v_heads, of_head.n_values())?;
    }
    for part in parts {
        let rows = part.rows.range().end;
        BackendError::check_at_least(OP, "length of the input", rows * rule.n_qkv(), qkv.n_values())?;
        for gates in [write, forget] {
            BackendError::check_at_least(OP, "length of the gates", rows * n_v_heads, gates.n_values())?;
        }
        BackendError::check_at_least(OP, "length of the output", rows * rule.n_out(), y.n_values())?;
        check_state(OP, part, rule.n_state())?;
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
