//! Parameters of attention to pooled keys (DeepSeek-V4), and their shape checks.
//!
//! A pooled key stands for the tokens of a stride: key e for the tokens before `(e + 1) stride`. A
//! row at position P sees the keys `e < (P + 1) / stride`, rounded down.

use crate::device::{Buffer, Page, Result};
use crate::kv::{check_attend, check_index};
use crate::recurrent::check_state;
use crate::{AttendParams, BackendError, KvBatchEntry, Selection, StateBatchEntry, TokenSpan};

/// How the rows of consecutive tokens become one, channel by channel (DeepSeek-V4). With the stride
/// s, a pooled row e is
///
/// ```text
/// y[e, c] = Σ_j w[j] x[e s + j, c],  w = softmax_j(gates[e s + j, c] + bias[j, c])   j = 0 .. s
/// ```
///
/// Where pools overlap, rows are twice as wide: the sum is over the second halves of these tokens
/// and, but for the first row, the first halves of the s tokens before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenPool {
    /// Tokens per pooled row.
    pub stride: usize,
    /// Values of a pooled row.
    pub width: usize,
    /// Whether a pooled row is of the tokens of the stride before too; rows have twice the width
    /// then, the first half for the next stride.
    pub overlaps: bool,
}

impl TokenPool {
    /// Returns the values per row of a token.
    pub fn n_in(&self) -> usize {
        if self.overlaps { 2 * self.width } else { self.width }
    }

    /// Returns the values of the state: of the tokens of an unfinished row, and where rows overlap
    /// of those for the next, the largest gate, the weighted sum and the sum of weights, `[3,
    /// width]` each.
    pub fn n_state(&self) -> usize {
        3 * self.n_in()
    }

    /// Returns the pooled rows that tokens complete, numbered from that of the first token.
    pub fn completed(stride: usize, tokens: TokenSpan) -> std::ops::Range<usize> {
        tokens.start / stride..tokens.end() / stride
    }
}

/// One sequence of a step, as its tokens read pooled keys.
#[derive(Debug)]
pub struct PooledBatchEntry<'a, P: Page> {
    /// Its tokens in the batch.
    pub tokens: TokenSpan,
    /// Tokens per key.
    pub stride: usize,
    /// The pooled keys, of which its rows are those that the tokens complete.
    pub keys: KvBatchEntry<'a, P>,
}

impl<P: Page> PooledBatchEntry<'_, P> {
    /// Returns the number of keys that a token at `position` sees.
    pub fn n_seen(&self, position: usize) -> usize {
        (position + 1) / self.stride
    }

    /// Returns the pooled keys, to append those that the tokens complete.
    pub fn own(&mut self) -> KvBatchEntry<'_, P> {
        let KvBatchEntry { rows, layer, memory, step_offset, channel_scales } = &mut self.keys;
        let (rows, step_offset, channel_scales) = (*rows, *step_offset, *channel_scales);
        KvBatchEntry { rows, layer, memory, step_offset, channel_scales }
    }

    /// Returns the same sequence as the index of its pooled keys processes it; `None` without an
    /// index.
    pub fn index(&mut self) -> Option<PooledBatchEntry<'_, P>> {
        let Self { tokens, stride, keys } = self;
        Some(PooledBatchEntry { tokens: *tokens, stride: *stride, keys: keys.index()? })
    }
}

/// The pooled keys that the rows of a step attend to beside their tokens.
#[derive(Debug)]
pub struct PooledKeys<'a, 'p, P: Page, Buffer> {
    /// The keys of each sequence.
    pub parts: &'a [PooledBatchEntry<'p, P>],
    /// Those that rows attend to, if not all that they see.
    pub selected: Option<SelectedKeys<'a, Buffer>>,
    /// Attention sinks beside them, as of [`Backend::attend`](crate::Backend::attend).
    pub sinks: Option<&'a Buffer>,
}

impl<P: Page, Buffer> Clone for PooledKeys<'_, '_, P, Buffer> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Page, Buffer> Copy for PooledKeys<'_, '_, P, Buffer> {}

/// Pooled keys that rows attend to.
#[derive(Debug)]
pub struct SelectedKeys<'a, Buffer> {
    /// Their numbers, ascending, `[rows, n_used]`. Exact, as they are below 2^24.
    pub numbers: &'a Buffer,
    /// Keys that a row attends to. Rows that see no more have no numbers.
    pub n_used: usize,
}

impl<Buffer> Clone for SelectedKeys<'_, Buffer> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buffer> Copy for SelectedKeys<'_, Buffer> {}

/// Checks [`Backend::pool_tokens`](crate::Backend::pool_tokens).
///
/// # Errors
/// [`BackendError::Shape`] that names the operand at fault.
pub(crate) fn check_pool_tokens<P: Page, B: Buffer>(
    parts: &[StateBatchEntry<'_, P>],
    pool: TokenPool,
    [x, gates, bias, y]: [&B; 4],
) -> Result<()> {
    const OP: &str = "pool_tokens";
    BackendError::check_at_least(OP, "tokens per pooled row", 1, pool.stride)?;
    BackendError::check_equal(OP, "length of the bias", pool.stride * pool.n_in(), bias.n_values())?;
    let mut n_pooled = 0;
    for part in parts {
        let rows = part.rows.range().end;
        for of_rows in [x, gates] {
            BackendError::check_at_least(OP, "length of the rows", rows * pool.n_in(), of_rows.n_values())?;
        }
        check_state(OP, part, pool.n_state())?;
        n_pooled += TokenPool::completed(pool.stride, part.rows).len();
    }
    BackendError::check_at_least(OP, "length of the output", n_pooled * pool.width, y.n_values())
}

/// Checks [`Backend::select_pooled`](crate::Backend::select_pooled).
///
/// # Errors
/// As [`check_pool_tokens`].
pub(crate) fn check_select_pooled<P: Page, B: Buffer>(
    Selection { n_heads, n_used }: Selection,
    parts: &[PooledBatchEntry<'_, P>],
    [q, weights, selected]: [&B; 3],
) -> Result<()> {
    const OP: &str = "select_pooled";
    BackendError::check_at_least(OP, "keys that a row attends to", 1, n_used)?;
    for part in parts {
        let rows = part.tokens.range().end;
        BackendError::check_at_least(OP, "weights", rows * n_heads, weights.n_values())?;
        check_pooled(OP, part)?;
        check_index(OP, &part.keys, [rows, n_heads], q, None)?;
        check_numbers(OP, part, n_used, selected)?;
    }
    Ok(())
}

/// Checks [`Backend::attend_pooled`](crate::Backend::attend_pooled).
///
/// # Errors
/// As [`check_pool_tokens`].
pub(crate) fn check_attend_pooled<P: Page, B: Buffer>(
    p: &AttendParams,
    parts: &[KvBatchEntry<'_, P>],
    [q, out]: [&B; 2],
    PooledKeys { parts: pooled, selected, sinks }: PooledKeys<'_, '_, P, B>,
    step_tiles: Option<&P>,
) -> Result<()> {
    const OP: &str = "attend_pooled";
    check_attend(p, parts, [q, out], sinks, step_tiles)?;
    BackendError::check_equal(OP, "sequences with pooled keys", parts.len(), pooled.len())?;
    BackendError::check_equal(OP, "KV heads", 1, p.n_kv_heads)?;
    for (part, pooled) in parts.iter().zip(pooled) {
        check_pooled(OP, pooled)?;
        BackendError::check_equal(OP, "tokens of a sequence", part.rows.n, pooled.tokens.n)?;
        BackendError::check_equal(OP, "position of the first token", part.rows.start, pooled.tokens.start)?;
        BackendError::check_equal(OP, "tensors of pooled keys", 1, pooled.keys.layer.k.len())?;
        let (own, of_pooled) = (&part.layer.k[0].spec, &pooled.keys.layer.k[0].spec);
        let is_alike = own.shared_kv.is_some()
            && (own.shared_kv, own.dtype, own.rotates)
                == (of_pooled.shared_kv, of_pooled.dtype, of_pooled.rotates);
        BackendError::check_equal(OP, "tensors alike", 1, usize::from(is_alike))?;
        BackendError::check_equal(OP, "size of a pooled key", own.head_dim, of_pooled.head_dim)?;
        if let Some(SelectedKeys { numbers, n_used }) = selected {
            check_numbers(OP, pooled, n_used, numbers)?;
        }
    }
    Ok(())
}

/// Checks that the keys of a sequence are those of its tokens, and need no step tiles.
fn check_pooled<P: Page>(op: &'static str, part: &PooledBatchEntry<'_, P>) -> Result<()> {
    BackendError::check_at_least(op, "tokens per key", 1, part.stride)?;
    let completed = TokenPool::completed(part.stride, part.tokens);
    BackendError::check_equal(op, "keys of the tokens", completed.end, part.keys.rows.end())?;
    let tail_tiles = part.keys.layer.tensors().map(|tensor| tensor.spec.tail_tiles).sum();
    BackendError::check_equal(op, "tiles in tails of pooled keys", 0, tail_tiles)
}

/// Checks that a buffer has `n_used` numbers of keys of each row, and that they are exact.
fn check_numbers<P: Page, B: Buffer>(
    op: &'static str,
    part: &PooledBatchEntry<'_, P>,
    n_used: usize,
    numbers: &B,
) -> Result<()> {
    let n = part.tokens.range().end * n_used;
    BackendError::check_at_least(op, "numbers of selected keys", n, numbers.n_values())?;
    let n_exact = 1 << f32::MANTISSA_DIGITS;
    BackendError::check_at_least(op, "keys with an exact number", part.keys.rows.end(), n_exact)
}
