//! Folders of dots.3 note, whose MLA differs in layers with a window.

use kvant::{Model, open_file};
use serde_json::{Value, json};

use super::saved::{Saved, Scratch, fixture, saved, write_folder};
use super::{assert_same_tensors, changed, logits, options};

const NAME: &str = "dots3note-latent128-swa1024-window20";

/// Returns the configuration as it is published: one for all layers with a window.
fn published() -> Value {
    let (mut config, _) = saved(NAME);
    let keys = config.as_object_mut().unwrap();
    for key in ["per_layer_config", "rope_parameters", "mlp_layer_types", "sliding_window", "head_dim"] {
        keys.remove(key).unwrap();
    }
    let width = keys.remove("shared_experts_intermediate_size").unwrap();
    for (key, value) in [
        (
            "layer_types",
            json!(["full_attention", "sliding_attention", "sliding_attention", "full_attention"]),
        ),
        ("swa_num_attention_heads", json!(2)),
        ("swa_q_lora_rank", json!(40)),
        ("swa_kv_lora_rank", json!(1024)),
        ("swa_qk_rope_head_dim", json!(32)),
        ("swa_qk_nope_head_dim", json!(24)),
        ("swa_head_dim", json!(56)),
        ("swa_v_head_dim", json!(32)),
        ("sliding_window_size", json!(20)),
        ("rope_theta", json!(1e6)),
        ("swa_rope_theta", json!(500)),
        ("first_k_dense_replace", json!(1)),
        ("moe_layer_freq", json!([1, 1, 1, 1])),
        ("moe_shared_expert_intermediate_size", width),
        ("scoring_func", json!("sigmoid")),
        ("topk_method", json!("noaux_tc")),
        ("apply_mla_qkv_lora_rescale", json!(true)),
    ] {
        keys.insert(key.to_owned(), value);
    }
    config
}

#[test]
fn published_folders_of_dots_3_have_the_keys_of_the_file() {
    let want = fixture(NAME);
    let others = [
        "vision_encoder.blocks.0.norm1.weight",
        "audio_encoder.conv_out.weight",
        "model.mtp.embed_tokens.weight",
        "model.layers.4.enorm.weight",
    ];
    let other =
        |name: &str| Saved { name: name.to_owned(), dtype: "F32", shape: json!([1]), bytes: vec![0; 4] };
    for config in [saved(NAME).0, published()] {
        let scratch = Scratch::new("windowed-latent");
        let (_, mut tensors) = saved(NAME);
        tensors.extend(others.map(other));
        write_folder(&scratch.0, &config, &tensors);
        let got = open_file(&scratch.0).unwrap();
        assert_same_tensors(NAME, &got, &want);
        const HEADS: &str = "dots3note.attention.head_count";
        let of_either = |key: &str| key == HEADS || key.ends_with("vocab_size");
        let keys = want.meta().iter().filter(|(key, _)| key.starts_with("dots3note.") && !of_either(key));
        for (key, value) in keys {
            assert_eq!(got.meta().value(key).as_ref(), Some(&value), "{key}");
        }
        assert_eq!(got.meta().get::<Vec<u32>>(HEADS).unwrap(), [3, 2, 2, 3]);
        let got = logits(&Model::from_gguf(got, options(None)).unwrap());
        assert_eq!(got, logits(&Model::from_gguf(fixture(NAME), options(None)).unwrap()));
    }
}

#[test]
fn faults_of_dots_3_are_reported_by_key_or_name() {
    let yarn = json!({"indexed_attention": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}});
    for (key, value, want) in [
        (
            "layer_types",
            json!(["linear_attention"]),
            "'layer_types': expected sliding_attention, indexed_attention or",
        ),
        ("layer_types", json!(["indexed_attention"]), "'layer_types': expected 4 layers, got 1"),
        (
            "per_layer_config",
            json!({"1": {"kv_lora_rank": 1024}}),
            "'per_layer_config': expected sizes of layers with a window alone, alike in all, got others in layer 2",
        ),
        ("per_layer_config", json!({"0": {"kv_lora_rank": 64}}), "got others in layer 0"),
        ("per_layer_config", Value::Null, "'swa_qk_rope_head_dim': expected a number, got nothing"),
        (
            "shared_experts_intermediate_size",
            json!(48),
            "'shared_experts_intermediate_size': expected the 24 of other experts, got 48",
        ),
        ("rope_parameters", yarn, "'rope_type': expected default, got yarn"),
        ("k_rope_only_layernorm", json!(false), "'k_rope_only_layernorm': expected true, as GGUF"),
        ("apply_mla_qkv_lora_rescale", json!(false), "'apply_mla_qkv_lora_rescale': expected true, as GGUF"),
        (
            "attention_gate_type",
            json!("elementwise"),
            "'attention_gate_type': expected headwise, got elementwise",
        ),
        ("scoring_func", json!("softmax"), "'scoring_func': expected sigmoid, got softmax"),
        ("moe_layer_freq", json!(2), "'moe_layer_freq': expected 1, as GGUF"),
        ("v_head_dim", json!(32), "heads of 72 rows of 128"),
    ] {
        let error = changed(NAME, |config, _| config[key] = value);
        assert!(error.contains(want), "{key}: {error}");
    }
    for (key, value, want) in [
        ("moe_layer_freq", json!([1, 1, 0, 1]), "'mlp_layer_types': expected dense ones before all others"),
        ("swa_v_head_dim", json!(24), "expected 2 heads of 48 rows of 1024"),
        (
            "swa_q_lora_rank",
            json!(48),
            "'swa_q_lora_rank': expected 40, as in layers without a window, got 48",
        ),
        ("swa_head_dim", json!(64), "'swa_head_dim': expected 56, got 64"),
        ("swa_kv_lora_rank", json!(0), "'swa_kv_lora_rank': expected a number from 1 on, got 0"),
        ("rope_scaling", json!({"type": "yarn", "factor": 4.0}), "'rope_type': expected default, got yarn"),
    ] {
        let error = changed(NAME, |config, _| {
            *config = published();
            config[key] = value;
        });
        assert!(error.contains(want), "{key}: {error}");
    }
    let error = changed(NAME, |_, tensors| {
        tensors.retain(|tensor| !tensor.name.ends_with("2.self_attn.g_proj.weight"))
    });
    assert!(error.contains("'blk.2.attn_gate.weight' is missing: layer 1 has it"), "{error}");
}
