//! States of recurrent layers, and pooled keys beside them: after forks, truncations, checkpoints,
//! snapshots and attached prefixes, they equal those of feeding the tokens one by one.

use std::path::Path;
use std::sync::Arc;

use kvant_backend::{Backend, PooledBatchEntry, TileLocation, TokenSpan};
use kvant_codec::DType;
use kvant_codec::random::Random;
use kvant_cpu::{CpuDevice, CpuPage};
use kvant_gguf::Gguf;
use kvant_kv::{BlockKey, BlockPool, Cache, KeyPool, KvLayerShape, KvShape, Layout, Plan, Policies};
use kvant_model::{Config, LayerRange};

use super::super::load;

const N_CTX: usize = 30_000;

struct Model {
    device: CpuDevice,
    pool: BlockPool<CpuPage>,
    layout: Arc<Layout>,
    /// f32 values of the states of two recurrent layers.
    states: [usize; 2],
    /// Tokens between their snapshots.
    every: usize,
    /// Tokens per pooled key of each layer.
    pooled: Vec<Option<usize>>,
}

impl Model {
    /// Returns a model whose recurrent layers are beside one attention layer, one without
    /// attention, and two whose layers have pooled keys, or an index with some.
    fn all() -> [Self; 4] {
        let heads = KvLayerShape {
            n_heads: 2,
            n_kv_heads: 1,
            k_head_dim: 64,
            v_head_dim: 64,
            window: None,
            shared_kv: false,
            index: None,
            pool: None,
        };
        let pool = |stride, of_index| Some(KeyPool { stride, of_index });
        let pooled =
            |stride| KvLayerShape { window: Some(128), shared_kv: true, pool: pool(stride, false), ..heads };
        let with_index = KvLayerShape { index: Some(32), ..pooled(3) };
        let of_index = KvLayerShape { index: Some(64), pool: pool(5, true), ..heads };
        let with_pooled_index = vec![of_index, KvLayerShape { pool: pool(128, true), ..of_index }];
        [
            Self::new(vec![heads], [5, 18_000], 1024),
            Self::new(Vec::new(), [5, 300], 8192),
            Self::new(vec![pooled(4), with_index, pooled(128)], [5, 200], 1024),
            Self::new(with_pooled_index, [5, 40_000], 1024),
        ]
    }

    fn new(layers: Vec<KvLayerShape>, states: [usize; 2], every: usize) -> Self {
        let shape = KvShape { layers, states: states.to_vec(), statistics: None };
        // Pooled keys are compared with what they should be.
        let dtype = if shape.layers.len() > 1 { DType::F32 } else { DType::Turbo3 };
        let plan = Plan::new(&shape, dtype, dtype, &Policies::none()).unwrap();
        let device = CpuDevice::from_env(Some(1)).unwrap();
        let layout = Arc::new(Layout::new(&shape, plan));
        let pooled = shape.layers.iter().map(|layer| Some(layer.pool?.stride)).collect();
        Self { device, pool: BlockPool::default(), layout, states, every, pooled }
    }

    fn start(&self) -> Sequence {
        let mut cache = Cache::new(Arc::clone(&self.layout), N_CTX);
        cache.set_prefix_root(BlockKey::root(&[b"states"]));
        Sequence { cache, tokens: Vec::new() }
    }
}

/// State update of a layer with a token; it is irreversible.
fn turn(layer: usize, state: &mut [u8], token: u32) {
    for (index, value) in state.chunks_exact_mut(4).enumerate().step_by(1 + 97 * layer) {
        let old = u32::from_le_bytes(value.try_into().unwrap());
        let new = (old ^ token).wrapping_mul(0x9e37_79b1).rotate_left(index as u32 % 31) ^ layer as u32;
        value.copy_from_slice(&new.to_le_bytes());
    }
}

/// Returns the pooled key of some tokens.
fn pooled_key(tokens: &[u32]) -> impl Iterator<Item = f32> {
    let sum: u32 = tokens.iter().enumerate().map(|(i, token)| token * (i as u32 % 7 + 1)).sum();
    (0..64).map(move |i| (sum % (1000 + i)) as f32)
}

#[derive(Clone)]
struct Sequence {
    cache: Cache<CpuPage>,
    tokens: Vec<u32>,
}

impl Sequence {
    /// Feeds `tokens` in steps of at most `chunk`; keys and values of tokens stay unwritten.
    fn feed(&mut self, model: &Model, tokens: &[u32], chunk: usize) {
        let mut left = tokens;
        while !left.is_empty() {
            let n = left.len().min(chunk).min(self.cache.max_rows());
            self.cache.reserve(&model.device, &model.pool, n).unwrap();
            for (layer, n_values) in model.states.into_iter().enumerate() {
                let rows: TokenSpan = self.cache.rows(0, n);
                let part = self.cache.state_part(layer, rows);
                assert_eq!((part.n_values, part.rows.n), (n_values, n));
                let state = &mut part.page.as_mut_bytes()[part.offset..][..4 * n_values];
                left[..n].iter().for_each(|&token| turn(layer, state, token));
            }
            self.tokens.extend_from_slice(&left[..n]);
            self.append_pooled(model, n);
            self.cache.commit(n);
            self.cache.register_prefix(&model.pool, &self.tokens);
            left = &left[n..];
        }
    }

    /// Appends the pooled keys that the last `n` tokens complete.
    fn append_pooled(&mut self, model: &Model, n: usize) {
        let Self { cache, tokens } = self;
        for (layer, stride) in model.pooled.iter().enumerate() {
            let (Some(stride), rows) = (*stride, cache.rows(0, n)) else { continue };
            let PooledBatchEntry { keys, .. } = cache.pooled_part(layer, rows, 0).expect("pooled keys");
            let completed = keys.rows.start..keys.rows.end();
            let key = |e: usize| pooled_key(&tokens[e * stride..(e + 1) * stride]);
            let values: Vec<f32> = completed.flat_map(key).collect();
            let mut on_device = model.device.buffer(values.len()).unwrap();
            model.device.write(&mut on_device, &values).unwrap();
            model.device.kv_append(&mut [keys], &on_device, &on_device, None).unwrap();
        }
    }

    /// Asserts that the pooled keys of `cache` are those of the tokens.
    fn check_pooled(&self, model: &Model, cache: &mut Cache<CpuPage>, what: &str) {
        for (layer, stride) in model.pooled.iter().enumerate() {
            let (Some(stride), rows) = (*stride, cache.rows(0, 1)) else { continue };
            let PooledBatchEntry { keys, .. } = cache.pooled_part(layer, rows, 0).expect("pooled keys");
            for (e, tokens) in self.tokens.chunks_exact(stride).enumerate() {
                let tile = keys.memory.tile(&keys.layer.k[0], TileLocation::Main(e / 16));
                let mut got = [0.0; 64];
                let bytes = &tile.page.as_bytes()[tile.offset..][..tile.layout.bytes()];
                tile.layout.get(bytes, e % 16, &mut got);
                assert!(pooled_key(tokens).eq(got), "{what}: layer {layer}, key {e}: {got:?}");
            }
        }
    }

    /// Truncates to at most `n` tokens; returns the tokens left.
    fn cut(&mut self, n: usize) -> usize {
        let left = self.cache.truncate(n);
        self.tokens.truncate(left);
        left
    }

    /// Asserts that the states a step would read are those of the tokens.
    fn check(&self, model: &Model, what: &str) {
        assert_eq!(self.cache.len(), self.tokens.len(), "{what}");
        let mut cache = self.cache.clone();
        cache.reserve(&model.device, &model.pool, 1).unwrap();
        for (layer, n_values) in model.states.into_iter().enumerate() {
            let mut want = vec![0; 4 * n_values];
            self.tokens.iter().for_each(|&token| turn(layer, &mut want, token));
            let rows = cache.rows(0, 1);
            let part = cache.state_part(layer, rows);
            let got = &part.page.as_bytes()[part.offset..][..want.len()];
            assert!(got == want, "{what}: layer {layer} after {} tokens", self.tokens.len());
        }
        self.check_pooled(model, &mut cache, what);
    }

    fn stored(&self, model: &Model) -> Self {
        let images: Vec<_> = self.cache.pages(&model.device).collect::<Result<_, _>>().unwrap();
        assert!(images.iter().map(Vec::len).eq(self.cache.page_bytes()));
        let next = &mut |index: usize| Ok::<_, kvant_kv::KvError>(images[index].clone());
        let (layout, state) = (Arc::clone(&model.layout), self.cache.state());
        let mut cache = Cache::from_pages(&model.device, &model.pool, layout, N_CTX, state, next).unwrap();
        cache.set_prefix_root(BlockKey::root(&[b"states"]));
        Self { cache, tokens: self.tokens.clone() }
    }
}

fn text(from: usize, to: usize) -> Vec<u32> {
    (from..to).map(|i| (i * 37 % 501) as u32).collect()
}

#[test]
fn recurrent_states_depend_on_the_tokens_alone() {
    for model in Model::all() {
        let mut random = Random::new(7);
        let mut below = |n: usize| random.bits() as usize % n;
        let (n_rounds, longest) = (12 * 1024 / model.every.min(4096), 6000.max(3 * model.every));
        for round in 0..n_rounds {
            let mut sequences = vec![model.start()];
            for _ in 0..14 {
                let which = below(sequences.len());
                let (chunk, n) = (1 + below(512), 1 + below(900 * model.every / 1024));
                let sequence = &mut sequences[which];
                let len = sequence.tokens.len();
                match below(8) {
                    0..=3 if len + n < longest => {
                        // The same text for all, so that prefixes are shared.
                        sequence.feed(&model, &text(len, len + n), chunk);
                    }
                    4 => _ = sequence.cut(below(len + 1)),
                    5 => sequence.cache.set_checkpoint(),
                    6 => {
                        let fork = sequence.clone();
                        sequences.push(fork);
                    }
                    _ => {
                        let stored = sequence.stored(&model);
                        let mut attached = model.start();
                        let prefix = text(0, longest - 1000);
                        let n = attached.cache.attach_prefix(&model.pool, &prefix);
                        assert_eq!(n % model.every, 0);
                        attached.tokens.extend_from_slice(&prefix[..n]);
                        sequences.extend([stored, attached]);
                    }
                }
                let what = format!("round {round} with snapshots every {} tokens", model.every);
                sequences.iter().for_each(|sequence| sequence.check(&model, &what));
            }
        }
    }
}

#[test]
fn truncation_returns_to_a_state_snapshot() {
    for model in Model::all() {
        let every = model.every;
        let (marked, len) = (2 * every + 452, 2 * every + 552);
        let mut sequence = model.start();
        sequence.feed(&model, &text(0, marked), 300);
        sequence.cache.set_checkpoint();
        sequence.feed(&model, &text(marked, len), 100);
        let mut fork = sequence.clone();
        assert_eq!((sequence.cut(len - 50), fork.cut(marked - 1)), (marked, 2 * every));
        sequence.check(&model, "the mark");
        fork.check(&model, "a snapshot");
        let cuts = [marked - 1, every + 476, every - 24].map(|n| sequence.cut(n));
        assert_eq!(cuts, [2 * every, every, 0]);
        // A failed step has spoilt the states, but not the snapshots.
        fork.feed(&model, &text(2 * every, 2 * every + 52), 7);
        assert_eq!(fork.cache.undo_step(), 2 * every);
        fork.tokens.truncate(2 * every);
        fork.check(&model, "after a step that failed");
    }
}

#[test]
fn prefixes_are_shared_at_state_snapshots() {
    for model in Model::all() {
        let every = model.every;
        let mut first = model.start();
        first.feed(&model, &text(0, 2 * every + 700), 512);
        let before = model.pool.n_bytes();
        let [mut second, mut third] = [model.start(), model.start()];
        assert_eq!(second.cache.attach_prefix(&model.pool, &text(0, 2 * every + 600)), 2 * every);
        assert_eq!(third.cache.attach_prefix(&model.pool, &text(0, 2 * every)), every);
        (second.tokens, third.tokens) = (text(0, 2 * every), text(0, every));
        assert_eq!(model.pool.n_bytes(), before, "shared");
        second.check(&model, "attached");
        third.check(&model, "a shorter one attached");
        // What a sequence holds is found after the one that computed it is gone.
        drop((first, third));
        assert_eq!(model.start().cache.attach_prefix(&model.pool, &text(0, 3 * every)), 2 * every);
        // The blocks are freed with the last sequence that holds them.
        drop(second);
        assert_eq!(model.pool.n_bytes(), 0);
        assert_eq!(model.start().cache.attach_prefix(&model.pool, &text(0, 3 * every)), 0);
    }
}

#[test]
fn allocated_bytes_equal_the_announced_ones() {
    for model in Model::all() {
        let mut sequence = model.start();
        let last = 8 * model.every;
        for n in [1, 15, 500, 507, 1, 1, 1023, 2, 900, last] {
            let len = sequence.tokens.len();
            let n = n.min(N_CTX - len);
            sequence.feed(&model, &text(len, len + n), 512);
            assert_eq!(sequence.cache.n_bytes(), model.layout.n_bytes(sequence.tokens.len()), "{len} + {n}");
            assert_eq!(sequence.cache.n_bytes(), model.pool.n_bytes());
        }
    }
}

#[test]
fn a_part_of_a_model_with_states_has_layers_of_both_kinds() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    let gguf = Arc::new(Gguf::open(dir.join("lfm2-h64-g2-conv3.gguf")).unwrap());
    let config = Config::from_gguf(&gguf).unwrap();
    // A convolution, attention and two convolutions.
    for (n, wants) in [
        (1, [Some("layers 0 to 0 on their own device, as none of them attends"), None]),
        (2, [None, Some("layers 2 to 3 on their own device, as none of them attends")]),
    ] {
        for (part, want) in LayerRange::split(4, n).iter().zip(wants) {
            let device = CpuDevice::from_env(Some(1)).unwrap();
            let result = load(device, config.clone(), part, &gguf, &mut |_| ()).map(|_| ());
            match want {
                Some(want) => {
                    assert_eq!(result.unwrap_err().to_string(), format!("not supported yet: {want}"))
                }
                None => result.unwrap(),
            }
        }
    }
}
