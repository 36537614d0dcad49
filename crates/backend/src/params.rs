//! Parameters of the ops. Shapes are in brackets, outermost dimension first.

use crate::{Candidate, top_k};

/// An RMS normalization: `y = x / sqrt(mean(x²) + eps) * weight` over the last dimension.
#[derive(Debug)]
pub struct Norm<'a, Buffer> {
    /// Learned gain, `[cols]`; for heads `[head_dim]`, or one gain per head where an op supports
    /// it.
    pub weight: &'a Buffer,
    /// Added to the mean square.
    pub eps: f32,
}

impl<Buffer> Clone for Norm<'_, Buffer> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buffer> Copy for Norm<'_, Buffer> {}

/// The activation `a` of the gate in a gated feed-forward layer, `a(g) * u`: `g / (1 + exp(-z))`,
/// with z a function of g; or its limit for large z.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// SiLU: `z = g`.
    Silu,
    /// GELU in its tanh form (arXiv 1606.08415), `g / 2 (1 + tanh(√(2/π) (g + 0.044715 g³)))`:
    /// `z = g (a + b g²)` with a and b of [`Activation::GELU`].
    Gelu,
    /// The clamped SiLU of gpt-oss: with the rate r and the limit L of [`Activation::BOUNDED`],
    /// `z = r g`, `min(g, L)` replaces g, and `1 + max(-L, min(u, L))` replaces u.
    Bounded,
    /// ReLU: g where it is positive, else 0. With `gate` = `up` this is squared ReLU (arXiv
    /// 2109.08668).
    Relu,
    /// The normal distribution function as GELU approximates it, `1 / (1 + exp(-z))` with GELU's z.
    /// With `gate` = `up` this is GELU of a layer without gates, `u Φ(u)`.
    NormalCdf,
    /// SiLU up to a limit L, `min(g / (1 + exp(-g)), L)`, and `max(-L, min(u, L))` replaces u
    /// (Step 3.5).
    Limited {
        /// L, above 0.
        limit: f32,
    },
    /// SiLU of a clamped gate, `g = min(g, L)`, and `max(-L, min(u, L))` replaces u (Hunyuan 4).
    Clamped {
        /// L, above 0.
        limit: f32,
    },
    /// SiTU, a SiLU that approaches limits L and M, `L tanh(g / L) / (1 + exp(-g))`, where
    /// `M tanh(u / M)` replaces u (Kimi K3).
    Situ {
        /// L, above 0.
        limit: f32,
        /// M, above 0; u stays as it is when `None`.
        up_limit: Option<f32>,
    },
}

impl Activation {
    /// The rate and the limit of [`Activation::Bounded`].
    pub const BOUNDED: [f32; 2] = [1.702, 7.0];

    /// Returns the limit of [`Activation::Limited`] and [`Activation::Clamped`]; 0 for others.
    pub fn limit(self) -> f32 {
        if let Self::Limited { limit } | Self::Clamped { limit } = self { limit } else { 0.0 }
    }

    /// `√(8/π)`, and `0.044715 √(8/π)`.
    pub const GELU: [f32; 2] = [1.595_769_2, 0.071_354_81];
}

/// xIELU (arXiv 2411.13010), an activation with learned numbers: `x (p x + b)` for positive x, else
/// `n (exp(min(x, eps)) - 1 - x) + b x`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Xielu {
    /// p, of positive values.
    pub positive: f32,
    /// n, of negative values.
    pub negative: f32,
    /// b, the slope at 0.
    pub slope: f32,
    /// The largest exponent, just below 0.
    pub eps: f32,
}

/// How an MoE router selects the experts of a row (arXiv 1701.06538).
///
/// The router's logits `l` give scores `p`; the `n_used` experts of the largest scores are
/// selected, ties by lower index. A selected expert e has weight `scale p[e]`, or
/// `scale p[e] / Σ p` over the selected ones where `normalizes`. With
/// [a selection bias](crate::Router::selection_bias), `p + bias` selects experts, and p gives their
/// weights. A logit of NaN or positive infinity makes the weights NaN, so that callers notice it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Experts per row.
    pub n_used: usize,
    /// The score function.
    pub scores: RouterScores,
    /// Whether the weights add up to `scale`.
    pub normalizes: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// Groups of experts, of which a row first selects some.
    pub expert_groups: Option<ExpertGroups>,
}

/// Equal groups of neighbouring experts: a row selects experts from a few groups only.
///
/// With softmax, the groups of the best experts (arXiv 2405.04434); with sigmoids, the groups of
/// the largest sum of their two best experts (arXiv 2412.19437), biases included; ties by lower
/// index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups.
    pub n: usize,
    /// Groups per row.
    pub n_used: usize,
}

/// The score function of a router's logits `l`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterScores {
    /// `p = softmax(l)` over all experts.
    Softmax,
    /// `p = 1 / (1 + exp(-l))`, each by itself (arXiv 2412.19437). Normalized weights are divided
    /// by the sum plus [`RouterScores::SUM_EPSILON`].
    Sigmoid,
    /// `p = √softplus(l)`, normalized as sigmoids are (DeepSeek-V4).
    SqrtSoftplus,
    /// SparseMixer (arXiv 2409.12136) as trained models use it: `p = 1 / Σ exp(l' - l)` over the
    /// experts that are not selected before and [near](RouterScores::NEARNESS): with
    /// `(l - l') / max(|l'|, l)` at most that. No normalization, selection bias or groups.
    SparseMixer,
}

impl RouterScores {
    /// Prevents division by zero where all scores are 0.
    pub const SUM_EPSILON: f32 = 1e-20;
    /// The relative distance of logits up to which [`RouterScores::SparseMixer`] mixes experts.
    pub const NEARNESS: f32 = 0.02;

    /// Returns whether a logit is near the `best` one of those left.
    pub fn is_near(logit: f32, best: f32) -> bool {
        let distance = (best - logit) / logit.abs().max(best);
        // A quotient of zeros counts as near.
        distance <= Self::NEARNESS || distance.is_nan()
    }
}

/// How an index selects the tokens that a row attends to (DeepSeek Sparse Attention, arXiv
/// 2512.02556). A row r at position P with more tokens than `n_used` selects the `n_used` of the
/// largest
///
/// ```text
/// I_t = Σ_h weights[r, h] max(0, q[r, h] · k_t)          t = 0 ..= P
/// ```
///
/// the older of equal ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Selection {
    /// Query heads of the index.
    pub n_heads: usize,
    /// Tokens that a row attends to.
    pub n_used: usize,
}

/// How an index selects the blocks of tokens that a row attends to (MiniMax Sparse Attention). For
/// each head h of the index, a row r at position P with more blocks than `n_used` selects `n_used`:
/// the last `n_local` of the blocks up to that of P, and the others b of the largest
///
/// ```text
/// I_b = max_t q[r, h] · k_t          t = b size .. min((b + 1) size, P + 1)
/// ```
///
/// the older of equal ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSelection {
    /// Query heads of the index, each of which selects for a KV head.
    pub n_heads: usize,
    /// Blocks that a row attends to.
    pub n_used: usize,
    /// Tokens of a block.
    pub size: usize,
    /// The last blocks, which each row attends to.
    pub n_local: usize,
}

/// The tokens that rows attend to.
#[derive(Debug)]
pub struct Selected<'a, Buffer> {
    /// The numbers of their blocks, ascending, `[rows, n_lists, n_used]`: positions, in blocks of
    /// one token. Exact, as positions are below 2^24.
    pub numbers: &'a Buffer,
    /// Blocks that a row attends to. Rows with no more blocks have no numbers.
    pub n_used: usize,
    /// Tokens of a block.
    pub block: usize,
    /// One for all KV heads, or one for each.
    pub n_lists: usize,
    /// Whether blocks are whole, and a row attends to the tokens behind the last whole one up to
    /// its own too.
    pub with_rest: bool,
    /// Attention sinks beside them, as of [`Backend::attend`](crate::Backend::attend).
    pub sinks: Option<&'a Buffer>,
}

impl<Buffer> Selected<'_, Buffer> {
    /// Returns the first position whose row has numbers.
    pub fn first_position(&self) -> usize {
        match self.with_rest {
            // With more whole blocks than that.
            true => (self.n_used + 1) * self.block - 1,
            false => self.n_used * self.block,
        }
    }
}

impl<Buffer> Clone for Selected<'_, Buffer> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buffer> Copy for Selected<'_, Buffer> {}

/// How the last dimension of a buffer splits into heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Number of heads.
    pub n: usize,
    /// Values per head.
    pub dim: usize,
}

/// Bidirectional attention of one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BidirectionalParams {
    /// The heads of the queries.
    pub heads: Heads,
    /// Heads of keys and values, as wide: each belongs to as many neighbouring heads of queries.
    pub n_kv_heads: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// The largest distance between a query and the keys that it sees; all when `None`.
    pub reach: Option<usize>,
}

/// A range of columns of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// Values per row of the buffer.
    pub width: usize,
    /// The first column.
    pub first: usize,
}

/// Which two values of a head form a RoPE pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// `(x[2i], x[2i + 1])`: GGUF files of the llama family, whose Q and K rows are permuted for
    /// it.
    Interleaved,
    /// `(x[i], x[i + n_rot / 2])`: the "NeoX" order of qwen2, qwen3 and most others.
    Halves,
}

/// How to apply a rotary position embedding (RoFormer, arXiv 2104.09864). The angles are a buffer,
/// so that scaling methods (linear, llama3, YaRN) stay in the model and every device uses the same
/// numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeParams {
    /// Which values form a pair.
    pub pairing: Pairing,
    /// The first `n_rot` values of each head are rotated; the rest are unchanged. Even, at most the
    /// head dimension.
    pub n_rot: usize,
}

impl RopeParams {
    /// Returns the two indices of pair `index` within a head.
    pub fn pair(self, index: usize) -> [usize; 2] {
        match self.pairing {
            Pairing::Interleaved => [2 * index, 2 * index + 1],
            Pairing::Halves => [index, index + self.n_rot / 2],
        }
    }
}

/// RoPE of the queries and keys of a step, with the per-head norms that may precede it.
#[derive(Debug)]
pub struct Rope<'a, Buffer> {
    /// Pairing and number of rotated values.
    pub params: RopeParams,
    /// Cosine and sine for each row and pair, `[rows, n_rot / 2, 2]`.
    pub angles: &'a Buffer,
    /// Query heads.
    pub q_heads: Heads,
    /// Key heads.
    pub k_heads: Heads,
    /// Norm of each query head.
    pub q_norm: Option<Norm<'a, Buffer>>,
    /// Norm of each key head.
    pub k_norm: Option<Norm<'a, Buffer>>,
}

/// Shape of attention. A row at position p attends to the keys `0 ..= p` (causal), or to the
/// youngest of them where the layer has a sliding window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttendParams {
    /// Query heads. A multiple of `n_kv_heads`.
    pub n_heads: usize,
    /// KV heads; query head `h` reads KV head `h / (n_heads / n_kv_heads)`.
    pub n_kv_heads: usize,
    /// True (unpadded) head dimension of keys and queries.
    pub k_head_dim: usize,
    /// True (unpadded) head dimension of values.
    pub v_head_dim: usize,
    /// Factor on the scores, `1 / sqrt(k_head_dim)` with the true head dimension.
    pub scale: f32,
    /// Soft cap `c` of the scores `s`: `c tanh(s / c)` replaces them (arXiv 2408.00118). Positive.
    pub soft_cap: Option<f32>,
}

/// A row of logits whose most probable tokens are selected.
#[derive(Debug)]
pub struct TopK<'a> {
    /// Index of the row.
    pub row: usize,
    /// Number of tokens; all of them when the vocabulary has fewer.
    pub k: usize,
    /// Receives them, in the order of [`Candidate::rank`]. Its memory is reused.
    pub out: &'a mut Vec<Candidate>,
}

impl TopK<'_> {
    /// Answers the rows of which a device does not select as many tokens as they want, more than
    /// `max_k`, or of which none are wanted; returns the others. `read` reads a row of logits into
    /// `values`.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn answer_on_host<'a, E>(
        rows: &'a mut [TopK<'_>],
        n_vocab: usize,
        max_k: usize,
        values: &mut Vec<f32>,
        mut read: impl FnMut(usize, &mut [f32]) -> Result<(), E>,
    ) -> Result<Vec<TopK<'a>>, E> {
        let mut on_device = Vec::with_capacity(rows.len());
        for TopK { row, k, out } in rows {
            match (*k).min(n_vocab) {
                0 => out.clear(),
                k if k <= max_k => on_device.push(TopK { row: *row, k, out }),
                k => {
                    values.resize(n_vocab, 0.0);
                    read(*row, values)?;
                    top_k(values, k, out);
                }
            }
        }
        Ok(on_device)
    }
}
