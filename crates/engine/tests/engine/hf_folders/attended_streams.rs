//! Folders of Kimi K3, as its checkpoint is published.

use kvant::{Model, open_file};
use serde_json::{Value, json};

use super::saved::{Saved, Scratch, fixture, saved, write_folder};
use super::{assert_same_tensors, changed, logits, options};

const NAME: &str = "kimik3-latent128-streams";

#[test]
fn folders_of_kimi_k3_have_the_keys_of_the_file() {
    const ATTENDS: &str = "kimi-k3.attention.head_count_kv";
    let want = fixture(NAME);
    let (config, mut tensors) = saved(NAME);
    let other =
        |name: &str| Saved { name: name.to_owned(), dtype: "F32", shape: json!([1]), bytes: vec![0; 4] };
    tensors.extend(["vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight"].map(other));
    // Rates may be followed by others.
    let rates = tensors.iter_mut().find(|tensor| tensor.name.ends_with("layers.1.self_attn.A_log")).unwrap();
    rates.bytes.extend([0; 8]);
    rates.shape = json!([6]);
    let scratch = Scratch::new("attended-streams");
    write_folder(&scratch.0, &config, &tensors);
    let got = open_file(&scratch.0).unwrap();
    assert_same_tensors(NAME, &got, &want);
    let of_either = |key: &str| key == ATTENDS || key.ends_with("vocab_size");
    let keys = want.meta().iter().filter(|(key, _)| key.starts_with("kimi-k3.") && !of_either(key));
    for (key, value) in keys {
        assert_eq!(got.meta().value(key).as_ref(), Some(&value), "{key}");
    }
    assert_eq!(got.meta().get::<Vec<u32>>(ATTENDS).unwrap(), [0, 0, 1, 0]);
    let [got, want] = [got, want].map(|gguf| logits(&Model::from_gguf(gguf, options(None)).unwrap()));
    // Rates are exponentials that another library computed.
    assert!(got.iter().zip(&want).all(|(got, want)| (got - want).abs() <= 1e-4));
}

#[test]
fn faults_of_kimi_k3_are_reported_by_key_or_name() {
    let other = json!({"quant_method": "aqlm"});
    for (key, value, want) in [
        ("hidden_act", json!("silu"), "'hidden_act': expected situ, got silu"),
        ("moe_router_activation_func", json!("softmax"), "'moe_router_activation_func': expected sigmoid"),
        ("mla_use_nope", json!(false), "'mla_use_nope': expected true, as GGUF readers assume"),
        ("mla_use_output_gate", json!(false), "'mla_use_output_gate': expected true, as GGUF"),
        ("latent_moe_use_norm", json!(false), "'latent_moe_use_norm': expected true, as GGUF"),
        ("attn_res_block_size", json!(0), "'attn_res_block_size': expected a number from 1 on, got 0"),
        ("activation_situ_beta", Value::Null, "'activation_situ_beta': expected a number, got nothing"),
        ("quantization_config", other, "aqlm"),
    ] {
        let error = changed(NAME, |config, _| config["text_config"][key] = value);
        assert!(error.contains(want), "{key}: {error}");
    }
    let error = changed(NAME, |config, _| {
        config["text_config"]["linear_attn_config"]["full_attn_layers"] = json!([2, 3]);
    });
    assert!(error.contains("'blk.2.attn_q_a.weight' is missing") || error.contains("'blk.1."), "{error}");
    let error = changed(NAME, |config, _| {
        config["text_config"]["linear_attn_config"]["use_full_rank_gate"] = json!(false);
    });
    assert!(error.contains("'use_full_rank_gate': expected true, as GGUF"), "{error}");
    let without = |end: &'static str| {
        changed(NAME, |_, tensors| {
            let n = tensors.len();
            tensors.retain(|tensor| !tensor.name.ends_with(end));
            assert_eq!(tensors.len(), n - 1, "{end}");
        })
    };
    for (end, want) in [
        (
            "layers.1.mlp_res_proj.weight",
            "'ffn_res_score.weight' is missing: the other factor beside 'language_model.model.layers.1.mlp_res_norm.weight'",
        ),
        ("layers.1.mlp_res_norm.weight", "'ffn_res_score.weight' is missing: the other factor"),
        ("model.output_attn_res_norm.weight", "'output_res_score.weight' is missing: the other factor"),
        (
            "layers.3.block_sparse_moe.routed_expert_norm.weight",
            "'blk.3.ffn_routed_norm.weight' is missing: layer 1 has it",
        ),
        ("layers.3.block_sparse_moe.experts.5.w2.weight", "expert 5 of 6"),
    ] {
        let error = without(end);
        assert!(error.contains(want), "{error}");
    }
    let error = changed(NAME, |_, tensors| {
        let factor =
            tensors.iter_mut().find(|tensor| tensor.name.ends_with("layers.1.mlp_res_proj.weight")).unwrap();
        factor.shape = json!([1, 32]);
        factor.bytes.truncate(128);
    });
    assert!(
        error.contains("layers.1.mlp_res_proj.weight' has the shape [1, 32], expected 64 values"),
        "{error}"
    );
}
