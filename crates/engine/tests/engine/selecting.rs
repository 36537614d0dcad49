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

/// Where layers attend to pooled keys too, and some select them.
const POOLED: &str = "deepseek4-h64";
const RATIOS: &str = "deepseek4.attention.compress_ratios";

/// Where layers between two with an index have windows, heads and ranks of their own.
const WINDOWED: &str = "dots3note-latent128-swa1024-window20";
const PATTERN: &str = "dots3note.attention.sliding_window_pattern";
const TYPES: &str = "dots3note.attention.indexer.types";

/// Where layers select blocks by their pooled keys, and n-grams add to gated streams.
pub const NGRAMS: &str = "qwen4exp-h64-g2-ngrams";

pub fn fixture(name: &str) -> Gguf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    Gguf::open(folder.join(format!("{name}.gguf"))).unwrap()
}

/// Returns a fixture with a changed key, removed where there is no value, without a tensor.
pub fn changed(name: &str, key: Option<(&str, Option<Value<'_>>)>, without: &str) -> Gguf {
    let put = |writer: &mut GgufWriter| {
        if let Some((key, Some(value))) = key {
            writer.set(key, value).unwrap();
        }
    };
    rewritten(name, key.map(|(key, _)| key), without, put)
}

/// Returns a fixture without a key and a tensor, with the keys that `put` adds.
pub fn rewritten(name: &str, key: Option<&str>, without: &str, put: impl FnOnce(&mut GgufWriter)) -> Gguf {
    let gguf = fixture(name);
    let mut writer = GgufWriter::new();
    let known = gguf.meta().iter().filter(|(known, _)| key != Some(*known));
    known.for_each(|(known, value)| writer.set(known, value).unwrap());
    put(&mut writer);
    let kept = || gguf.tensors().iter().filter(|info| info.name != without);
    kept().for_each(|info| writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap());
    let mut bytes = Vec::new();
    let fill =
        |data: &mut TensorSink<'_>| kept().try_for_each(|info| data.bytes(&info.name, &gguf.data(info)));
    writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
    Gguf::from_bytes(bytes).unwrap()
}

/// Returns the logits after this many tokens.
fn logits(gguf: Gguf, n_tokens: u32) -> Vec<f32> {
    let model = Model::from_gguf(Arc::new(gguf), OpenOptions::default()).unwrap();
    let mut session = model.session(SessionOptions::default()).unwrap();
    let tokens: Vec<u32> = (0..n_tokens).map(|i| i * 37 % 64).collect();
    session.feed(&tokens, &mut |_| true).unwrap();
    session.logits().unwrap().to_vec()
}

pub fn error_of(gguf: Gguf) -> String {
    let error = Model::from_gguf(Arc::new(gguf), OpenOptions::default()).expect_err("a refused file");
    let error = error.to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

/// In any schedule of steps, forks, rewinds, saves and shared prefixes, with every KV type.
#[test]
fn logits_over_selected_tokens_depend_on_the_tokens_alone() {
    for (i, name) in SELECTING.into_iter().chain([BLOCKS, CONNECTED, POOLED, WINDOWED, NGRAMS]).enumerate() {
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
    assert_eq!(logits(changed(name, Some((types, None)), ""), 60), logits(fixture(name), 60));
}

/// Queries of layers with and without RoPE, and of other ranks, grow with the position alike.
#[test]
fn temperatures_apply_to_every_kind_of_mla() {
    for (name, arch) in [(WINDOWED, "dots3note"), ("kimilinear-latent128-kda", "kimi-linear")] {
        let put = |writer: &mut GgufWriter| {
            writer.set(&format!("{arch}.attention.temperature_scale"), 0.6_f32).unwrap();
            writer.set(&format!("{arch}.attention.temperature_length"), 16_u32).unwrap();
        };
        let growing = || rewritten(name, None, "", put);
        for (n_tokens, is_alike) in [(10, true), (60, false)] {
            let [plain, grown] = [fixture(name), growing()].map(|gguf| logits(gguf, n_tokens));
            assert_eq!(plain == grown, is_alike, "{name}: {n_tokens} tokens");
        }
    }
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
        (POOLED, RATIOS, None, "attention.compress_ratios"),
        (POOLED, "deepseek4.attention.sliding_window", u32(0), "attention.sliding_window"),
        (POOLED, "deepseek4.attention.head_count_kv", u32(2), "expected one KV head"),
        (POOLED, "deepseek4.attention.value_length", u32(32), "expected the 64 of a key"),
        (POOLED, "deepseek4.attention.output_group_count", u32(3), "expected equal groups of 4 heads, got 3"),
        (POOLED, "deepseek4.attention.output_lora_rank", None, "attention.output_lora_rank"),
        (POOLED, "deepseek4.attention.q_lora_rank", u32(0), "expected a positive number, got 0"),
        (POOLED, "deepseek4.attention.indexer.key_length", u32(33), "expected an even size up to 1024"),
        (POOLED, "deepseek4.attention.indexer.head_count", u32(1025), "expected at most 1024 heads"),
        (POOLED, "deepseek4.attention.indexer.top_k", u32(0), "expected a positive number, got 0"),
        (POOLED, "deepseek4.rope.dimension_count", u32(48), "expected an even number up to 32, got 48"),
        (POOLED, "deepseek4.rope.dimension_count", u32(15), "expected an even number up to 32, got 15"),
        (POOLED, "deepseek4.hyper_connection.sinkhorn_iterations", u32(101), "expected at most 100, got 101"),
        (POOLED, "deepseek4.hyper_connection.sinkhorn_iterations", u32(0), "hyper_connection.magnitude"),
        (POOLED, "deepseek4.expert_gating_func", u32(5), "known: 1, softmax"),
        (POOLED, "deepseek4.hash_layer_count", u32(3), "blk.2.ffn_gate_tid2eid.weight"),
        (POOLED, "deepseek4.hash_layer_count", u32(1), "blk.1.ffn_gate_tid2eid.weight"),
    ];
    let of_windows = [
        (WINDOWED, "dots3note.attention.kv_lora_rank_swa", None, "attention.kv_lora_rank_swa"),
        (WINDOWED, "dots3note.attention.kv_lora_rank_swa", u32(1122), "expected an even number up to 1120"),
        (WINDOWED, "dots3note.attention.key_length_mla_swa", None, "attention.key_length_mla_swa"),
        (WINDOWED, "dots3note.attention.key_length_mla_swa", u32(32), "expected an even number below 32"),
        (WINDOWED, "dots3note.attention.value_length_mla_swa", u32(1025), "expected a head size up to 1024"),
        (WINDOWED, "dots3note.attention.value_length_mla_swa", u32(24), "blk.1.attn_"),
        (WINDOWED, "dots3note.attention.sliding_window", u32(0), "expected a positive number, got 0"),
        (WINDOWED, "dots3note.attention.sliding_window", None, "attention.sliding_window"),
        (WINDOWED, PATTERN, None, "attention.sliding_window_pattern"),
        (WINDOWED, PATTERN, u32(2), "attention.sliding_window_pattern"),
    ];
    for (name, key, value, want) in keys.into_iter().chain(of_windows) {
        let error = error_of(changed(name, Some((key, value)), ""));
        assert!(error.contains(want), "{key}: {error}");
    }
    for tensor in ["attn_k.weight", "attn_q_b.weight", "k_norm.weight", "k_norm.bias", "proj.weight"] {
        let tensor = format!("blk.1.indexer.{tensor}");
        let error = error_of(changed(each, None, &tensor));
        assert!(error.contains(&tensor), "{tensor}: {error}");
    }
    for (ratios, want) in [
        (&[0, 4, 8, 4][..], "expected 5 layers, got 4"),
        (&[0, 4, 1, 4, 8], "expected 0, or 2 to 4096 tokens, got 1"),
        (&[0, 4, -8, 4, 8], "tokens, got -8"),
        (&[0, 4, 9999, 4, 8], "tokens, got 9999"),
        (&[0, 8, 8, 4, 8], "blk.1.attn_compressor_"),
        (&[0, 0, 8, 4, 8], "blk.1."),
    ] {
        let put = |writer: &mut GgufWriter| writer.set_array(RATIOS, ratios.iter().copied()).unwrap();
        let error = error_of(rewritten(POOLED, Some(RATIOS), "", put));
        assert!(error.contains(want), "{ratios:?}: {error}");
    }
    for (key, flags, want) in [
        (
            PATTERN,
            &[false, true, true, true][..],
            "expected the same number in all layers of a kind, got 2 and 3",
        ),
        (TYPES, &[true, false, true, true], "either an index or a window in layer 2, got both"),
        (PATTERN, &[false, true, true], "expected 4 layers, got 3"),
        (TYPES, &[false, false, false, true], "either an index or a window in layer 0, got none"),
        (TYPES, &[true, false], "expected 4 layers, got 2"),
    ] {
        let put = |writer: &mut GgufWriter| writer.set_array(key, flags.iter().copied()).unwrap();
        let error = error_of(rewritten(WINDOWED, Some(key), "", put));
        assert!(error.contains(want), "{key}: {error}");
    }
    for tensor in ["blk.0.attn_k_norm.weight", "blk.1.attn_k_norm.weight", "blk.2.attn_gate.weight"] {
        let error = error_of(changed(WINDOWED, None, tensor));
        assert!(error.contains(tensor), "{tensor}: {error}");
    }
    let of_pools = ["attn_compressor_ape", "attn_compressor_norm", "indexer_compressor_gate", "indexer.proj"];
    for tensor in of_pools.into_iter().chain(["attn_output_a", "attn_kv", "ffn_gate_tid2eid", "attn_sinks"]) {
        let tensor = format!("blk.1.{tensor}.weight");
        let error = error_of(changed(POOLED, None, &tensor));
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
