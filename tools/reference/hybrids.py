"""The tiny models with recurrent layers, their keys and their weights."""

from collections.abc import Iterator

import gguf
import torch
from spec import GRANITE, Spec
from transformers import PreTrainedConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen4ExpTextConfig

DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DELTA_WEIGHTS = ("A_log", "dt_bias", "conv1d.weight", "linear_attn.norm.weight", "out_proj.weight")
SPACE = {
    "mamba_n_heads": 16,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
}
SPACE_WEIGHTS = ("A_log", "dt_bias", "conv1d.weight", "conv1d.bias", "mamba.norm.weight", ".D", "out_proj.weight")
# The same under other names, in layers with a single sublayer.
HALVED = {
    "mamba_num_heads": 16,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "n_groups": 2,
}
# The same in models without attention.
ALONE = {"num_heads": 16, "head_dim": 16, "state_size": 32, "conv_kernel": 4, "n_groups": 2}
# In every layer beside attention; factors are folded into the weights in files.
BESIDE = {
    **SPACE,
    "mamba_n_heads": 8,
    "mamba_d_ssm": 128,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.3,
    "key_multiplier": 0.7,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "mlp_multipliers": [1.4, 0.8],
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.9,
}
HALVED_EXPERTS = {
    **HALVED,
    "layer_types": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.6,
    "norm_topk_prob": True,
}
HALVED_WEIGHTS = ("A_log", "dt_bias", "conv1d.weight", "conv1d.bias", "mixer.norm.weight", ".D", "out_proj.weight")

RWKV_WEIGHTS = (
    *(f"attention.{name}" for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "k_k", "k_a", "r_k")),
    *(f"attention.{name}.weight" for name in ("w2", "a2", "v2", "g2", "ln_x")),
    *("attention.w0", "attention.a0", "attention.v0", "pre_ln.bias", "ln1.bias", "ln2.bias", "ln_x.bias", "ln_out.bias", "feed_forward.x_k"),
)

KIMI = {
    "linear_head_dim": 32,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 40,
    "v_head_dim": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.6,
}
KIMI_WEIGHTS = ("A_log", "dt_bias", "conv1d.weight", "f_b_proj.weight", "g_b_proj.weight", "b_proj.weight", "o_norm.weight", "e_score_correction_bias")

LING3 = {
    **{key: value for key, value in KIMI.items() if not key.startswith("linear")},
    "head_dim": 32,
    "kda_lower_bound": -4.0,
    "n_group": 3,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_mtp_layers": 0,
}
LING3_WEIGHTS = ("A_log", "dt_bias", "conv1d.weight", "f_proj.weight", "0.self_attn.g_proj.weight", "2.self_attn.g_proj.weight", "b_proj.weight", "e_score_correction_bias")

KIMI_K3 = {
    **KIMI,
    "q_lora_rank": 48,
    "norm_topk_prob": True,
    "gate_lower_bound": -4.0,
    "routed_expert_hidden_size": 32,
    "activation_situ_beta": 0.8,
    "activation_situ_linear_beta": 1.2,
    "attn_res_block_size": 2,
    "rms_norm_eps": 0.01,  # rounding of small outputs of states grows with a small one
}
KIMI_K3_WITHOUT = (  # no factors on experts, which the norm of their sum undoes
    {"num_experts_per_tok": 1},
    {"gate_lower_bound": -0.5},
    {"has_routed_expert_norm": False},
    {"has_output_gate": False},
    {"activation_situ_beta": 50.0},
    {"activation_situ_linear_beta": 0.0},
    {"attn_res_block_size": 1},
    {"attn_res_block_size": 3},
    {"rms_norm_eps": 1e-6},
)
KIMI_K3_WEIGHTS = (
    *("A_log", "dt_bias", "conv1d.weight", "f_b_proj.weight", "g_b_proj.weight", "b_proj.weight", "o_norm.weight", "e_score_correction_bias"),
    *("self_attention_res_proj.weight", "mlp_res_proj.weight", "output_attn_res_proj.weight", "shared_experts.down_proj.weight"),
)

HYBRIDS = [
    Spec(
        "kimik3-latent128-streams",
        hidden=64,
        heads=4,
        kv_heads=4,
        head_dim=None,
        layers=4,
        extra={
            **KIMI_K3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
        without=KIMI_K3_WITHOUT,
        less=KIMI_K3_WEIGHTS,
    ),
    Spec(
        "bailingmoe3-latent128-kda-bound",
        hidden=64,
        heads=4,
        kv_heads=4,
        head_dim=None,
        layers=3,
        theta=1e6,
        extra={
            **LING3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        without=({"num_experts_per_tok": 1}, {"kda_lower_bound": -0.5}, {"kda_safe_gate": False}, {"topk_group": 3}),
        less=LING3_WEIGHTS,
    ),
    Spec(
        "kimilinear-latent128-kda",
        hidden=64,
        heads=4,
        kv_heads=4,
        head_dim=None,
        layers=4,
        extra={
            **KIMI,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
        without=({"num_experts_per_tok": 1}, {"routed_scaling_factor": 1.0}, {"norm_topk_prob": False}),
        less=KIMI_WEIGHTS,
    ),
    Spec(
        "lfm2-h64-g2-conv3",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=None,
        layers=4,
        tied=True,
        theta=1e6,
        extra={
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
        less=("0.conv.conv.weight", "2.conv.conv.weight", "3.conv.conv.weight"),
    ),
    Spec(
        "lfm2moe-h64-g2-conv3-dense1",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=None,
        layers=3,
        tied=True,
        theta=1e6,
        extra={
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        without=({"num_experts_per_tok": 1}, {"norm_topk_prob": False}),
        less=("expert_bias",),
    ),
    Spec(
        "qwen35-h64-g2-delta",
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=64,
        layers=4,
        theta=1e6,
        partial=0.25,
        extra={**DELTA, "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]},
        less=DELTA_WEIGHTS,
    ),
    Spec(
        "qwen35moe-h64-g2-delta-experts",
        hidden=64,
        heads=2,
        kv_heads=1,
        head_dim=64,
        layers=3,
        theta=1e6,
        partial=0.25,
        extra={
            **DELTA,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
        without=({"num_experts_per_tok": 2},),
        less=DELTA_WEIGHTS,
    ),
    Spec(
        "qwen3next-h64-g2-delta-experts",
        hidden=64,
        heads=2,
        kv_heads=1,
        head_dim=64,
        layers=3,
        theta=1e6,
        partial=0.5,
        extra={
            **DELTA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
        without=({"num_experts_per_tok": 1}, {"norm_topk_prob": False}),
        less=DELTA_WEIGHTS,
    ),
    Spec(
        "graniteh-h64-g2-space",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=None,
        layers=3,
        tied=True,
        extra={
            **GRANITE,
            **SPACE,
            "shared_intermediate_size": 48,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["mamba", "attention", "mamba"],
            "position_embedding_type": "nope",
        },
        without=({"attention_multiplier": 1.0}, {"position_embedding_type": "rope"}),
        less=SPACE_WEIGHTS,
    ),
    Spec(
        "graniteh-h64-g2-space-experts",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=None,
        layers=3,
        ffn=24,
        tied=True,
        extra={
            **GRANITE,
            **SPACE,
            "mamba_n_groups": 2,
            "shared_intermediate_size": 40,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "layer_types": ["mamba", "attention", "mamba"],
            "position_embedding_type": "nope",
        },
        without=({"num_experts_per_tok": 1}, *({name: 1.0} for name in GRANITE)),
        less=(*SPACE_WEIGHTS, "shared_mlp.output_linear.weight"),
    ),
    Spec(
        "falconh1-h64-g2-beside",
        hidden=64,
        heads=2,
        kv_heads=1,
        head_dim=64,
        theta=1e5,
        extra={**BESIDE, "mamba_n_groups": 2},
        without=({"key_multiplier": 3.0}, {"ssm_multipliers": 5 * [1.0]}),
        less=("A_log", "dt_bias", "conv1d.weight", "conv1d.bias", ".D", "mamba.out_proj.weight", "o_proj.weight"),
    ),
    Spec(
        "falconh1-h64-g2-beside-normed",
        hidden=64,
        heads=2,
        kv_heads=1,
        head_dim=64,
        theta=1e5,
        extra={**BESIDE, "mamba_rms_norm": True},
        less=SPACE_WEIGHTS,
    ),
    Spec(
        "mamba2-space",
        hidden=128,
        heads=0,
        kv_heads=0,
        head_dim=None,
        ffn=0,
        layers=3,
        tied=True,
        extra=ALONE,
        less=HALVED_WEIGHTS,
    ),
    Spec(
        "rwkv7-h32",
        hidden=128,
        heads=0,
        kv_heads=0,
        head_dim=32,
        ffn=192,
        layers=3,
        without=({"group_norm_eps": 1e-6},),
        less=RWKV_WEIGHTS,
    ),
    Spec(
        "nemotronh-h64-g2-space",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=64,
        layers=5,
        extra={**HALVED, "layer_types": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]},
        less=(*HALVED_WEIGHTS, "1.mixer.down_proj.weight"),
    ),
    Spec(
        "nemotronhmoe-h64-g2-space-experts",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=64,
        layers=4,
        extra=HALVED_EXPERTS,
        without=({"num_experts_per_tok": 1}, {"routed_scaling_factor": 1.0}, {"norm_topk_prob": False}),
        less=(*HALVED_WEIGHTS, "shared_experts.down_proj.weight", "e_score_correction_bias"),
    ),
    Spec(
        "nemotronhmoe-h64-g2-space-latent",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=64,
        layers=4,
        extra={**HALVED_EXPERTS, "moe_latent_size": 32, "n_group": 2, "topk_group": 1},
        without=({"topk_group": 2},),
        less=(*HALVED_WEIGHTS, "fc2_latent_proj.weight"),
    ),
]


def has_kimi_delta(spec: Spec) -> bool:
    """Returns whether layers are Kimi's delta rules, beside MLA."""
    return "linear_num_heads" in spec.extra or "kda_lower_bound" in spec.extra


def write_states(writer: gguf.GGUFWriter, spec: Spec) -> None:
    """Returns the sizes of heads with a matrix state, and their layers."""
    extra, arch = spec.extra, gguf.MODEL_ARCH_NAMES[spec.family.arch]
    if "linear_key_head_dim" in extra:
        writer.add_ssm_conv_kernel(extra["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(extra["linear_key_head_dim"])
        writer.add_ssm_group_count(extra["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(extra["linear_num_value_heads"])
        writer.add_ssm_inner_size(extra["linear_value_head_dim"] * extra["linear_num_value_heads"])
        kinds = [kind == "linear_attention" for kind in extra["layer_types"]]
        if kinds == [(i + 1) % 2 > 0 for i in range(spec.layers)]:
            writer.add_full_attention_interval(2)
        else:
            writer.add_array(f"{arch}.attention.recurrent_layers", kinds)
    if has_kimi_delta(spec):
        writer.add_ssm_conv_kernel(extra.get("linear_conv_kernel_dim", 4))
        writer.add_kda_head_dim(extra.get("linear_head_dim") or extra["head_dim"])
    if "kda_lower_bound" in extra:
        writer.add_bool("bailingmoe3.kda.safe_gate", True)
        writer.add_float32("bailingmoe3.kda.gate_lower_bound", extra["kda_lower_bound"])
    for names in (SPACE, HALVED, ALONE):
        heads, dim, state, taps, groups = names
        if heads in extra:
            writer.add_ssm_conv_kernel(extra[taps])
            writer.add_ssm_state_size(extra[state])
            writer.add_ssm_group_count(extra[groups])
            writer.add_ssm_time_step_rank(extra[heads])
            writer.add_ssm_inner_size(extra[heads] * extra[dim])
            writer.add_rope_scaling_finetuned(extra.get("position_embedding_type") == "rope")


def multiplied(config: PreTrainedConfig, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight of Falcon-H1 with its input and output factors."""
    if not hasattr(config, "key_multiplier"):
        return weight
    inner, groups = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    gate, down = config.mlp_multipliers
    attention = config.attention_in_multiplier
    for part, by in {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": attention,
        "k_proj": attention * config.key_multiplier,
        "v_proj": attention,
        "o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
    }.items():
        if f"{part}.weight" in name:
            return weight * by
    if "mamba.in_proj" in name:
        rows = [inner, inner, groups, groups, config.mamba_n_heads]
        return weight * config.ssm_in_multiplier * torch.tensor(config.ssm_multipliers).repeat_interleave(torch.tensor(rows))[:, None]
    return weight


def delta_parts(config: PreTrainedConfig, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns the weights of a gated delta rule layer in file format: factors instead of their
    logarithms, queries, keys and values consecutively. Qwen3.5's value heads of one key head are
    as many heads apart as there are key heads."""
    n_k, n_v = config.linear_num_key_heads, config.linear_num_value_heads
    k, v = config.linear_key_head_dim, config.linear_value_head_dim
    weight = -weight.exp() if name.endswith("A_log") else weight.squeeze(1) if "conv1d" in name else weight
    name = name.replace("dt_bias", "dt_proj.bias")

    def tiled(rows: torch.Tensor) -> torch.Tensor:
        if not isinstance(config, (Qwen3_5TextConfig, Qwen3_5MoeTextConfig, Qwen4ExpTextConfig)):
            return rows
        return rows.reshape(n_k, n_v // n_k, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if "in_proj_qkvz" in name:
        each = n_v // n_k * v
        q, k, v, z = weight.reshape(n_k, -1, weight.shape[-1]).split([k, k, each, each], dim=1)
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), torch.cat([x.flatten(0, 1) for x in (q, k, v)])
        yield name.replace("in_proj_qkvz", "in_proj_z"), z.flatten(0, 1)
    elif "in_proj_qkv" in name or "conv1d" in name:
        yield name, torch.cat([weight[: 2 * n_k * k], tiled(weight[2 * n_k * k :])])
    elif "out_proj" in name:
        yield name, tiled(weight.T).T.contiguous()
    elif "in_proj_ba" in name or name.endswith("norm.weight"):
        yield name, weight
    else:
        yield name, tiled(weight)


def is_gate_of_state(config: PreTrainedConfig, name: str) -> bool:
    """Returns whether the weight makes the output gates of a layer of Ling's with a state."""
    if config.model_type != "bailing_hybrid" or "g_proj" not in name:
        return False
    return config.layer_types[int(name.split(".")[2])] == "linear_attention"


def kimi_parts(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns the weights of Kimi's delta rule in file format: factors instead of their logarithms,
    and a convolution for each of queries, keys and values."""
    if "conv1d" in name:
        for part, taps in zip("qkv", weight.chunk(3)):
            yield name.replace("conv1d", f"{part}_conv1d"), taps.unsqueeze(0)
    elif name.endswith("A_log"):
        yield name.replace("forget_gate.", ""), -weight.exp() if weight.ndim > 1 else weight.exp().unsqueeze(1)
    else:
        name = name.replace("forget_gate.", "").replace("dt_bias", "dt_proj.bias")
        # Ling's are whole, under the names of Kimi's first factors.
        yield name.replace("f_proj", "f_a_proj").replace("g_proj", "g_a_proj"), weight


def space_parts(config: PreTrainedConfig, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns the weights of a state space in file format: factors instead of their logarithms, and
    per-head numbers as columns."""
    if name.endswith("A_log"):
        yield name, -weight.exp().unsqueeze(1)
    elif name.endswith(".D"):
        yield name, weight.unsqueeze(1)
    elif name.endswith("norm.weight"):  # per group of heads
        yield name, weight.reshape(getattr(config, "mamba_n_groups", None) or config.n_groups, -1)
    elif ".mixer.experts." in name:
        yield name.replace("backbone", "model").replace("mixer", "mlp") + ".weight", weight
    else:
        yield name.replace("dt_bias", "dt_proj.bias").replace("mixer.dt_proj", "mixer.dt"), weight.squeeze(1) if "conv1d.weight" in name else weight
