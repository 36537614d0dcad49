"""Kimi K3, which `transformers` lacks: Kimi Linear whose sublayers attend to banked residual streams."""

from collections.abc import Iterator

import gguf
import torch
from torch.nn import Embedding, Identity, Linear, Module, ModuleList
from transformers import KimiLinearConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

# Ends of names in files of layers, by those of their weights here.
OF_LAYERS = {
    "self_attention_res_score.weight": "attn_res_score.weight",
    "mlp_res_score.weight": "ffn_res_score.weight",
    "self_attn.g_b_proj.weight": "ssm_g.weight",
    "mlp.routed_expert_down_proj.weight": "ffn_routed_down.weight",
    "mlp.routed_expert_up_proj.weight": "ffn_routed_up.weight",
    "mlp.routed_expert_norm.weight": "ffn_routed_norm.weight",
}
# The name of the tensor behind them.
BEHIND = {"model.output_attn_res_score.weight": "output_res_score.weight"}


class KimiK3Config(KimiLinearConfig):
    """Names of sizes as in checkpoints, as far as Kimi Linear has none; the activation of its
    convolutions stays SiLU."""

    model_type = "kimi_k3"
    gate_lower_bound: float = -4.0
    routed_expert_hidden_size: int = 32
    has_routed_expert_norm: bool = True
    has_output_gate: bool = True
    activation_situ_beta: float = 0.8
    activation_situ_linear_beta: float = 1.2
    attn_res_block_size: int = 2


def situ(config: KimiK3Config, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns a SiLU between limits that it approaches, times a number between others."""
    beta, of_up = config.activation_situ_beta, config.activation_situ_linear_beta
    limited = of_up * torch.tanh(up / of_up) if of_up > 0 else up
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * limited


class Mlp(kimi_linear.KimiLinearMLP):
    """A dense feed-forward layer, or the shared expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(situ(self.config, self.gate_proj(x), self.up_proj(x)))


class Experts(Module):
    """The routed experts, in their latent space."""

    def __init__(self, config: KimiK3Config):
        super().__init__()
        self.config, latent, width = config, config.routed_expert_hidden_size, config.moe_intermediate_size
        self.gate_up_proj = torch.nn.Parameter(torch.empty(config.num_local_experts, 2 * width, latent))
        self.down_proj = torch.nn.Parameter(torch.empty(config.num_local_experts, latent, width))

    def forward(self, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros_like(x)
        for row, experts in enumerate(selected):
            for expert, weight in zip(experts, weights[row]):
                gate, up = (self.gate_up_proj[expert] @ x[row]).chunk(2)
                sums[row] += weight * (self.down_proj[expert] @ situ(self.config, gate, up))
        return sums


class LatentMoe(Module):
    """Experts in a latent space, whose sum is normalized there, and a shared expert beside them."""

    def __init__(self, config: KimiK3Config):
        super().__init__()
        width, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = kimi_linear.KimiLinearTopkRouter(config)
        self.experts = Experts(config)
        self.routed_expert_down_proj = Linear(width, latent, bias=False)
        self.routed_expert_norm = kimi_linear.KimiLinearRMSNorm(latent, config.rms_norm_eps)
        self.routed_expert_up_proj = Linear(latent, width, bias=False)
        self.shared_experts = Mlp(config, config.moe_intermediate_size * config.n_shared_experts)
        self.is_normed = config.has_routed_expert_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, selected = self.gate(x)
        sums = self.experts(self.routed_expert_down_proj(x).flatten(0, 1), selected, weights).view(*x.shape[:-1], -1)
        if self.is_normed:
            sums = self.routed_expert_norm(sums)
        return self.routed_expert_up_proj(sums) + self.shared_experts(x)


class ForgetGate(kimi_linear.KimiLinearForgetGate):
    """Decays with a lower bound."""

    def __init__(self, config: KimiK3Config):
        super().__init__(config)
        self.lower_bound = config.gate_lower_bound
        self.A_log = torch.nn.Parameter(torch.empty(self.num_heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = (self.f_b_proj(self.f_a_proj(x)) + self.dt_bias).unflatten(-1, (self.num_heads, -1))
        return self.lower_bound * torch.sigmoid(self.A_log.exp()[:, None] * steps)


class DeltaAttention(kimi_linear.KimiLinearDeltaAttention):
    """Kimi's delta rule with bounded decays, and output gates of full rank."""

    def __init__(self, config: KimiK3Config, layer: int):
        super().__init__(config, layer)
        self.forget_gate, self.g_a_proj = ForgetGate(config), Identity()
        self.g_b_proj = Linear(config.hidden_size, self.qkv_dim, bias=False)


class LatentAttention(kimi_linear.KimiLinearAttention):
    """MLA with gates of its output."""

    def __init__(self, config: KimiK3Config, layer: int):
        super().__init__(config, layer)
        # With the epsilon of the configuration, as all others.
        self.q_a_layernorm, self.kv_a_layernorm = (
            kimi_linear.KimiLinearRMSNorm(rank, config.rms_norm_eps) for rank in (self.q_lora_rank, self.kv_lora_rank)
        )
        self.g_proj = Linear(config.hidden_size, self.num_heads * self.v_head_dim, bias=False)

    def forward(self, x: torch.Tensor, cache: DynamicCache | None) -> torch.Tensor:
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        latent, shared = self.kv_a_layernorm(latent)[:, None], shared[:, None]
        if cache is not None:
            latent, shared = cache.update(latent, shared, self.layer_idx)
        keys, values = self.expand_kv(latent, shared)
        n, n_keys = queries.shape[2], keys.shape[2]
        is_later = torch.ones(n, n_keys, dtype=torch.bool).triu(n_keys - n + 1)
        scores = (self.scaling * queries @ keys.transpose(2, 3)).masked_fill(is_later, -torch.inf)
        attended = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        return self.o_proj(attended * torch.sigmoid(self.g_proj(x)) if self.config.has_output_gate else attended)


class Layer(Module):
    """Both sublayers, and what scores the streams that each reads."""

    def __init__(self, config: KimiK3Config, layer: int):
        super().__init__()
        width, eps, self.is_recurrent = config.hidden_size, config.rms_norm_eps, config.layer_types[layer] == "linear_attention"
        self.self_attn = (DeltaAttention if self.is_recurrent else LatentAttention)(config, layer)
        self.mlp = LatentMoe(config) if config.mlp_layer_types[layer] == "sparse" else Mlp(config)
        self.input_layernorm, self.post_attention_layernorm = (kimi_linear.KimiLinearRMSNorm(width, eps) for _ in range(2))
        add_scores(self, config, "self_attention_res")
        add_scores(self, config, "mlp_res")

    def mixed(self, x: torch.Tensor, cache: DynamicCache | None) -> torch.Tensor:
        """Returns what the token mixer makes of its input."""
        x = self.input_layernorm(x)
        return self.self_attn(x, cache=cache) if self.is_recurrent else self.self_attn(x, cache)


def add_scores(module: Module, config: KimiK3Config, name: str) -> None:
    """Adds the two weights that score streams."""
    module.add_module(f"{name}_norm", kimi_linear.KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps))
    module.add_module(f"{name}_proj", Linear(config.hidden_size, 1, bias=False))


def attend(module: Module, name: str, banked: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Returns the mean of the banked streams and the current one, weighted by a softmax."""
    streams = torch.stack([*banked, x])
    norm, proj = module.get_submodule(f"{name}_norm"), module.get_submodule(f"{name}_proj")
    return (proj(norm(streams)).softmax(0) * streams).sum(0)


class KimiK3ForCausalLM(PreTrainedModel):
    """The whole text model."""

    config_class = KimiK3Config

    def __init__(self, config: KimiK3Config):
        super().__init__(config)
        self.model = Module()
        self.model.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        add_scores(self.model, config, "output_attn_res")
        self.model.norm = kimi_linear.KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, past_key_values: DynamicCache | None = None, use_cache: bool = False) -> CausalLMOutputWithPast:
        cache = past_key_values or (DynamicCache(config=self.config) if use_cache else None)
        x, banked = self.model.embed_tokens(input_ids), []
        for i, layer in enumerate(self.model.layers):
            mixed = layer.mixed(attend(layer, "self_attention_res", banked, x), cache)
            if i % self.config.attn_res_block_size == 0:
                banked.append(x)
                x = mixed
            else:
                x = x + mixed
            x = x + layer.mlp(layer.post_attention_layernorm(attend(layer, "mlp_res", banked, x)))
        x = self.model.norm(attend(self.model, "output_attn_res", banked, x))
        return CausalLMOutputWithPast(logits=self.lm_head(x), past_key_values=cache)


def is_of_kimi_k3(name: str) -> bool:
    """Returns whether files have the weight in a form or under a name of this family."""
    return "_res_" in name or name.endswith("A_log")


def kimi_k3_parts(model: KimiK3ForCausalLM, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields such a weight in file format: the product of the two that score streams, and factors
    instead of their logarithms, of each head."""
    if name.endswith("A_log"):
        yield name.replace("forget_gate.", ""), -weight.exp()
    elif name.endswith("_res_norm.weight"):
        proj = model.get_parameter(name.replace("_norm.", "_proj."))
        yield name.replace("_norm.", "_score."), weight * proj.flatten()


def write_kimi_k3(writer: gguf.GGUFWriter, config: KimiK3Config) -> None:
    """Writes the keys that Kimi Linear has none of."""
    arch = "kimi-k3"
    writer.add_float32(f"{arch}.kda.gate_lower_bound", config.gate_lower_bound)
    writer.add_uint32(f"{arch}.expert_latent_length", config.routed_expert_hidden_size)
    writer.add_float32(f"{arch}.activation.situ_beta", config.activation_situ_beta)
    writer.add_float32(f"{arch}.activation.situ_linear_beta", config.activation_situ_linear_beta)
    writer.add_uint32(f"{arch}.attn_res.block_size", config.attn_res_block_size)


# Parts of names here, and those in checkpoints.
PUBLISHED = (
    (".forget_gate.", "."),
    (".g_b_proj.", ".g_proj."),
    (".mlp.gate.", ".block_sparse_moe.gate."),
    (".mlp.routed_expert_", ".block_sparse_moe.routed_expert_"),
    (".mlp.shared_experts.", ".block_sparse_moe.shared_experts."),
    (".mlp.experts.", ".block_sparse_moe.experts."),
)


def published_weights(model: KimiK3ForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights of the text model as checkpoints have them."""
    for name, weight in model.state_dict().items():
        for ours, theirs in PUBLISHED:
            name = name.replace(ours, theirs)
        name = f"language_model.{name}"
        if name.endswith(".conv1d.weight"):
            for part, taps in zip("qkv", weight.chunk(3)):
                yield name.replace(".conv1d.", f".{part}_conv1d."), taps
        elif name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            module, part = name.rsplit(".", 1)
            parts = ("w1", "w3") if part == "gate_up_proj" else ("w2",)
            for expert, matrices in enumerate(weight):
                for of, matrix in zip(parts, matrices.chunk(len(parts))):
                    yield f"{module}.{expert}.{of}.weight", matrix
        else:
            yield name, weight


def published_config(config: KimiK3Config) -> dict:
    """Returns the configuration as checkpoints have it, around that of the text model."""
    kept = (
        "attn_res_block_size activation_situ_beta activation_situ_linear_beta hidden_size intermediate_size kv_lora_rank "
        "model_max_length moe_intermediate_size moe_renormalize num_attention_heads num_experts num_experts_per_token "
        "num_hidden_layers num_key_value_heads num_shared_experts q_lora_rank qk_nope_head_dim qk_rope_head_dim rms_norm_eps "
        "routed_expert_hidden_size routed_scaling_factor tie_word_embeddings v_head_dim vocab_size"
    ).split()
    attends = [kind == "full_attention" for kind in config.layer_types]
    layers = range(1, len(attends) + 1)
    text = {
        **{key: getattr(config, key) for key in kept},
        "architectures": ["KimiLinearForCausalLM"],
        "first_k_dense_replace": config.mlp_layer_types.count("dense"),
        "hidden_act": "situ",
        "linear_attn_config": {
            "full_attn_layers": [layer for layer, full in zip(layers, attends) if full],
            "kda_layers": [layer for layer, full in zip(layers, attends) if not full],
            "gate_lower_bound": config.gate_lower_bound,
            "use_full_rank_gate": True,
            "head_dim": config.linear_head_dim,
            "num_heads": config.linear_num_heads,
            "short_conv_kernel_size": config.linear_conv_kernel_dim,
        },
        "latent_moe_use_norm": True,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "rope_theta": 10_000.0,
    }
    return {"architectures": ["KimiK3ForConditionalGeneration"], "text_config": text}
