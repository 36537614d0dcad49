//! Transforms of tensors from folder layout to GGUF layout: splits, permutations and
//! transpositions.
//!
//! Every transform is the same strided copy with other numbers: a [`View`] selects values by a
//! count and a stride for each dimension, and a tensor is the concatenation of the views of its
//! parts.

use crate::metadata::Sizes;

/// Transform of a folder tensor; shapes are outermost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transform {
    /// The whole tensor.
    Whole,
    /// The same of integers: a table of the experts of each token.
    Integers,
    /// The taps of a convolution, `[channels, 1, taps]`, as `[channels, taps]`.
    Taps,
    /// The same of a convolution of queries, keys or values alone, as `[1, channels, 1, taps]`.
    OwnTaps,
    /// Per-head values as a column, which `[1, 1, n, 1]` is already.
    Column,
    /// The same of rates within a bounded exponent, of which the file has the logarithms.
    ExponentialColumn,
    /// The only row of a matrix.
    Row,
    /// A vector split into the groups of heads of a state-space layer.
    Groups,
    /// Of stacked experts, `[experts, inputs, outputs]`, every `step`th output from `first` on, as
    /// rows.
    Columns { first: usize, step: usize },
    /// The biases of these outputs, `[experts, outputs]`.
    Biases { first: usize, step: usize },
    /// The same for outputs that are rows of 4-bit blocks, `[experts, outputs, blocks, 16 bytes]`.
    Blocks { first: usize, step: usize },
    /// Scales of such blocks, `[experts, outputs, blocks]`.
    Scales { first: usize, step: usize },
    /// The first or second half of the outputs of stacked experts, `[experts, outputs, inputs]`, or
    /// of one matrix.
    Half(usize),
    /// Of an MLA up-projection, `[heads * (keys + values), latent]`, the key part, transposed:
    /// `[heads, latent, keys]`.
    LatentKeys,
    /// The value part: `[heads, values, latent]`.
    LatentValues,
    /// Of MLA's heads of this kind, the last rows, which RoPE rotates: neighbours, not halves.
    LastNeighbours(HeadsOf),
    /// Of the queries and the key of an index, whose rows follow each other, either.
    IndexRows { keys: bool },
    /// The first values of a vector, one for each head.
    Heads,
    /// A factor of a vector, which is a row of a matrix or a vector itself.
    Factor { second: bool },
    /// Gates of attention layers.
    GatesOfAttention,
    /// Gates of recurrent layers.
    GatesOfState,
    /// A gate for each head of attention, `[heads, inputs]`; other shapes are another tensor.
    GatesOfHeads,
    /// A gate for each dim of the heads of a state; other shapes are another tensor.
    GatesOfDims,
    /// Queries, keys and values, each contiguous, from rows grouped by key head (its query, its
    /// key, and the values and gates of the value heads that share it).
    DeltaQkv,
    /// The gates among these rows.
    DeltaGate,
    /// Rows of the value heads, optionally after those of queries and keys, one or `v_dim` rows per
    /// head. Reorders value heads so that those that share a key head are as many heads apart as
    /// there are key heads.
    Tiled { behind_keys: bool, per_value: bool },
    /// Columns of the value heads, in that order.
    TiledColumns,
}

/// Kind of heads of MLA whose last rows RoPE rotates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeadsOf {
    Queries,
    /// The latent vector and the part of a key with RoPE.
    Latent,
    /// Queries or the key of an index.
    Index,
}

/// A strided selection of tensor values: count and stride per dimension, outermost first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct View {
    pub first: usize,
    pub steps: Vec<(usize, usize)>,
}

impl View {
    /// Interleaves the two halves of each head, for rows of `row` values.
    pub fn interleave_halves(heads: usize, rows: usize, row: usize) -> Self {
        let dim = rows / heads;
        Self { first: 0, steps: vec![(heads, dim * row), (dim / 2, row), (2, dim / 2 * row), (row, 1)] }
    }

    /// Returns the same selection in blocks of `len` values; `None` if it divides one.
    pub fn in_blocks(&self, len: usize) -> Option<Self> {
        let (last, outer) = self.steps.split_last()?;
        let is_whole = last.1 == 1
            && [self.first, last.0].iter().chain(outer.iter().map(|(_, step)| step)).all(|n| n % len == 0);
        let mut steps: Vec<_> = outer.iter().map(|(n, step)| (*n, step / len)).collect();
        steps.push((last.0 / len, 1));
        is_whole.then_some(Self { first: self.first / len, steps })
    }

    /// Number of selected values.
    fn len(&self) -> usize {
        self.steps.iter().map(|(n, _)| n).product()
    }

    /// Appends the selected values, of `size` bytes each, to `out`.
    pub fn copy(&self, bytes: &[u8], size: usize, out: &mut Vec<u8>) {
        out.reserve(self.len() * size);
        copy(&bytes[self.first * size..], &self.steps, size, out);
    }
}

fn copy(bytes: &[u8], steps: &[(usize, usize)], size: usize, out: &mut Vec<u8>) {
    match steps {
        [] => out.extend_from_slice(&bytes[..size]),
        // Contiguous values.
        [(n, 1)] => out.extend_from_slice(&bytes[..n * size]),
        [(n, step), rest @ ..] => (0..*n).for_each(|i| copy(&bytes[i * step * size..], rest, size, out)),
    }
}

/// Shape of a transformed tensor, outermost first, and its views; empty views keep the original
/// order.
pub(crate) type TransformedShape = (Vec<usize>, Vec<View>);

impl Transform {
    /// Returns whether it is made for a tensor of this shape in a layer, counted from 1.
    pub fn is_for(self, shape: &[usize], layer: usize, sizes: &Sizes) -> bool {
        let is_per_head = shape.first() == Some(&sizes.n_heads);
        let attends = layer > 0 && sizes.attends.get(layer - 1) == Some(&true);
        match self {
            Self::GatesOfAttention => attends,
            Self::GatesOfState => !attends,
            Self::GatesOfHeads => is_per_head,
            Self::GatesOfDims => !is_per_head,
            _ => true,
        }
    }

    /// Returns which part of a tensor of several transforms it makes.
    pub fn part(self) -> usize {
        usize::from(matches!(self, Self::Scales { .. } | Self::Factor { second: true }))
    }

    /// Applies the transform to a tensor of this shape.
    ///
    /// # Errors
    /// A description of the expected shape.
    pub fn of(self, shape: &[usize], sizes: &Sizes) -> Result<TransformedShape, String> {
        let view = |first, steps: &[(usize, usize)]| View { first, steps: steps.to_vec() };
        let experts = sizes.n_experts;
        match (self, shape) {
            (
                Self::Whole
                | Self::Integers
                | Self::GatesOfAttention
                | Self::GatesOfState
                | Self::GatesOfHeads
                | Self::GatesOfDims,
                shape,
            ) => Ok((shape.to_vec(), Vec::new())),
            (Self::Heads, &[n]) if n >= sizes.n_heads => {
                Ok((vec![sizes.n_heads], vec![view(0, &[(sizes.n_heads, 1)])]))
            }
            (Self::Factor { .. }, &[n] | &[1, n]) => Ok((vec![n], Vec::new())),
            (Self::Row, &[1, n]) => Ok((vec![n], Vec::new())),
            (Self::Column | Self::ExponentialColumn, &[1, 1, _, 1]) => Ok((shape.to_vec(), Vec::new())),
            (Self::Column | Self::ExponentialColumn, &[n]) => Ok((vec![n, 1], Vec::new())),
            (Self::Groups, &[n]) if sizes.space.is_some_and(|space| n.is_multiple_of(space.n_groups)) => {
                let groups = sizes.space.map_or(1, |space| space.n_groups);
                Ok((vec![groups, n / groups], Vec::new()))
            }
            (Self::OwnTaps, &[n, 1, taps] | &[n, taps]) => Ok((vec![1, n, 1, taps], Vec::new())),
            (Self::Taps, &[n, 1, taps]) => Ok((vec![n, taps], Vec::new())),
            (Self::Columns { first, step }, &[e, n_in, n_out])
                if e == experts && n_out.is_multiple_of(step) =>
            {
                let steps = [(e, n_in * n_out), (n_out / step, step), (n_in, n_out)];
                Ok((vec![e, n_out / step, n_in], vec![view(first, &steps)]))
            }
            (Self::Biases { first, step }, &[e, n]) if e == experts && n.is_multiple_of(step) => {
                Ok((vec![e, n / step], vec![view(first, &[(e, n), (n / step, step)])]))
            }
            (Self::Blocks { first, step }, &[e, n, blocks, 16]) if e == experts && n.is_multiple_of(step) => {
                let row = 16 * blocks;
                let steps = [(e, n * row), (n / step, step * row), (row, 1)];
                Ok((vec![e, n / step, 32 * blocks], vec![view(first * row, &steps)]))
            }
            (Self::Scales { first, step }, &[e, n, blocks]) if e == experts && n.is_multiple_of(step) => {
                let steps = [(e, n * blocks), (n / step, step * blocks), (blocks, 1)];
                Ok((vec![e, n / step, 32 * blocks], vec![view(first * blocks, &steps)]))
            }
            (Self::Half(half), &[e, n, n_in]) if e == experts && n.is_multiple_of(2) => {
                let all = n / 2 * n_in;
                Ok((vec![e, n / 2, n_in], vec![view(half * all, &[(e, 2 * all), (all, 1)])]))
            }
            (Self::Half(half), &[n, n_in]) if n.is_multiple_of(2) => {
                let all = n / 2 * n_in;
                Ok((vec![n / 2, n_in], vec![view(half * all, &[(all, 1)])]))
            }
            (Self::LatentKeys | Self::LatentValues, &[rows, rank]) => self.of_latent(rows, rank, sizes),
            (Self::LastNeighbours(kind), shape) => last_neighbours(kind, shape, sizes),
            (Self::IndexRows { keys }, &[rows, row]) => index_rows(keys, rows, row, sizes),
            (Self::DeltaQkv | Self::DeltaGate, &[rows, row]) => self.of_delta(rows, row, sizes),
            (Self::Tiled { behind_keys, per_value }, shape) => tiled(behind_keys, per_value, shape, sizes),
            (Self::TiledColumns, &[rows, row]) => tiled_columns(rows, row, sizes),
            (cut, _) => Err(format!("a shape for {cut:?} of {experts} experts")),
        }
    }

    fn of_latent(self, rows: usize, rank: usize, sizes: &Sizes) -> Result<TransformedShape, String> {
        let Some(latent) = sizes.latent else { return Err("none".to_owned()) };
        let (heads, keys, values) = (sizes.n_heads, latent.k_dim, latent.v_dim);
        let per_head = keys + values;
        if (rows, rank) != (heads * per_head, latent.rank) {
            return Err(format!("{heads} heads of {per_head} rows of {}", latent.rank));
        }
        let (shape, first, inner) = match self {
            Self::LatentKeys => ([heads, rank, keys], 0, vec![(rank, 1), (keys, rank)]),
            _ => ([heads, values, rank], keys * rank, vec![(values * rank, 1)]),
        };
        let steps = [vec![(heads, per_head * rank)], inner].concat();
        Ok((shape.to_vec(), vec![View { first, steps }]))
    }

    fn of_delta(self, rows: usize, row: usize, sizes: &Sizes) -> Result<TransformedShape, String> {
        let Some(delta) = sizes.delta else { return Err("none".to_owned()) };
        let (heads, key, shared) = (delta.n_k_heads, delta.k_dim, delta.n_sharing() * delta.v_dim);
        let per_head = 2 * (key + shared);
        if rows != heads * per_head {
            return Err(format!("{heads} heads of {per_head} rows"));
        }
        let of_each = |first: usize, n: usize| View {
            first: first * row,
            steps: vec![(heads, per_head * row), (n * row, 1)],
        };
        Ok(match self {
            Self::DeltaQkv => (
                vec![heads * (2 * key + shared), row],
                vec![of_each(0, key), of_each(key, key), of_each(2 * key, shared)],
            ),
            _ => (vec![heads * shared, row], vec![of_each(2 * key + shared, shared)]),
        })
    }
}

/// Separates the last head of an index, its key, from those of queries.
fn index_rows(keys: bool, rows: usize, row: usize, sizes: &Sizes) -> Result<TransformedShape, String> {
    let dim = sizes.index_dim.unwrap_or(0);
    if dim == 0 || rows <= dim || !rows.is_multiple_of(dim) {
        return Err(format!("heads of {dim} rows, the last of which is the key"));
    }
    let (first, n) = if keys { (rows - dim, dim) } else { (0, rows - dim) };
    Ok((vec![n, row], vec![View { first: first * row, steps: vec![(n * row, 1)] }]))
}

/// Interleaves the halves of the last rows of each head.
fn last_neighbours(kind: HeadsOf, shape: &[usize], sizes: &Sizes) -> Result<TransformedShape, String> {
    let Some(latent) = sizes.latent else { return Err("none".to_owned()) };
    let dim = match kind {
        HeadsOf::Queries => latent.k_dim + latent.n_rot,
        HeadsOf::Latent => latent.rank + latent.n_rot,
        HeadsOf::Index => sizes.index_dim.unwrap_or(0),
    };
    let (n, n_rot) = (shape[0], latent.n_rot);
    let Some(plain) = dim.checked_sub(n_rot).filter(|_| n_rot % 2 == 0 && n.is_multiple_of(dim)) else {
        return Err(format!("heads of {dim} rows, of which the last {n_rot} are rotated"));
    };
    let row = shape[1..].iter().product::<usize>();
    let of_head = |head: usize| {
        let turned = View { first: (head * dim + plain) * row, ..View::interleave_halves(1, n_rot, row) };
        [View { first: head * dim * row, steps: vec![(plain * row, 1)] }, turned]
    };
    Ok((shape.to_vec(), (0..n / dim).flat_map(of_head).collect()))
}

/// Reorders rows, or single values, of value heads so that sharing heads are as many apart as there
/// are key heads.
fn tiled(
    behind_keys: bool,
    per_value: bool,
    shape: &[usize],
    sizes: &Sizes,
) -> Result<TransformedShape, String> {
    let Some(delta) = sizes.delta else { return Err("none".to_owned()) };
    let (groups, sharing) = (delta.n_k_heads, delta.n_sharing());
    let rows = if per_value { delta.v_dim } else { 1 };
    let front = if behind_keys { 2 * groups * delta.k_dim } else { 0 };
    let (n, row) = (shape[0], shape[1..].iter().product::<usize>());
    if n != front + groups * sharing * rows {
        return Err(format!("{} rows", front + groups * sharing * rows));
    }
    let head = rows * row;
    let keys = View { first: 0, steps: vec![(front * row, 1)] };
    let values =
        View { first: front * row, steps: vec![(sharing, head), (groups, sharing * head), (head, 1)] };
    let views = if behind_keys { vec![keys, values] } else { vec![values] };
    // The last of three dimensions of a convolution holds its taps.
    let shape = if shape.len() == 3 { vec![n, row] } else { shape.to_vec() };
    Ok((shape, views))
}

fn tiled_columns(rows: usize, row: usize, sizes: &Sizes) -> Result<TransformedShape, String> {
    let Some(delta) = sizes.delta else { return Err("none".to_owned()) };
    let (groups, sharing, dim) = (delta.n_k_heads, delta.n_sharing(), delta.v_dim);
    if row != groups * sharing * dim {
        return Err(format!("rows of {} values", groups * sharing * dim));
    }
    let steps = vec![(rows, row), (sharing, dim), (groups, sharing * dim), (dim, 1)];
    Ok((vec![rows, row], vec![View { first: 0, steps }]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_each_head_are_interleaved() {
        // Two heads of four rows of two bytes.
        let rows: Vec<u8> = (0..8).flat_map(|row| [row, 100 + row]).collect();
        let mut order = Vec::new();
        View::interleave_halves(2, 8, 2).copy(&rows, 1, &mut order);
        let firsts: Vec<u8> = order.chunks(2).map(|row| row[0]).collect();
        assert_eq!(firsts, [0, 2, 1, 3, 4, 6, 5, 7]);
        assert!(order.chunks(2).all(|row| row[1] == 100 + row[0]));
    }

    #[test]
    fn views_of_whole_blocks_select_blocks() {
        let rows = View::interleave_halves(2, 8, 64);
        let blocks = rows.in_blocks(32).unwrap();
        let (mut values, mut of_blocks) = (Vec::new(), Vec::new());
        let bytes: Vec<u8> = (0..8 * 64).map(|at| (at / 32) as u8).collect();
        rows.copy(&bytes, 1, &mut values);
        blocks.copy(&bytes.iter().step_by(32).copied().collect::<Vec<_>>(), 1, &mut of_blocks);
        assert_eq!(of_blocks, values.into_iter().step_by(32).collect::<Vec<_>>());
        assert!(View { first: 0, steps: vec![(2, 1), (2, 3)] }.in_blocks(2).is_none());
        assert!(View { first: 16, steps: vec![(64, 1)] }.in_blocks(32).is_none());
    }

    #[test]
    fn views_copy_multi_byte_values_by_stride() {
        // Two by three values of two bytes, transposed from the second column on.
        let bytes: Vec<u8> = (0..12).collect();
        let mut out = vec![99];
        View { first: 1, steps: vec![(2, 1), (2, 3)] }.copy(&bytes, 2, &mut out);
        assert_eq!(out, [99, 2, 3, 8, 9, 4, 5, 10, 11]);
    }
}
