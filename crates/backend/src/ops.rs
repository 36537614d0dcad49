//! The ops of a device. One list declares both traits, so that an op's signature and its check
//! stand together, once: [`Kernels`], which a device implements, and [`Backend`], which a model
//! calls.

use std::sync::Arc;

use crate::check::{
    check_add_normed, check_apply, check_attend_all, check_broken_row, check_copy, check_copy_columns,
    check_dense_ffn, check_embed, check_expert_ffn, check_experts, check_gate_rows, check_gated_ffn,
    check_layer_norm, check_matrix, check_project, check_project_each, check_read, check_rope,
    check_rope_append, check_rows_alike, check_scale, check_soft_cap, check_top_k, check_watch, check_write,
    check_xielu,
};
use crate::device::{
    Buffer, DeviceInfo, ExpertWeights, Experts, FfnWeights, Input, KernelChoice, KernelTime, Matrix, Output,
    Page, Result, Router, WeightSource, dense_ffn,
};
use crate::error::{no_pools, no_selection, no_stage};
use crate::host_ops::{self, Pointwise};
use crate::kv::{
    batch_rows, check_append, check_attend, check_attend_selected, check_select, check_select_blocks,
};
use crate::pooled::{check_attend_pooled, check_pool_tokens, check_select_pooled};
use crate::recurrent::{check_gate, check_recur, check_short_conv};
use crate::rwkv::{check_shift_tokens, check_wkv7};
use crate::streams::{
    check_attend_streams, check_connect_streams, check_gate_streams, check_inject_ngrams, check_mix_streams,
};
use crate::{
    Activation, AttendParams, BackendError, BidirectionalParams, BlockSelection, Columns, Gate, GatedStreams,
    Heads, HyperConnections, InputSquares, KvBatchEntry, NgramInjection, Norm, PooledBatchEntry, PooledKeys,
    Rope, RopeParams, Selected, Selection, ShortConv, StateBatchEntry, StateHeads, StateInputs,
    StreamAttention, Streams, TokenPool, TokenShift, TopK, Wkv7Inputs, Xielu,
};

ops! {
    /// Returns the description of this device and its kernels.
    fn info(&self) -> DeviceInfo;
    /// Returns the kernel for every op and type that this device supports.
    fn kernel_choices(&self) -> Vec<KernelChoice>;

    /// Returns the free memory for weights and caches, in bytes; `None` for a device without memory
    /// of its own.
    fn free_bytes(&self) -> Result<Option<usize>> => { Ok(None) };

    /// Returns the upper bound of all pages together, in bytes, where kernel addressing limits it.
    fn max_page_bytes(&self) -> Option<usize> => { None };

    /// Allocates a zeroed buffer of `len` values.
    fn buffer(&self, len: usize) -> Result<Self::Buffer>;
    /// Copies `src` to the start of `dst`.
    fn write(&self, dst: &mut Self::Buffer, src: &[f32]) -> Result<()>
        where check_write(dst, src);
    /// Copies `len` values from offset `from` of `src` to offset `to` of `dst`.
    fn copy(
        &self,
        src: &Self::Buffer,
        from: usize,
        dst: &mut Self::Buffer,
        to: usize,
        len: usize,
    ) -> Result<()>
        where check_copy(src, from, dst, to, len);
    /// Copies `dst.len()` values from `src`, starting at value `offset`.
    fn read(&self, src: &Self::Buffer, offset: usize, dst: &mut [f32]) -> Result<()>
        where check_read(src, offset, dst);
    /// Selects the most probable tokens of `rows` of `logits` `[_, n_vocab]`, in any order and
    /// number; usually sampling needs no more of a row. Those of each row equal
    /// [`top_k`](crate::top_k) of the logits that [`Backend::read`] returns. A step that samples
    /// several sequences asks once for all of them: a device with memory of its own then waits
    /// once.
    fn top_k(&self, logits: &Self::Buffer, n_vocab: usize, rows: &mut [TopK<'_>]) -> Result<()>
        where check_top_k(logits, n_vocab, rows);
    /// Waits until all submitted work is complete.
    fn finish(&self) -> Result<()> => { Ok(()) };
    /// Uploads a weight matrix for products, repacked where that pays. A device with memory of its
    /// own drops `source`.
    fn upload_matrix(&self, source: WeightSource) -> Result<Self::Matrix>
        where check_matrix(&source);
    /// Uploads a matrix for [`Backend::embed`] alone: a token embedding that is not tied to the
    /// output matrix.
    fn table(&self, source: WeightSource) -> Result<Self::Matrix>
        where check_matrix(&source) => { Kernels::upload_matrix(self, source) };
    /// Uploads a matrix for both products and [`Backend::embed`]: a token embedding tied to the
    /// output matrix.
    fn upload_tied(&self, source: WeightSource) -> Result<Self::Matrix>
        where check_matrix(&source) => { Kernels::upload_matrix(self, source) };
    /// Uploads `n_experts` matrices of one shape: `source` holds the rows of all of them, matrix
    /// after matrix.
    fn upload_experts(&self, source: WeightSource, n_experts: usize) -> Result<Self::Experts>
        where check_experts(&source, n_experts);
    /// As [`Backend::upload_experts`], with matrices that stay in `source`, a mapped file: they use
    /// no process memory, and the selected ones are repacked at every step. Results are
    /// bit-identical. A device without support returns an error.
    fn map_experts(&self, source: WeightSource, n_experts: usize) -> Result<Self::Experts>
        where check_experts(&source, n_experts) => {
        _ = (source, n_experts);
        Err(BackendError::unsupported("mapped_experts", "mapped experts", "experts in its memory"))
    };
    /// From now on adds the squares of each input of products with `w`, after its norm, to
    /// `squares`. A device without support returns an error.
    fn watch_inputs(&self, w: &mut Self::Matrix, squares: &Arc<InputSquares>) -> Result<()>
        where check_watch(w.n_in(), 1, squares) => {
        _ = (w, squares);
        Err(BackendError::unsupported("watch_inputs", "sums of squared inputs", "products alone"))
    };
    /// As [`Backend::watch_inputs`], with the sums of each expert apart.
    fn watch_expert_inputs(&self, w: &mut Self::Experts, squares: &Arc<InputSquares>) -> Result<()>
        where check_watch(w.n_in(), w.n_experts(), squares) => {
        _ = (w, squares);
        Err(BackendError::unsupported("watch_inputs", "sums of squared inputs", "products alone"))
    };
    /// Allocates zeroed cache memory of `n_bytes`.
    fn page(&self, n_bytes: usize) -> Result<Self::Page>;
    /// Copies a page's bytes to host memory of the same length.
    fn read_page(&self, page: &Self::Page, dst: &mut [u8]) -> Result<()>;
    /// Overwrites a page from host memory of the same length.
    fn write_page(&self, page: &mut Self::Page, src: &[u8]) -> Result<()>;

    /// Looks up rows of `table` `[n_vocab, n_embd]`, uploaded by [`Backend::table`] or
    /// [`Backend::upload_tied`], into `out` `[tokens, n_embd]`, each value times `scale`.
    fn embed(&self, table: &Self::Matrix, tokens: &[u32], scale: f32, out: &mut Self::Buffer) -> Result<()>
        where check_embed(table, tokens, out);

    /// Computes every product of `outputs` on the same input. Equals `rms_norm` into a scratch
    /// buffer (when `norm` is given) and one product per output; the input is normalized and
    /// quantized once for all of them.
    fn project(&self, input: Input<'_, Self>, outputs: &mut [Output<'_, Self>]) -> Result<()>
        where check_project(&input, outputs);

    /// Computes `y = a(gate x) * (up x)`, `[rows, n_ff]`, `a` the activation. Equals `project` with
    /// two outputs, then `a(g) * u`. Where `gate` is `up` itself, a device may multiply once. A
    /// device without [token selection](DeviceInfo::selects_tokens) returns an error for
    /// [`Activation::Situ`], as do the other ops with an activation.
    fn gated_ffn(&self, input: Input<'_, Self>, activation: Activation, gate: &Self::Matrix,
        up: &Self::Matrix, y: &mut Self::Buffer) -> Result<()>
        where check_gated_ffn(&input, gate, up, y);

    /// Computes `x += W_down (a(W_gate n) * (W_up n)) + bias` for the first `rows` rows of `x`
    /// `[rows, n]`, `n = norm(x)` (when `norm` is given); or writes the sum to `to` `[rows, n]` and
    /// leaves `x` unchanged. Equals [`Backend::gated_ffn`] into `hidden` `[rows, n_ff]`, then
    /// `project`; `hidden` holds anything afterwards, as a device may gate while it rounds to f16.
    fn dense_ffn(&self, x: &mut Self::Buffer, rows: usize, norm: Option<Norm<'_, Self::Buffer>>,
        weights: FfnWeights<'_, Self>, hidden: &mut Self::Buffer, to: Option<&mut Self::Buffer>) -> Result<()>
        where check_dense_ffn([x, hidden], rows, norm, weights, to.as_deref())
        => { dense_ffn(self, x, rows, norm, weights, hidden, to) };

    /// Computes `y = a(g) y` for the first `len` values of `y` and of `gates`, `a` the activation:
    /// [`Backend::gated_ffn`] of products that were computed before.
    fn activate(&self, y: &mut Self::Buffer, len: usize, gates: &Self::Buffer, activation: Activation)
        -> Result<()>
        where check_gate("activate", y, len, gates);

    /// Computes `x += Σ_e weight[e] W_down[e] (a(W_gate[e] n) * (W_up[e] n))` for the first `rows`
    /// rows of `x` `[rows, n]`, `n = norm(x)` (when `norm` is given) and a the activation of
    /// `weights`; each product plus its bias, if any. With `to`, writes the sum to it, `[rows, n]`,
    /// and leaves `x` unchanged.
    ///
    /// `choice` gives the experts of each row and their weights, without a host synchronization.
    /// Equals [`Backend::gated_ffn`] and a product for each expert of a row, added in an order that
    /// does not depend on other rows.
    fn moe_ffn(
        &self,
        x: &mut Self::Buffer,
        rows: usize,
        norm: Option<Norm<'_, Self::Buffer>>,
        choice: Router<'_, Self>,
        weights: ExpertWeights<'_, Self>,
        to: Option<&mut Self::Buffer>,
    ) -> Result<()>
        where check_expert_ffn(x, rows, norm, choice, weights, to.as_deref());

    /// Computes `y[r, i] = W[i] x[r, i]` for each matrix i of `w` `[n, n_out, n_in]` and the first
    /// `rows` rows of `x` `[rows, n, n_in]`, into `y` `[rows, n, n_out]`. Equals
    /// [`Backend::project`] of each.
    fn project_per_expert(
        &self,
        x: &Self::Buffer,
        rows: usize,
        w: &Self::Experts,
        y: &mut Self::Buffer,
    ) -> Result<()>
        where check_project_each(x, rows, w, y);

    /// Copies the first rows of `src`, `shape` `[rows, n]` of them, to the columns of `dst` from
    /// `to.first` on; rows of `dst` are `to.width` wide.
    fn copy_columns(
        &self,
        src: &Self::Buffer,
        shape: [usize; 2],
        dst: &mut Self::Buffer,
        to: Columns,
    ) -> Result<()>
        where check_copy_columns(src, shape, dst, to);

    /// Multiplies the first `rows` rows of `y` `[rows, cols]` by `gate` of the row's value of
    /// `gates` `[rows]`.
    fn gate_rows(
        &self,
        y: &mut Self::Buffer,
        rows: usize,
        cols: usize,
        gates: &Self::Buffer,
        gate: Gate,
    ) -> Result<()>
        where check_gate_rows(y, rows, cols, gates);

    /// Computes `x += norm(y)`, `norm` over each of the first `rows` rows of `y` `[rows, n]`, n the
    /// length of its weight: a branch that is normalized before it is added to the residual.
    fn add_normed(
        &self,
        x: &mut Self::Buffer,
        y: &Self::Buffer,
        rows: usize,
        norm: Norm<'_, Self::Buffer>,
    ) -> Result<()>
        where check_add_normed(x, y, rows, &norm);

    /// Computes `y = (x - m) / sqrt(mean((x - m)²) + eps) * weight + bias`, m the mean of x, for
    /// each of the first `rows` rows of `x` `[rows, n]`, n the length of the weight and of the
    /// bias, which is 0 without one: LayerNorm (arXiv 1607.06450). A device without [the ops of
    /// encoders](DeviceInfo::runs_encoders) returns an error for a bias.
    fn layer_norm(
        &self,
        x: &Self::Buffer,
        rows: usize,
        norm: Norm<'_, Self::Buffer>,
        bias: Option<&Self::Buffer>,
        y: &mut Self::Buffer,
    ) -> Result<()>
        where check_layer_norm(x, rows, &norm, bias, y);

    /// Computes `x = cap tanh(x / cap)` for the first `len` values of `x` (arXiv 2408.00118).
    fn soft_cap(&self, x: &mut Self::Buffer, len: usize, cap: f32) -> Result<()>
        where check_soft_cap(x, len);

    /// Computes `x = xielu(x)` for the first `len` values of `x`, with these
    /// [numbers](crate::Xielu).
    fn xielu(&self, x: &mut Self::Buffer, len: usize, numbers: Xielu) -> Result<()>
        where check_xielu(x, len);

    /// Computes `x = f(x)` for the first `len` values of `x`; without a kernel for it, on the host.
    fn apply(&self, x: &mut Self::Buffer, len: usize, f: Pointwise) -> Result<()>
        where check_apply(x, len) => { host_ops::apply_to_buffer(self, x, len, f) };

    /// Computes `y[i] = Σ_j coefs[row, i, j] x[j]`, for each of the first `rows` rows: the streams
    /// of `y` `[n_out, rows, width]` are linear combinations of those of `x` `[n_in, rows, width]`,
    /// with the coefficients `[rows, n_out, n_in]`.
    fn mix_streams(
        &self,
        coefs: &Self::Buffer,
        x: &Self::Buffer,
        rows: usize,
        streams: Streams,
        y: &mut Self::Buffer,
    ) -> Result<()>
        where check_mix_streams(coefs, x, rows, streams, y);

    /// Computes how a sublayer reads and writes n residual streams, as coefficients of
    /// [`Backend::mix_streams`]; [`HyperConnections`] has the equation. `products` is `[rows,
    /// n_products]`, `streams` `[n, rows, width]`, `reads` `[rows, n]` and `writes` `[rows, n, n +
    /// 1]`. Behind the last layer nothing is written, and `products` is `[rows, n]`. A device
    /// without [token selection](DeviceInfo::selects_tokens) returns an error.
    fn connect_streams(
        &self,
        connections: HyperConnections<'_, Self::Buffer>,
        products: &Self::Buffer,
        streams: &Self::Buffer,
        rows: usize,
        reads: &mut Self::Buffer,
        writes: Option<&mut Self::Buffer>,
    ) -> Result<()>
        where check_connect_streams(connections, [products, streams, reads], rows, writes.as_deref()) => {
        _ = (connections, products, streams, rows, reads, writes);
        Err(BackendError::unsupported("connect_streams", "hyper-connections", "one residual stream"))
    };

    /// Computes how a sublayer reads n residual streams by attention to them, and what it leaves,
    /// as coefficients of [`Backend::mix_streams`]; [`StreamAttention`] has the equation. `streams`
    /// is `[n, rows, width]`, `reads` `[rows, n]` and `writes` `[rows, n + 1]`. A device without
    /// [token selection](DeviceInfo::selects_tokens) returns an error.
    fn attend_streams(
        &self,
        attention: StreamAttention<'_, Self::Buffer>,
        streams: &Self::Buffer,
        rows: usize,
        reads: &mut Self::Buffer,
        writes: Option<&mut Self::Buffer>,
    ) -> Result<()>
        where check_attend_streams(attention, [streams, reads], rows, writes.as_deref()) => {
        _ = (attention, streams, rows, reads, writes);
        Err(BackendError::unsupported("attend_streams", "attention to residual streams", "one stream"))
    };

    /// Computes what a sublayer reads of n gated residual streams, `x` `[rows, width]`, and how it
    /// writes them, as coefficients of [`Backend::mix_streams`]; [`GatedStreams`] has the equation.
    /// `streams` is `[n, rows, width]`, `writes` `[rows, n, n + 2]`. A device without [token
    /// selection](DeviceInfo::selects_tokens) returns an error.
    fn gate_streams(
        &self,
        gated: GatedStreams<'_, Self::Buffer>,
        streams: &Self::Buffer,
        rows: usize,
        x: &mut Self::Buffer,
        writes: Option<&mut Self::Buffer>,
    ) -> Result<()>
        where check_gate_streams(gated, [streams, x], rows, writes.as_deref()) => {
        _ = (gated, streams, rows, x, writes);
        Err(BackendError::unsupported("gate_streams", "gated residual streams", "one stream"))
    };

    /// Adds the values of n-grams to the residual streams `[n, rows, width]` of the rows of each
    /// part; [`NgramInjection`] has the equation. `keys` is `[rows, n, width]`, `values` `[rows,
    /// width]`; the state is what the convolution read of the last tokens. A device without [token
    /// selection](DeviceInfo::selects_tokens) returns an error.
    fn inject_ngrams(
        &self,
        parts: &mut [StateBatchEntry<'_, Self::Page>],
        injection: NgramInjection<'_, Self::Buffer>,
        keys: &Self::Buffer,
        values: &Self::Buffer,
        rows: usize,
        streams: &mut Self::Buffer,
    ) -> Result<()>
        where check_inject_ngrams(parts, injection, [keys, values, streams], rows) => {
        _ = (parts, injection, keys, values, rows, streams);
        Err(BackendError::unsupported("inject_ngrams", "values of n-grams", "those of tokens"))
    };

    /// Multiplies each of the first `rows` rows of `x` `[rows, width]` by the root mean square of
    /// the same row of `like`.
    fn scale_by_rms(&self, x: &mut Self::Buffer, like: &Self::Buffer, rows: usize, width: usize)
        -> Result<()>
        where check_rows_alike("scale_by_rms", x, like, rows, width);

    /// Computes `y = gelu(max(0, g - c)) y` for the first `rows` rows of `y` and of `gates`
    /// `[rows, width]`, c the mean of the row of gates plus `deviations` times their standard
    /// deviation: statistical top-k (arXiv 2506.06644).
    fn gate_sparsely(
        &self,
        y: &mut Self::Buffer,
        gates: &Self::Buffer,
        rows: usize,
        width: usize,
        deviations: f32,
    ) -> Result<()>
        where check_rows_alike("gate_sparsely", y, gates, rows, width);

    /// Computes `x = x + y` for the first `len` values of `x` and `y`.
    fn add(&self, x: &mut Self::Buffer, y: &Self::Buffer, len: usize) -> Result<()>
        where check_rows_alike("add", x, y, 1, len);

    /// Computes `x = by x` for the first `len` values of `x`.
    fn scale(&self, x: &mut Self::Buffer, len: usize, by: f32) -> Result<()>
        where check_scale(x, len);

    /// Normalizes each head of the first `rows` rows of `x` `[rows, heads.n * heads.dim]` (when
    /// `norm` is given, with one gain for all heads or one per head, `[heads.n, heads.dim]`), then
    /// applies RoPE with `angles` `[rows, n_rot / 2, 2]`: cosine and sine for each row and pair,
    /// magnitude included.
    fn rope(
        &self,
        x: &mut Self::Buffer,
        rows: usize,
        heads: Heads,
        norm: Option<Norm<'_, Self::Buffer>>,
        params: RopeParams,
        angles: &Self::Buffer,
    ) -> Result<()>
        where check_rope(x, rows, heads, norm, params, angles);

    /// Returns the first of the first `rows` rows of `x` `[rows, cols]` that contains NaN or an
    /// infinity. Always `None` on a device without [the check](DeviceInfo::checks_finite_rows),
    /// where it would require a synchronization.
    fn find_non_finite_row(&self, x: &Self::Buffer, rows: usize, cols: usize) -> Result<Option<usize>>
        where check_broken_row(x, rows, cols);

    /// Appends the rows of each part to its KV tensors: `k` `[rows, n_kv_heads * k_head_dim]` after
    /// RoPE, `v` `[rows, n_kv_heads * v_head_dim]`, which is not read for
    /// [shared-KV](crate::KvTensorSpec::new_shared_kv) tensors. Pads and rotates as the tensor
    /// requires, and writes the tiles of [`KvTensorSpec::writes`](crate::KvTensorSpec::writes),
    /// step tiles to `step_tiles`. The memory must have been reserved.
    fn kv_append(
        &self,
        parts: &mut [KvBatchEntry<'_, Self::Page>],
        k: &Self::Buffer,
        v: &Self::Buffer,
        step_tiles: Option<&mut Self::Page>,
    ) -> Result<()>
        where check_append(parts, [k, v], step_tiles.as_deref());

    /// Applies [`Backend::rope`] to `q` and `k`, then [`Backend::kv_append`]; equals these three
    /// ops. The contents of `k` afterwards are unspecified.
    fn rope_append(
        &self,
        parts: &mut [KvBatchEntry<'_, Self::Page>],
        rope: &Rope<'_, Self::Buffer>,
        q: &mut Self::Buffer,
        k: &mut Self::Buffer,
        v: &Self::Buffer,
        step_tiles: Option<&mut Self::Page>,
    ) -> Result<()>
        where check_rope_append(parts, rope, [q, k, v], step_tiles.as_deref()) => {
        let rows = batch_rows(parts);
        Kernels::rope(self, q, rows, rope.q_heads, rope.q_norm, rope.params, rope.angles)?;
        Kernels::rope(self, k, rows, rope.k_heads, rope.k_norm, rope.params, rope.angles)?;
        Kernels::kv_append(self, parts, k, v, step_tiles)
    };

    /// Computes causal attention of the rows of each part of `q` `[rows, n_heads * k_head_dim]`,
    /// after they were appended, over the tokens of the part's sequence, into the same rows of
    /// `out` `[rows, n_heads * v_head_dim]`.
    ///
    /// Which tokens a row reads in f16 and which as codes depends on its position alone (see
    /// [`KvTensorSpec::f16_window_start`](crate::KvTensorSpec::f16_window_start)); `step_tiles` is
    /// the output of the append. Queries are rotated once when K is rotated, the output is
    /// un-rotated once when V is. Reads the tiles in place; never writes a dequantized copy of the
    /// cache.
    ///
    /// With `sinks` `[n_heads]`, the softmax of a head has one more score, its sink, without a
    /// value: weights add up to less than one (gpt-oss; arXiv 2309.17453 gives the reason). A sink
    /// is neither scaled nor soft-capped.
    fn attend(
        &self,
        params: &AttendParams,
        parts: &[KvBatchEntry<'_, Self::Page>],
        q: &Self::Buffer,
        sinks: Option<&Self::Buffer>,
        step_tiles: Option<&Self::Page>,
        out: &mut Self::Buffer,
    ) -> Result<()>
        where check_attend(params, parts, [q, out], sinks, step_tiles);

    /// Selects the tokens that the rows of each part attend to, by the keys of an index that were
    /// appended as the [shared KV](crate::KvTensorSpec::new_shared_kv) of `parts`; [`Selection`]
    /// has the equation. It writes their positions, ascending, to `selected` `[rows, n_used]`, and
    /// leaves rows with no more tokens unchanged. `q` is `[rows, n_heads * head_dim]` after RoPE,
    /// `weights` `[rows, n_heads]`. A device without [token
    /// selection](DeviceInfo::selects_tokens) returns an error.
    fn select_tokens(
        &self,
        selection: Selection,
        parts: &[KvBatchEntry<'_, Self::Page>],
        q: &Self::Buffer,
        weights: &Self::Buffer,
        step_tiles: Option<&Self::Page>,
        selected: &mut Self::Buffer,
    ) -> Result<()>
        where check_select(selection, parts, [q, weights, selected], step_tiles) => {
        _ = (selection, parts, q, weights, step_tiles, selected);
        Err(no_selection("select_tokens"))
    };

    /// Selects the blocks of tokens that the KV heads of each row attend to, by the keys of an
    /// index as [`Backend::select_tokens`]; [`BlockSelection`] has the equation. It writes their
    /// numbers, ascending, to `selected` `[rows, n_heads, n_used]`, and leaves rows with no more
    /// blocks unchanged. `q` is `[rows, n_heads * head_dim]` after RoPE. A device without [token
    /// selection](DeviceInfo::selects_tokens) returns an error.
    fn select_blocks(
        &self,
        selection: BlockSelection,
        parts: &[KvBatchEntry<'_, Self::Page>],
        q: &Self::Buffer,
        step_tiles: Option<&Self::Page>,
        selected: &mut Self::Buffer,
    ) -> Result<()>
        where check_select_blocks(selection, parts, [q, selected], step_tiles) => {
        _ = (selection, parts, q, step_tiles, selected);
        Err(no_selection("select_blocks"))
    };

    /// As [`Backend::attend`], for the rows with more blocks than `n_used`, over the tokens of
    /// their [selected](Backend::select_tokens) blocks alone. Leaves the other rows of `out`
    /// unchanged.
    fn attend_selected(
        &self,
        params: &AttendParams,
        parts: &[KvBatchEntry<'_, Self::Page>],
        q: &Self::Buffer,
        selected: Selected<'_, Self::Buffer>,
        step_tiles: Option<&Self::Page>,
        out: &mut Self::Buffer,
    ) -> Result<()>
        where check_attend_selected(params, parts, [q, out], selected, step_tiles) => {
        _ = (params, parts, q, selected, step_tiles, out);
        Err(no_selection("attend_selected"))
    };

    /// Pools the rows of consecutive tokens of each part; [`TokenPool`] has the equation. `x` and
    /// `gates` are `[rows, n_in]`, `bias` `[stride, n_in]`. `y` `[pooled rows, width]` receives the
    /// rows that the tokens complete, those of the first part first; the state keeps the tokens of
    /// an unfinished one. A device without a kernel for it returns an error.
    fn pool_tokens(
        &self,
        parts: &mut [StateBatchEntry<'_, Self::Page>],
        pool: TokenPool,
        x: &Self::Buffer,
        gates: &Self::Buffer,
        bias: &Self::Buffer,
        y: &mut Self::Buffer,
    ) -> Result<()>
        where check_pool_tokens(parts, pool, [x, gates, bias, y]) => {
        _ = (parts, pool, x, gates, bias, y);
        Err(no_pools("pool_tokens"))
    };

    /// As [`Backend::select_tokens`], of the pooled keys that a row
    /// [sees](PooledBatchEntry::n_seen): their numbers.
    fn select_pooled(
        &self,
        selection: Selection,
        parts: &[PooledBatchEntry<'_, Self::Page>],
        q: &Self::Buffer,
        weights: &Self::Buffer,
        selected: &mut Self::Buffer,
    ) -> Result<()>
        where check_select_pooled(selection, parts, [q, weights, selected]) => {
        _ = (selection, parts, q, weights, selected);
        Err(no_pools("select_pooled"))
    };

    /// As [`Backend::attend`], of one shared-KV head, over the tokens and over the pooled keys that
    /// a row sees, in one softmax; of selected keys over these alone in rows that see more.
    fn attend_pooled(
        &self,
        params: &AttendParams,
        parts: &[KvBatchEntry<'_, Self::Page>],
        q: &Self::Buffer,
        pooled: PooledKeys<'_, '_, Self::Page, Self::Buffer>,
        step_tiles: Option<&Self::Page>,
        out: &mut Self::Buffer,
    ) -> Result<()>
        where check_attend_pooled(params, parts, [q, out], pooled, step_tiles) => {
        _ = (params, parts, q, pooled, step_tiles, out);
        Err(no_pools("attend_pooled"))
    };

    /// Computes `out[r, h] = Σ_s softmax_s(scale q[r, h] · k[s, g] + b[h, s - r]) v[s, g]` for each
    /// head h of the first rows of `q` and `out` `[rows, heads.n * heads.dim]`, and g its head of
    /// `k` and `v` `[rows, n_kv_heads * heads.dim]`: bidirectional attention within windows,
    /// without a cache. `windows` gives the rows of each, which are consecutive; s are those of the
    /// window within the reach of r. b is 0, or relative position biases (arXiv 1910.10683): with n
    /// the rows of the longest window, `bias` `[heads.n, 2 n - 1]` has b of the distances from
    /// 1 - n to n - 1. A device without [the ops of encoders](DeviceInfo::runs_encoders) returns an
    /// error.
    fn attend_bidirectional(
        &self,
        params: &BidirectionalParams,
        windows: &[usize],
        bias: Option<&Self::Buffer>,
        qkv: [&Self::Buffer; 3],
        out: &mut Self::Buffer,
    ) -> Result<()>
        where check_attend_all(params, windows, bias, qkv, out) => {
        _ = (params, windows, bias, qkv, out);
        Err(BackendError::unsupported("attend_all", "bidirectional attention", "causal attention"))
    };

    /// Computes `y[r, c] = b[c] + Σ_j w[j, c] u[r - taps + 1 + j, c]` for the rows of each part,
    /// channel by channel. u is the convolution input: from the rows of `x` `[rows, n_in]` and,
    /// before the first row of a step, from the state, which is updated for the next step. `kernel`
    /// `[taps + 1, channels]` is w and then b, `y` `[rows, channels]`.
    /// [`ConvForm`](crate::ConvForm) defines the input and the output.
    fn short_conv(
        &self,
        parts: &mut [StateBatchEntry<'_, Self::Page>],
        conv: ShortConv,
        x: &Self::Buffer,
        kernel: &Self::Buffer,
        y: &mut Self::Buffer,
    ) -> Result<()>
        where check_short_conv(parts, conv, [x, kernel, y]);

    /// Updates the states of heads by the rows of each part, one after the other, and reads them
    /// into `y` `[rows, n_v_heads * v_dim]`; [`StateInputs`] has the equations.
    fn linear_attention(
        &self,
        parts: &mut [StateBatchEntry<'_, Self::Page>],
        heads: StateHeads,
        inputs: StateInputs<&Self::Buffer>,
        y: &mut Self::Buffer,
    ) -> Result<()>
        where check_recur(parts, &heads, inputs, y);

    /// Computes `y[i, r] = x[r] + amounts[i] * (x[r - 1] - x[r])` for the rows of each part and
    /// each of `shift.n_mixes` mixes i: token shift (RWKV, arXiv 2305.13048). Before the first row
    /// of a step, x is the state `[channels]`, which is updated for the next step. `x` is
    /// `[rows, channels]`, `amounts` `[n_mixes, channels]`, `y` `[n_mixes, rows, channels]`. A
    /// device without a kernel for it returns an error.
    fn shift_tokens(
        &self,
        parts: &mut [StateBatchEntry<'_, Self::Page>],
        shift: TokenShift,
        x: &Self::Buffer,
        amounts: &Self::Buffer,
        y: &mut Self::Buffer,
    ) -> Result<()>
        where check_shift_tokens(parts, shift, [x, amounts, y]) => {
        _ = (parts, shift, x, amounts, y);
        Err(BackendError::unsupported("shift_tokens", "token shift", "rows by themselves"))
    };

    /// Updates the states of heads by the rows of each part, one after the other, and reads them
    /// into `y` `[rows, heads.n * heads.dim]` (RWKV-7, arXiv 2503.14456); [`Wkv7Inputs`] has the
    /// equations. The state is laid out as that of [`Backend::linear_attention`]. A device without
    /// a kernel for it returns an error.
    fn wkv7(
        &self,
        parts: &mut [StateBatchEntry<'_, Self::Page>],
        heads: Heads,
        inputs: Wkv7Inputs<&Self::Buffer>,
        y: &mut Self::Buffer,
    ) -> Result<()>
        where check_wkv7(parts, heads, inputs, y) => {
        _ = (parts, heads, inputs, y);
        Err(BackendError::unsupported("wkv7", "the state of RWKV-7", "linear attention"))
    };

    /// Multiplies the first `len` values of `y` by `gate` of as many of `gates`.
    fn gate(&self, y: &mut Self::Buffer, len: usize, gates: &Self::Buffer, gate: Gate) -> Result<()>
        where check_gate("gate", y, len, gates);

    /// Starts timing every kernel launch, which slows them, or stops and forgets the times. Returns
    /// whether the device times kernels.
    fn time_kernels(&self, is_on: bool) -> Result<bool> => { let _ = is_on; Ok(false) };

    /// Returns the time of each kernel since [`Backend::time_kernels`] started, the longest first.
    fn kernel_times(&self) -> Result<Vec<KernelTime>> => { Ok(Vec::new()) };

    /// Returns the stages of reading coded tiles, for measuring the cost of each: names, least
    /// reading first, the last one full attention. Empty for a device without stages.
    fn attend_stages(&self) -> &'static [&'static str] => { &[] };

    /// Computes [`Backend::attend`] without sinks and without the work that stage `stage` of
    /// [`Backend::attend_stages`] omits; only the last stage gives meaningful results.
    fn attend_staged(
        &self,
        stage: usize,
        params: &AttendParams,
        parts: &[KvBatchEntry<'_, Self::Page>],
        q: &Self::Buffer,
        step_tiles: Option<&Self::Page>,
        out: &mut Self::Buffer,
    ) -> Result<()>
        where check_attend(params, parts, [q, out], None, step_tiles) => {
        let _ = (params, parts, q, step_tiles, out);
        Err(no_stage(stage, self.attend_stages().len()))
    };
}
