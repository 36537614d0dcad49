"""Specification of a tiny model."""

from dataclasses import dataclass, field
from typing import Any

from families import FAMILIES, Family
from rwkv import Rwkv7Config
from transformers import (
    Cohere2MoeConfig,
    Jais2Config,
    Lfm2Config,
    Lfm2MoeConfig,
    Mamba2Config,
    NemotronConfig,
    NemotronHConfig,
    PhiConfig,
    PreTrainedConfig,
    StableLmConfig,
    Starcoder2Config,
)

N_VOCAB = 64
N_LAYERS = 2
CONTEXT = 256
ORIGINAL_CONTEXT = 32  # of scaled RoPE: short, so that 80 positions exceed it

# Names of the norm epsilon, if they differ.
LAYER_EPS = {
    Starcoder2Config: "norm_epsilon",
    NemotronConfig: "norm_eps",
    PhiConfig: "layer_norm_eps",
    StableLmConfig: "layer_norm_eps",
    Jais2Config: "layer_norm_eps",
}
EPS = {Cohere2MoeConfig: "layer_norm_eps", Lfm2Config: "norm_eps", Lfm2MoeConfig: "norm_eps", Mamba2Config: "layer_norm_epsilon", NemotronHConfig: "layer_norm_epsilon", Rwkv7Config: "norm_eps", **LAYER_EPS}
# Configurations whose RoPE rotates a part of a head unless they say that it rotates all.
PARTIAL = (NemotronConfig, PhiConfig, StableLmConfig)


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
    local_theta: float | None = None  # if it differs from the family's
    rope: dict[str, Any] = field(default_factory=dict)
    rope_without: tuple[dict[str, Any], ...] = ({},)  # replacements of `rope` for the sensitivity check
    partial: float = 1.0  # share of a head with RoPE
    extra: dict[str, Any] = field(default_factory=dict)
    without: tuple[dict[str, Any], ...] = ()  # replacements of `extra` for the sensitivity check
    less: tuple[str, ...] = ()  # name suffixes of weights that must have an effect

    @property
    def family(self) -> Family:
        return FAMILIES[self.name.split("-")[0]]

    def to_config(self, rope: dict[str, Any], extra: dict[str, Any] | None = None) -> PreTrainedConfig:
        """Returns the `transformers` configuration, with this RoPE scaling (`{}`: none) and
        `extra`."""
        extra = extra or {}
        explicit = {} if self.head_dim is None else {"head_dim": self.head_dim}
        turns = {"rope_type": "default", "rope_theta": self.theta, **rope}
        if self.partial != 1.0 or self.family.config in PARTIAL:
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
            tie_word_embeddings=self.tied,
            attn_implementation="eager",
            experts_implementation="eager",
            **explicit,
            **{"rope_parameters": turns, EPS.get(self.family.config, "rms_norm_eps"): 1e-6, "pad_token_id": None, **self.extra, **extra},
        )


# RoPE scaling methods.
SCALED = {"original_max_position_embeddings": ORIGINAL_CONTEXT}
SHORT = {"original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED}
# For 24 pairs: different from each other, and from 1.
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [1.5 + 0.25 * i for i in range(24)],
    "short_factor": [1.0 + 0.0625 * i for i in range(24)],
}
YARN = {"rope_type": "yarn", "factor": 8.0, **SCALED}
GROWING = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.6}
# A quarter of a head's pairs rotate, with the frequencies of a full rotation.
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
# Low enough to affect scores and logits.
GRANITE = {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 0.7}
