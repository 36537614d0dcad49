"""Keys of MLA."""

import gguf
from hybrids import has_kimi_delta
from spec import Spec
from transformers import PreTrainedConfig


def is_absorbed(config: PreTrainedConfig) -> bool:
    """Returns whether the file has heads in absorbed form; older files have them as in the
    model."""
    return config.q_lora_rank is not None or config.model_type in ("kimi_linear", "bailing_hybrid")


def write_latent(writer: gguf.GGUFWriter, spec: Spec) -> None:
    """Returns the sizes of MLA."""
    extra = spec.extra
    whole, v_dim = extra["qk_nope_head_dim"] + extra["qk_rope_head_dim"], extra["v_head_dim"]
    if "norm_topk_prob" in extra:
        writer.add_expert_weights_norm(extra["norm_topk_prob"])
    if extra["q_lora_rank"] is None and not has_kimi_delta(spec):
        writer.add_key_length(whole)
        writer.add_value_length(v_dim)
    else:
        writer.add_key_length(extra["kv_lora_rank"] + extra["qk_rope_head_dim"])
        writer.add_value_length(extra["kv_lora_rank"])
        writer.add_key_length_mla(whole)
        writer.add_value_length_mla(v_dim)
