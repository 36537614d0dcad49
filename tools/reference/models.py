"""The tiny models that `make_fixtures.py` makes: a line of SPECS each."""

from dataclasses import dataclass, field
from typing import Any

from families import FAMILIES, Family
from transformers import Lfm2Config, Lfm2MoeConfig, PreTrainedConfig

N_VOCAB = 64
N_LAYERS = 2
CONTEXT = 256
ORIGINAL_CONTEXT = 32  # of scaled RoPE: short, so that 80 positions reach beyond it


@dataclass(frozen=True)
class Spec:
    """One model. `head_dim` None means `hidden / heads`, with no key for it in the GGUF file."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int | None
    ffn: int = 48
    layers: int = N_LAYERS
    tied: bool = False
    theta: float = 10_000.0
    local_theta: float | None = None  # where it is not the family's
    rope: dict[str, Any] = field(default_factory=dict)
    rope_without: tuple[dict[str, Any], ...] = ({},)  # what to put in the place of `rope`, where there is some, to see that it matters
    partial: float = 1.0  # share of a head that RoPE turns
    extra: dict[str, Any] = field(default_factory=dict)
    without: tuple[dict[str, Any], ...] = ()  # what to put in the place of `extra` to see that it matters
    less: tuple[str, ...] = ()  # ends of the names of weights that must matter

    @property
    def family(self) -> Family:
        return FAMILIES[self.name.split("-")[0]]

    def to_config(self, rope: dict[str, Any], extra: dict[str, Any] | None = None) -> PreTrainedConfig:
        """The `transformers` configuration, with this RoPE scaling (`{}`: none), and this in the place of `extra`."""
        extra = extra or {}
        explicit = {} if self.head_dim is None else {"head_dim": self.head_dim}
        turns = {"rope_type": "default", "rope_theta": self.theta, **rope}
        if self.partial != 1.0:
            turns["partial_rotary_factor"] = self.partial
        if self.family.local_theta is not None:
            local = self.local_theta or self.family.local_theta
            turns = {"full_attention": turns, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
        return self.family.config(
            vocab_size=N_VOCAB,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=CONTEXT,
            **{"norm_eps" if self.family.config in (Lfm2Config, Lfm2MoeConfig) else "rms_norm_eps": 1e-6},
            tie_word_embeddings=self.tied,
            rope_parameters=turns,
            pad_token_id=None,
            attn_implementation="eager",
            experts_implementation="eager",
            **explicit,
            **{**self.extra, **extra},
        )


SCALED = {"original_max_position_embeddings": ORIGINAL_CONTEXT}
SHORT = {"original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED}
# Of 24 pairs: apart from each other, and from 1.
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [1.5 + 0.25 * i for i in range(24)],
    "short_factor": [1.0 + 0.0625 * i for i in range(24)],
}
YARN = {"rope_type": "yarn", "factor": 8.0, **SCALED}
GROWING = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.6}
# So low that scores and logits bend.
GRANITE = {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 0.7}
# A quarter of the pairs of a head are turned, by what they would be if all were.
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
GEMMA2 = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0}

DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# Two layers, of which the first has no experts.
LATENT = {
    "qk_nope_head_dim": 40,
    "v_head_dim": 24,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
DELTA_WEIGHTS = ("A_log", "dt_bias", "conv1d.weight", "linear_attn.norm.weight", "out_proj.weight")

# Named family-h<head size>-g<query heads per KV head>[-speciality].
SPECS = [
    Spec("llama-h64-g8", hidden=32, heads=8, kv_heads=1, head_dim=64),
    Spec("llama-h80-g1-linear", hidden=32, heads=2, kv_heads=2, head_dim=80, tied=True, rope=LINEAR),
    Spec("llama-h128-g2-llama3", hidden=32, heads=4, kv_heads=2, head_dim=128, theta=500_000.0, rope=LLAMA3),
    Spec("llama-h64-g1-yarn", hidden=32, heads=2, kv_heads=2, head_dim=64, rope={**YARN, "attention_factor": 0.9}),
    Spec("llama-h96-g2-bias", hidden=32, heads=2, kv_heads=1, head_dim=96, extra={"attention_bias": True}),
    Spec(
        "llama-h64-g2-ffn-bias",
        hidden=32,
        heads=2,
        kv_heads=1,
        head_dim=64,
        tied=True,
        extra={"mlp_bias": True},
        less=("gate_proj.bias", "up_proj.bias", "down_proj.bias"),
    ),
    Spec("mistral-h96-g3", hidden=48, heads=3, kv_heads=1, head_dim=96, theta=1e6, extra={"sliding_window": 10_000}),
    Spec("qwen2-h64-g2-implicit", hidden=128, heads=2, kv_heads=1, head_dim=None, tied=True, theta=1e6),
    Spec("qwen2-h64-g6", hidden=48, heads=6, kv_heads=1, head_dim=64),
    Spec("qwen2-h128-g1-yarn", hidden=32, heads=2, kv_heads=2, head_dim=128, theta=1e6, rope=YARN),
    Spec("qwen3-h80-g2-linear", hidden=32, heads=4, kv_heads=2, head_dim=80, tied=True, rope=LINEAR),
    Spec("qwen3-h192-g3", hidden=40, heads=3, kv_heads=1, head_dim=192, ffn=56, theta=1e6),
    Spec(
        "qwen3-h256-g2-yarn",
        hidden=32,
        heads=2,
        kv_heads=1,
        head_dim=256,
        theta=1e6,
        rope={**YARN, "beta_fast": 8.0, "beta_slow": 0.5},
    ),
    Spec("gemma-h64-g2", hidden=32, heads=2, kv_heads=1, head_dim=64, tied=True),
    Spec(
        "gemma2-h64-g2-window20-caps",
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=64,
        layers=3,
        tied=True,
        extra={**GEMMA2, "query_pre_attn_scalar": 64, "sliding_window": 20},
        without=({"sliding_window": 10_000}, {"attn_logit_softcapping": None}, {"final_logit_softcapping": None}),
    ),
    Spec(
        "gemma3-h256-g4-window24",
        hidden=32,
        heads=4,
        kv_heads=1,
        head_dim=256,
        layers=7,
        tied=True,
        theta=1e6,
        extra={"query_pre_attn_scalar": 256, "sliding_window": 24},
        without=({"sliding_window": 10_000},),
    ),
    Spec(
        "gemma3-h96-g2-window40-linear",
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=96,
        layers=6,
        tied=True,
        theta=1e6,
        local_theta=500.0,
        rope=LINEAR,
        extra={"query_pre_attn_scalar": 96, "sliding_window": 40},
        without=({"sliding_window": 10_000},),
    ),
    Spec(
        "gemma4-h64-h128-g4-window20-keys",
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=64,
        layers=4,
        tied=True,
        theta=1e6,
        rope=PROPORTIONAL,
        extra={
            "global_head_dim": 128,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 20,
            "final_logit_softcapping": 6.0,
            "hidden_size_per_layer_input": 0,
        },
        without=({"sliding_window": 10_000}, {"final_logit_softcapping": None}),
        less=("layer_scalar",),
    ),
    Spec(
        "gemma4-h64-h96-g2-window24-shared-given",
        hidden=32,
        heads=2,
        kv_heads=1,
        head_dim=64,
        ffn=24,
        layers=5,
        tied=True,
        theta=1e6,
        local_theta=500.0,
        rope=PROPORTIONAL,
        extra={
            "global_head_dim": 96,
            "layer_types": [*2 * ["sliding_attention"], "full_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "sliding_window": 24,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": N_VOCAB,
        },
        without=({"sliding_window": 10_000},),
        less=(
            "layer_scalar",
            "embed_tokens_per_layer.weight",
            "per_layer_model_projection.weight",
            "4.per_layer_projection.weight",
        ),
    ),
    Spec(
        "gemma4-h64-g2-window20-experts",
        hidden=32,
        heads=2,
        kv_heads=1,
        head_dim=64,
        ffn=24,
        layers=2,
        tied=True,
        theta=1e6,
        rope=PROPORTIONAL,
        extra={
            "global_head_dim": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 20,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
        without=({"sliding_window": 10_000}, {"top_k_experts": 1}),
        less=(
            "router.scale",
            "per_expert_scale",
            "post_feedforward_layernorm_1.weight",
            "post_feedforward_layernorm_2.weight",
        ),
    ),
    Spec(
        "granite-h64-g2-factors",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=None,
        tied=True,
        extra=GRANITE,
        without=tuple({name: 1.0} for name in GRANITE),
    ),
    Spec(
        "granitehybrid-h64-g2-attention",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=None,
        tied=True,
        extra={
            **GRANITE,
            "shared_intermediate_size": 48,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": 2 * ["attention"],
            "position_embedding_type": "rope",
        },
        without=({"attention_multiplier": 1.0}, {"position_embedding_type": None}),
    ),
    Spec(
        "smollm3-h64-g2-unturned",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=None,
        layers=4,
        tied=True,
        theta=5e4,
        without=({"no_rope_layer_interval": 100},),
    ),
    Spec("olmo2-h64-g2", hidden=128, heads=2, kv_heads=1, head_dim=None, theta=5e5),
    Spec(
        "olmo3-h64-g2-window20-yarn",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=None,
        layers=4,
        theta=5e5,
        rope=YARN,
        extra={"sliding_window": 20},
        without=({"sliding_window": 10_000}, {"layer_types": 4 * ["sliding_attention"]}),
    ),
    Spec(
        "phi3-h64-g2-window24",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=None,
        partial=0.75,
        extra={"sliding_window": 24},
        without=({"sliding_window": 10_000},),
    ),
    Spec(
        "phi3-h64-g2-longrope",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=None,
        tied=True,
        partial=0.75,
        rope={**LONGROPE, **SCALED},
        rope_without=(
            {},
            {**LONGROPE, **SCALED, "long_factor": LONGROPE["short_factor"]},
            {**LONGROPE, **SCALED, "attention_factor": 1.0},
        ),
        extra={"sliding_window": None, **SCALED},
    ),
    # Its original context is one that its text does not leave.
    Spec(
        "phi3-h64-g2-longrope-short",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=None,
        tied=True,
        partial=0.75,
        rope={**LONGROPE, **SHORT},
        rope_without=({}, {**LONGROPE, **SHORT, "short_factor": LONGROPE["long_factor"]}),
        extra={"sliding_window": None, **SHORT},
    ),
    Spec(
        "mixtral-h64-g2",
        hidden=32,
        heads=2,
        kv_heads=1,
        head_dim=64,
        ffn=40,
        extra={"num_local_experts": 5, "num_experts_per_tok": 2},
        without=({"num_experts_per_tok": 1}, {"num_experts_per_tok": 3}),
    ),
    Spec(
        "qwen2moe-h64-g1-shared",
        hidden=64,
        heads=1,
        kv_heads=1,
        head_dim=None,
        extra={
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": False,
        },
        without=({"num_experts_per_tok": 2}, {"norm_topk_prob": True}),
    ),
    Spec(
        "qwen3moe-h64-g2-dense1",
        hidden=32,
        heads=2,
        kv_heads=1,
        head_dim=64,
        layers=3,
        extra={
            "num_experts": 9,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
        },
        without=({"num_experts_per_tok": 1}, {"norm_topk_prob": False}),
    ),
    Spec(
        "gptoss-h64-g4-window24-sinks",
        hidden=64,
        heads=8,
        kv_heads=2,
        head_dim=64,
        ffn=40,
        layers=3,
        theta=150_000.0,
        rope={**YARN, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False},
        rope_without=({}, {**YARN, "beta_fast": 4.0, "beta_slow": 1.0}),
        extra={"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24},
        without=(
            {"sliding_window": 10_000},
            {"layer_types": 3 * ["sliding_attention"]},
            {"swiglu_limit": 70.0},
            {"swiglu_alpha": 1.0},
            {"num_experts_per_tok": 1},
        ),
        less=("sinks", "experts.gate_up_proj_bias", "experts.down_proj_bias", "router.bias"),
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
        "deepseek2-latent512-lite",
        hidden=32,
        heads=2,
        kv_heads=2,
        head_dim=None,
        extra={
            **LATENT,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 1,
            "topk_method": "group_limited_greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
        },
        without=({"num_experts_per_tok": 1}, {"routed_scaling_factor": 1.0}, {"topk_method": "greedy"}),
        less=("kv_a_layernorm.weight", "shared_experts.down_proj.weight"),
    ),
    Spec(
        "deepseek3-latent192-yarn",
        hidden=48,
        heads=3,
        kv_heads=3,
        head_dim=None,
        rope={**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        rope_without=({}, {**YARN, "mscale": 0.0, "mscale_all_dim": 0.0}),
        extra={
            **LATENT,
            "q_lora_rank": 40,
            "kv_lora_rank": 192,
            "qk_rope_head_dim": 32,
            "n_routed_experts": 9,
            "n_group": 3,
            "topk_group": 1,
            "routed_scaling_factor": 1.6,
            "norm_topk_prob": True,
        },
        without=(
            {"num_experts_per_tok": 1},
            {"norm_topk_prob": False},
            {"routed_scaling_factor": 1.0},
            {"topk_group": 3},
        ),
        less=("q_a_layernorm.weight", "e_score_correction_bias", "shared_experts.down_proj.weight"),
    ),
    Spec(
        "glm4moelite-latent128",
        hidden=48,
        heads=3,
        kv_heads=3,
        head_dim=None,
        theta=1e6,
        extra={
            **LATENT,
            "q_lora_rank": 40,
            "kv_lora_rank": 128,
            "qk_rope_head_dim": 32,
            "n_routed_experts": 7,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
        },
        without=({"num_experts_per_tok": 1}, {"norm_topk_prob": False}, {"routed_scaling_factor": 1.0}),
        less=("q_a_layernorm.weight", "e_score_correction_bias", "shared_experts.down_proj.weight"),
    ),
    Spec("glm4-h64-g2-bias", hidden=32, heads=4, kv_heads=2, head_dim=64, partial=0.5, extra={"attention_bias": True}),
    Spec(
        "cohere2-h64-g2-window20",
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=None,
        layers=4,
        tied=True,
        theta=5e4,
        extra={"sliding_window": 20, "logit_scale": 0.6},
        without=({"sliding_window": 10_000}, {"logit_scale": 1.0}, {"layer_types": 4 * ["sliding_attention"]}),
    ),
    Spec(
        "mistral3-h64-g2-yarn-growing",
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=64,
        theta=1e6,
        rope=GROWING,
        rope_without=(
            {"llama_4_scaling_beta": 0.0, **SCALED},
            {**GROWING, "llama_4_scaling_beta": 0.0},
            {**GROWING, "mscale_all_dim": 1.0},
        ),
    ),
]
