//! Shape checks shared by every device, for the ops without sequences. Those of the cache's ops are
//! in `kv`.
//!
//! Each function takes the operands of the op that it is named after. It returns
//! [`BackendError::Shape`] or [`BackendError::TooShort`], which name the operand at fault, unless
//! documented otherwise.

use crate::device::{
    Buffer, ExpertWeights, Experts, FfnWeights, Input, Matrix, Output, Page, Result, Router, WeightSource,
};
use crate::kv::{batch_rows, check_append};
use crate::{
    Backend, BackendError, BidirectionalParams, Columns, ExpertGroups, Heads, InputSquares, KvBatchEntry,
    Norm, Rope, RopeParams, RouterScores, TopK,
};

/// Checks [`Backend::write`].
pub(crate) fn check_write(dst: &impl Buffer, src: &[f32]) -> Result<()> {
    BackendError::check_at_least("write", "length of the buffer", src.len(), dst.n_values())
}

/// Checks [`Backend::copy`].
pub(crate) fn check_copy<B: Buffer>(src: &B, from: usize, dst: &B, to: usize, len: usize) -> Result<()> {
    const OP: &str = "copy";
    BackendError::check_at_least(OP, "length of the source", from.saturating_add(len), src.n_values())?;
    BackendError::check_at_least(OP, "length of the destination", to.saturating_add(len), dst.n_values())
}

/// Checks [`Backend::read`].
pub(crate) fn check_read(src: &impl Buffer, offset: usize, dst: &[f32]) -> Result<()> {
    let end = offset.saturating_add(dst.len());
    BackendError::check_at_least("read", "length of the buffer", end, src.n_values())
}

/// Checks [`Backend::top_k`].
pub(crate) fn check_top_k(logits: &impl Buffer, n_vocab: usize, rows: &[TopK<'_>]) -> Result<()> {
    let n_rows = rows.iter().map(|of| of.row.saturating_add(1)).max().unwrap_or(0);
    let end = n_rows.saturating_mul(n_vocab);
    BackendError::check_at_least("top_k", "length of the buffer", end, logits.n_values())
}

/// Checks the sums of `n` matrices with `n_in` columns.
pub(crate) fn check_watch(n_in: usize, n: usize, squares: &InputSquares) -> Result<()> {
    const OP: &str = "watch_inputs";
    BackendError::check_equal(OP, "columns of the sums", n_in, squares.n_in())?;
    BackendError::check_equal(OP, "matrices of the sums", n, squares.n_matrices())
}

/// Checks [`Backend::upload_matrix`] and [`Backend::table`].
///
/// # Errors
/// [`BackendError::Unsupported`] for a type that only caches support and for rows that are not
/// whole blocks.
pub(crate) fn check_matrix(source: &WeightSource) -> Result<()> {
    const OP: &str = "matrix";
    let &WeightSource { dtype, n_out, n_in, ref bytes } = source;
    let unsupported = |wanted, has| BackendError::Unsupported { op: OP, requested: wanted, has };
    if !dtype.is_weight() {
        let has = "every type but the turbo cache types".to_owned();
        return Err(unsupported(format!("weights in {dtype}"), has));
    }
    let row_bytes = dtype
        .row_bytes(n_in)
        .map_err(|error| unsupported(format!("{dtype} rows of {n_in} values"), error.to_string()))?;
    BackendError::check_at_least(OP, "input features", 1, n_in)?;
    BackendError::check_equal(OP, "bytes of the weights", n_out.saturating_mul(row_bytes), bytes.len())
}

/// Checks [`Backend::upload_experts`], including [`check_matrix`] of all rows together.
pub(crate) fn check_experts(source: &WeightSource, n_experts: usize) -> Result<()> {
    const OP: &str = "experts";
    check_matrix(source)?;
    BackendError::check_at_least(OP, "experts", 1, n_experts)?;
    BackendError::check_equal(OP, "rows beyond whole experts", 0, source.n_out % n_experts)
}

/// Checks [`Backend::embed`].
pub(crate) fn check_embed(table: &impl Matrix, tokens: &[u32], out: &impl Buffer) -> Result<()> {
    const OP: &str = "embed";
    let len = tokens.len().saturating_mul(table.n_in());
    BackendError::check_at_least(OP, "length of the output", len, out.n_values())?;
    let rows = tokens.iter().map(|&token| (token as usize).saturating_add(1)).max().unwrap_or(0);
    BackendError::check_at_least(OP, "rows of the table", rows, table.n_out())
}

/// Checks [`Backend::project`].
pub(crate) fn check_project<B: Backend>(input: &Input<'_, B>, outputs: &[Output<'_, B>]) -> Result<()> {
    const OP: &str = "project";
    let Some(first) = outputs.first() else { return Ok(()) };
    let n_in = first.w.n_in();
    check_input(OP, input, n_in)?;
    for Output { w, bias, y, .. } in outputs {
        BackendError::check_equal(OP, "input features of the weights", n_in, w.n_in())?;
        check_biased_output(OP, input.rows, *w, *bias, *y)?;
    }
    Ok(())
}

/// Checks [`Backend::gated_ffn`].
pub(crate) fn check_gated_ffn<B: Backend>(
    input: &Input<'_, B>,
    gate: &B::Matrix,
    up: &B::Matrix,
    y: &B::Buffer,
) -> Result<()> {
    const OP: &str = "gated_ffn";
    check_input(OP, input, gate.n_in())?;
    BackendError::check_equal(OP, "input features of `up`", gate.n_in(), up.n_in())?;
    BackendError::check_equal(OP, "output features of `up`", gate.n_out(), up.n_out())?;
    check_output(OP, input.rows, up, y)
}

/// Checks [`Backend::dense_ffn`].
pub(crate) fn check_dense_ffn<B: Backend>(
    [x, hidden]: [&B::Buffer; 2],
    rows: usize,
    norm: Option<Norm<'_, B::Buffer>>,
    FfnWeights { gate, up, down, bias, .. }: FfnWeights<'_, B>,
    to: Option<&B::Buffer>,
) -> Result<()> {
    check_gated_ffn(&Input::<B> { x, norm, first_row: 0, rows }, gate, up, hidden)?;
    const OP: &str = "dense_ffn";
    BackendError::check_equal(OP, "input features of `down`", up.n_out(), down.n_in())?;
    BackendError::check_equal(OP, "output features of `down`", gate.n_in(), down.n_out())?;
    check_biased_output(OP, rows, down, bias, to.unwrap_or(x))
}

/// Checks [`Backend::moe_ffn`].
pub(crate) fn check_expert_ffn<B: Backend>(
    x: &B::Buffer,
    rows: usize,
    norm: Option<Norm<'_, B::Buffer>>,
    Router { routing, logits, selection_bias, scales, chosen }: Router<'_, B>,
    ExpertWeights { gate, up, down, biases, .. }: ExpertWeights<'_, B>,
    to: Option<&B::Buffer>,
) -> Result<()> {
    const OP: &str = "expert_ffn";
    let (n, n_ff, n_experts) = (gate.n_in(), gate.n_out(), gate.n_experts());
    for (what, [of_up, of_down], expected) in [
        ("experts of `up` and of `down`", [up.n_experts(), down.n_experts()], n_experts),
        ("input features of `up`, output features of `down`", [up.n_in(), down.n_out()], n),
        ("output features of `up`, input features of `down`", [up.n_out(), down.n_in()], n_ff),
    ] {
        BackendError::check_equal(OP, what, expected, of_up)?;
        BackendError::check_equal(OP, what, expected, of_down)?;
    }
    BackendError::check_at_least(OP, "experts per token", 1, routing.n_used)?;
    BackendError::check_at_least(OP, "experts", routing.n_used, n_experts)?;
    let is_plain = !routing.normalizes && routing.expert_groups.is_none() && selection_bias.is_none();
    if routing.scores == RouterScores::SparseMixer && !is_plain {
        let (requested, has) =
            ("normalized or biased weights of SparseMixer".to_owned(), "its own".to_owned());
        return Err(BackendError::Unsupported { op: OP, requested, has });
    }
    if let Some(ExpertGroups { n, n_used }) = routing.expert_groups {
        BackendError::check_at_least(OP, "expert groups per token", 1, n_used)?;
        BackendError::check_at_least(OP, "expert groups", n_used, n)?;
        BackendError::check_equal(OP, "experts beyond whole groups", 0, n_experts % n)?;
        BackendError::check_at_least(OP, "experts of the groups", routing.n_used, n_experts / n * n_used)?;
    }
    for (bias, n_out) in biases.into_iter().flatten().zip([n_ff, n_ff, n]) {
        let len = n_experts.saturating_mul(n_out);
        BackendError::check_equal(OP, "length of the biases", len, bias.n_values())?;
    }
    if let Some(selection_bias) = selection_bias {
        BackendError::check_equal(OP, "length of the selection bias", n_experts, selection_bias.n_values())?;
    }
    if let Some(chosen) = chosen {
        BackendError::check_at_least(OP, "chosen experts", rows * routing.n_used, chosen.n_values())?;
    }
    if let Some(scales) = scales {
        BackendError::check_equal(OP, "scales of experts", n_experts, scales.n_values())?;
    }
    check_norm(OP, norm, n)?;
    for stream in [Some(x), to].into_iter().flatten() {
        BackendError::check_at_least(OP, "residual length", rows.saturating_mul(n), stream.n_values())?;
    }
    let n_logits = rows.saturating_mul(n_experts);
    BackendError::check_at_least(OP, "length of the logits", n_logits, logits.n_values())
}

/// Checks [`Backend::project_per_expert`].
pub(crate) fn check_project_each<E: Experts, B: Buffer>(x: &B, rows: usize, w: &E, y: &B) -> Result<()> {
    const OP: &str = "project_each";
    let n = rows.saturating_mul(w.n_experts());
    let (n_in, n_out) = (n.saturating_mul(w.n_in()), n.saturating_mul(w.n_out()));
    BackendError::check_at_least(OP, "length of the input", n_in, x.n_values())?;
    BackendError::check_at_least(OP, "length of the output", n_out, y.n_values())
}

/// Checks [`Backend::copy_columns`].
pub(crate) fn check_copy_columns<B: Buffer>(
    src: &B,
    [rows, n]: [usize; 2],
    dst: &B,
    to: Columns,
) -> Result<()> {
    const OP: &str = "copy_columns";
    let Columns { width, first } = to;
    BackendError::check_at_least(OP, "columns of the destination", first.saturating_add(n), width)?;
    BackendError::check_at_least(OP, "length of the source", rows.saturating_mul(n), src.n_values())?;
    BackendError::check_at_least(OP, "length of the destination", rows.saturating_mul(width), dst.n_values())
}

/// Checks [`Backend::gate_rows`].
pub(crate) fn check_gate_rows<B: Buffer>(y: &B, rows: usize, cols: usize, gates: &B) -> Result<()> {
    const OP: &str = "gate_rows";
    BackendError::check_at_least(OP, "length of the rows", rows.saturating_mul(cols), y.n_values())?;
    BackendError::check_at_least(OP, "gates", rows, gates.n_values())
}

/// Checks [`Backend::add_normed`].
pub(crate) fn check_add_normed<B: Buffer>(x: &B, y: &B, rows: usize, norm: &Norm<'_, B>) -> Result<()> {
    const OP: &str = "add_normed";
    let len = rows.saturating_mul(norm.weight.n_values());
    BackendError::check_at_least(OP, "length of the sum", len, x.n_values())?;
    BackendError::check_at_least(OP, "length of the branch", len, y.n_values())
}

/// Checks [`Backend::layer_norm`].
pub(crate) fn check_layer_norm<B: Buffer>(
    x: &B,
    rows: usize,
    norm: &Norm<'_, B>,
    bias: Option<&B>,
    y: &B,
) -> Result<()> {
    const OP: &str = "layer_norm";
    let n = norm.weight.n_values();
    BackendError::check_equal(OP, "length of the bias", n, bias.map_or(n, Buffer::n_values))?;
    let len = rows.saturating_mul(n);
    BackendError::check_at_least(OP, "length of the rows", len, x.n_values())?;
    BackendError::check_at_least(OP, "length of the result", len, y.n_values())
}

/// Checks [`Backend::soft_cap`].
pub(crate) fn check_soft_cap(x: &impl Buffer, len: usize) -> Result<()> {
    BackendError::check_at_least("soft_cap", "length of the buffer", len, x.n_values())
}

/// Checks [`Backend::xielu`].
pub(crate) fn check_xielu(x: &impl Buffer, len: usize) -> Result<()> {
    BackendError::check_at_least("xielu", "length of the buffer", len, x.n_values())
}

/// Checks that two operands of the op `op` have as many rows of `width` values.
pub(crate) fn check_rows_alike<B: Buffer>(
    op: &'static str,
    x: &B,
    other: &B,
    rows: usize,
    width: usize,
) -> Result<()> {
    let len = rows.saturating_mul(width);
    BackendError::check_at_least(op, "length of the result", len, x.n_values())?;
    BackendError::check_at_least(op, "length of the operand", len, other.n_values())
}

/// Checks [`Backend::attend_bidirectional`].
pub(crate) fn check_attend_all<B: Buffer>(
    &BidirectionalParams { heads, n_kv_heads, .. }: &BidirectionalParams,
    windows: &[usize],
    bias: Option<&B>,
    [q, k, v]: [&B; 3],
    out: &B,
) -> Result<()> {
    const OP: &str = "attend_all";
    BackendError::check_at_least(OP, "values of a head", 1, heads.dim)?;
    BackendError::check_at_least(OP, "heads of keys and values", 1, n_kv_heads)?;
    BackendError::check_equal(OP, "heads beyond whole groups", 0, heads.n % n_kv_heads)?;
    let rows: usize = windows.iter().sum();
    if let Some(bias) = bias {
        let n_distances = windows.iter().max().map_or(0, |&n| n.saturating_mul(2).saturating_sub(1));
        let len = n_distances.saturating_mul(heads.n);
        BackendError::check_at_least(OP, "length of the bias", len, bias.n_values())?;
    }
    let len = |n_heads: usize| rows.saturating_mul(n_heads).saturating_mul(heads.dim);
    [(q, heads.n), (k, n_kv_heads), (v, n_kv_heads), (out, heads.n)].iter().try_for_each(|(of, n)| {
        BackendError::check_at_least(OP, "length of the buffer", len(*n), of.n_values())
    })
}

/// Checks [`Backend::apply`].
pub(crate) fn check_apply(x: &impl Buffer, len: usize) -> Result<()> {
    BackendError::check_at_least("apply", "length of the buffer", len, x.n_values())
}

/// Checks [`Backend::scale`].
pub(crate) fn check_scale(x: &impl Buffer, len: usize) -> Result<()> {
    BackendError::check_at_least("scale", "length of the buffer", len, x.n_values())
}

/// Checks [`Backend::rope`].
pub(crate) fn check_rope<B: Buffer>(
    x: &B,
    rows: usize,
    heads: Heads,
    norm: Option<Norm<'_, B>>,
    params: RopeParams,
    angles: &B,
) -> Result<()> {
    const OP: &str = "rope";
    let len = rows.saturating_mul(heads.n).saturating_mul(heads.dim);
    BackendError::check_at_least(OP, "length of the heads", len, x.n_values())?;
    BackendError::check_at_least(OP, "size of a head", params.n_rot, heads.dim)?;
    BackendError::check_equal(OP, "rotated values beyond whole pairs", 0, params.n_rot % 2)?;
    let n_angles = rows.saturating_mul(params.n_rot);
    BackendError::check_at_least(OP, "length of the angles", n_angles, angles.n_values())?;
    match norm {
        Some(norm) if norm.weight.n_values() == heads.n * heads.dim => Ok(()),
        norm => check_norm(OP, norm, heads.dim),
    }
}

/// Checks [`Backend::rope_append`], as its unfused equivalent.
pub(crate) fn check_rope_append<P: Page, B: Buffer>(
    parts: &[KvBatchEntry<'_, P>],
    rope: &Rope<'_, B>,
    [q, k, v]: [&B; 3],
    step_tiles: Option<&P>,
) -> Result<()> {
    let &Rope { params, angles, q_heads, k_heads, q_norm, k_norm } = rope;
    let rows = batch_rows(parts);
    check_rope(q, rows, q_heads, q_norm, params, angles)?;
    check_rope(k, rows, k_heads, k_norm, params, angles)?;
    check_append(parts, [k, v], step_tiles)
}

/// Checks [`Backend::find_non_finite_row`].
pub(crate) fn check_broken_row(x: &impl Buffer, rows: usize, cols: usize) -> Result<()> {
    BackendError::check_at_least(
        "broken_row",
        "length of the buffer",
        rows.saturating_mul(cols),
        x.n_values(),
    )
}

/// Checks the rows of `n_in` activations, and the norm before the product.
fn check_input<B: Backend>(op: &'static str, input: &Input<'_, B>, n_in: usize) -> Result<()> {
    let end = input.first_row.saturating_add(input.rows).saturating_mul(n_in);
    BackendError::check_at_least(op, "length of the input", end, input.x.n_values())?;
    check_norm(op, input.norm, n_in)
}

fn check_norm<B: Buffer>(op: &'static str, norm: Option<Norm<'_, B>>, len: usize) -> Result<()> {
    let weight = norm.map_or(len, |norm| norm.weight.n_values());
    BackendError::check_equal(op, "length of the norm's weight", len, weight)
}

fn check_biased_output<B: Buffer>(
    op: &'static str,
    rows: usize,
    w: &impl Matrix,
    bias: Option<&B>,
    y: &B,
) -> Result<()> {
    check_output(op, rows, w, y)?;
    let n_biases = bias.map_or(w.n_out(), Buffer::n_values);
    BackendError::check_equal(op, "length of the bias", w.n_out(), n_biases)
}

fn check_output(op: &'static str, rows: usize, w: &impl Matrix, y: &impl Buffer) -> Result<()> {
    BackendError::check_at_least(op, "length of the output", rows.saturating_mul(w.n_out()), y.n_values())
}
