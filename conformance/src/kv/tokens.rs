//! Keys and values to append, and their expected decoded values.

use std::ops::{Add, Mul, Range};

use kvant_backend::{KvTensorSpec, TOKENS_PER_BLOCK, TileLocation};
use kvant_codec::Side;
use kvant_codec::tile::{TILE, TileLayout, centre, prepare_row, put_centre, restore_row};

use super::Shape;
use crate::weights::gaussian;

/// The tokens of one sequence: independent of chunks and of other sequences in the batch.
pub struct Tokens {
    /// Shape of the layer.
    pub shape: Shape,
    /// Keys, `[tokens, n_kv_heads, k_head_dim]`.
    pub k: Vec<f32>,
    /// Values, `[tokens, n_kv_heads, v_head_dim]`; empty if they are a prefix of their keys.
    pub v: Vec<f32>,
    /// Content of the K tensors, `[n_kv_heads]`.
    pub keys: Vec<Record>,
    /// Values as read, `[n_kv_heads]`: the content of the V tensors, or a part of that of the K
    /// tensors.
    pub values: Vec<Record>,
    /// Maps on queries before the scores, `[n_kv_heads]`.
    pub queries: Vec<Affine>,
    /// Maps on outputs, `[n_kv_heads]`.
    pub outs: Vec<Affine>,
}

/// `x * scale + shift`, per dimension.
pub struct Affine {
    scale: Vec<f32>,
    shift: Vec<f32>,
}

impl Affine {
    /// Returns the map on the stored rows of a KV head.
    pub fn on_rows(shape: &Shape, side: Side, kv_head: usize) -> Self {
        let layout = shape.balance_layout();
        match side {
            Side::K => Self::new(shape, side, kv_head, layout.key, None),
            Side::V if !shape.scales_values() => Self::none(shape.spec(side).head_dim),
            Side::V => Self::new(shape, side, kv_head, layout.value, Some(layout.value_shift)),
        }
    }

    /// Returns the map on the queries of a KV head, or on the outputs.
    pub fn on_results(shape: &Shape, side: Side, kv_head: usize) -> Self {
        let layout = shape.balance_layout();
        match side {
            Side::V if shape.shared_kv => {
                let Self { mut scale, mut shift } = Self::new(shape, side, kv_head, layout.query, None);
                scale.truncate(shape.v_head_dim);
                shift.truncate(shape.v_head_dim);
                Self { scale, shift }
            }
            Side::K => Self::new(shape, side, kv_head, layout.query, None),
            Side::V if !shape.scales_values() => Self::none(shape.spec(side).head_dim),
            Side::V => Self::new(shape, side, kv_head, layout.out, Some(layout.out_shift)),
        }
    }

    fn new(
        shape: &Shape,
        side: Side,
        kv_head: usize,
        scale: Range<usize>,
        shift: Option<Range<usize>>,
    ) -> Self {
        let dim = shape.spec(side).head_dim;
        let Some(values) = shape.balance() else {
            return Self::none(dim);
        };
        let of_head = |all: Range<usize>| values[all][kv_head * dim..][..dim].to_vec();
        Self { scale: of_head(scale), shift: shift.map_or_else(|| vec![0.0; dim], of_head) }
    }

    /// Returns the identity.
    fn none(dim: usize) -> Self {
        Self { scale: vec![1.0; dim], shift: vec![0.0; dim] }
    }

    /// Applies the map to `row` `[head_dim]`.
    pub fn apply<T: Copy + From<f32> + Mul<Output = T> + Add<Output = T>>(&self, row: &[T]) -> Vec<T> {
        let affine = self.scale.iter().zip(&self.shift);
        row.iter().zip(affine).map(|(&x, (&s, &b))| x * s.into() + b.into()).collect()
    }

    /// Returns the maximum factor by which it lengthens a vector.
    pub fn max_stretch(&self) -> f64 {
        self.scale.iter().fold(0.0, |max, s| max.max(f64::from(s.abs())))
    }

    /// Returns the norm of the largest intermediate values that are rounded for `out`; 0 for the
    /// identity.
    pub fn reach(&self, out: &[f64]) -> f64 {
        if self.scale.iter().all(|&s| s == 1.0) && self.shift.iter().all(|&b| b == 0.0) {
            return 0.0;
        }
        let largest = out.iter().zip(&self.shift).map(|(x, b)| x.abs() + f64::from(b.abs()));
        largest.map(|x| x * x).sum::<f64>().sqrt()
    }
}

/// Every row of a KV tensor in both forms, `[tokens]`, as encoded by the codec.
pub struct Record {
    spec: KvTensorSpec,
    sixteen: Vec<Row>,
    main: Vec<Row>,
}

/// A row of a KV tensor in one form.
pub struct Row {
    /// Padded, rotated if the KV tensor is, less the centre if it has one, `[dim]`.
    pub stored: Vec<f32>,
    /// That centre, `[dim]`.
    pub centre: Vec<f32>,
    /// The decoded value, with factors and shifts if rows have them, `[head_dim]`.
    pub plain: Vec<f32>,
}

impl Tokens {
    /// Creates tokens of independent Gaussians.
    pub fn gaussian(shape: Shape, n: usize, seed: u64) -> Self {
        let width = |head_dim| n * shape.n_kv_heads * head_dim;
        let k = gaussian(2 * seed, width(shape.k_head_dim), 1.0);
        let v_head_dim = if shape.shared_kv { 0 } else { shape.v_head_dim };
        Self::new(shape, k, gaussian(2 * seed + 1, width(v_head_dim), 1.0))
    }

    /// Creates tokens with these keys and values.
    pub fn new(shape: Shape, k: Vec<f32>, v: Vec<f32>) -> Self {
        let record = |side, x: &[f32], head: usize| {
            let spec = shape.spec(side);
            let balance = Affine::on_rows(&shape, side, head);
            let rows = x.chunks_exact(spec.head_dim).skip(head).step_by(shape.n_kv_heads);
            Record::new(spec, rows.map(|row| balance.apply(row)))
        };
        let keys = (0..shape.n_kv_heads).map(|head| record(Side::K, &k, head)).collect();
        let values = |head| match shape.shared_kv {
            true => record(Side::K, &k, head).of_values(),
            false => record(Side::V, &v, head),
        };
        let values = (0..shape.n_kv_heads).map(values).collect();
        let results = |side| (0..shape.n_kv_heads).map(move |head| Affine::on_results(&shape, side, head));
        let (queries, outs) = (results(Side::K).collect(), results(Side::V).collect());
        Self { shape, k, v, keys, values, queries, outs }
    }

    /// Creates tokens to feed alone: without the records that answers and stored tokens are
    /// compared with.
    pub fn to_feed(shape: Shape, k: Vec<f32>, v: Vec<f32>) -> Self {
        let (keys, values) = (Vec::new(), Vec::new());
        let (queries, outs) = (Vec::new(), Vec::new());
        Self { shape, k, v, keys, values, queries, outs }
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.k.len() / (self.shape.n_kv_heads * self.shape.k_head_dim)
    }

    /// Returns whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.k.is_empty()
    }
}

impl Record {
    /// Encodes rows. In a KV tensor with a tail, rows are rounded to f16 first; `alpha` scales the
    /// quantized rows.
    pub fn new(spec: KvTensorSpec, rows: impl Iterator<Item = Vec<f32>>) -> Self {
        let (mut sixteen, mut rows_to_code) = (Vec::new(), Vec::new());
        for row in rows {
            let mut padded = vec![0.0; spec.stored_dim()];
            prepare_row(spec.rotates, &row, &mut padded);
            let rounded = Row::through(&spec, spec.f16_layout(), &padded, &vec![0.0; spec.stored_dim()]);
            if spec.tail_tiles > 0 {
                padded.clone_from(&rounded.stored);
            }
            rows_to_code.push(padded);
            sixteen.push(rounded);
        }
        let coded = |(token, row): (usize, &Vec<f32>)| {
            let centre = Self::centre(&spec, &rows_to_code, token);
            let mut row: Vec<f32> = row.iter().zip(&centre).map(|(v, c)| v - c).collect();
            if spec.dtype.code().is_some() {
                row.iter_mut().for_each(|v| *v *= spec.alpha);
            }
            Row::through(&spec, spec.main_layout(), &row, &centre)
        };
        let main = rows_to_code.iter().enumerate().map(coded).collect();
        Self { spec, sixteen, main }
    }

    /// Returns the values that are a prefix of these keys.
    fn of_values(mut self) -> Self {
        let (dim, v_head_dim) = (self.spec.stored_value_dim(), self.spec.v_head_dim());
        for Row { stored, centre, plain } in self.sixteen.iter_mut().chain(&mut self.main) {
            stored.truncate(dim);
            centre.truncate(dim);
            plain.truncate(v_head_dim);
        }
        self
    }

    /// Returns the centre that is subtracted from `token` before quantization, `[dim]`.
    fn centre(spec: &KvTensorSpec, rows: &[Vec<f32>], token: usize) -> Vec<f32> {
        let mut bytes = vec![0; 2 * spec.stored_dim()];
        let first = (token / TOKENS_PER_BLOCK * TOKENS_PER_BLOCK).max(TILE * spec.sink_tiles);
        if spec.centres && first < rows.len() {
            put_centre(rows[first..rows.len().min(first + 2 * TILE)].iter().map(Vec::as_slice), &mut bytes);
        }
        centre(&bytes).collect()
    }

    /// Returns the row of `token` in 16 bits.
    pub fn sixteen(&self, token: usize) -> &Row {
        &self.sixteen[token]
    }

    /// Returns the row of `token` as it is stored once there are `n` tokens, `[dim]`; token
    /// `first`, a multiple of [`TOKENS_PER_BLOCK`], is the first of this record.
    pub fn stored_since(&self, first: usize, token: usize, n: usize) -> &[f32] {
        let location = self.spec.location(token / TILE, self.spec.first_tail_tile(n));
        let is_main = matches!(location, TileLocation::Main(_));
        let rows = if is_main { &self.main } else { &self.sixteen };
        &rows[token - first].stored
    }

    /// Returns the row of `token` as a query at `position` reads it, and whether it is quantized.
    pub fn read_at(&self, position: usize, token: usize) -> (&Row, bool) {
        let tile = token / TILE;
        if tile < self.spec.sink_tiles || tile >= self.spec.f16_window_start(position / TILE) {
            (&self.sixteen[token], false)
        } else {
            (&self.main[token], self.spec.dtype.code().is_some())
        }
    }
}

impl Row {
    /// Encodes and decodes `row` in a tile of this layout, in a block with this centre.
    fn through(spec: &KvTensorSpec, layout: TileLayout, row: &[f32], centre: &[f32]) -> Self {
        let (mut tile, mut stored) = (vec![0; layout.bytes()], vec![0.0; row.len()]);
        layout.put(&mut tile, 0, row);
        layout.get(&tile, 0, &mut stored);
        let mut restored: Vec<f32> = stored.iter().zip(centre).map(|(v, c)| v + c).collect();
        let mut plain = vec![0.0; spec.head_dim];
        restore_row(spec.rotates, &mut restored, &mut plain);
        Self { stored, centre: centre.to_vec(), plain }
    }
}
