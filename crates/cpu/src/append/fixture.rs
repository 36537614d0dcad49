//! Caches for tests, with a record of what their streams must hold.

use kvant_backend::{AttendParams, KvLayer, Place, Stream, StreamSpec};
use kvant_codec::random::Random;
use kvant_codec::tile::{TILE, TileLayout, prepare_row};
use kvant_codec::{DType, Rotation, Side};

use super::{is_coded, kv_append};
use crate::{CpuPage, Isa, Pool};

/// The streams of a layer to test with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) k: DType,
    pub(crate) v: DType,
    pub(crate) k_head_dim: usize,
    pub(crate) v_head_dim: usize,
    pub(crate) n_kv_heads: usize,
    pub(crate) group: usize,
    pub(crate) sink_tiles: usize,
    pub(crate) extra_tail_tiles: usize,
    pub(crate) tail: bool,
    pub(crate) alpha: f32,
}

impl Case {
    pub(crate) fn new(k: DType, v: DType) -> Self {
        Self {
            k,
            v,
            k_head_dim: 128,
            v_head_dim: 128,
            n_kv_heads: 2,
            group: 2,
            sink_tiles: 0,
            extra_tail_tiles: 0,
            tail: true,
            alpha: 1.0,
        }
    }

    pub(crate) fn spec(&self, side: Side) -> StreamSpec {
        let (dtype, head_dim) = match side {
            Side::K => (self.k, self.k_head_dim),
            Side::V => (self.v, self.v_head_dim),
        };
        let spec = StreamSpec::new(dtype, side, head_dim);
        if !is_coded(dtype) {
            return spec;
        }
        let tail_tiles = if self.tail { spec.tail_tiles + self.extra_tail_tiles } else { 0 };
        StreamSpec { sink_tiles: self.sink_tiles, tail_tiles, alpha: self.alpha, ..spec }
    }

    /// Attention of the last `rows` of `tokens` positions.
    pub(crate) fn params(&self, tokens: usize, rows: usize) -> AttendParams {
        AttendParams {
            n_heads: self.n_kv_heads * self.group,
            n_kv_heads: self.n_kv_heads,
            k_head_dim: self.k_head_dim,
            v_head_dim: self.v_head_dim,
            scale: 1.0 / (self.k_head_dim as f32).sqrt(),
            first_row: 0,
            start: tokens - rows,
            rows,
        }
    }
}

/// Rows of one stream, `[tokens][dim]`.
pub(crate) type Rows = Vec<Vec<f32>>;

/// A layer, and beside it what a reader must find in each stream: decoded rows, padded and rotated as stored.
pub(crate) struct Filled {
    pub(crate) case: Case,
    pub(crate) layer: KvLayer<CpuPage>,
    pub(crate) keys: Vec<Rows>,
    pub(crate) values: Vec<Rows>,
}

impl Filled {
    pub(crate) fn empty(case: Case) -> Self {
        let streams = |side| {
            let stream = || Stream::new(case.spec(side), &mut |bytes| Ok(CpuPage::zeroed(bytes))).unwrap();
            (0..case.n_kv_heads).map(|_| stream()).collect()
        };
        let layer = KvLayer { k: streams(Side::K), v: streams(Side::V) };
        let none = vec![Vec::new(); case.n_kv_heads];
        Self { case, layer, keys: none.clone(), values: none }
    }

    /// Gaussian keys and values, appended `chunk` tokens at a time.
    pub(crate) fn gaussian(case: Case, isa: Isa, tokens: usize, chunk: usize, seed: u64) -> Self {
        let mut filled = Self::empty(case);
        let mut random = Random::new(seed);
        let mut gaussian = |len| {
            let mut x = vec![0.0; len];
            random.fill_gaussian(&mut x, 1.0);
            x
        };
        let mut left = tokens;
        while left > 0 {
            let rows = chunk.min(left);
            let k = gaussian(rows * case.n_kv_heads * case.k_head_dim);
            let v = gaussian(rows * case.n_kv_heads * case.v_head_dim);
            filled.append(isa, &k, &v, rows);
            left -= rows;
        }
        filled
    }

    /// Appends through the device's code, and to the record through the codec.
    pub(crate) fn append(&mut self, isa: Isa, k: &[f32], v: &[f32], rows: usize) {
        for (streams, rows_of_heads, x) in
            [(&mut self.layer.k, &mut self.keys, k), (&mut self.layer.v, &mut self.values, v)]
        {
            for (head, (stream, stored)) in streams.iter_mut().zip(rows_of_heads).enumerate() {
                stream.reserve(rows, &mut |bytes| Ok(CpuPage::zeroed(bytes))).unwrap();
                record(stream, stored, rows, &|row| {
                    let head_dim = stream.spec().head_dim;
                    &x[(row * self.case.n_kv_heads + head) * head_dim..][..head_dim]
                });
            }
        }
        kv_append(isa, &Pool::new(2), &mut self.layer, k, v, 0..rows).unwrap();
    }
}

/// Adds what the stream must hold after `rows` more tokens; tokens that leave the tail change.
fn record<'a>(stream: &Stream<CpuPage>, stored: &mut Rows, rows: usize, row: &dyn Fn(usize) -> &'a [f32]) {
    let spec = stream.spec();
    let rotation = spec.rotates().then(Rotation::kv);
    let start = stored.len();
    let plan = stream.plan(rows);
    for token in 0..start + rows {
        let place = plan.place(token / TILE);
        if token >= start {
            let mut padded = vec![0.0; spec.dim()];
            prepare_row(rotation.as_ref(), row(token - start), &mut padded);
            stored.push(padded);
        } else if place == stream.place(token / TILE) || !matches!(place, Place::Main(_)) {
            continue;
        }
        let (layout, factor) = match place {
            Place::Main(_) if is_coded(spec.dtype) => (spec.main_layout(), spec.alpha),
            Place::Main(_) => (spec.main_layout(), 1.0),
            _ => (spec.f16_layout(), 1.0),
        };
        stored[token].iter_mut().for_each(|v| *v *= factor);
        through(layout, &mut stored[token]);
    }
}

fn through(layout: TileLayout, row: &mut [f32]) {
    let mut tile = vec![0; layout.bytes()];
    layout.put(&mut tile, 0, row);
    layout.get(&tile, 0, row);
}
