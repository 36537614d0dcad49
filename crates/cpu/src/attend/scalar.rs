//! The reference: one token at a time, decoded by the codec, with an online softmax in f64.

use kvant_backend::{AttendParams, KvLayer, Stream};
use kvant_codec::Rotation;
use kvant_codec::tile::{TILE, restore_row};

use crate::shards::Shards;
use crate::{CpuPage, Pool};

/// Query rows that share one walk over the tokens.
const ROWS: usize = 32;

/// The softmax so far of one (query row, query head): `out / sum` is the mean of the values seen, weighted by
/// `exp(score - max)`.
struct State {
    query: Vec<f32>,
    max: f64,
    sum: f64,
    out: Vec<f64>,
}

/// See [`super::attend`], which has checked the shapes.
pub(super) fn attend(pool: &Pool, p: &AttendParams, q: &[f32], layer: &KvLayer<CpuPage>, out: &mut [f32]) {
    let group = p.n_heads / p.n_kv_heads.max(1);
    let row_blocks = p.rows.div_ceil(ROWS);
    let out = Shards::new(out);
    pool.for_each(p.n_kv_heads * row_blocks, &|item| {
        let (head, first_row) = (item / row_blocks, item % row_blocks * ROWS);
        let (keys, values) = (&layer.k[head], &layer.v[head]);
        let queries = || {
            let rows = first_row..(first_row + ROWS).min(p.rows);
            rows.flat_map(|row| (head * group..(head + 1) * group).map(move |head| (row, head)))
        };
        let mut states: Vec<State> = queries()
            .map(|(row, head)| {
                let query = &q[(row * p.n_heads + head) * p.k_head_dim..][..p.k_head_dim];
                let out = vec![0.0; values.spec().dim()];
                State { query: prepare_query(keys, query), max: f64::NEG_INFINITY, sum: 0.0, out }
            })
            .collect();

        let last_position = p.start + (first_row + ROWS).min(p.rows) - 1;
        let (mut key, mut value) = (vec![0.0; keys.spec().dim()], vec![0.0; values.spec().dim()]);
        for token in 0..=last_position {
            read(keys, token, &mut key);
            read(values, token, &mut value);
            for ((row, _), state) in queries().zip(&mut states) {
                if token <= p.start + row {
                    state.add(p.scale, &key, &value);
                }
            }
        }

        let rotation = values.spec().rotates().then(Rotation::kv);
        for ((row, head), state) in queries().zip(states) {
            let mut mean: Vec<f32> = state.out.iter().map(|&v| (v / state.sum) as f32).collect();
            let at = (row * p.n_heads + head) * p.v_head_dim;
            // SAFETY: each (row, query head) belongs to exactly one item.
            let out = unsafe { out.part(at..at + p.v_head_dim) };
            restore_row(rotation.as_ref(), &mut mean, out);
        }
    });
}

/// Pads a query to the width of the keys and rotates it if they are. Bad numbers stay what they are.
fn prepare_query(keys: &Stream<CpuPage>, query: &[f32]) -> Vec<f32> {
    let mut padded = vec![0.0; keys.spec().dim()];
    padded[..query.len()].copy_from_slice(query);
    if keys.spec().rotates() {
        Rotation::kv().forward(&mut padded);
    }
    padded
}

fn read(stream: &Stream<CpuPage>, token: usize, row: &mut [f32]) {
    let tile = stream.tile(token / TILE);
    let bytes = &tile.page.as_bytes()[tile.offset..][..tile.layout.bytes()];
    tile.layout.get(bytes, token % TILE, row);
}

impl State {
    fn add(&mut self, scale: f32, key: &[f32], value: &[f32]) {
        let dot: f64 = self.query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
        let score = f64::from(scale) * dot;
        if score > self.max {
            let shrink = (self.max - score).exp();
            self.sum *= shrink;
            self.out.iter_mut().for_each(|o| *o *= shrink);
            self.max = score;
        }
        // A NaN score never becomes the maximum; it makes the weight, and so the whole output, NaN.
        let weight = (score - self.max).exp();
        self.sum += weight;
        self.out.iter_mut().zip(value).for_each(|(o, &v)| *o += weight * f64::from(v));
    }
}
