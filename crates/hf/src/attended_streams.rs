//! Residual streams that every sublayer attends to, and experts in a latent space beside them, as
//! Kimi K3 has them.

use crate::error::HfError;
use crate::folder::Object;
use crate::metadata::Keys;

/// Writes the streams, the bound of decays, the latent space, and the limits of the activation.
pub(crate) fn write(keys: &mut Keys<'_>, config: Object<'_>) -> Result<(), HfError> {
    let of_states = config.object("linear_attn_config")?;
    if let Some(bound) = of_states.find_float("gate_lower_bound")? {
        keys.set("kda.gate_lower_bound", bound as f32)?;
    }
    const WHOLE_GATES: &str = "use_full_rank_gate";
    if of_states.find_bool(WHOLE_GATES)? == Some(false) {
        return Err(of_states.bad(WHOLE_GATES, "true, as GGUF readers assume", "false"));
    }
    keys.set("attn_res.block_size", config.size("attn_res_block_size")?)?;
    if let Some(width) = config.find_size("routed_expert_hidden_size")? {
        keys.set("expert_latent_length", width)?;
    }
    for limit in ["situ_beta", "situ_linear_beta"] {
        let number = config.float(&format!("activation_{limit}"))?;
        keys.set(&format!("activation.{limit}"), number as f32)?;
    }
    Ok(())
}
