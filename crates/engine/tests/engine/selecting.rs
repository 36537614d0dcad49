//! Attention to selected tokens (DeepSeek Sparse Attention): the keys of the index are a cache of
//! their own, and errors of such files name the key or the tensor.

use std::path::Path;
use std::sync::Arc;

use kvant::gguf::{Gguf, GgufError, GgufWriter, TensorSink, Value};
use kvant::{KvOptions, Model, OpenOptions, SessionOptions};

use crate::history::{CASES, family, histories, is_scalar};

/// Where layers select blocks of tokens, for each KV head by itself.
const BLOCKS: &str = "minimaxm3-h64-g2-index48-blocks";
/// Where each layer selects tokens, and where two attend to those of the first.
const SELECTING: [&str; 2] = ["deepseek32-latent192-index48-yarn", "glmdsa-latent128-index64-shared"];

/// Where every sublayer reads and writes three residual streams.
const CONNECTED: &str = "hyv4-latent128-index64-streams3";

fn fixture(name: &str) -> Gguf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    Gguf::open(folder.join(format!("{name}.gguf"))).unwrap()
}

/// Returns a fixture with a changed key, removed where there is no value, without a tensor.
fn changed(name: &str, key: Option<(&str, Option<Value<'_>>)>, without: &str) -> Gguf {
    let gguf = fixture(name);
    let mut writer = GgufWriter::new();
    for (known, value) in gguf.meta().iter() {
        match key {
            Some((changed, _)) if changed == known => {}
            _ => writer.set(known, value).unwrap(),
        }
    }
    if let Some((key, Some(value))) = key {
        writer.set(key, value).unwrap();
    }
    let kept = || gguf.tensors().iter().filter(|info| info.name != without);
    kept().for_each(|info| writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap());
    let mut bytes = Vec::new();
    let fill =
        |data: &mut TensorSink<'_>| kept().try_for_each(|info| data.bytes(&info.name, &gguf.data(info)));
    writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
    Gguf::from_bytes(bytes).unwrap()
}

fn error_of(gguf: Gguf) -> String {
    let error = Model::from_gguf(Arc::new(gguf), OpenOptions::default()).expect_err("a refused file");
    let error = error.to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

/// In any schedule of steps, forks, rewinds, saves and shared prefixes, with every KV type.
#[test]
fn logits_over_selected_tokens_depend_on_the_tokens_alone() {
    for (i, name) in SELECTING.into_iter().chain([BLOCKS, CONNECTED]).enumerate() {
        let models = [1, 2].map(|n| family(name, n));
        let (cases, n_steps) = if is_scalar(&models[0]) { (&CASES[..2], 12) } else { (&CASES[..], 16) };
        // Channel scales of these tests are those of separate values.
        for case in cases.iter().filter(|(.., is_balanced)| !is_balanced) {
            let (_, read_ahead) = histories(&models, *case, 500 + i as u64, n_steps);
            assert!(read_ahead > 0, "{name}, {case:?}: no draft token was verified");
        }
    }
}

/// A latent vector per layer, and a key of the index in layers that select tokens.
#[test]
fn the_cache_stores_the_keys_of_each_index() {
    let shared = 4 * (128 + 32) + 2 * 64;
    let per_token = [2 * (192 + 32 + 48), shared, 3 * 2 * 2 * 64 + 2 * 48, shared];
    for (name, per_token) in SELECTING.into_iter().chain([BLOCKS, CONNECTED]).zip(per_token) {
        let model = Model::from_gguf(Arc::new(fixture(name)), OpenOptions::default()).unwrap();
        let kv = KvOptions::symmetric("f32".parse().unwrap());
        let mut session = model.session(SessionOptions { n_ctx: Some(160), kv }).unwrap();
        let tokens: Vec<u32> = (0..150).map(|i| i * 37 % 64).collect();
        session.feed(&tokens, &mut |_| true).unwrap();
        assert_eq!(session.kv().bytes, 256 * per_token * 4, "{name}: two blocks of 128 tokens");
    }
}

/// Where the file does not say which layers select tokens, those do that have the tensors.
#[test]
fn layers_with_an_index_select_tokens() {
    let name = SELECTING[1];
    let types = "glm-dsa.attention.indexer.types";
    let logits = |gguf: Gguf| {
        let model = Model::from_gguf(Arc::new(gguf), OpenOptions::default()).unwrap();
        let mut session = model.session(SessionOptions::default()).unwrap();
        let tokens: Vec<u32> = (0..60).map(|i| i * 37 % 64).collect();
        session.feed(&tokens, &mut |_| true).unwrap();
        session.logits().unwrap().to_vec()
    };
    assert_eq!(logits(changed(name, Some((types, None)), "")), logits(fixture(name)));
}

#[test]
fn indexes_that_make_no_sense_are_refused_in_a_line() {
    let u32 = |value: u32| Some(Value::U32(value));
    let [each, shared] = SELECTING;
    let keys = [
        (each, "deepseek32.attention.indexer.head_count", None, "attention.indexer.head_count"),
        (each, "deepseek32.attention.indexer.head_count", u32(0), "expected a positive number, got 0"),
        (each, "deepseek32.attention.indexer.head_count", u32(2000), "expected at most 1024 heads, got 2000"),
        (each, "deepseek32.attention.indexer.head_count", u32(4), "blk.0.indexer.proj.weight"),
        (each, "deepseek32.attention.indexer.key_length", u32(30), "expected an even size from 32 to 1024"),
        (each, "deepseek32.attention.indexer.key_length", u32(49), "expected an even size from 32 to 1024"),
        (each, "deepseek32.attention.indexer.key_length", u32(50), "blk.0.indexer."),
        (each, "deepseek32.attention.indexer.top_k", None, "attention.indexer.top_k"),
        (each, "deepseek32.attention.indexer.top_k", u32(0), "expected a positive number, got 0"),
        (each, "deepseek32.attention.q_lora_rank", u32(0), "expected a rank"),
        (BLOCKS, "minimax-m3.attention.indexer.head_count", u32(1), "a head for each of 2 KV heads, got 1"),
        (BLOCKS, "minimax-m3.attention.indexer.block_size", u32(0), "expected a positive number, got 0"),
        (BLOCKS, "minimax-m3.attention.indexer.local_blocks", u32(4), "expected at most the 3"),
        (BLOCKS, "minimax-m3.attention.indexer.key_length", u32(30), "expected an even size from 32 to 1024"),
        (CONNECTED, "hy_v4.hyper_connection.count", u32(1), "expected 2 to 16 streams, got 1"),
        (CONNECTED, "hy_v4.hyper_connection.count", u32(17), "expected 2 to 16 streams, got 17"),
        (CONNECTED, "hy_v4.hyper_connection.count", u32(4), "output_hc_fn.weight"),
        (CONNECTED, "hy_v4.hyper_connection.count", None, "hyper_connection.count"),
        (CONNECTED, "hy_v4.hyper_connection.epsilon", None, "hyper_connection.epsilon"),
        (
            CONNECTED,
            "hy_v4.hyper_connection.magnitude",
            Some(Value::F32(f32::NAN)),
            "expected a finite number",
        ),
        (CONNECTED, "hy_v4.attention.head_count", u32(2), "blk.0."),
    ];
    for (name, key, value, want) in keys {
        let error = error_of(changed(name, Some((key, value)), ""));
        assert!(error.contains(want), "{key}: {error}");
    }
    for tensor in ["attn_k.weight", "attn_q_b.weight", "k_norm.weight", "k_norm.bias", "proj.weight"] {
        let tensor = format!("blk.1.indexer.{tensor}");
        let error = error_of(changed(each, None, &tensor));
        assert!(error.contains(&tensor), "{tensor}: {error}");
    }
    let of_streams = ["output_hc_fn", "output_hc_base", "blk.1.hc_ffn_scale", "blk.2.hc_attn_fn"];
    for tensor in of_streams.into_iter().chain(["blk.3.attn_sinks", "blk.3.attn_gate"]) {
        let tensor = format!("{tensor}.weight");
        let error = error_of(changed(CONNECTED, None, &tensor));
        assert!(error.contains(&tensor), "{tensor}: {error}");
    }
    let tensor = "blk.3.indexer.attn_k.weight";
    let error = error_of(changed(shared, None, tensor));
    assert!(error.contains(tensor), "{error}");
    let error = error_of(changed(
        shared,
        Some(("glm-dsa.attention.indexer.types", None)),
        "blk.0.indexer.attn_k.weight",
    ));
    assert!(error.contains("a first layer that selects tokens"), "{error}");
}
