//! Parameters of the ops of several residual streams, and their shape checks.

use crate::device::{Buffer, Page, Result};
use crate::recurrent::check_state;
use crate::{BackendError, StateBatchEntry};

/// Sizes of a linear combination of residual streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Streams {
    /// Number of streams that are combined.
    pub n_in: usize,
    /// Number of resulting streams.
    pub n_out: usize,
    /// Values of a row of a stream.
    pub width: usize,
}

/// Hyper-connections (arXiv 2409.19606): how a sublayer reads and writes several residual streams.
///
/// With p the products of a row of all streams, divided by the root mean square of that row, s the
/// scales and b the bases:
///
/// ```text
/// in[j] = sigmoid(s[0] p[j] + b[j]) + eps
/// out[i] = magnitude sigmoid(s[1] p[n + i] + b[n + i]) + write_eps
/// reads[row, j] = in[j]
/// writes[row, i, j] = mix[j, i] - out[i] in[j],  writes[row, i, n] = out[i]
/// ```
///
/// A sublayer reads `x = Σ_j reads[j] stream[j]` and returns `y = x + f(x)`; the streams become
/// `Σ_j mix[j, i] stream[j] + out[i] f(x)`, linear combinations of themselves and, as the last, y.
/// [`StreamMixing`] defines mix.
#[derive(Debug)]
pub struct HyperConnections<'a, Buffer> {
    /// Number of streams.
    pub n: usize,
    /// Values of a row of a stream.
    pub width: usize,
    /// A scale for reading, for writing and for mixing, then their n, n and n² bases; without
    /// those of what is not done.
    pub numbers: &'a Buffer,
    /// Added to the mean square of a row of all streams.
    pub norm_eps: f32,
    /// Added to the gates of what a sublayer reads.
    pub eps: f32,
    /// Added to the gates of what it writes.
    pub write_eps: f32,
    /// Factor on these.
    pub magnitude: f32,
    /// What a stream keeps of all.
    pub mixing: StreamMixing,
}

/// What residual streams become of each other while a sublayer adds to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamMixing {
    /// Themselves.
    None,
    /// Combinations by a matrix with rows and columns that add up to one (mHC, arXiv 2512.24880).
    /// With p, s and b as in [`HyperConnections`],
    ///
    /// ```text
    /// mix = softmax of each row of (s[2] p[2 n + n j + i] + b[2 n + n j + i]), plus eps
    /// ```
    ///
    /// and then its columns are divided by their sum plus eps, and after that `iterations - 1`
    /// times its rows and its columns.
    Sinkhorn {
        /// Divisions of the columns, at least one.
        iterations: usize,
    },
}

impl StreamMixing {
    /// Returns the products per row of n streams: for reading, and for writing and mixing.
    pub fn n_products(self, n: usize, is_written: bool) -> usize {
        match (is_written, self) {
            (false, _) => n,
            (true, Self::None) => 2 * n,
            (true, Self::Sinkhorn { .. }) => (2 + n) * n,
        }
    }

    /// Returns the scales of these products.
    pub fn n_scales(self, is_written: bool) -> usize {
        match (is_written, self) {
            (false, _) => 1,
            (true, Self::None) => 2,
            (true, Self::Sinkhorn { .. }) => 3,
        }
    }
}

impl<Buffer> Clone for HyperConnections<'_, Buffer> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buffer> Copy for HyperConnections<'_, Buffer> {}

/// Attention of a sublayer to residual streams: those of earlier layers, and the current one behind
/// them (Kimi K3). With w the scores, and norm an RMSNorm without a gain:
///
/// ```text
/// reads[row] = softmax(s),  s[j] = w · norm(stream[j])
/// writes[row, j] = continues (j == n - 1) - reads[row, j],  writes[row, n] = 1
/// ```
///
/// A sublayer reads `x = Σ_j reads[j] stream[j]` and returns `y = x + f(x)`; it leaves `stream[n -
/// 1] + f(x)`, or f(x) alone where it begins a stream, a linear combination of the streams and, as
/// the last, y.
#[derive(Debug)]
pub struct StreamAttention<'a, Buffer> {
    /// Number of streams, the current one among them.
    pub n: usize,
    /// Scores of a normalized row, `[width]`, the values of a row of a stream.
    pub scores: &'a Buffer,
    /// Added to the mean square of a row.
    pub norm_eps: f32,
    /// Whether the sublayer adds to the current stream; otherwise it begins a new one.
    pub continues: bool,
}

impl<Buffer> Clone for StreamAttention<'_, Buffer> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buffer> Copy for StreamAttention<'_, Buffer> {}

/// Gated reading and writing of residual streams by a sublayer (Qwen4-Exp). With norm the RMSNorm
/// of each stream, whose weights are divided by n:
///
/// ```text
/// x[row] = Σ_j σ(gates[row, j]) * norm_j(stream[j])
/// writes[row, i, j] = (i == j),  writes[row, i, n] = -out[i],  writes[row, i, n + 1] = out[i]
/// out[i] = 2 σ(products[row, i])
/// ```
///
/// σ is the logistic function, * elementwise. A sublayer reads x and returns `y = x + f(x)`; the
/// streams become `stream[i] + out[i] f(x)`, linear combinations of themselves and, behind them, of
/// x and y.
#[derive(Debug)]
pub struct GatedStreams<'a, Buffer> {
    /// Number of streams.
    pub n: usize,
    /// Values of a row of a stream.
    pub width: usize,
    /// Weights of the norms, `[n, width]`.
    pub norms: &'a Buffer,
    /// Added to the mean square of a row of a stream.
    pub norm_eps: f32,
    /// Of what is read, `[rows, n, width]`.
    pub gates: &'a Buffer,
    /// Of what is written, `[rows, n]`.
    pub products: &'a Buffer,
}

impl<Buffer> Clone for GatedStreams<'_, Buffer> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buffer> Copy for GatedStreams<'_, Buffer> {}

/// Values that n-grams of tokens add to residual streams, by a gate of each, and with a dilated
/// convolution over the values before (Qwen4-Exp). With key and value those of a row, and norm an
/// RMSNorm of each stream with weights of its own:
///
/// ```text
/// s[j] = norm_j(key[j]) · norm_j(stream[j]) / √width
/// g[j] = σ(sign(s[j]) √max(|s[j]|, MIN_SCORE)) value,  c[j] = norm_j(g[j])
/// stream[j] += g[j] + silu(Σ_i kernel[i, j] * c[j] of the row (taps - 1 - i) dilation before)
/// ```
#[derive(Debug)]
pub struct NgramInjection<'a, Buffer> {
    /// Number of streams.
    pub n: usize,
    /// Values of a row of a stream.
    pub width: usize,
    /// Weights of the norms of keys, of streams, and of what the convolution reads, `[n, width]`
    /// each.
    pub norms: [&'a Buffer; 3],
    /// Added to the mean square of a row of a stream.
    pub norm_eps: f32,
    /// Kernel of the convolution, `[taps, n, width]`.
    pub kernel: &'a Buffer,
    /// Its rows, at least one.
    pub taps: usize,
    /// Tokens between them.
    pub dilation: usize,
}

impl<Buffer> Clone for NgramInjection<'_, Buffer> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buffer> Copy for NgramInjection<'_, Buffer> {}

impl NgramInjection<'_, ()> {
    /// The least score whose root a gate takes.
    pub const MIN_SCORE: f32 = 1e-6;

    /// Returns the values of the state of a convolution over `width` values: what it read of the
    /// last tokens, the oldest first, `[(taps - 1) dilation, width]`.
    pub fn n_state(taps: usize, dilation: usize, width: usize) -> usize {
        taps.saturating_sub(1) * dilation * width
    }
}

/// Checks [`Backend::mix_streams`](crate::Backend::mix_streams).
pub(crate) fn check_mix_streams<B: Buffer>(
    coefs: &B,
    x: &B,
    rows: usize,
    Streams { n_in, n_out, width }: Streams,
    y: &B,
) -> Result<()> {
    const OP: &str = "mix_streams";
    let len = |n: usize, each: usize| rows.saturating_mul(n).saturating_mul(each);
    BackendError::check_at_least(OP, "number of coefficients", len(n_out, n_in), coefs.n_values())?;
    BackendError::check_at_least(OP, "length of the streams", len(n_in, width), x.n_values())?;
    BackendError::check_at_least(OP, "length of the result", len(n_out, width), y.n_values())
}

/// Checks [`Backend::connect_streams`](crate::Backend::connect_streams): products, streams and what
/// a sublayer reads, and what it writes.
pub(crate) fn check_connect_streams<B: Buffer>(
    HyperConnections { n, width, numbers, mixing, .. }: HyperConnections<'_, B>,
    [products, streams, reads]: [&B; 3],
    rows: usize,
    writes: Option<&B>,
) -> Result<()> {
    const OP: &str = "connect_streams";
    let (n_products, n_scales) = (mixing.n_products(n, writes.is_some()), mixing.n_scales(writes.is_some()));
    let len = |n: usize, each: usize| rows.saturating_mul(n).saturating_mul(each);
    BackendError::check_at_least(OP, "streams", 1, n)?;
    BackendError::check_at_least(OP, "values of a row", 1, width)?;
    if let StreamMixing::Sinkhorn { iterations } = mixing {
        BackendError::check_at_least(OP, "iterations", 1, iterations)?;
    }
    BackendError::check_equal(OP, "scales and bases", n_scales + n_products, numbers.n_values())?;
    BackendError::check_at_least(OP, "number of products", len(n_products, 1), products.n_values())?;
    BackendError::check_at_least(OP, "length of the streams", len(n, width), streams.n_values())?;
    BackendError::check_at_least(OP, "number of coefficients", rows.saturating_mul(n), reads.n_values())?;
    let Some(writes) = writes else { return Ok(()) };
    BackendError::check_at_least(OP, "number of coefficients", len(n, n + 1), writes.n_values())
}

/// Checks [`Backend::attend_streams`](crate::Backend::attend_streams).
pub(crate) fn check_attend_streams<B: Buffer>(
    StreamAttention { n, scores, .. }: StreamAttention<'_, B>,
    [streams, reads]: [&B; 2],
    rows: usize,
    writes: Option<&B>,
) -> Result<()> {
    const OP: &str = "attend_streams";
    let (of_row, width) = (rows.saturating_mul(n), scores.n_values());
    BackendError::check_at_least(OP, "streams", 1, n)?;
    BackendError::check_at_least(OP, "values of a row", 1, width)?;
    BackendError::check_at_least(
        OP,
        "length of the streams",
        of_row.saturating_mul(width),
        streams.n_values(),
    )?;
    BackendError::check_at_least(OP, "number of coefficients", of_row, reads.n_values())?;
    let Some(writes) = writes else { return Ok(()) };
    BackendError::check_at_least(OP, "number of coefficients", rows.saturating_mul(n + 1), writes.n_values())
}

/// Checks [`Backend::gate_streams`](crate::Backend::gate_streams).
pub(crate) fn check_gate_streams<B: Buffer>(
    GatedStreams { n, width, norms, gates, products, .. }: GatedStreams<'_, B>,
    [streams, x]: [&B; 2],
    rows: usize,
    writes: Option<&B>,
) -> Result<()> {
    const OP: &str = "gate_streams";
    let len = |n: usize, each: usize| rows.saturating_mul(n).saturating_mul(each);
    BackendError::check_at_least(OP, "streams", 1, n)?;
    BackendError::check_at_least(OP, "values of a row", 1, width)?;
    BackendError::check_equal(OP, "weights of the norms", n.saturating_mul(width), norms.n_values())?;
    BackendError::check_at_least(OP, "number of gates", len(n, width), gates.n_values())?;
    BackendError::check_at_least(OP, "length of the streams", len(n, width), streams.n_values())?;
    BackendError::check_at_least(OP, "length of the result", len(1, width), x.n_values())?;
    let Some(writes) = writes else { return Ok(()) };
    BackendError::check_at_least(OP, "number of products", len(n, 1), products.n_values())?;
    BackendError::check_at_least(OP, "number of coefficients", len(n, n + 2), writes.n_values())
}

/// Checks [`Backend::inject_ngrams`](crate::Backend::inject_ngrams): keys, values and streams.
pub(crate) fn check_inject_ngrams<P: Page, B: Buffer>(
    parts: &[StateBatchEntry<'_, P>],
    NgramInjection { n, width, norms, kernel, taps, dilation, .. }: NgramInjection<'_, B>,
    [keys, values, streams]: [&B; 3],
    rows: usize,
) -> Result<()> {
    const OP: &str = "inject_ngrams";
    let all = n.saturating_mul(width);
    BackendError::check_at_least(OP, "streams", 1, n)?;
    BackendError::check_at_least(OP, "values of a row", 1, width)?;
    BackendError::check_at_least(OP, "rows of the kernel", 1, taps)?;
    BackendError::check_at_least(OP, "tokens between rows of the kernel", 1, dilation)?;
    for norm in norms {
        BackendError::check_equal(OP, "weights of a norm", all, norm.n_values())?;
    }
    BackendError::check_equal(OP, "length of the kernel", taps.saturating_mul(all), kernel.n_values())?;
    for part in parts {
        BackendError::check_at_least(OP, "rows of all parts", part.rows.range().end, rows)?;
        check_state(OP, part, NgramInjection::n_state(taps, dilation, all))?;
    }
    BackendError::check_at_least(OP, "length of the keys", rows.saturating_mul(all), keys.n_values())?;
    BackendError::check_at_least(OP, "length of the values", rows.saturating_mul(width), values.n_values())?;
    BackendError::check_at_least(OP, "length of the streams", rows.saturating_mul(all), streams.n_values())
}
