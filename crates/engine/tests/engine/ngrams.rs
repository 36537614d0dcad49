//! Embeddings of n-grams, gated residual streams, and blocks of tokens that pooled keys select:
//! errors of such files name the key or the tensor.

use std::sync::Arc;

use kvant::gguf::{GgufWriter, Value};
use kvant::{KvLayerShape, Model, OpenOptions};

use crate::selecting::{NGRAMS, changed, error_of, fixture, rewritten};

/// Keys and values of one head of 64, and a share in a key of 32 for each block of 4 tokens.
#[test]
fn the_cache_stores_a_key_of_each_block() {
    let model = Model::from_gguf(Arc::new(fixture(NGRAMS)), OpenOptions::default()).unwrap();
    let layers = model.config().kv_shape().layers;
    let per_token: Vec<usize> = layers.iter().map(KvLayerShape::values_per_token).collect();
    assert_eq!(per_token, [2 * 64 + 32 / 4; 2]);
}

#[test]
fn ngrams_that_make_no_sense_are_refused_in_a_line() {
    let u32 = |value: u32| Some(Value::U32(value));
    for (key, value, want) in [
        ("hyper_connection.count", u32(1), "expected 2 to 16 streams, got 1"),
        ("hyper_connection.count", u32(3), "output_hc_norm.weight"),
        ("hyper_connection.low_rank", u32(0), "expected a positive number, got 0"),
        ("hyper_connection.low_rank", u32(25), "hc_down.weight"),
        ("hyper_connection.low_rank", None, "hyper_connection.epsilon"),
        ("attention.indexer.top_k", u32(14), "expected whole blocks of 4 tokens, got 14"),
        ("attention.indexer.top_k", u32(0), "expected a positive number, got 0"),
        ("attention.indexer.head_count", u32(5), "blk.1.indexer.q_proj.weight"),
        ("attention.indexer.key_length", u32(14), "expected an even size from 16 to 1024, got 14"),
        ("ple.ngram_size", u32(1), "expected 2 to 16, got 1"),
        ("ple.ngram_size", u32(4), "ple.layer_multipliers: expected 4 numbers, got 3"),
        ("ple.heads_per_ngram", u32(3), "expected 6 numbers, got 4"),
        ("ple.heads_per_ngram", u32(1), "ple_key.weight"),
        ("ple.conv_kernel", u32(0), "expected a positive number, got 0"),
        ("ple.conv_kernel", u32(65), "expected 1 to 64, got 65"),
        ("ple.conv_kernel", u32(4), "ple_conv1d.weight"),
        ("ple.eos_token_id", None, "ple.eos_token_id"),
        ("ple.layers", None, "per_layer_"),
        ("embedding_length_per_layer_input", u32(8), "per_layer_token_embd.weight"),
    ] {
        let error = error_of(changed(NGRAMS, Some((&format!("qwen4exp.{key}"), value)), ""));
        assert!(error.contains(want), "{key}: {error}");
    }
    let of_arrays = [
        ("ple.layers", &[4][..], "expected one of 4 layers, got [4]"),
        ("ple.layers", &[0, 2], "expected one of 4 layers, got [0, 2]"),
        ("ple.layers", &[1], "blk.1.ple_"),
        ("ple.head_offsets", &[0, 97, 198, 500], "per_layer_token_embd.weight: expected at least 607 rows"),
        ("ple.head_vocab_sizes", &[97, 101, 0, 107], "expected ranges of rows whose numbers are below 2^32"),
        ("ple.head_offsets", &[0, 97, u64::MAX, 301], "expected ranges of rows"),
        ("ple.head_vocab_sizes", &[97, 101], "expected 4 numbers, got 2"),
        ("attention.compress_ratios", &[0, 4], "expected 4 layers, got 2"),
        ("attention.compress_ratios", &[0, 1, 0, 4], "expected 0, or 2 to 4096 tokens, got 1"),
        ("attention.compress_ratios", &[0, 0, 0, 4], "blk.1.indexer."),
    ];
    for (key, numbers, want) in of_arrays {
        let key = format!("qwen4exp.{key}");
        let put = |writer: &mut GgufWriter| writer.set_array(&key, numbers.iter().copied()).unwrap();
        let error = error_of(rewritten(NGRAMS, Some(&key), "", put));
        assert!(error.contains(want), "{key}: {error}");
    }
    for tensor in [
        "output_hc_norm",
        "output_hc_up",
        "blk.0.hc_attn_inject",
        "blk.1.hc_ffn_down",
        "blk.1.indexer.q_norm",
        "blk.3.indexer.k_proj",
        "blk.2.ple_value",
        "blk.2.ple_norm_conv",
        "per_layer_token_embd",
    ] {
        let tensor = format!("{tensor}.weight");
        let error = error_of(changed(NGRAMS, None, &tensor));
        assert!(error.contains(&tensor), "{tensor}: {error}");
    }
}
