"""Qwen4-Exp: gated residual streams, blocks of tokens selected by pooled keys, n-gram embeddings."""

from collections.abc import Iterator

import gguf
import numpy as np
import torch
from hybrids import DELTA, delta_parts
from spec import Spec
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer, Qwen4ExpTextTopKRouter, apply_rotary_pos_emb

EOS = 7  # ends the context of n-grams, within prompts too

NGRAM_MODELS = [
    Spec(
        "qwen4exp-h64-g2-ngrams",
        hidden=64,
        heads=2,
        kv_heads=1,
        head_dim=64,
        layers=4,
        theta=1e6,
        partial=0.25,
        extra={
            **DELTA,
            "linear_value_head_dim": 32,  # llama.cpp has one size for keys and values
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "output_gate_type": "sigmoid",
            "hc_count": 4,
            "hc_lowrank": 24,
            "ple_layer_ids": [3],
            "ple_conv_kernel_size": 3,
            "ngram_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 97,
            "split_ngram_parts": 1,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
            "bos_token_id": None,
            "eos_token_id": EOS,
        },
        without=(
            {"num_experts_per_tok": 1},
            {"output_gate_type": "silu"},
            {"indexer_budget": 12},
            {"indexer_budget": 256},
            {"indexer_compress_ratio": 8},
            {"eos_token_id": 63},
        ),
        less=(
            "A_log",
            "dt_bias",
            "linear_attn.conv1d.weight",
            "linear_attn.norm.weight",
            "out_proj.weight",
            "attn_hyper_connection.input_mix_weight_up.weight",
            "attn_hyper_connection.block_inject_weight.weight",
            "mlp_hyper_connection.input_mix_weight_down.weight",
            "mlp_hyper_connection.block_inject_weight.weight",
            "hyper_connection_mixer.input_mix_weight_up.weight",
            "indexer.q_layernorm.weight",
            "indexer.k_layernorm.weight",
            "ple.key_proj.weight",
            "ple.value_proj.weight",
            "ple.conv1d.weight",
            "ple.norm_key.weight",
            "ple.norm_query.weight",
            "ple.norm_conv.weight",
            "shared_expert_gate.weight",
        ),
    ),
]

# Names in files, by those in `transformers`: outside the layers, and in one.
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.hyper_connection_mixer.hc_norm.weight": "output_hc_norm.weight",
    "model.hyper_connection_mixer.input_mix_weight_down.weight": "output_hc_down.weight",
    "model.hyper_connection_mixer.input_mix_weight_up.weight": "output_hc_up.weight",
}
INSIDE = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.indexer.q_layernorm.weight": "indexer.q_norm.weight",
    "self_attn.indexer.k_layernorm.weight": "indexer.k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_proj.bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "ple.key_proj.weight": "ple_key.weight",
    "ple.value_proj.weight": "ple_value.weight",
    "ple.norm_key.weight": "ple_norm_key.weight",
    "ple.norm_query.weight": "ple_norm_query.weight",
    "ple.norm_conv.weight": "ple_norm_conv.weight",
    "ple.conv1d.weight": "ple_conv1d.weight",
}
for theirs, ours in (("attn_hyper_connection", "hc_attn"), ("mlp_hyper_connection", "hc_ffn")):
    INSIDE |= {
        f"{theirs}.hc_norm.weight": f"{ours}_norm.weight",
        f"{theirs}.input_mix_weight_down.weight": f"{ours}_down.weight",
        f"{theirs}.input_mix_weight_up.weight": f"{ours}_up.weight",
        f"{theirs}.block_inject_weight.weight": f"{ours}_inject.weight",
    }
TABLE = "ple.ple_embedding.ngram_embedding.weight"


def is_norm(name: str) -> bool:
    """Returns whether a parameter is the weight of a norm."""
    return name.endswith("norm.weight") or ".ple.norm_" in name


def ngram_values(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Returns random values of a weight of which all have an effect: matrices exact in f16."""
    normal = torch.randn_like(weight)
    if is_norm(name):  # all but those of states around zero, in files around one
        return 0.3 * normal + (1 if "linear_attn" in name else 0)
    if name.endswith("A_log"):  # decay time of states: about ten tokens
        return 0.5 * normal - 2.0
    if name.endswith("dt_bias"):
        return 0.5 * normal
    if "conv1d" in name:
        return weight.shape[-1] ** -0.5 * normal
    gain = {
        "embed_tokens.weight": 2.0,
        "lm_head.weight": 2.0,
        "gate_up_proj": 1.4,
        "experts.down_proj": 1.4,
        "q_proj.weight": 1.4,
        "k_proj.weight": 1.4,
        "index_qk_proj.weight": 1.4,
        "ngram_embedding.weight": 8.0,
        "mix_weight_down.weight": 8.0,  # divided by the streams, as the gates of writing are
        "mix_weight_up.weight": 2.0,
        "block_inject_weight.weight": 8.0,
    }
    by = next((value for of, value in gain.items() if name.endswith(of)), 1.0)
    return (by * weight.shape[-1] ** -0.5 * normal).half().float()


@torch.no_grad()
def least_block_gap(model: torch.nn.Module, tokens: list[int]) -> float:
    """Returns the smallest difference between the last chosen score and the next, of blocks and of
    experts: rounding must not change a choice."""
    gaps = []

    def of_blocks(index: torch.nn.Module, inputs: tuple, options: dict, _output: torch.Tensor) -> None:
        hidden, (cos, sin) = inputs[0], inputs[1]
        stride, dim, n = index.compress_ratio, index.index_head_dim, len(hidden[0])
        q, k = index.index_qk_proj(hidden)[0].split([index.index_n_heads * dim, dim], dim=-1)
        q = apply_rotary_pos_emb(index.q_layernorm(q.reshape(1, n, -1, dim)), cos=cos, sin=sin, unsqueeze_dim=2)[0]
        pooled = index.k_layernorm(k[: n // stride * stride].reshape(-1, stride, dim).mean(1))
        starts = torch.arange(len(pooled)) * stride
        keys = apply_rotary_pos_emb(pooled.unsqueeze(1), cos=cos[0, starts], sin=sin[0, starts]).squeeze(1)
        scores = torch.relu(torch.einsum("thd,bd->tbh", q, keys)).sum(-1) / dim**0.5
        for position, row in enumerate(scores):
            best = row[: (position + 1) // stride].sort(descending=True).values
            if len(best) > index.block_topk:
                gaps.append(best[index.block_topk - 1] - best[index.block_topk])

    def of_experts(router: torch.nn.Module, _inputs: tuple, outputs: tuple) -> None:
        best = outputs[0].softmax(-1).sort(descending=True).values
        gaps.append((best[:, router.top_k - 1] - best[:, router.top_k]).min())

    hooks = []
    for module in model.modules():
        if isinstance(module, Qwen4ExpTextQSAIndexer):
            hooks.append(module.register_forward_hook(of_blocks, with_kwargs=True))
        elif isinstance(module, Qwen4ExpTextTopKRouter):
            hooks.append(module.register_forward_hook(of_experts))
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return float(min(gaps))


def ngram_tensors(model: torch.nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the weights in file format: queries and keys of the index, and gate and up of the
    experts, apart; value heads of states as Qwen3.5 has them."""
    config = model.config
    for name, weight in model.named_parameters():
        if is_norm(name) and "linear_attn" not in name:
            weight = weight + 1.0
        if name in OUTSIDE:
            yield OUTSIDE[name], stored(name, weight)
            continue
        layer, inside = name.split(".", 3)[2:]
        if inside == TABLE:
            yield "per_layer_token_embd.weight", stored(name, weight)
        elif inside == "self_attn.indexer.index_qk_proj.weight":
            sizes = [config.indexer_n_heads * config.indexer_head_dim, config.indexer_head_dim]
            for part, rows in zip("qk", weight.split(sizes)):
                yield f"blk.{layer}.indexer.{part}_proj.weight", stored(name, rows)
        elif inside == "mlp.experts.gate_up_proj":
            for part, half in zip(("gate", "up"), weight.chunk(2, dim=1)):
                yield f"blk.{layer}.ffn_{part}_exps.weight", stored(name, half)
        elif inside.startswith("linear_attn"):
            for part, values in delta_parts(config, inside, weight):
                yield f"blk.{layer}.{INSIDE[part]}", stored(name, values)
        else:
            vector = "conv1d" in inside or "shared_expert_gate" in inside
            yield f"blk.{layer}.{INSIDE[inside]}", stored(name, weight.squeeze() if vector else weight)


def stored(name: str, weight: torch.Tensor) -> np.ndarray:
    """Returns matrices in f16 (exactly), others in f32."""
    is_matrix = weight.ndim > 1 and "conv1d" not in name and not name.endswith("mlp.gate.weight")
    values = weight.detach().to(torch.float16 if is_matrix else torch.float32).contiguous()
    assert torch.equal(values.float(), weight), f"{name} is not exact in {values.dtype}"
    return values.numpy()


def write_ngrams(writer: gguf.GGUFWriter, spec: Spec, model: torch.nn.Module) -> None:
    """Writes the keys of the family, which has no dense layers."""
    arch, config = spec.family.arch_name, model.config
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(spec.theta)
    writer.add_rope_dimension_count(int(spec.partial * spec.head_dim))
    writer.add_rope_dimension_sections([3, 3, 2, 0])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    kinds = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{arch}.attention.recurrent_layers", kinds)
    writer.add_uint32(f"{arch}.hyper_connection.count", config.hc_count)
    writer.add_uint32(f"{arch}.hyper_connection.low_rank", config.hc_lowrank)
    writer.add_indexer_head_count(config.indexer_n_heads)
    writer.add_indexer_key_length(config.indexer_head_dim)
    writer.add_indexer_top_k(config.indexer_budget)
    writer.add_array(f"{arch}.attention.compress_ratios", [0 if is_state else config.indexer_compress_ratio for is_state in kinds])
    (layer,) = config.ple_layer_ids
    ngrams = model.model.layers[layer - 1].ple.ple_embedding
    writer.add_array(f"{arch}.ple.layers", [layer - 1])
    writer.add_uint32(f"{arch}.ple.ngram_size", config.ngram_size)
    writer.add_uint32(f"{arch}.ple.heads_per_ngram", config.heads_per_ngram)
    writer.add_uint32(f"{arch}.ple.conv_kernel", config.ple_conv_kernel_size)
    writer.add_uint32(f"{arch}.ple.eos_token_id", EOS)
    writer.add_embedding_length_per_layer_input(ngrams.ngram_embedding.embedding_dim)
    for key, numbers in (
        ("layer_multipliers", ngrams.layer_multipliers),
        ("head_offsets", ngrams.ngram_heads_offsets),
        ("head_vocab_sizes", ngrams.ngram_heads_vocab_sizes),
    ):
        kind = gguf.GGUFValueType
        writer.add_key_value(f"{arch}.ple.{key}", numbers.tolist(), kind.ARRAY, sub_type=kind.UINT64)
