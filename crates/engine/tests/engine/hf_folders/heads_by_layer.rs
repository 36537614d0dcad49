//! Folders of families whose layers differ in their number of query heads.

use kvant::{Model, open_file};
use serde_json::{Value, json};

use super::saved::{Scratch, saved, write_folder};
use super::{logits, options};

const STEP: &str = "step35-h64-g2-g3-window20-llama3";

/// Returns the configuration of a model of Step 3.5 as it was before `transformers` had it: without
/// a vision encoder, with lists that go on with a layer for multi-token prediction.
fn older(config: &Value) -> Value {
    let mut older = config["text_config"].clone();
    let keys = older.as_object_mut().unwrap();
    for key in [
        "mlp_layer_types",
        "n_routed_experts",
        "num_experts_per_tok",
        "num_key_value_heads",
        "num_sliding_attention_heads",
        "per_layer_config",
    ] {
        assert!(keys.remove(key).is_some(), "{key}");
    }
    let mut rope = keys.remove("rope_parameters").unwrap()["full_attention"].take();
    let scaling = rope.as_object_mut().unwrap();
    ["rope_theta", "partial_rotary_factor"].iter().for_each(|key| _ = scaling.remove(*key).unwrap());
    keys.insert("rope_scaling".to_owned(), rope);
    for (key, last) in [
        ("layer_types", json!("full_attention")),
        ("swiglu_limits", json!(null)),
        ("swiglu_limits_shared", json!(0)),
    ] {
        keys[key].as_array_mut().unwrap().push(last);
    }
    let more = json!({
        "architectures": ["Step3p5ForCausalLM"],
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 64},
        "moe_num_experts": 6,
        "moe_top_k": 2,
        "moe_layers_enum": "1, 2,3,4",
        "moe_router_activation": "sigmoid",
        "norm_expert_weight": true,
        "num_nextn_predict_layers": 1,
        "rope_theta": [500_000.0, 500.0, 500.0, 500.0, 500_000.0, 500_000.0],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5, 0.5],
    });
    keys.extend(more.as_object().unwrap().clone());
    older
}

#[test]
fn older_configurations_of_step_3_5_give_the_same_logits() {
    let scratch = Scratch::new("older-step");
    let (config, tensors) = saved(STEP);
    write_folder(&scratch.0, &config, &tensors);
    let want = logits(&Model::open_with(&scratch.0, options(None)).unwrap());
    let older = older(&config);
    write_folder(&scratch.0, &older, &tensors);
    assert_eq!(logits(&Model::open_with(&scratch.0, options(None)).unwrap()), want);
    for (path, value, complaint) in [
        (
            "/attention_other_setting/num_attention_groups",
            json!(4),
            "expected 2, as other layers have, got 4",
        ),
        ("/attention_other_setting/num_attention_heads", json!(0), "a number of heads for each of 5 layers"),
        ("/moe_router_activation", json!("softmax"), "expected sigmoid, got softmax"),
        ("/norm_expert_weight", json!(false), "expected true"),
        ("/moe_layers_enum", json!("0,2,3,4"), "dense ones before all others"),
        ("/partial_rotary_factors/1", json!(0.5), "twice that of full attention"),
        ("/partial_rotary_factors/1", json!(1.5), "a share of 64"),
        ("/swiglu_limits", json!([7.0]), "a limit or null for each of 5 layers, got 1 of 1"),
        ("/swiglu_limits/0", json!("7"), "got 4 of 5"),
        ("/layer_types", json!(null), "the type of each layer"),
        ("/query_pre_attn_scalar", json!(32), "expected 64"),
    ] {
        let mut wrong = older.clone();
        *wrong.pointer_mut(path).unwrap() = value;
        write_folder(&scratch.0, &wrong, &tensors);
        let error = open_file(&scratch.0).err().unwrap_or_else(|| panic!("taken: {path}")).to_string();
        assert!(error.contains(complaint) && !error.contains('\n'), "{path}: {error}");
    }
}

#[test]
fn unsupported_configurations_of_laguna_are_refused_by_key() {
    let (config, tensors) = saved("laguna-h64-g2-g3-window20-yarn");
    let scratch = Scratch::new("faulty-laguna");
    for (key, value, complaint) in [
        ("num_attention_heads_per_layer", json!([4, 6, 6, 6]), "heads for each of 5 layers, got 4 of 4"),
        ("moe_router_logit_softcapping", json!(30.0), "expected 0"),
        ("moe_apply_router_weight_on_input", json!(true), "expected false"),
        ("layer_types", json!(null), "the type of each layer"),
    ] {
        let mut wrong = config.clone();
        wrong[key] = value;
        write_folder(&scratch.0, &wrong, &tensors);
        let error = open_file(&scratch.0).err().unwrap_or_else(|| panic!("taken: {key}")).to_string();
        assert!(error.contains(key) && error.contains(complaint), "{key}: {error}");
    }
}
