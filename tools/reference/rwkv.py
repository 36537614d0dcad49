"""RWKV-7 ("Goose", arXiv 2503.14456), which `transformers` lacks: one token after the other."""

import math
from collections.abc import Iterator

import gguf
import torch
from torch.nn import GroupNorm, LayerNorm, Linear, Parameter
from torch.nn.functional import normalize
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

MIXED = "rwkvag"  # the vectors that time mixing interpolates, in the order of files
# Matrices that llama.cpp's converter has in f32.
IN_F32 = ("attention.w1.weight", "attention.w2.weight", "lerp_fused.weight")


class Rwkv7Config(PreTrainedConfig):
    """Names of sizes as in checkpoints of flash-linear-attention."""

    model_type = "rwkv7"
    hidden_size: int = 128
    intermediate_size: int = 192
    num_hidden_layers: int = 3
    vocab_size: int = 64
    max_position_embeddings: int = 256
    norm_eps: float = 1e-5
    group_norm_eps: float = 64e-5  # of each head
    head_dim: int = 32
    decay_low_rank_dim: int = 16
    a_low_rank_dim: int = 16
    v_low_rank_dim: int = 16
    gate_low_rank_dim: int = 32


class TimeMix(torch.nn.Module):
    """The generalized delta rule, with a matrix as the state of each head."""

    def __init__(self, config: Rwkv7Config, layer: int):
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        ranks = {"w": config.decay_low_rank_dim, "a": config.a_low_rank_dim, "v": config.v_low_rank_dim, "g": config.gate_low_rank_dim}
        if layer == 0:  # whose values are the first ones
            del ranks["v"]
        vectors = [f"x_{part}" for part in MIXED] + [f"{part}0" for part in ranks if part != "g"] + ["k_k", "k_a", "r_k"]
        for name in vectors:
            self.register_parameter(name, Parameter(torch.zeros(width)))
        for part, rank in ranks.items():
            self.add_module(f"{part}1", Linear(width, rank, bias=False))
            self.add_module(f"{part}2", Linear(rank, width, bias=False))
        for name in ("receptance", "key", "value", "output"):
            self.add_module(name, Linear(width, width, bias=False))
        self.ln_x = GroupNorm(width // self.head_dim, width, eps=config.group_norm_eps)

    def forward(self, x: torch.Tensor, before: torch.Tensor, state: torch.Tensor, first_v: torch.Tensor | None):
        """Returns the output for one token `x` of each sequence after the token `before`, the new
        states `[sequences, heads, values, keys]`, and the values of the first layer."""
        x_r, x_w, x_k, x_v, x_a, x_g = (x + (before - x) * self.get_parameter(f"x_{part}") for part in MIXED)
        r, k, v = self.receptance(x_r), self.key(x_k), self.value(x_v)
        decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(self.w0 + self.w2(torch.tanh(self.w1(x_w)))))
        rate = torch.sigmoid(self.a0 + self.a2(self.a1(x_a)))
        gate = self.g2(torch.sigmoid(self.g1(x_g)))
        if first_v is None:
            first_v = v
        else:
            v = v + (first_v - v) * torch.sigmoid(self.v0 + self.v2(self.v1(x_v)))

        def heads(vector: torch.Tensor) -> torch.Tensor:
            return vector.unflatten(-1, (-1, self.head_dim))

        removed = normalize(heads(k * self.k_k), dim=-1, eps=1e-12)
        k = k * (1 + (rate - 1) * self.k_a)
        r, k, v, decay, rate = (heads(vector) for vector in (r, k, v, decay, rate))
        found = state @ removed[..., None]
        state = state * decay[..., None, :] - found * (removed * rate)[..., None, :] + v[..., None] * k[..., None, :]
        read = self.ln_x((state @ r[..., None]).flatten(1))
        bonus = (r * k * heads(self.r_k)).sum(-1, keepdim=True) * v
        return self.output((read + bonus.flatten(1)) * gate), state, first_v


class ChannelMix(torch.nn.Module):
    """The feed-forward layer, which reads the token before too."""

    def __init__(self, config: Rwkv7Config):
        super().__init__()
        self.x_k = Parameter(torch.zeros(config.hidden_size))
        self.key = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.value = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return self.value(torch.relu(self.key(x + (before - x) * self.x_k)) ** 2)


class Layer(torch.nn.Module):
    """Both sublayers with their norms."""

    def __init__(self, config: Rwkv7Config, layer: int):
        super().__init__()
        self.ln1 = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.ln2 = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = TimeMix(config, layer)
        self.feed_forward = ChannelMix(config)


class Rwkv7ForCausalLM(PreTrainedModel):
    """The whole model; its cache has the inputs of both sublayers at the last token and the state,
    for each layer."""

    config_class = Rwkv7Config

    def __init__(self, config: Rwkv7Config):
        super().__init__(config)
        self.model = torch.nn.Module()
        self.model.embeddings = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.pre_ln = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.model.layers = torch.nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.model.ln_out = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def step(self, x: torch.Tensor, cache: list[tuple]) -> tuple[torch.Tensor, list[tuple]]:
        """Returns the logits after one token `x` of each sequence, and the new cache."""
        x, first_v, new = self.model.pre_ln(x), None, []
        for layer, (before, before_channels, state) in zip(self.model.layers, cache):
            inputs = layer.ln1(x)
            mixed, state, first_v = layer.attention(inputs, before, state, first_v)
            x = x + mixed
            channels = layer.ln2(x)
            x = x + layer.feed_forward(channels, before_channels)
            new.append((inputs, channels, state))
        return self.lm_head(self.model.ln_out(x)), new

    def forward(self, input_ids: torch.Tensor, past_key_values: list[tuple] | None = None, use_cache: bool = False) -> CausalLMOutputWithPast:
        x, size = self.model.embeddings(input_ids), self.config.head_dim
        nothing, no_state = torch.zeros_like(x[:, 0]), x.new_zeros(len(x), x.shape[-1] // size, size, size)
        cache, rows = past_key_values or [(nothing, nothing, no_state)] * len(self.model.layers), []
        for token in x.unbind(1):
            logits, cache = self.step(token, cache)
            rows.append(logits)
        return CausalLMOutputWithPast(logits=torch.stack(rows, 1), past_key_values=cache if use_cache else None)


def rwkv_values(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Returns random values of a weight of which all have an effect: matrices exact in f16."""
    end, normal = name.split(".", 3)[-1], torch.randn_like(weight)
    if weight.ndim == 2:
        # The reads from the states are so small that the epsilon of their norm has an effect.
        gain = {"receptance.weight": 0.1, "g2.weight": 2.0, "feed_forward.value.weight": 0.7, "lm_head.weight": 2.0}
        by = next((value for of, value in gain.items() if name.endswith(of)), 1.0)
        return (by * weight.shape[-1] ** -0.5 * normal).half().float()
    if ".x_" in name:
        return torch.rand_like(weight)
    mean, spread = {
        "attention.w0": (-1.6, 0.7),  # decay times of about ten tokens
        "attention.a0": (0.0, 0.7),
        "attention.v0": (0.0, 0.7),
        "attention.r_k": (0.0, 3.0),
    }.get(end, (0.0, 0.15 if "ln_out" in name else 0.5) if end.endswith("bias") else (1.0, 0.3))
    return mean + spread * normal


def rwkv_parts(model: Rwkv7ForCausalLM, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a weight in file format: one tensor of all factors of interpolation, and in the first
    layer as many values of `v` as of `a`, which nothing reads."""
    if name.endswith("attention.x_r"):
        factors = [model.get_parameter(f"{name[:-1]}{part}") for part in MIXED]
        yield name.replace("x_r", "lerp_fused.weight"), torch.stack(factors)[:, None, None]
    elif "attention.x_" not in name:
        name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        yield name, weight
        if "layers.0.attention.a" in name:
            yield name.replace("attention.a", "attention.v"), weight


def write_rwkv(writer: gguf.GGUFWriter, _spec: object, model: torch.nn.Module) -> None:
    """Writes the keys of the family."""
    config = model.config
    writer.add_layer_norm_eps(config.norm_eps)
    writer.add_wkv_head_size(config.head_dim)
    writer.add_decay_lora_rank(config.decay_low_rank_dim)
    writer.add_iclr_lora_rank(config.a_low_rank_dim)
    writer.add_value_residual_mix_lora_rank(config.v_low_rank_dim)
    writer.add_gate_lora_rank(config.gate_low_rank_dim)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(0)
