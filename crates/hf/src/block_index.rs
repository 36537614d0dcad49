//! The index of MiniMax M3, which selects blocks of tokens.

use serde_json::{Map, Value};

use crate::error::HfError;
use crate::folder::Object;
use crate::metadata::Keys;

/// Keys of the nested configuration that checkpoints have, and those of `transformers`.
const NESTED: [(&str, &str); 5] = [
    ("sparse_num_index_heads", "index_n_heads"),
    ("sparse_index_dim", "index_head_dim"),
    ("sparse_block_size", "index_block_size"),
    ("sparse_topk_blocks", "index_topk_blocks"),
    ("sparse_local_block", "index_local_blocks"),
];

/// Adds the keys of `transformers` to a configuration of the checkpoint. Faulty values stay, and
/// the readers of the keys report them.
pub(crate) fn add_usual_keys(all: &mut Map<String, Value>) {
    let nested = all.get("sparse_attention_config").and_then(Value::as_object).cloned().unwrap_or_default();
    for (theirs, usual) in NESTED {
        if let Some(value) = nested.get(theirs) {
            all.insert(usual.to_owned(), value.clone());
        }
    }
    if let Some(Value::Array(has_experts)) = all.get("moe_layer_freq") {
        let kind = |has: &Value| if has == 0 { "dense" } else { "sparse" };
        let kinds: Vec<_> = has_experts.iter().map(kind).collect();
        all.insert("mlp_layer_types".to_owned(), kinds.into());
    }
}

/// Writes the index.
pub(crate) fn write(keys: &mut Keys<'_>, config: Object<'_>) -> Result<(), HfError> {
    for (theirs, ours) in [
        ("index_n_heads", "attention.indexer.head_count"),
        ("index_head_dim", "attention.indexer.key_length"),
        ("index_topk_blocks", "attention.indexer.top_k"),
        ("index_block_size", "attention.indexer.block_size"),
    ] {
        keys.set(ours, config.size(theirs)?)?;
    }
    keys.set("attention.indexer.local_blocks", config.find_size("index_local_blocks")?.unwrap_or(0))
}
