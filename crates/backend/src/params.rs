//! Parameters of the ops. Shapes are in brackets, outermost dimension first.

/// An RMS normalisation: `y = x / sqrt(mean(x²) + eps) * weight` over the last dimension.
#[derive(Debug)]
pub struct Norm<'a, Buffer> {
    /// Learned gain, `[cols]`; of heads `[head_dim]`, or one for each of them where an op says so.
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

/// The activation `a` of the gate in a gated feed-forward layer, `a(g) * u`: `g / (1 + exp(-z))`, with a z of g; or its limit for a
/// large one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// SiLU: `z = g`.
    Silu,
    /// GELU in its tanh form (arXiv 1606.08415), `g / 2 (1 + tanh(√(2/π) (g + 0.044715 g³)))`: `z = g (a + b g²)` with
    /// a and b of [`Activation::GELU`].
    Gelu,
    /// The SiLU of gpt-oss, all of whose numbers are bounded: with the rate r and the limit L of [`Activation::BOUNDED`],
    /// `z = r g`, `min(g, L)` in the place of g, and `1 + max(-L, min(u, L))` in that of u.
    Bounded,
    /// ReLU: g where it is positive, else 0. What is its own gate is squared so (arXiv 2109.08668).
    Relu,
}

impl Activation {
    /// The rate and the limit of [`Activation::Bounded`].
    pub const BOUNDED: [f32; 2] = [1.702, 7.0];

    /// `√(8/π)`, and `0.044715 √(8/π)`.
    pub const GELU: [f32; 2] = [1.595_769_2, 0.071_354_81];
}

/// How a row chooses among experts (arXiv 1701.06538).
///
/// Of the router's logits `l` come scores `p`, and the `n_used` experts of the largest are chosen, of equal ones those of lower
/// number. Expert e among them weighs `scale p[e]`, or `scale p[e] / Σ p` over the chosen ones where `normalises`. Where experts
/// have [a selection bias](crate::Choice::selection_bias), `p + bias` decides who is chosen, and p what it weighs. A logit that is
/// NaN or positive infinity makes the weights NaN, so that it is noticed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Experts that each row goes through.
    pub n_used: usize,
    /// What scores are made with.
    pub scores: Scores,
    /// Whether their weights add up to `scale`.
    pub normalises: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// The groups that experts are in, where a row first chooses some of them.
    pub expert_groups: Option<ExpertGroups>,
}

/// Experts in groups of neighbours, all as large: a row chooses among those of a few groups. With softmax, those of the best experts
/// (arXiv 2405.04434); with sigmoids, those whose two best are best together (arXiv 2412.19437), biases counted; of equal ones
/// those of lower number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// How many there are.
    pub n: usize,
    /// How many a row chooses.
    pub n_used: usize,
}

/// What a router's logits `l` become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// `p = softmax(l)` over all experts. Handicaps are not known here.
    Softmax,
    /// `p = 1 / (1 + exp(-l))`, each by itself (arXiv 2412.19437). Weights that add up are divided by [`Scores::LEAST`] more than
    /// the sum.
    Sigmoid,
}

impl Scores {
    /// What keeps a sum of scores that all are 0 from dividing.
    pub const LEAST: f32 = 1e-20;
}

/// How the last dimension of a buffer splits into heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Number of heads.
    pub n: usize,
    /// Values per head.
    pub dim: usize,
}

/// Some columns of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// Values of its rows.
    pub width: usize,
    /// The first of the columns.
    pub first: usize,
}

/// Which two values of a head a rotary embedding turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// `(x[2i], x[2i + 1])`: GGUF files of the llama family, whose Q and K rows are permuted for it.
    Interleaved,
    /// `(x[i], x[i + n_rot / 2])`: the "NeoX" order of qwen2, qwen3 and most others.
    Halves,
}

/// How to apply a rotary position embedding (RoFormer, arXiv 2104.09864). The angles come as a buffer, so that
/// scaling methods (linear, llama3, YaRN) stay in the model and every device sees the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeParams {
    /// Which values form a pair.
    pub pairing: Pairing,
    /// The first `n_rot` values of each head are turned; the rest pass. Even, at most the head's size.
    pub n_rot: usize,
}

impl RopeParams {
    /// The two values of a head that form pair `index`.
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
    /// Which values are turned together.
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

/// Shape of attention. A row at position p sees the keys `0 ..= p` (causal), or the youngest of them where the layer has a
/// window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttendParams {
    /// Query heads. A multiple of `n_kv_heads`.
    pub n_heads: usize,
    /// KV heads; query head `h` reads KV head `h / (n_heads / n_kv_heads)`.
    pub n_kv_heads: usize,
    /// True (unpadded) size of a key head and of a query head.
    pub k_head_dim: usize,
    /// True (unpadded) size of a value head.
    pub v_head_dim: usize,
    /// Factor on the scores, `1 / sqrt(k_head_dim)` with the true head size.
    pub scale: f32,
    /// Where scores `s` are bounded, by the cap `c`: `c tanh(s / c)` takes their place (arXiv 2408.00118). Positive.
    pub soft_cap: Option<f32>,
}
