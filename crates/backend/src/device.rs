//! The trait a device implements, and the operands of its ops.

use std::fmt::Debug;

use kvant_codec::DType;

use crate::{
    Activation, AttendParams, BackendError, Candidate, Columns, Gate, Heads, KvPart, Norm, Rope, RopeParams,
    Routing, SharedBytes, ShortConv, StateHeads, StateInputs, StatePart,
};

/// Shorthand for a result with a [`BackendError`].
pub type Result<T> = std::result::Result<T, BackendError>;

/// f32 activations on a device.
pub trait Buffer: Send + Sync {
    /// Number of values.
    fn n_values(&self) -> usize;
}

/// A weight matrix `[n_out, n_in]` in a device's own layout.
pub trait Matrix: Send + Sync {
    /// Rows: output features.
    fn n_out(&self) -> usize;
    /// Columns: input features, at least one.
    fn n_in(&self) -> usize;
}

/// Weight matrices of one shape and type, one for each expert: `[n_experts, n_out, n_in]`.
pub trait Experts: Send + Sync {
    /// Matrices, at least one.
    fn n_experts(&self) -> usize;
    /// Rows of each: output features.
    fn n_out(&self) -> usize;
    /// Columns of each: input features, at least one.
    fn n_in(&self) -> usize;
}

/// One allocation of cache memory on a device.
pub trait Page: Send + Sync + Sized {
    /// What the device keeps beside the blocks of a sequence; `()` where it needs nothing.
    type Table: PageTable<Self>;

    /// Size of the allocation in bytes.
    fn n_bytes(&self) -> usize;
    /// A second page with the same bytes: copy on write of shared prefixes.
    fn duplicate(&self) -> Result<Self>;
    /// Takes over the bytes of another page of the same length.
    fn copy_from(&mut self, other: &Self) -> Result<()> {
        *self = other.duplicate()?;
        Ok(())
    }
}

/// A device's own index of the blocks of a sequence, such as their addresses in its memory. It is told of every change, so that
/// a device need not look through all blocks at each step. A clone belongs to the sequence's clone.
pub trait PageTable<P>: Clone + Default + Send + Sync + Debug {
    /// Block `index`, at most one past the last, is `page` from now on.
    fn set(&mut self, index: usize, page: &P);
    /// Only the first `len` blocks are left.
    fn truncate(&mut self, len: usize);
}

impl<P> PageTable<P> for () {
    fn set(&mut self, _: usize, _: &P) {}
    fn truncate(&mut self, _: usize) {}
}

/// What a device is, for summary lines and benchmark rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The device's name, `cpu` or `cuda:0`.
    pub name: String,
    /// The kernel set in use, such as `avx512+vnni`.
    pub kernels: String,
    /// Threads that work on an op, or the multiprocessors of a GPU.
    pub n_threads: usize,
    /// What `n_threads` counts: `threads` or `SMs`.
    pub thread_unit: &'static str,
    /// Whether a row of a step gives the same bits alone and among others.
    pub rows_are_independent: bool,
    /// Whether [`Backend::broken_row`] looks. Where it does not, what is broken shows in the logits.
    pub looks_for_broken_rows: bool,
}

/// Which kernel a device runs for one op and type, for `kvant doctor`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelChoice {
    /// The op, such as `matmul` or `attend`.
    pub op: &'static str,
    /// The weight or cache type.
    pub dtype: DType,
    /// The kernel's own name, such as `gemv-q4_0-avx512vnni`.
    pub kernel: String,
}

/// A weight matrix on its way to a device.
#[derive(Debug, Clone)]
pub struct WeightSource {
    /// Storage type of the rows.
    pub dtype: DType,
    /// Rows: output features.
    pub n_out: usize,
    /// Columns: input features, contiguous in memory.
    pub n_in: usize,
    /// `n_out` rows of `dtype.row_bytes(n_in)` bytes.
    pub bytes: SharedBytes,
}

/// The left operand of a projection: `rows` rows of `[.., n_in]` activations, normalised first when `norm` is given.
pub struct Input<'a, B: Backend> {
    /// Activations, `[first_row + rows, n_in]` or more.
    pub x: &'a B::Buffer,
    /// RMS norm applied to each row before the product. `x` itself is left as it is.
    pub norm: Option<Norm<'a, B::Buffer>>,
    /// First row to read; the outputs start at their row 0.
    pub first_row: usize,
    /// Number of rows to read.
    pub rows: usize,
}

/// One product of a projection: `y = W x + bias`, or `y += W x + bias`.
pub struct Output<'a, B: Backend> {
    /// Weights `[n_out, n_in]`.
    pub w: &'a B::Matrix,
    /// Added to every row, `[n_out]`.
    pub bias: Option<&'a B::Buffer>,
    /// Result `[rows, n_out]`.
    pub y: &'a mut B::Buffer,
    /// Add to `y` instead of overwriting it (a residual connection).
    pub accumulate: bool,
}

/// A feed-forward layer of experts.
pub struct ExpertWeights<'a, B: Backend> {
    /// Of the gates.
    pub activation: Activation,
    /// What the gates are made with, `[n_experts, n_ff, n]`; where it is `up` itself, a device may multiply once.
    pub gate: &'a B::Experts,
    /// Of what is gated, `[n_experts, n_ff, n]`.
    pub up: &'a B::Experts,
    /// Back to the width of the stream, `[n_experts, n, n_ff]`.
    pub down: &'a B::Experts,
    /// What is added to the products of gate and up, `[n_experts, n_ff]` each, and to that of down, `[n_experts, n]`.
    pub biases: Option<[&'a B::Buffer; 3]>,
}

impl<B: Backend> Clone for ExpertWeights<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for ExpertWeights<'_, B> {}

/// Whom rows choose among experts, and what those weigh.
pub struct Choice<'a, B: Backend> {
    /// How they choose.
    pub routing: Routing,
    /// How much each is wanted, `[rows, n_experts]`.
    pub logits: &'a B::Buffer,
    /// What is added to the scores that decide who is chosen, `[n_experts]`, and to nothing else: experts that many rows choose are
    /// held back so, and others brought forward (arXiv 2408.15664).
    pub selection_bias: Option<&'a B::Buffer>,
    /// What is multiplied with the weight of each, `[n_experts]`.
    pub scales: Option<&'a B::Buffer>,
}

impl<B: Backend> Clone for Choice<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Choice<'_, B> {}

/// A device: memory, and the ops of a transformer step.
///
/// Buffers hold f32 activations, `[rows, cols]` without padding; they may be longer than the step needs.
/// Each fused op names its unfused equivalent; the conformance suite holds the two equal. What does not fit is refused: a device
/// calls the `check_..` function of the op before it does anything.
pub trait Backend: Send + Sync + Sized + 'static {
    /// f32 activations on the device.
    type Buffer: Buffer;
    /// A weight matrix in the device's own layout.
    type Matrix: Matrix;
    /// The matrices of experts in the device's own layout.
    type Experts: Experts;
    /// Cache memory.
    type Page: Page;

    /// What this device is and which kernels it runs.
    fn info(&self) -> DeviceInfo;
    /// The kernel for every op and type this device has.
    fn kernel_choices(&self) -> Vec<KernelChoice>;

    /// Memory that is free for weights and caches, in bytes, where the device has memory of its own.
    fn free_bytes(&self) -> Result<Option<usize>> {
        Ok(None)
    }

    /// The most bytes that all pages may have together, where the reach of kernels bounds them.
    fn most_page_bytes(&self) -> Option<usize> {
        None
    }

    /// Runs `ops`, the ops of one step; `is_decode` says that each sequence has one row in it. Nothing is read back in them, so
    /// that a device may record them and run them as a whole when they end.
    fn step<T, E: From<BackendError>>(
        &self,
        is_decode: bool,
        ops: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        let _ = is_decode;
        ops()
    }

    /// A zeroed buffer of `len` values.
    fn buffer(&self, len: usize) -> Result<Self::Buffer>;
    /// Copies `src` to the start of `dst`.
    fn write(&self, dst: &mut Self::Buffer, src: &[f32]) -> Result<()>;
    /// Copies `len` values of `src`, from value `from` on, to `dst`, from value `to` on.
    fn copy(
        &self,
        src: &Self::Buffer,
        from: usize,
        dst: &mut Self::Buffer,
        to: usize,
        len: usize,
    ) -> Result<()>;
    /// Copies `dst.len()` values from `src`, starting at value `offset`.
    fn read(&self, src: &Self::Buffer, offset: usize, dst: &mut [f32]) -> Result<()>;
    /// The `k` likeliest of `n_vocab` logits that start at value `offset` of `logits` into `out`, in the order of
    /// [`Candidate::rank`]: all that sampling needs of a row, most often. Equals [`top_k`](crate::top_k) of what
    /// [`Backend::read`] gives.
    fn top_k(
        &self,
        logits: &Self::Buffer,
        offset: usize,
        n_vocab: usize,
        k: usize,
        out: &mut Vec<Candidate>,
    ) -> Result<()>;
    /// Waits until everything that was asked for is done.
    fn finish(&self) -> Result<()> {
        Ok(())
    }
    /// Takes a weight matrix for products, repacking it where that pays. A device with memory of its own lets go of `source`.
    fn matrix(&self, source: WeightSource) -> Result<Self::Matrix>;
    /// Takes a matrix that only [`Backend::embed`] will read: a token embedding beside an output matrix of its own.
    fn table(&self, source: WeightSource) -> Result<Self::Matrix> {
        self.matrix(source)
    }
    /// Takes a matrix for products that [`Backend::embed`] reads too: a token embedding that is the output matrix as well.
    fn tied(&self, source: WeightSource) -> Result<Self::Matrix> {
        self.matrix(source)
    }
    /// Takes `n_experts` matrices of one shape: `source` has the rows of all of them, one matrix after the other.
    fn experts(&self, source: WeightSource, n_experts: usize) -> Result<Self::Experts>;
    /// As [`Backend::experts`], of matrices that stay where `source` has them, a mapped file: they take no memory of the process,
    /// and those that rows choose are laid out anew for every step. The same bits come of them. A device that cannot do so
    /// refuses.
    fn mapped_experts(&self, source: WeightSource, n_experts: usize) -> Result<Self::Experts> {
        _ = (source, n_experts);
        let (wanted, has) = ("experts that stay in the file".to_owned(), "experts in its memory".to_owned());
        Err(BackendError::Unsupported { op: "mapped_experts", wanted, has })
    }
    /// Zeroed cache memory of `n_bytes`.
    fn page(&self, n_bytes: usize) -> Result<Self::Page>;
    /// Copies a page's bytes to host memory of the same length.
    fn read_page(&self, page: &Self::Page, dst: &mut [u8]) -> Result<()>;
    /// Overwrites a page from host memory of the same length.
    fn write_page(&self, page: &mut Self::Page, src: &[u8]) -> Result<()>;

    /// Looks up rows of `table` `[n_vocab, n_embd]`, which [`Backend::table`] or [`Backend::tied`] has taken, into `out`
    /// `[tokens, n_embd]`, each value times `scale`.
    fn embed(&self, table: &Self::Matrix, tokens: &[u32], scale: f32, out: &mut Self::Buffer) -> Result<()>;

    /// Every product of `outputs` on the same input. Equals `rms_norm` into a scratch buffer (when `norm` is
    /// given) and one product per output; the input is normalised and quantised once for all of them.
    fn project(&self, input: Input<'_, Self>, outputs: &mut [Output<'_, Self>]) -> Result<()>;

    /// `y = a(gate x) * (up x)`, `[rows, n_ff]`, `a` the activation. Equals `project` with two outputs, then `a(g) * u`. Where `gate` is
    /// `up` itself, a device may multiply once.
    fn gated_ffn(
        &self,
        input: Input<'_, Self>,
        activation: Activation,
        gate: &Self::Matrix,
        up: &Self::Matrix,
        y: &mut Self::Buffer,
    ) -> Result<()>;

    /// `x += Σ_e weight[e] W_down[e] (a(W_gate[e] n) * (W_up[e] n))` for the first `rows` rows of `x` `[rows, n]`, `n = norm(x)`
    /// (when `norm` is given) and a the activation of `weights`; each product plus its bias, where there are some. With `to`, the sum is
    /// put there, `[rows, n]`, and `x` is left as it is. Each row's experts and their weights come of `choice`; nobody waits for them.
    /// Equals [`Backend::gated_ffn`] and a product for each expert of a row, added in an order that does not depend on other rows.
    fn expert_ffn(
        &self,
        x: &mut Self::Buffer,
        rows: usize,
        norm: Option<Norm<'_, Self::Buffer>>,
        choice: Choice<'_, Self>,
        weights: ExpertWeights<'_, Self>,
        to: Option<&mut Self::Buffer>,
    ) -> Result<()>;

    /// `y[r, i] = W[i] x[r, i]` for each matrix i of `w` `[n, n_out, n_in]` and the first `rows` rows of `x` `[rows, n, n_in]`, into
    /// `y` `[rows, n, n_out]`. Equals [`Backend::project`] of each.
    fn project_each(
        &self,
        x: &Self::Buffer,
        rows: usize,
        w: &Self::Experts,
        y: &mut Self::Buffer,
    ) -> Result<()>;

    /// Copies the first rows of `src`, `shape` `[rows, n]` of them, to the columns of `dst` from `to.first` on: rows of `dst` are
    /// `to.width` wide.
    fn copy_columns(
        &self,
        src: &Self::Buffer,
        shape: [usize; 2],
        dst: &mut Self::Buffer,
        to: Columns,
    ) -> Result<()>;

    /// `y = y / (1 + exp(-g))` for the first `rows` rows of `y` `[rows, cols]`, g the row's value of `gates` `[rows]`.
    fn gate_rows(&self, y: &mut Self::Buffer, rows: usize, cols: usize, gates: &Self::Buffer) -> Result<()>;

    /// `x += norm(y)`, `norm` over each of the first `rows` rows of `y` `[rows, n]`, n the length of its weight: a branch that
    /// is normalised before it joins the residual stream.
    fn add_normed(
        &self,
        x: &mut Self::Buffer,
        y: &Self::Buffer,
        rows: usize,
        norm: Norm<'_, Self::Buffer>,
    ) -> Result<()>;

    /// `y = (x - m) / sqrt(mean((x - m)²) + eps) * weight`, m the mean of x, for each of the first `rows` rows of `x` `[rows, n]`,
    /// n the length of the weight: LayerNorm (arXiv 1607.06450) without a bias.
    fn layer_norm(
        &self,
        x: &Self::Buffer,
        rows: usize,
        norm: Norm<'_, Self::Buffer>,
        y: &mut Self::Buffer,
    ) -> Result<()>;

    /// `x = cap tanh(x / cap)` for the first `len` values of `x` (arXiv 2408.00118).
    fn soft_cap(&self, x: &mut Self::Buffer, len: usize, cap: f32) -> Result<()>;

    /// `x = by x` for the first `len` values of `x`.
    fn scale(&self, x: &mut Self::Buffer, len: usize, by: f32) -> Result<()>;

    /// Normalises each head of the first `rows` rows of `x` `[rows, heads.n * heads.dim]` (when `norm` is given, with a gain for all
    /// heads or `[heads.n, heads.dim]`, one for each), then turns its pairs by `angles` `[rows, n_rot / 2, 2]`: the cosine and the
    /// sine for each row and pair, magnitude included.
    fn rope(
        &self,
        x: &mut Self::Buffer,
        rows: usize,
        heads: Heads,
        norm: Option<Norm<'_, Self::Buffer>>,
        params: RopeParams,
        angles: &Self::Buffer,
    ) -> Result<()>;

    /// The first of the first `rows` rows of `x` `[rows, cols]` that holds NaN or an infinity. `None` too of a device that
    /// [says](DeviceInfo::looks_for_broken_rows) that it does not look, as it could not tell without being waited for.
    fn broken_row(&self, x: &Self::Buffer, rows: usize, cols: usize) -> Result<Option<usize>>;

    /// Appends the rows of each part to its streams: `k` `[rows, n_kv_heads * k_head_dim]` after RoPE, `v`
    /// `[rows, n_kv_heads * v_head_dim]`, of which nothing is read where streams are
    /// [joint](crate::StreamSpec::joint). Pads and rotates where a stream says so, and writes the tiles that
    /// [`StreamSpec::writes`](crate::StreamSpec::writes) names, those of the band to `band`. The memory must have been
    /// reserved.
    fn kv_append(
        &self,
        parts: &mut [KvPart<'_, Self::Page>],
        k: &Self::Buffer,
        v: &Self::Buffer,
        band: Option<&mut Self::Page>,
    ) -> Result<()>;

    /// [`Backend::rope`] of `q`, [`Backend::rope`] of `k` and [`Backend::kv_append`], which it equals. What `k` holds
    /// afterwards is the device's affair.
    fn rope_append(
        &self,
        parts: &mut [KvPart<'_, Self::Page>],
        rope: &Rope<'_, Self::Buffer>,
        q: &mut Self::Buffer,
        k: &mut Self::Buffer,
        v: &Self::Buffer,
        band: Option<&mut Self::Page>,
    ) -> Result<()> {
        let rows = parts.iter().map(|part| part.rows.range().end).max().unwrap_or(0);
        self.rope(q, rows, rope.q_heads, rope.q_norm, rope.params, rope.angles)?;
        self.rope(k, rows, rope.k_heads, rope.k_norm, rope.params, rope.angles)?;
        self.kv_append(parts, k, v, band)
    }

    /// Causal attention of the rows of each part of `q` `[rows, n_heads * k_head_dim]`, once they have been appended, over
    /// the tokens that the part's sequence holds, into the same rows of `out` `[rows, n_heads * v_head_dim]`. What a row sees
    /// in 16 bit and what in codes depends on its position alone (see [`StreamSpec::window`](crate::StreamSpec::window));
    /// `band` is what the append has written. Queries are rotated once when K is rotated, the output un-rotated once when V
    /// is. Reads the tiles as they are; never writes a dequantised copy of the cache.
    ///
    /// With `sinks` `[n_heads]`, the softmax of a head has one more score, its sink, and no value that goes with it: weights add
    /// up to less than one (gpt-oss; arXiv 2309.17453 says what for). A sink is neither scaled nor bounded.
    fn attend(
        &self,
        params: &AttendParams,
        parts: &[KvPart<'_, Self::Page>],
        q: &Self::Buffer,
        sinks: Option<&Self::Buffer>,
        band: Option<&Self::Page>,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// `out[r, h] = Σ_s softmax_s(scale q[r, h] · k[s, h]) v[s, h]` for each head h of the first rows of `q`, `k`, `v` and `out`
    /// `[rows, heads.n * heads.dim]`: attention in which each row sees all of its window, and that nothing is kept of. `windows` says how many
    /// rows each has, one behind the other. A device that has no kernel for it refuses.
    fn attend_all(
        &self,
        windows: &[usize],
        heads: Heads,
        scale: f32,
        qkv: [&Self::Buffer; 3],
        out: &mut Self::Buffer,
    ) -> Result<()> {
        _ = (windows, heads, scale, qkv, out);
        let (wanted, has) = ("rows that see all others".to_owned(), "rows that see those before".to_owned());
        Err(BackendError::Unsupported { op: "attend_all", wanted, has })
    }

    /// `y[r, c] = b[c] + Σ_j w[j, c] u[r - taps + 1 + j, c]` for the rows of each part, channel by channel, u what enters of the rows
    /// of `x` `[rows, n_in]` and, before the first of a step, of the state, which is left as the next step wants it: `kernel`
    /// `[taps + 1, channels]` is w and then b, `y` `[rows, channels]`. What enters and what becomes of y says
    /// [`ConvForm`](crate::ConvForm).
    fn short_conv(
        &self,
        parts: &mut [StatePart<'_, Self::Page>],
        conv: ShortConv,
        x: &Self::Buffer,
        kernel: &Self::Buffer,
        y: &mut Self::Buffer,
    ) -> Result<()>;

    /// Changes the states of heads by the rows of each part, one after the other, and reads them into `y` `[rows, n_v_heads * v_dim]`.
    /// With the key k and the query q of a value head, its value v and its state S `[k_dim, v_dim]`, by the
    /// [rule](crate::StateRule) of the inputs:
    ///
    /// ```text
    /// t = softplus(step + bias)
    /// S = exp(rate t) S
    /// delta:  S = S + k dᵀ,  d = (v - Sᵀ k) / (1 + exp(-write)),  y = Sᵀ q / √k_dim    q and k divided by their length
    /// space:  S = S + t k vᵀ,  y = Sᵀ q + skip v
    /// ```
    fn recur(
        &self,
        parts: &mut [StatePart<'_, Self::Page>],
        heads: StateHeads,
        inputs: StateInputs<&Self::Buffer>,
        y: &mut Self::Buffer,
    ) -> Result<()>;

    /// Multiplies the first `len` values of `y` by what `gate` makes of as many of `gates`.
    fn gate(&self, y: &mut Self::Buffer, len: usize, gates: &Self::Buffer, gate: Gate) -> Result<()>;

    /// What can be left out of the reading of coded tiles, to measure what it costs: names, least reading first, the last one
    /// attention in earnest. None where a device has no such stages.
    fn stages(&self) -> &'static [&'static str] {
        &[]
    }

    /// [`Backend::attend`], without sinks, with all that stage `stage` of [`Backend::stages`] leaves out; but for the last, the results mean
    /// nothing.
    fn attend_staged(
        &self,
        stage: usize,
        params: &AttendParams,
        parts: &[KvPart<'_, Self::Page>],
        q: &Self::Buffer,
        band: Option<&Self::Page>,
        out: &mut Self::Buffer,
    ) -> Result<()> {
        let _ = (params, parts, q, band, out);
        Err(BackendError::Unsupported {
            op: "attend",
            wanted: format!("stage {stage}"),
            has: format!("{} stages", self.stages().len()),
        })
    }
}
