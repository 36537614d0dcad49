#!/usr/bin/env python3
"""Make tiny random models and their golden outputs with Hugging Face `transformers`.

Nothing here is needed to build or test Kvant: the outputs are committed in `crates/model/tests/fixtures`.
For every model below two files are written:

NAME.gguf    weights and metadata by the conventions of llama.cpp's converter. Matrices are f16, norms and biases
             f32; there is no tokenizer (`tokenizer.ggml.model = "none"`).
NAME.golden  what `transformers` computes in f32 from exactly those weights, little-endian:
                 u8  magic[4] = "KVGD"
                 u32 n_prompt, n_steps, n_vocab
                 i32 tokens [n_prompt + n_steps]             the prompt, then the greedy continuation
                 f32 logits [n_prompt + n_steps, n_vocab]    row t: after tokens 0..=t were read
             Prompt rows come from one pass over the prompt, the others from one-token steps on its cache.

Before a pair is written its worth as a test is checked: greedy choices are clear, the f32 result is near the f64
result, stepping agrees with one pass over all tokens, and RoPE scaling, windows, bounds and the like make a difference that
cannot be missed.
"""

import argparse
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

N_PROMPT = 64
N_STEPS = 16
N_VOCAB = 64
N_LAYERS = 2
MAX_PROMPTS = 500
CONTEXT = 256
ORIGINAL_CONTEXT = 32  # of scaled RoPE: short, so that 80 positions reach beyond it

# The reader's tolerance on a logit is 2e-3. Each demand keeps its distance from it.
MIN_GREEDY_MARGIN = 0.05  # between the best two logits at every chosen token
MIN_DISTINCT_TOKENS = 5  # among the chosen ones: a decoder stuck on one token proves little
MAX_ROUNDING_ERROR = 1e-4  # of the f32 logits against f64, and of stepping against one pass
MIN_EFFECT = 0.5  # largest change of a logit when a feature is left out, RoPE scaling for one


@dataclass(frozen=True)
class Family:
    """A model family: the `transformers` configuration and the GGUF architecture it is stored as."""

    config: type[PreTrainedConfig]
    arch: gguf.MODEL_ARCH
    interleaved_rope: bool = False  # rows of Q and K are reordered so that RoPE turns neighbours, not halves
    norm_offset: float = 0.0  # what norms multiply by, beyond their weights; files hold the sum
    quiet: float = 1.0  # how much smaller embeddings are, and larger what the last norm gives: scaled ones drown the layers
    local_theta: float | None = None  # RoPE base of layers with a window, which scaling leaves alone
    mean: float = 0.0  # of embeddings, for norms that take it off
    transposed_experts: bool = False  # whose gates and ups are columns that alternate


FAMILIES = {
    "llama": Family(LlamaConfig, gguf.MODEL_ARCH.LLAMA, interleaved_rope=True),
    "mistral": Family(MistralConfig, gguf.MODEL_ARCH.LLAMA, interleaved_rope=True),
    "mixtral": Family(MixtralConfig, gguf.MODEL_ARCH.LLAMA, interleaved_rope=True),
    "qwen2": Family(Qwen2Config, gguf.MODEL_ARCH.QWEN2),
    "qwen3": Family(Qwen3Config, gguf.MODEL_ARCH.QWEN3),
    "qwen2moe": Family(Qwen2MoeConfig, gguf.MODEL_ARCH.QWEN2MOE),
    "qwen3moe": Family(Qwen3MoeConfig, gguf.MODEL_ARCH.QWEN3MOE),
    "gemma": Family(GemmaConfig, gguf.MODEL_ARCH.GEMMA, norm_offset=1.0, quiet=8.0),
    "gemma2": Family(Gemma2Config, gguf.MODEL_ARCH.GEMMA2, norm_offset=1.0, quiet=8.0),
    "gemma3": Family(Gemma3TextConfig, gguf.MODEL_ARCH.GEMMA3, norm_offset=1.0, quiet=8.0, local_theta=10_000.0),
    "granite": Family(GraniteConfig, gguf.MODEL_ARCH.GRANITE, interleaved_rope=True, quiet=8.0),
    "smollm3": Family(SmolLM3Config, gguf.MODEL_ARCH.SMOLLM3, interleaved_rope=True),
    "olmo2": Family(Olmo2Config, gguf.MODEL_ARCH.OLMO2),
    "phi3": Family(Phi3Config, gguf.MODEL_ARCH.PHI3),
    "glm4": Family(Glm4Config, gguf.MODEL_ARCH.GLM4),
    "gptoss": Family(GptOssConfig, gguf.MODEL_ARCH.GPT_OSS, transposed_experts=True),
    "cohere2": Family(Cohere2Config, gguf.MODEL_ARCH.COHERE2, mean=0.5),
    "mistral3": Family(Ministral3Config, gguf.MODEL_ARCH.MISTRAL3, interleaved_rope=True),
}


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
            rms_norm_eps=1e-6,
            tie_word_embeddings=self.tied,
            rope_parameters=turns,
            pad_token_id=None,
            attn_implementation="eager",
            experts_implementation="eager",
            **explicit,
            **{**self.extra, **extra},
        )


SCALED = {"original_max_position_embeddings": ORIGINAL_CONTEXT}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED}
YARN = {"rope_type": "yarn", "factor": 8.0, **SCALED}
GROWING = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.6}
# So low that scores and logits bend.
GRANITE = {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 0.7}
GEMMA2 = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0}

# Named family-h<head size>-g<query heads per KV head>[-speciality].
SPECS = [
    Spec("llama-h64-g8", hidden=32, heads=8, kv_heads=1, head_dim=64),
    Spec("llama-h80-g1-linear", hidden=32, heads=2, kv_heads=2, head_dim=80, tied=True, rope=LINEAR),
    Spec("llama-h128-g2-llama3", hidden=32, heads=4, kv_heads=2, head_dim=128, theta=500_000.0, rope=LLAMA3),
    Spec("llama-h64-g1-yarn", hidden=32, heads=2, kv_heads=2, head_dim=64, rope={**YARN, "attention_factor": 0.9}),
    Spec("llama-h96-g2-bias", hidden=32, heads=2, kv_heads=1, head_dim=96, extra={"attention_bias": True}),
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


def build_model(spec: Spec) -> torch.nn.Module:
    """A model whose logits, norms and attention are all far from uniform, and whose matrices are exact in f16."""
    torch.manual_seed(zlib.crc32(spec.name.encode()))
    model = AutoModelForCausalLM.from_config(spec.to_config(spec.rope)).eval()
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            values = 1 + 0.3 * torch.randn_like(weight)
            if name == "model.norm.weight":
                values *= spec.family.quiet
            values -= spec.family.norm_offset
        elif name.endswith(("bias", "sinks")):
            values = 0.5 * torch.randn_like(weight)
        else:
            # Unit inputs give outputs of this spread: scores of about +-2 after the division by sqrt(head_dim).
            gain = 1.4 if "q_proj" in name or "k_proj" in name else 2.0 if "embed" in name or "lm_head" in name else 1.0
            n_in = weight.shape[-2 if spec.family.transposed_experts and "experts." in name else -1]
            if "experts." in name:  # a few of them, each with a share
                gain = 1.4
                if hasattr(model.config, "swiglu_limit"):  # so far that bounds bind, and back
                    gain = 4.0 if "gate_up" in name else 0.15
            mean = 0.0
            if "embed" in name:
                gain /= spec.family.quiet
                mean = spec.family.mean * weight.shape[-1] ** -0.5
            values = (gain * n_in**-0.5 * torch.randn_like(weight) + mean).half().float()
        weight.data.copy_(values)
    return model


@torch.no_grad()
def forward(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Logits `[tokens, vocab]` from one pass."""
    return model(torch.tensor([tokens])).logits[0]


@torch.no_grad()
def decode_greedily(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """The prompt with its continuation, and the logits after every token, decoded token by token on a cache."""
    step = model(torch.tensor([prompt]), use_cache=True)
    tokens, rows = list(prompt), [step.logits[0]]
    for _ in range(N_STEPS):
        tokens.append(int(rows[-1][-1].argmax()))
        step = model(torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values, use_cache=True)
        rows.append(step.logits[0])
    return tokens, torch.cat(rows)


def greedy_margin(logits: torch.Tensor) -> float:
    """The narrowest lead of a chosen token over the runner-up."""
    best, second = logits[N_PROMPT - 1 : -1].topk(2).values.unbind(-1)
    return float((best - second).min())


def decode_good_prompt(spec: Spec, model: torch.nn.Module) -> tuple[list[int], torch.Tensor]:
    """Golden output for the first random prompt with a varied continuation that no rounding can change."""
    random = np.random.default_rng(zlib.crc32(spec.name.encode()))
    for _ in range(MAX_PROMPTS):
        tokens, logits = decode_greedily(model, random.integers(0, N_VOCAB, N_PROMPT).tolist())
        varied = len(set(tokens[N_PROMPT:])) >= MIN_DISTINCT_TOKENS
        if varied and greedy_margin(logits) >= MIN_GREEDY_MARGIN:
            return tokens, logits
    raise RuntimeError(f"{spec.name}: no good prompt among {MAX_PROMPTS}; change the model")


def check_worth(spec: Spec, model: torch.nn.Module, tokens: list[int], logits: torch.Tensor) -> None:
    """Refuses golden data that is inexact or would let a mistake pass; prints the figures."""
    others = [forward(model, tokens), forward(model.double(), tokens)]
    model.float()
    rounding = max(float((other - logits).abs().max()) for other in others)
    assert rounding <= MAX_ROUNDING_ERROR, f"{spec.name}: rounding error {rounding}"
    effects = []
    turned_otherwise = [spec.to_config(rope) for rope in spec.rope_without] if spec.rope else []
    for config in turned_otherwise + [spec.to_config(spec.rope, less) for less in spec.without]:
        plain = AutoModelForCausalLM.from_config(config).eval()
        plain.load_state_dict(model.state_dict())
        effects.append(float((forward(plain, tokens) - logits).abs().max()))
        assert effects[-1] >= MIN_EFFECT, f"{spec.name}: a feature changes logits by {effects[-1]} only"
    for end in spec.less:
        plain = AutoModelForCausalLM.from_config(spec.to_config(spec.rope)).eval()
        nothing = -1e4 if end == "sinks" else 0.0
        weights = model.state_dict().items()
        plain.load_state_dict({k: torch.full_like(v, nothing) if k.endswith(end) else v for k, v in weights})
        effects.append(float((forward(plain, tokens) - logits).abs().max()))
        assert effects[-1] >= MIN_EFFECT, f"{spec.name}: {end} changes logits by {effects[-1]} only"
    print(
        f"{spec.name:30} logits' std {float(logits.std()):.2f}  greedy margin {greedy_margin(logits):.3f}  "
        f"distinct tokens {len(set(tokens[N_PROMPT:])):2}  rounding {rounding:.1e}  effects {' '.join(f'{effect:.2f}' for effect in effects) or '-'}"
    )


def to_interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders the rows of each head from (first half, second half) to alternating, as llama.cpp's converter does."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_metadata(writer: gguf.GGUFWriter, spec: Spec, model: torch.nn.Module) -> None:
    """The keys llama.cpp's converter writes for these families."""
    config = model.config
    writer.add_name(spec.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(N_VOCAB)
    writer.add_block_count(spec.layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    if hasattr(type(config), "layer_norm_eps"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(spec.theta)
    if spec.head_dim is not None:
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
        if spec.family.arch == gguf.MODEL_ARCH.LLAMA:
            writer.add_rope_dimension_count(spec.head_dim)
    if spec.partial != 1.0:
        writer.add_rope_dimension_count(int(spec.partial * (spec.head_dim or spec.hidden // spec.heads)))
    write_extra(writer, spec)
    write_rope_scaling(writer, spec, model)


def write_extra(writer: gguf.GGUFWriter, spec: Spec) -> None:
    """What the families have beside the usual."""
    if spec.local_theta is not None:
        writer.add_rope_freq_base_swa(spec.local_theta)
    for name, add in {
        "sliding_window": writer.add_sliding_window,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "attention_multiplier": writer.add_attention_scale,
        "logits_scaling": writer.add_logit_scale,
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "logit_scale": writer.add_logit_scale,
    }.items():
        if spec.extra.get(name) is not None:
            add(spec.extra[name])
    if "mlp_only_layers" in spec.extra:
        writer.add_leading_dense_block_count(len(spec.extra["mlp_only_layers"]))


def write_rope_scaling(writer: gguf.GGUFWriter, spec: Spec, model: torch.nn.Module) -> None:
    """RoPE scaling: keys for linear and YaRN, a tensor of frequency divisors for llama3."""
    match spec.rope.get("rope_type"):
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(spec.rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(spec.rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(spec.rope["original_max_position_embeddings"])
            if "beta_fast" in spec.rope:
                writer.add_rope_scaling_yarn_beta_fast(spec.rope["beta_fast"])
                writer.add_rope_scaling_yarn_beta_slow(spec.rope["beta_slow"])
            if "mscale_all_dim" in spec.rope:
                writer.add_rope_scaling_yarn_log_mul(spec.rope["mscale_all_dim"])
            if "llama_4_scaling_beta" in spec.rope:
                writer.add_attn_temperature_scale(spec.rope["llama_4_scaling_beta"])
            if "attention_factor" in spec.rope:
                # `transformers` replaces the default magnitude 1 + 0.1 ln(factor), this key multiplies it.
                default = 1 + 0.1 * np.log(spec.rope["factor"])
                writer.add_rope_scaling_attn_factors(spec.rope["attention_factor"] / default)
        case "llama3":
            scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, device="cpu")
            plain = spec.theta ** (-torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim)
            writer.add_tensor("rope_freqs.weight", (plain / scaled.double()).float().numpy())


def parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as files hold them: gate and up of the experts apart, the gate of the shared one as a vector."""
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            yield f"{name}.weight", weight
        elif "experts." in name and hasattr(model.config, "swiglu_limit"):  # gpt-oss
            part, suffix = name.removesuffix("_bias"), ".bias" if name.endswith("_bias") else ".weight"
            rows = weight if suffix == ".bias" else weight.transpose(1, 2)
            if part.endswith("gate_up_proj"):
                for half, of in enumerate(("gate_proj", "up_proj")):
                    yield part.replace("gate_up_proj", of) + suffix, rows[:, half::2].contiguous()
            else:
                yield part + suffix, rows.contiguous()
        elif name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1)):
                yield name.replace("gate_up_proj", f"{part}.weight"), half.contiguous()
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", weight
        else:
            yield name, weight.squeeze(0) if "shared_expert_gate" in name else weight


def write_gguf(path: Path, spec: Spec, model: torch.nn.Module) -> None:
    """The model as a GGUF file: matrices in f16 (exactly), vectors in f32."""
    arch = spec.family.arch
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    write_metadata(writer, spec, model)
    names = gguf.get_tensor_name_map(arch, spec.layers)
    dense = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, spec.layers)  # of layers without experts among others
    for name, weight in parts(model):  # a tied head is listed once, as the embedding
        if spec.family.interleaved_rope and ("q_proj" in name or "k_proj" in name):
            weight = to_interleaved(weight, spec.heads if "q_proj" in name else spec.kv_heads)
        if name.endswith("norm.weight"):
            weight = weight + spec.family.norm_offset
        is_router = name.endswith(("mlp.gate.weight", "router.weight"))
        is_matrix = weight.ndim >= 2 and not name.endswith("bias")
        kind = torch.float16 if is_matrix and not is_router else torch.float32
        stored = weight.detach().to(kind)
        assert torch.equal(stored.float(), weight), f"{name} is not exact in {kind}"
        suffixes = {"try_suffixes": (".weight", ".bias")}
        writer.add_tensor(names.get_name(name, **suffixes) or dense.get_name(name, **suffixes), stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_golden(path: Path, tokens: list[int], logits: torch.Tensor) -> None:
    """The golden file; its layout is at the top of this file."""
    assert len(tokens) == N_PROMPT + N_STEPS and logits.shape == (len(tokens), N_VOCAB)
    header = struct.pack("<4sIII", b"KVGD", N_PROMPT, N_STEPS, N_VOCAB)
    path.write_bytes(header + np.array(tokens, "<i4").tobytes() + logits.numpy().astype("<f4").tobytes())


def main() -> None:
    default = Path(__file__).resolve().parents[2] / "crates/model/tests/fixtures"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=default, help="folder to write to (default: %(default)s)")
    parser.add_argument("names", nargs="*", help="models to make (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the order of additions, hence the last bit, depends on it
    for spec in SPECS:
        if args.names and spec.name not in args.names:
            continue
        model = build_model(spec)
        tokens, logits = decode_good_prompt(spec, model)
        check_worth(spec, model, tokens, logits)
        write_gguf(args.out / f"{spec.name}.gguf", spec, model)
        write_golden(args.out / f"{spec.name}.golden", tokens, logits)


if __name__ == "__main__":
    main()
