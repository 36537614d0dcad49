//! Folders of models whose index selects blocks of tokens.

use kvant::{Model, open_file};
use serde_json::json;

use super::saved::{Scratch, saved, write_folder};
use super::{logits, options};

/// As checkpoints have it: in an object of its own, and with numbers for kinds of layers.
#[test]
fn minimax_m3_accepts_both_forms_of_its_index() {
    let scratch = Scratch::new("blocks");
    let (config, tensors) = saved("minimaxm3-h64-g2-index48-blocks");
    write_folder(&scratch.0, &config, &tensors);
    let want = logits(&Model::open_with(&scratch.0, options(None)).unwrap());
    let mut older = config.clone();
    let text = older["text_config"].as_object_mut().unwrap();
    let mut index = json!({"sparse_attention_freq": [0, 1, 1]});
    for (usual, theirs) in [
        ("index_n_heads", "sparse_num_index_heads"),
        ("index_head_dim", "sparse_index_dim"),
        ("index_block_size", "sparse_block_size"),
        ("index_topk_blocks", "sparse_topk_blocks"),
        ("index_local_blocks", "sparse_local_block"),
    ] {
        index[theirs] = text.remove(usual).unwrap();
    }
    assert!(text.remove("mlp_layer_types").is_some());
    text.insert("sparse_attention_config".to_owned(), index);
    text.insert("moe_layer_freq".to_owned(), json!([0, 1, 1]));
    text.insert("hidden_act".to_owned(), json!("swigluoai"));
    write_folder(&scratch.0, &older, &tensors);
    assert_eq!(logits(&Model::open_with(&scratch.0, options(None)).unwrap()), want);
    for (path, value, complaint) in [
        ("/text_config/sparse_attention_config/sparse_block_size", json!(0), "index_block_size"),
        ("/text_config/sparse_attention_config/sparse_index_dim", json!("48"), "index_head_dim"),
        ("/text_config/moe_layer_freq", json!([1, 0, 1]), "dense ones before all others"),
        ("/text_config/swiglu_limit", json!(5.0), "expected 7"),
    ] {
        let mut wrong = older.clone();
        *wrong.pointer_mut(path).unwrap() = value;
        write_folder(&scratch.0, &wrong, &tensors);
        let error = open_file(&scratch.0).err().unwrap_or_else(|| panic!("taken: {path}")).to_string();
        assert!(error.contains(complaint) && !error.contains('\n'), "{path}: {error}");
    }
}
