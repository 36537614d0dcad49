//! Parameters of the ops of RWKV-7 (arXiv 2503.14456), and their shape checks.

use crate::device::{Buffer, Page, Result};
use crate::recurrent::check_state;
use crate::{BackendError, Heads, StateBatchEntry, StateHeads};

/// Mixes of each row with the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenShift {
    /// Values per row.
    pub channels: usize,
    /// Mixes of each row.
    pub n_mixes: usize,
    /// Rows of all parts.
    pub rows: usize,
}

/// Inputs of [`Backend::wkv7`](crate::Backend::wkv7), `[rows, heads.n * heads.dim]` each; `T` is a
/// device's reference to a buffer. With σ the logistic function, * elementwise, and for each head
/// the receptance r, the key k, the value v, the decay w, the rate a and the gate g of a row, its
/// [weights](Wkv7Weights), and its state S `[dim, dim]` from keys to values:
///
/// ```text
/// v = v + (first - v) * σ(share)               of the first layer's values, but in that layer
/// n = k * removal / |k * removal|
/// k = k * (1 + (σ(a) - 1) * replacement)
/// S = diag(exp(-σ(w) / √e)) S - (n * σ(a)) (nᵀ S) + k vᵀ,  z = Sᵀ r
/// y = (layer_norm(z) * norm + norm_bias + (Σ k * r * bonus) v) * g
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Wkv7Inputs<T> {
    /// Receptances, which read the state as queries do.
    pub receptance: T,
    /// Keys.
    pub key: T,
    /// Values of this layer.
    pub value: T,
    /// Decays before their function.
    pub decay: T,
    /// In-context learning rates before the logistic function.
    pub rate: T,
    /// Gates of the output.
    pub gate: T,
    /// The values of the first layer; `None` in that layer.
    pub first: Option<FirstValues<T>>,
    /// What does not depend on the row.
    pub weights: Wkv7Weights<T>,
}

/// The values of the first layer, and how much of them a layer takes.
#[derive(Debug, Clone, Copy)]
pub struct FirstValues<T> {
    /// The values.
    pub values: T,
    /// Their share before the logistic function.
    pub share: T,
}

/// Weights of [`Backend::wkv7`](crate::Backend::wkv7), `[heads.n * heads.dim]` each.
#[derive(Debug, Clone, Copy)]
pub struct Wkv7Weights<T> {
    /// Factor on the keys whose values the state loses.
    pub removal: T,
    /// How much the learning rate scales the keys that it gains.
    pub replacement: T,
    /// Factor on the products of key and receptance with which a row reads its own value.
    pub bonus: T,
    /// Weight of the LayerNorm of each head's output.
    pub norm: T,
    /// Its bias.
    pub norm_bias: T,
}

impl<T: Copy> Wkv7Inputs<T> {
    /// Epsilon of the LayerNorm of each head's output.
    pub const NORM_EPS: f32 = 64e-5;
    /// The least length by which keys are divided.
    pub const MIN_LENGTH: f32 = 1e-12;

    /// Applies `f` to each buffer.
    pub fn map<U>(self, f: impl Fn(T) -> U) -> Wkv7Inputs<U> {
        let Self { receptance, key, value, decay, rate, gate, first, weights } = self;
        let Wkv7Weights { removal, replacement, bonus, norm, norm_bias } = weights;
        Wkv7Inputs {
            receptance: f(receptance),
            key: f(key),
            value: f(value),
            decay: f(decay),
            rate: f(rate),
            gate: f(gate),
            first: first
                .map(|FirstValues { values, share }| FirstValues { values: f(values), share: f(share) }),
            weights: Wkv7Weights {
                removal: f(removal),
                replacement: f(replacement),
                bonus: f(bonus),
                norm: f(norm),
                norm_bias: f(norm_bias),
            },
        }
    }
}

/// Checks [`Backend::shift_tokens`](crate::Backend::shift_tokens).
///
/// # Errors
/// [`BackendError::Shape`] that names the operand at fault.
pub(crate) fn check_shift_tokens<P: Page, B: Buffer>(
    parts: &[StateBatchEntry<'_, P>],
    TokenShift { channels, n_mixes, rows }: TokenShift,
    [x, amounts, y]: [&B; 3],
) -> Result<()> {
    const OP: &str = "shift_tokens";
    BackendError::check_at_least(OP, "length of the input", rows * channels, x.n_values())?;
    BackendError::check_at_least(OP, "length of the amounts", n_mixes * channels, amounts.n_values())?;
    BackendError::check_at_least(OP, "length of the output", n_mixes * rows * channels, y.n_values())?;
    for part in parts {
        BackendError::check_at_least(OP, "rows of all parts", part.rows.range().end, rows)?;
        check_state(OP, part, channels)?;
    }
    Ok(())
}

/// Checks [`Backend::wkv7`](crate::Backend::wkv7).
///
/// # Errors
/// As [`check_shift_tokens`].
pub(crate) fn check_wkv7<P: Page, B: Buffer>(
    parts: &[StateBatchEntry<'_, P>],
    heads: Heads,
    inputs: Wkv7Inputs<&B>,
    y: &B,
) -> Result<()> {
    const OP: &str = "wkv7";
    let n = heads.n * heads.dim;
    BackendError::check_at_least(OP, "heads", 1, heads.n)?;
    BackendError::check_at_least(OP, "size of a head", StateHeads::COLUMNS, heads.dim)?;
    let beyond = heads.dim % StateHeads::COLUMNS;
    BackendError::check_equal(OP, "values of a head beyond a multiple of 16", 0, beyond)?;
    BackendError::check_at_least(OP, "largest size of a head", heads.dim, StateHeads::MAX_K_DIM)?;
    let Wkv7Weights { removal, replacement, bonus, norm, norm_bias } = inputs.weights;
    for weight in [removal, replacement, bonus, norm, norm_bias] {
        BackendError::check_at_least(OP, "length of the weights", n, weight.n_values())?;
    }
    let Wkv7Inputs { receptance, key, value, decay, rate, gate, first, .. } = inputs;
    let of_rows = [receptance, key, value, decay, rate, gate, y].into_iter();
    let of_rows = of_rows.chain(first.into_iter().flat_map(|first| [first.values, first.share]));
    let rows = parts.iter().map(|part| part.rows.range().end).max().unwrap_or(0);
    for values in of_rows {
        BackendError::check_at_least(OP, "length of the rows", rows * n, values.n_values())?;
    }
    parts.iter().try_for_each(|part| check_state(OP, part, n * heads.dim))
}
