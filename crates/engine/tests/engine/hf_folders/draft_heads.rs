//! Folders of EAGLE-3 heads, as trainers save them (see `tools/reference/heads.py`): opened as
//! GGUF, they have the bits of converted files.

use kvant::{Config, Gguf, open_file};
use kvant_model::DraftHeadConfig;
use serde_json::{Value, json};

use super::assert_same_tensors;
use super::saved::{Saved, Scratch, saved_in, write_folder};
use crate::draft_heads::{HEADS, head, model};

/// Returns the folder of a head, and the file of the same.
fn saved(of: &str, name: &str) -> (Value, Vec<Saved>, Gguf) {
    let file = head(of, name);
    let (config, tensors) = saved_in(&file.path().unwrap().with_extension("json"), &file);
    (config, tensors, file)
}

#[test]
fn folders_of_draft_heads_have_the_bits_of_converted_files() {
    for (of, name) in HEADS {
        let scratch = Scratch::new(name);
        let (config, mut tensors, want) = saved(of, name);
        let target = Config::from_gguf(&model(of)).unwrap();
        // Some trainers save all names with a prefix, and tensors that only training needs.
        for prefix in ["", "model."] {
            write_folder(&scratch.0, &config, &tensors);
            let got = open_file(&scratch.0).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_same_tensors(name, &got, &want);
            let [got, want] = [&got, &want].map(|gguf| {
                let mut head = DraftHeadConfig::of(gguf, &target, 64).unwrap();
                // Computed divisors are close.
                head.config.ropes.clear();
                head
            });
            assert_eq!(got, want, "{name}, {prefix}");
            tensors.iter_mut().for_each(|tensor| tensor.name = format!("model.{}", tensor.name));
            let unused = |name: &str| Saved {
                name: name.to_owned(),
                dtype: "F32",
                shape: json!([1]),
                bytes: vec![0; 4],
            };
            tensors.extend(["verifier_norm.weight", "verifier_lm_head.weight"].map(unused));
        }
    }
}

/// A head whose output matrix is its embedding.
#[test]
fn a_tied_draft_head_has_its_embedding_as_output() {
    let (mut config, mut tensors, _) = saved("llama-h64-g2-six", "own");
    config["transformer_layer_config"]["tie_word_embeddings"] = json!(true);
    tensors.retain(|tensor| !["lm_head.weight", "d2t", "t2d"].contains(&&*tensor.name));
    let scratch = Scratch::new("tied-head");
    write_folder(&scratch.0, &config, &tensors);
    let gguf = open_file(&scratch.0).unwrap();
    let [embedding, output] =
        ["token_embd.weight", "output.weight"].map(|name| gguf.tensor(name).unwrap().bytes.to_vec());
    assert!(embedding == output);
}

#[test]
fn unsupported_folders_of_draft_heads_are_refused_by_name() {
    let flag = "as GGUF readers assume, got true";
    for (of, name, path, value, complaint) in [
        (
            "llama-h64-g2-six",
            "own",
            "/norm_before_residual",
            json!(null),
            "expected true or false, got nothing",
        ),
        ("llama-h64-g2-six", "own", "/fc_norm", json!(true), flag),
        ("llama-h64-g2-six", "own", "/norm_output", json!(true), flag),
        ("llama-h64-g2-six", "own", "/transformer_layer_config/num_hidden_layers", json!(2), "got 2"),
        ("llama-h64-g2-six", "plain", "/num_attention_heads", json!(4), "4 heads of 64 rows"),
        ("qwen3-h64-g2-five", "part", "/eagle_config/use_aux_hidden_state", json!(false), "expected true"),
        (
            "qwen3-h64-g2-five",
            "part",
            "/eagle_config/eagle_aux_hidden_state_layer_ids",
            json!([0, -3]),
            "expected numbers of layers, got -3",
        ),
        (
            "qwen3-h64-g2-five",
            "part",
            "/architectures",
            json!(["DFlashSpeculator"]),
            "only EAGLE-3 and DFlash",
        ),
        ("llama-h64-g2-six", "block", "/dflash_config", json!(null), "dflash_config"),
        ("llama-h64-g2-six", "block", "/dflash_config/mask_token_id", json!(null), "mask_token_id"),
        (
            "llama-h64-g2-six",
            "block",
            "/dflash_config/target_layer_ids",
            json!([-1]),
            "expected numbers of layers",
        ),
        ("qwen3-h64-g2-five", "part", "/hidden_act", json!("gelu"), "expected silu, got gelu"),
    ] {
        let (mut config, tensors, _) = saved(of, name);
        *config.pointer_mut(path).unwrap() = value;
        assert_refused(&config, &tensors, complaint);
    }
    let (config, mut tensors, _) = saved("llama-h64-g2-six", "own");
    for (key, value, complaint) in [
        ("quantization_config", json!({"quant_method": "fp8"}), "quantized weights of a draft head"),
        ("eagle_config", json!({"parallel_draft_step": 2}), "'parallel_draft_step': expected 1, got 2"),
        ("parallel_drafting", json!(true), flag),
        ("layer_types", json!(["sliding_attention"]), "expected full_attention, got \"sliding_attention\""),
    ] {
        let mut config = config.clone();
        config[key] = value;
        assert_refused(&config, &tensors, complaint);
    }
    let fc = tensors.iter().position(|tensor| tensor.name == "fc.weight").unwrap();
    tensors[fc].name = "fc_norm.0.weight".to_owned();
    assert_refused(&config, &tensors, "tensor 'fc_norm.0.weight' is unknown");
    tensors.remove(fc);
    assert_refused(&config, &tensors, "tensor 'fc.weight' is missing");
}

fn assert_refused(config: &Value, tensors: &[Saved], complaint: &str) {
    let scratch = Scratch::new("refused-head");
    write_folder(&scratch.0, config, tensors);
    let error = open_file(&scratch.0).err().unwrap_or_else(|| panic!("taken: {complaint}")).to_string();
    assert!(error.contains(complaint) && error.lines().count() == 1, "{error}");
}
