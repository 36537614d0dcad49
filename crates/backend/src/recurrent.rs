//! Parameters of the ops of recurrent layers, and their shape checks.

use crate::device::{Buffer, Page, Result};
use crate::{BackendError, StateBatchEntry};

/// A short convolution over the rows of a sequence, channel by channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConv {
    /// Channels.
    pub channels: usize,
    /// Rows per result, including its own; from 2 to [`ShortConv::MAX_TAPS`].
    pub taps: usize,
    /// Input and output transform.
    pub form: ConvForm,
}

/// The input and output transform of a short convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConvForm {
    /// Rows are b, c and x concatenated: the input is `b x`, the output is multiplied by c (LFM2,
    /// arXiv 2511.23404).
    Gated,
    /// The input is the row itself, the output passes through SiLU.
    Silu,
}

impl ShortConv {
    /// The maximum of `taps`.
    pub const MAX_TAPS: usize = 8;

    /// Returns the values per input row.
    pub fn n_in(&self) -> usize {
        match self.form {
            ConvForm::Gated => 3 * self.channels,
            ConvForm::Silu => self.channels,
        }
    }

    /// Returns the values of the state: previous inputs, the oldest first, `[taps - 1, channels]`.
    pub fn n_state(&self) -> usize {
        self.taps.saturating_sub(1) * self.channels
    }
}

/// Heads of linear attention, each with a state matrix that every row updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateHeads {
    /// Key heads, as many as query heads.
    pub n_k_heads: usize,
    /// Value heads; a multiple of `n_k_heads`.
    pub n_v_heads: usize,
    /// Head dimension of keys and queries; a multiple of [`StateHeads::COLUMNS`], at most
    /// [`StateHeads::MAX_K_DIM`].
    pub k_dim: usize,
    /// Head dimension of values; a multiple of [`StateHeads::COLUMNS`].
    pub v_dim: usize,
    /// Which value heads share the keys of a key head.
    pub sharing: KeySharing,
}

/// Which value heads share the keys of a key head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeySharing {
    /// Neighbouring value heads.
    Grouped,
    /// Value heads `n_k_heads` apart.
    Tiled,
}

impl StateHeads {
    /// Columns of a state that are stored together.
    pub const COLUMNS: usize = 16;
    /// The maximum of `k_dim`.
    pub const MAX_K_DIM: usize = 256;

    /// Returns the values per row of queries, keys and values.
    pub fn n_qkv(&self) -> usize {
        2 * self.n_k_heads * self.k_dim + self.n_out()
    }

    /// Returns the values per row of results.
    pub fn n_out(&self) -> usize {
        self.n_v_heads * self.v_dim
    }

    /// Returns the values of the state, `[n_v_heads, v_dim / 16, k_dim, 16]`.
    pub fn n_state(&self) -> usize {
        self.n_v_heads * self.k_dim * self.v_dim
    }

    /// Returns the key head of a value head.
    pub fn key_head(&self, v_head: usize) -> usize {
        match self.sharing {
            KeySharing::Grouped => v_head / (self.n_v_heads / self.n_k_heads.max(1)).max(1),
            KeySharing::Tiled => v_head % self.n_k_heads.max(1),
        }
    }
}

/// Inputs of the state update; `T` is a device's reference to a buffer. With the key k and the
/// query q of a value head, its value v and its state S `[k_dim, v_dim]`, by the
/// [rule](StateRule):
///
/// ```text
/// t = softplus(step + bias)
/// S = exp(rate t) S
/// delta:  S = S + k dᵀ,  d = (v - Sᵀ k) / (1 + exp(-write)),  y = Sᵀ q / √k_dim
///         q and k divided by their length
/// Kimi:   the same, with a step t for each row of S; or, with a bound of decays,
///         S = exp(bound / (1 + exp(-rate (step + bias)))) S
/// space:  S = S + t k vᵀ,  y = Sᵀ q + skip v
/// ```
#[derive(Debug, Clone, Copy)]
pub struct StateInputs<T> {
    /// Queries, keys and values of all heads, concatenated,
    /// `[rows, 2 n_k_heads k_dim + n_v_heads v_dim]`.
    pub qkv: T,
    /// Step size before the bias and softplus, `[rows, n_steps]`: see [`StateRule::n_steps`].
    pub step: T,
    /// Bias of the step size, `[n_steps]`.
    pub bias: T,
    /// Decay rate per unit of step size, negative, `[n_v_heads]`.
    pub decay: T,
    /// The update rule.
    pub rule: StateRule<T>,
}

/// The update rule of a state.
#[derive(Debug, Clone, Copy)]
pub enum StateRule<T> {
    /// The gated delta rule (arXiv 2412.06464): writes the value minus the prediction for its key.
    /// Keys and queries are L2-normalized.
    GatedDeltaNet {
        /// Write strength before the logistic function, `[rows, n_v_heads]`.
        write: T,
        /// Added to the squared norm of a key or query before the square root.
        eps: f32,
    },
    /// Kimi's delta rule (KDA, arXiv 2510.26692): the same, but each row of the state decays by a
    /// step of its own.
    KimiDelta {
        /// As in [`StateRule::GatedDeltaNet`].
        write: T,
        /// As in [`StateRule::GatedDeltaNet`].
        eps: f32,
        /// Lower bound of the logarithm of a decay, if it is bounded.
        bound: Option<f32>,
    },
    /// A state space (Mamba 2, arXiv 2405.21060): writes the value times the step size.
    Mamba2 {
        /// Factor of the value that bypasses the state, `[n_v_heads]`.
        skip: T,
    },
}

impl<T> StateRule<T> {
    /// Returns the number of step sizes per row: one for each value head, or for each of its key
    /// dims, `[n_v_heads, k_dim]`.
    pub fn n_steps(&self, heads: &StateHeads) -> usize {
        match self {
            Self::GatedDeltaNet { .. } | Self::Mamba2 { .. } => heads.n_v_heads,
            Self::KimiDelta { .. } => heads.n_v_heads * heads.k_dim,
        }
    }
}

impl<T> StateInputs<T> {
    /// Applies `f` to each buffer.
    pub fn map<U>(self, f: impl Fn(T) -> U) -> StateInputs<U> {
        let Self { qkv, step, bias, decay: rate, rule } = self;
        let rule = match rule {
            StateRule::GatedDeltaNet { write, eps } => StateRule::GatedDeltaNet { write: f(write), eps },
            StateRule::KimiDelta { write, eps, bound } => {
                StateRule::KimiDelta { write: f(write), eps, bound }
            }
            StateRule::Mamba2 { skip } => StateRule::Mamba2 { skip: f(skip) },
        };
        StateInputs { qkv: f(qkv), step: f(step), bias: f(bias), decay: f(rate), rule }
    }
}

/// Elementwise gate: the factor as a function of g.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// The logistic function, `1 / (1 + exp(-g))`.
    Sigmoid,
    /// SiLU, `g / (1 + exp(-g))`.
    Silu,
    /// GELU, as [`Activation::Gelu`](crate::Activation::Gelu).
    Gelu,
    /// g itself.
    Plain,
    /// Softplus, `ln(1 + exp(g))`.
    Softplus,
}

/// Checks [`Backend::short_conv`](crate::Backend::short_conv).
///
/// # Errors
/// [`BackendError::Shape`] that names the operand at fault.
pub(crate) fn check_short_conv<P: Page, B: Buffer>(
    parts: &[StateBatchEntry<'_, P>],
    conv: ShortConv,
    [x, kernel, y]: [&B; 3],
) -> Result<()> {
    const OP: &str = "short_conv";
    let ShortConv { channels, taps, .. } = conv;
    BackendError::check_at_least(OP, "taps", 2, taps)?;
    BackendError::check_at_least(OP, "largest number of taps", taps, ShortConv::MAX_TAPS)?;
    BackendError::check_at_least(OP, "length of the kernel", (taps + 1) * channels, kernel.n_values())?;
    for part in parts {
        let rows = part.rows.range().end;
        BackendError::check_at_least(OP, "length of the input", rows * conv.n_in(), x.n_values())?;
        BackendError::check_at_least(OP, "length of the output", rows * channels, y.n_values())?;
        check_state(OP, part, conv.n_state())?;
    }
    Ok(())
}

/// Checks [`Backend::linear_attention`](crate::Backend::linear_attention).
///
/// # Errors
/// As [`check_short_conv`].
pub(crate) fn check_recur<P: Page, B: Buffer>(
    parts: &[StateBatchEntry<'_, P>],
    heads: &StateHeads,
    inputs: StateInputs<&B>,
    y: &B,
) -> Result<()> {
    const OP: &str = "recur";
    let &StateHeads { n_k_heads, n_v_heads, k_dim, v_dim, .. } = heads;
    let StateInputs { qkv, step, bias, decay: rate, rule } = inputs;
    BackendError::check_at_least(OP, "key heads", 1, n_k_heads)?;
    BackendError::check_equal(OP, "value heads beyond whole groups", 0, n_v_heads % n_k_heads)?;
    for dim in [k_dim, v_dim] {
        BackendError::check_at_least(OP, "size of a head", StateHeads::COLUMNS, dim)?;
        BackendError::check_equal(
            OP,
            "values of a head beyond a multiple of 16",
            0,
            dim % StateHeads::COLUMNS,
        )?;
    }
    BackendError::check_at_least(OP, "largest size of a key head", k_dim, StateHeads::MAX_K_DIM)?;
    let n_steps = rule.n_steps(heads);
    let (write, skip) = match rule {
        StateRule::GatedDeltaNet { write, .. } | StateRule::KimiDelta { write, .. } => (Some(write), None),
        StateRule::Mamba2 { skip } => (None, Some(skip)),
    };
    for (what, n, values) in [
        ("length of the biases", n_steps, Some(bias)),
        ("length of the rates", n_v_heads, Some(rate)),
        ("length of the skips", n_v_heads, skip),
    ] {
        let Some(values) = values else { continue };
        BackendError::check_at_least(OP, what, n, values.n_values())?;
    }
    for part in parts {
        let rows = part.rows.range().end;
        BackendError::check_at_least(OP, "length of the input", rows * heads.n_qkv(), qkv.n_values())?;
        for (n, of_rows) in [(n_steps, Some(step)), (n_v_heads, write)] {
            let Some(of_rows) = of_rows else { continue };
            BackendError::check_at_least(OP, "length of the gates", rows * n, of_rows.n_values())?;
        }
        BackendError::check_at_least(OP, "length of the output", rows * heads.n_out(), y.n_values())?;
        check_state(OP, part, heads.n_state())?;
    }
    Ok(())
}

/// Checks [`Backend::gate`](crate::Backend::gate) and
/// [`Backend::activate`](crate::Backend::activate).
///
/// # Errors
/// As [`check_short_conv`].
pub(crate) fn check_gate<B: Buffer>(op: &'static str, y: &B, len: usize, gates: &B) -> Result<()> {
    BackendError::check_at_least(op, "length of the values", len, y.n_values())?;
    BackendError::check_at_least(op, "length of the gates", len, gates.n_values())
}

pub(crate) fn check_state<P: Page>(
    op: &'static str,
    part: &StateBatchEntry<'_, P>,
    n_values: usize,
) -> Result<()> {
    BackendError::check_equal(op, "values of the state", n_values, part.n_values)?;
    let end = part.offset + n_values * size_of::<f32>();
    BackendError::check_at_least(op, "bytes of the states", end, part.page.n_bytes())
}
