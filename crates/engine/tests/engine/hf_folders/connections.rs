//! Folders of models with several residual streams.

use kvant::{Model, open_file};
use serde_json::json;

use super::saved::{Scratch, saved, write_folder};
use super::{logits, options};

/// Parts of the names that `transformers` saves, those of checkpoints, and those of its modules.
const NAMES: [[&str; 3]; 6] = [
    ["hc_pre.hc_attn_layer.hc_", "hc_attn_layer.hc_pre.hc_", "attn_hc."],
    ["hc_pre.hc_mlp_layer.hc_", "hc_mlp_layer.hc_pre.hc_", "ffn_hc."],
    ["hc_pre.hc_head.hc_head_", "hc_head.hc_head_", "hc_head.hc_"],
    ["self_attn.linear_gate", "self_attn.linear_gate", "self_attn.gate_proj"],
    ["self_attn.learnable_sink_param", "self_attn.learnable_sink_param", "self_attn.sinks"],
    ["mlp.linear_gate", "mlp.gate_proj", "mlp.gate_proj"],
];

#[test]
fn hunyuan_4_has_three_names_of_its_tensors() {
    let scratch = Scratch::new("connections");
    let (config, mut tensors) = saved("hyv4-latent128-index64-streams3");
    write_folder(&scratch.0, &config, &tensors);
    let want = logits(&Model::open_with(&scratch.0, options(None)).unwrap());
    for form in [1, 2] {
        for names in NAMES {
            let mut n = 0;
            for tensor in tensors.iter_mut().filter(|tensor| tensor.name.contains(names[form - 1])) {
                tensor.name = tensor.name.replace(names[form - 1], names[form]);
                n += 1;
            }
            assert!(n >= 1, "{names:?}");
        }
        let mut published = config.clone();
        // As in the checkpoint, where it says nothing about MLA.
        published["num_key_value_heads"] = json!(1);
        write_folder(&scratch.0, &published, &tensors);
        assert_eq!(logits(&Model::open_with(&scratch.0, options(None)).unwrap()), want, "form {form}");
    }
    for (key, value, complaint) in [
        ("hc_mult", json!(0), "hc_mult"),
        ("hc_mult", json!(2), "hc_"),
        ("hc_eps", json!("small"), "hc_eps"),
        ("index_head_dim", json!(60), "the last 32 are rotated"),
        ("qk_rope_head_dim", json!(30), "rows"),
    ] {
        let mut wrong = config.clone();
        wrong[key] = value;
        write_folder(&scratch.0, &wrong, &tensors);
        let error = open_file(&scratch.0).err().map(|error| error.to_string());
        let error =
            error.or_else(|| Model::open_with(&scratch.0, options(None)).err().map(|e| e.to_string()));
        let error = error.unwrap_or_else(|| panic!("taken: {key}"));
        assert!(error.contains(complaint) && !error.contains('\n'), "{key}: {error}");
    }
}
