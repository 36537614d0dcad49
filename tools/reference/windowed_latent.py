"""The tiny model of dots.3 note: MLA whose sizes differ in layers with a sliding window."""

from collections.abc import Iterator
from unittest.mock import patch

import gguf
import torch
from spec import Spec
from transformers import PreTrainedConfig

KINDS = ["indexed_attention", "sliding_attention", "sliding_attention", "indexed_attention"]
THETA, LOCAL_THETA = 1e6, 500.0


def ropes(local_theta: float) -> dict[str, dict[str, object]]:
    """Returns the rotations of both kinds of layers."""
    thetas = {"indexed_attention": THETA, "sliding_attention": local_theta}
    return {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}


WINDOWED_LATENT_MODELS = [
    Spec(
        "dots3note-latent128-swa1024-window20",
        hidden=48,
        heads=3,
        kv_heads=3,
        head_dim=None,
        layers=4,
        theta=THETA,
        local_theta=LOCAL_THETA,
        extra={
            "rope_parameters": ropes(LOCAL_THETA),
            "layer_types": KINDS,
            "q_lora_rank": 40,
            "kv_lora_rank": 128,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 40,
            "v_head_dim": 24,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_q_lora_rank": 40,
            "swa_kv_lora_rank": 1024,
            "swa_qk_rope_head_dim": 32,
            "swa_qk_nope_head_dim": 24,
            "swa_head_dim": 56,
            "swa_v_head_dim": 32,
            "sliding_window": 20,
            "index_n_heads": 12,
            "index_head_dim": 64,
            "index_topk": 20,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "n_routed_experts": 7,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "shared_experts_intermediate_size": 24,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.6,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        without=(
            {"sliding_window": 10_000},
            {"rope_parameters": ropes(THETA)},
            {"index_topk": 19},
            {"index_topk": 256},
            {"num_experts_per_tok": 1},
            {"norm_topk_prob": False},
            {"routed_scaling_factor": 1.0},
        ),
        less=(
            "0.self_attn.k_rope_only_layernorm.weight",
            "1.self_attn.k_rope_only_layernorm.weight",
            "0.self_attn.g_proj.weight",
            "1.self_attn.g_proj.weight",
            "3.self_attn.indexer.wk.weight",
            "indexer.weights_proj.weight",
            "indexer.k_norm.bias",
            "e_score_correction_bias",
            "shared_experts.down_proj.weight",
        ),
    ),
]


@torch.no_grad()
def least_index_gap(model: torch.nn.Module, tokens: list[int]) -> float:
    """Returns the smallest difference between the score of the last token that an index selects and
    the next: rounding must not change a choice."""
    n, gaps, choose = model.config.index_topk, [], torch.Tensor.topk

    def measured(scores: torch.Tensor, k: int, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        if scores.shape[-1] == len(tokens):
            best = scores[0, n:].sort(descending=True).values
            gaps.append((best[:, n - 1] - best[:, n]).min())
        return choose(scores, k, **kwargs)

    with patch.object(torch.Tensor, "topk", measured):
        model(torch.tensor([tokens]))
    return float(min(gaps))


def has_windowed_latent(config: PreTrainedConfig) -> bool:
    """Returns whether layers with a window have MLA of other sizes."""
    return config.model_type == "dots3_note_text"


def write_windowed_latent(writer: gguf.GGUFWriter, spec: Spec) -> None:
    """Adds the sizes of layers with a window, and which layers have one; the others an index."""
    extra, arch = spec.extra, spec.family.arch_name
    rank, n_rot = extra["swa_kv_lora_rank"], extra["swa_qk_rope_head_dim"]
    for key, value in {
        "kv_lora_rank_swa": rank,
        "key_length_swa": rank + n_rot,
        "value_length_swa": rank,
        "key_length_mla_swa": extra["swa_head_dim"],
        "value_length_mla_swa": extra["swa_v_head_dim"],
    }.items():
        writer.add_uint32(f"{arch}.attention.{key}", value)
    is_windowed = [kind == "sliding_attention" for kind in extra["layer_types"]]
    writer.add_sliding_window_pattern(is_windowed)
    writer.add_array(f"{arch}.attention.indexer.types", [not windowed for windowed in is_windowed])


def is_of_windowed_latent(config: PreTrainedConfig, name: str) -> bool:
    """Returns whether a weight is stored in another form in files."""
    ends = ("kv_b_proj.weight", "q_a_layernorm.weight", "kv_a_layernorm.weight")
    return has_windowed_latent(config) and name.endswith(ends)


def windowed_latent_parts(config: PreTrainedConfig, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns the weights of MLA in file format: heads in absorbed form, and norms with the factor
    that follows them in the model."""
    if "layernorm" in name:
        yield name, weight * (config.hidden_size / weight.shape[-1]) ** 0.5
        return
    sizes = config.per_layer_config[int(name.split(".")[2])]
    heads = weight.reshape(sizes.num_attention_heads, -1, weight.shape[-1])
    k_dim = sizes.qk_nope_head_dim
    yield name.replace("kv_b", "k_b"), heads[:, :k_dim].transpose(1, 2).contiguous()
    yield name.replace("kv_b", "v_b"), heads[:, k_dim:].contiguous()
