//! Keys and values to feed, and what each must read back as.

use kvant_backend::StreamSpec;
use kvant_codec::Side;
use kvant_codec::tile::{TILE, TileLayout, prepare_row, restore_row};

use super::Shape;
use crate::weights::gaussian;

/// The tokens of one sequence: the same however they are fed, and in whatever company.
pub struct Tokens {
    /// Of which layer.
    pub shape: Shape,
    /// Keys, `[tokens, n_kv_heads, k_head_dim]`.
    pub k: Vec<f32>,
    /// Values, `[tokens, n_kv_heads, v_head_dim]`.
    pub v: Vec<f32>,
    /// What the streams of keys hold, `[n_kv_heads]`.
    pub keys: Vec<Record>,
    /// What the streams of values hold, `[n_kv_heads]`.
    pub values: Vec<Record>,
}

/// Every row of a stream in both forms, `[tokens]`, as the codec makes them.
pub struct Record {
    spec: StreamSpec,
    sixteen: Vec<Row>,
    main: Vec<Row>,
}

/// A row of a stream in one form.
pub struct Row {
    /// Padded, rotated where the stream is, `[dim]`.
    pub stored: Vec<f32>,
    /// What it stands for, `[head_dim]`.
    pub plain: Vec<f32>,
}

impl Tokens {
    /// Independent Gaussians.
    pub fn gaussian(shape: Shape, n: usize, seed: u64) -> Self {
        let width = |head_dim| n * shape.n_kv_heads * head_dim;
        let k = gaussian(2 * seed, width(shape.k_head_dim), 1.0);
        Self::new(shape, k, gaussian(2 * seed + 1, width(shape.v_head_dim), 1.0))
    }

    /// Tokens with these keys and values.
    pub fn new(shape: Shape, k: Vec<f32>, v: Vec<f32>) -> Self {
        let record = |side, x: &[f32], head: usize| {
            let spec = shape.spec(side);
            let rows = x.chunks_exact(spec.head_dim).skip(head).step_by(shape.n_kv_heads);
            Record::new(spec, rows)
        };
        let keys = (0..shape.n_kv_heads).map(|head| record(Side::K, &k, head)).collect();
        let values = (0..shape.n_kv_heads).map(|head| record(Side::V, &v, head)).collect();
        Self { shape, k, v, keys, values }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.k.len() / (self.shape.n_kv_heads * self.shape.k_head_dim)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.k.is_empty()
    }
}

impl Record {
    /// Rows are rounded to f16 first and coded from there in a stream that has a tail; `alpha` scales what is coded.
    fn new<'a>(spec: StreamSpec, rows: impl Iterator<Item = &'a [f32]>) -> Self {
        let (mut sixteen, mut main) = (Vec::new(), Vec::new());
        for row in rows {
            let mut padded = vec![0.0; spec.dim()];
            prepare_row(spec.rotates, row, &mut padded);
            let rounded = Row::through(&spec, spec.f16_layout(), &padded);
            if spec.tail_tiles > 0 {
                padded.clone_from(&rounded.stored);
            }
            if spec.dtype.code().is_some() {
                padded.iter_mut().for_each(|v| *v *= spec.alpha);
            }
            main.push(Row::through(&spec, spec.main_layout(), &padded));
            sixteen.push(rounded);
        }
        Self { spec, sixteen, main }
    }

    /// The row of `token` as it is in 16 bit.
    pub fn sixteen(&self, token: usize) -> &Row {
        &self.sixteen[token]
    }

    /// The row of `token` as it is in the blocks.
    pub fn main(&self, token: usize) -> &Row {
        &self.main[token]
    }

    /// The row of `token` as a query at `position` sees it, and whether that is in codes.
    pub fn seen(&self, position: usize, token: usize) -> (&Row, bool) {
        let tile = token / TILE;
        if tile < self.spec.sink_tiles || tile >= self.spec.window(position / TILE) {
            (&self.sixteen[token], false)
        } else {
            (&self.main[token], self.spec.dtype.code().is_some())
        }
    }
}

impl Row {
    /// What becomes of `row` in a tile of this layout.
    fn through(spec: &StreamSpec, layout: TileLayout, row: &[f32]) -> Self {
        let (mut tile, mut stored) = (vec![0; layout.bytes()], vec![0.0; row.len()]);
        layout.put(&mut tile, 0, row);
        layout.get(&tile, 0, &mut stored);
        let mut plain = vec![0.0; spec.head_dim];
        restore_row(spec.rotates, &mut stored.clone(), &mut plain);
        Self { stored, plain }
    }
}
