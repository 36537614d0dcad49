//! A layer that attends to the keys and values of an earlier layer.

use std::ops::Range;

use kvant_codec::DType;
use kvant_cpu::CpuDevice;
use kvant_gguf::Gguf;
use kvant_kv::Policies;
use kvant_model::{LayerRange, LayerState};

use super::super::*;
use crate::bundled::POCKET;

/// The layer with a cache, and the layer that shares it.
const OWNER: usize = 1;
const SHARER: usize = 2;

/// The bundled model, changed so that the keys and values of both layers are equal: the owner adds
/// nothing to the residual stream, and both have the same norms and K and V matrices.
fn with_equal_layers() -> Arc<Gguf> {
    let plain = Gguf::from_bytes(POCKET).unwrap();
    let place = |name: String| -> Range<usize> {
        let bytes = plain.tensor(&name).unwrap().bytes;
        let first = POCKET.windows(bytes.len()).position(|window| window == &*bytes);
        let first = first.expect("tensors lie in the file");
        first..first + bytes.len()
    };
    let mut file = POCKET.to_vec();
    for name in ["attn_output", "ffn_down"] {
        file[place(format!("blk.{OWNER}.{name}.weight"))].fill(0);
    }
    for name in ["attn_norm", "attn_k", "attn_k_norm", "attn_v"] {
        let [from, to] = [OWNER, SHARER].map(|layer| place(format!("blk.{layer}.{name}.weight")));
        assert_eq!(from.len(), to.len(), "{name}: the same type in both layers");
        file.copy_within(from, to.start);
    }
    Arc::new(Gguf::from_bytes(file).unwrap())
}

fn config(gguf: &Gguf, state: LayerState) -> Config {
    let mut config = Config::from_gguf(gguf).unwrap();
    config.layers[SHARER].state = state;
    config
}

fn open(gguf: &Arc<Gguf>, state: LayerState) -> Arc<dyn LoadedModel> {
    let config = config(gguf, state);
    let whole = LayerRange::whole(config.layers.len());
    load(CpuDevice::from_env(Some(2)).unwrap(), config, &whole, gguf, &mut |_| ()).unwrap()
}

fn start(loaded: &Arc<dyn LoadedModel>, dtype: DType) -> Sequence {
    let plan = Plan::new(&loaded.properties().kv_shape, dtype, dtype, &Policies::default()).unwrap();
    Sequence::start(Arc::clone(loaded), plan, ContextSize::Exactly(700)).unwrap()
}

/// Returns the logits of batched steps of two sequences, in chunks; the second prompt has half the
/// tokens.
fn feed(sequences: [&Sequence; 2], chunk: usize) -> Vec<u32> {
    let tokens: Vec<u32> = (0..600).map(|i| i * 37 % 500).collect();
    let mut bits = Vec::new();
    for tokens in tokens.chunks(chunk) {
        let n = tokens.len().div_ceil(2);
        let row = |sequence: &Sequence, n| sequence.step_row(n, LogitsFor::Last);
        let batch = [row(sequences[0], tokens.len()), row(sequences[1], n)];
        let entered = [tokens, &tokens[..n]].concat();
        let logits =
            sequences[0].loaded().step(&batch, Entry::Tokens(&entered), None, None).unwrap().unwrap();
        for which in 0..2 {
            let mut row = vec![f32::NAN; sequences[0].loaded().properties().n_vocab];
            logits.read(which, &mut row).unwrap();
            bits.extend(row.into_iter().map(f32::to_bits));
        }
    }
    bits
}

#[test]
fn shared_kv_gives_the_logits_of_equal_own_kv() {
    let gguf = with_equal_layers();
    let (own, shared) = (open(&gguf, LayerState::Own), open(&gguf, LayerState::Shared(OWNER)));
    assert_eq!(shared.properties().kv_shape.layers.len() + 1, own.properties().kv_shape.layers.len());
    for dtype in [DType::F16, DType::Turbo3] {
        for chunk in [256, 23, 1] {
            let sequences = [&own, &shared].map(|model| [start(model, dtype), start(model, dtype)]);
            let [want, got] = sequences.each_ref().map(|[a, b]| feed([a, b], chunk));
            assert!(want == got, "{dtype} in chunks of {chunk}");
            let [n_own, n_shared] = [&own, &shared].map(|model| model.properties().kv_shape.layers.len());
            assert_eq!(
                sequences[0][0].n_bytes() * n_shared,
                sequences[1][0].n_bytes() * n_own,
                "one layer less"
            );
        }
    }
}

#[test]
fn a_layer_with_shared_kv_stays_with_its_owner() {
    let gguf = with_equal_layers();
    let shared = config(&gguf, LayerState::Shared(OWNER));
    let n_layers = shared.layers.len();
    for n in 1..n_layers {
        let [_, rest] = LayerRange::split(n_layers, n);
        let device = CpuDevice::from_env(Some(1)).unwrap();
        let result = load(device, shared.clone(), &rest, &gguf, &mut |_| ()).map(|_| ());
        match n == SHARER {
            true => assert_eq!(
                result.unwrap_err().to_string(),
                "layer 2 shares K and V of layer 1, and cannot be on another device"
            ),
            false => result.unwrap(),
        }
    }
}
