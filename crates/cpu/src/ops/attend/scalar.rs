//! The reference: one token at a time, decoded by the codec, with an online softmax in f64.

use kvant_backend::AttendParams;
use kvant_codec::tile::{TILE, prepare_query, restore_row};

use super::AttendArgs;
use super::view::View;
use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::channel_scales::HeadScales;

/// Online softmax state of one (row, query head): `out / sum` is the mean of the values so far,
/// weighted by `exp(score - max)`.
struct State {
    query: Vec<f32>,
    max: f64,
    sum: f64,
    out: Vec<f64>,
}

/// See [`super::attend`], which has checked the shapes.
pub(super) fn attend(
    pool: &Pool,
    AttendArgs { p, parts, q, sinks, step_tiles, .. }: AttendArgs<'_>,
    out: &mut [f32],
) {
    let (group, out) = (p.n_heads / p.n_kv_heads.max(1), DisjointMut::new(out));
    for part in parts {
        let rows = part.rows;
        let tiles = rows.start / TILE..rows.end().div_ceil(TILE);
        // Rows of one tile see the same forms, so they share the pass over the tokens.
        pool.for_each(p.n_kv_heads * tiles.len(), &|item| {
            let (tile, kv_head) = (tiles.start + item / p.n_kv_heads, item % p.n_kv_heads);
            let positions = rows.start.max(tile * TILE)..rows.end().min((tile + 1) * TILE);
            let queries = || {
                positions.clone().flat_map(|p| (kv_head * group..(kv_head + 1) * group).map(move |h| (p, h)))
            };
            let at = |position: usize, head: usize| (rows.first + position - rows.start) * p.n_heads + head;
            let balance = HeadScales::of(part, kv_head);
            let keys = View::new(part, &part.layer.k[kv_head], step_tiles);
            let values = View::new(part, part.layer.values(kv_head), step_tiles);
            let query = |(position, head)| {
                let mut q = q[at(position, head) * p.k_head_dim..][..p.k_head_dim].to_vec();
                if let Some(balance) = &balance {
                    balance.query.apply(0..p.k_head_dim, &q.clone(), &mut q);
                }
                State::new(&keys, &values, &q)
            };
            let mut states: Vec<State> = queries().map(query).collect();

            let oldest = |position: usize| part.layer.window_start(position);
            let (mut key, mut value) = (vec![0.0; keys.dim()], vec![0.0; values.dim()]);
            for token in oldest(positions.start)..positions.end {
                keys.read(tile, token, &mut key);
                values.read(tile, token, &mut value);
                for ((position, _), state) in queries().zip(&mut states) {
                    if (oldest(position)..=position).contains(&token) {
                        state.add(p, &key, &value);
                    }
                }
            }
            for ((position, head), mut state) in queries().zip(states) {
                if let Some(sinks) = sinks {
                    state.add_sink(sinks[head]);
                }
                let mut mean: Vec<f32> = state.out.iter().map(|&v| (v / state.sum) as f32).collect();
                let at = at(position, head) * p.v_head_dim;
                // SAFETY: each (row, query head) belongs to exactly one item.
                let out = unsafe { out.part(at..at + p.v_head_dim) };
                restore_row(values.tensor.spec.rotates, &mut mean, out);
                if let Some(of_out) = balance.as_ref().and_then(|balance| balance.out) {
                    of_out.apply(0..p.v_head_dim, &mean[..p.v_head_dim], out);
                }
            }
        });
    }
}

impl State {
    fn new(keys: &View<'_>, values: &View<'_>, query: &[f32]) -> Self {
        let mut padded = vec![0.0; keys.dim()];
        prepare_query(keys.tensor.spec.rotates, query, &mut padded);
        Self { query: padded, max: f64::NEG_INFINITY, sum: 0.0, out: vec![0.0; values.dim()] }
    }

    /// Adds a score without a value.
    fn add_sink(&mut self, sink: f32) {
        self.raise(f64::from(sink));
        self.sum += (f64::from(sink) - self.max).exp();
    }

    /// Rescales all weights to `score`, if that is the new maximum.
    fn raise(&mut self, score: f64) {
        if score > self.max {
            let rescale_old = (self.max - score).exp();
            self.sum *= rescale_old;
            self.out.iter_mut().for_each(|o| *o *= rescale_old);
            self.max = score;
        }
    }

    fn add(&mut self, p: &AttendParams, key: &[f32], value: &[f32]) {
        let dot: f64 = self.query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
        let mut score = f64::from(p.scale) * dot;
        if let Some(cap) = p.soft_cap.map(f64::from) {
            // A score that is not finite must not become the cap.
            score = cap * (score / cap).tanh() + 0.0 * score;
        }
        self.raise(score);
        // A NaN score never becomes the maximum; it makes the weight, and so the whole output, NaN.
        let weight = (score - self.max).exp();
        self.sum += weight;
        self.out.iter_mut().zip(value).for_each(|(o, &v)| *o += weight * f64::from(v));
    }
}
