//! Residual streams with a gate for each value, and an index of pooled keys, as Qwen4-Exp has them.

use crate::error::HfError;
use crate::folder::Object;
use crate::metadata::Keys;

/// Writes the streams, and the index of the layers that are not recurrent.
pub(crate) fn write(keys: &mut Keys<'_>, config: Object<'_>, is_recurrent: Vec<bool>) -> Result<(), HfError> {
    for (theirs, ours) in [
        ("hc_count", "hyper_connection.count"),
        ("hc_lowrank", "hyper_connection.low_rank"),
        ("indexer_n_heads", "attention.indexer.head_count"),
        ("indexer_head_dim", "attention.indexer.key_length"),
        ("indexer_budget", "attention.indexer.top_k"),
    ] {
        keys.set(ours, config.size(theirs)?)?;
    }
    let stride = config.size("indexer_compress_ratio")? as i32;
    let strides = is_recurrent.into_iter().map(|is| if is { 0 } else { stride });
    keys.set_array("attention.compress_ratios", strides)
}
