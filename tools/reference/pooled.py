"""DeepSeek-V4: a window of tokens beside entries that pool the tokens before, and streams."""

from collections.abc import Iterator

import gguf
import numpy as np
import torch
from spec import YARN, Spec
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4IndexerScorer,
    DeepseekV4TopKRouter,
)

TURNED = {
    **YARN,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
}
KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
RATES = {KINDS[1]: 4, KINDS[2]: 8}

POOLED_MODELS = [
    # A layer without pooling, two whose queries select entries of 4 tokens, two with all of 8.
    Spec(
        "deepseek4-h64",
        hidden=128,
        heads=4,
        kv_heads=1,
        head_dim=64,
        ffn=64,
        layers=5,
        rope=TURNED,
        rope_without=(
            {},
            {**TURNED, "beta_fast": 32.0},
            {**TURNED, "beta_slow": 1.0},
            {**TURNED, "attention_factor": 1.139},
        ),
        extra={
            "qk_rope_head_dim": 16,
            "compress_rope_theta": 160_000.0,
            "q_lora_rank": 64,
            "o_groups": 2,
            "o_lora_rank": 32,
            "layer_types": [*KINDS, *KINDS[1:]],
            "compress_rates": RATES,
            "sliding_window": 12,
            "index_n_heads": 8,
            "index_head_dim": 32,
            "index_topk": 4,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 4,
            "hc_eps": 0.03125,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "num_hash_layers": 2,
            "swiglu_limit": 1.0,
            "num_nextn_predict_layers": 0,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        without=(
            {"sliding_window": 11},
            {"index_topk": 3},
            {"index_topk": 256},
            {"compress_rope_theta": 10_000.0},
            {"hc_sinkhorn_iters": 3},
            {"hc_eps": 0.0},
            {"swiglu_limit": 100.0},
            {"routed_scaling_factor": 1.0},
            {"scoring_func": "sigmoid"},
        ),
        less=(
            "sinks",
            "layers.1.self_attn.compressor.kv_norm.weight",
            "layers.4.self_attn.compressor.kv_norm.weight",
            "layers.3.self_attn.compressor.position_bias",
            "layers.2.self_attn.compressor.position_bias",
            "indexer.position_bias",
            "indexer.scorer.weights_proj.weight",
            "attn_hc.fn",
            "attn_hc.base",
            "ffn_hc.fn",
            "ffn_hc.base",
            "hc_head.hc_fn",
            "hc_head.hc_base",
            "tid2eid",
            "e_score_correction_bias",
            "shared_experts.down_proj.weight",
        ),
    ),
]

# Names in files, by those in `transformers`: behind the layers, and in one.
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    **{f"model.hc_head.hc_{part}": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")},
}
INSIDE = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"attn_hc.{part}": f"hc_attn_{part}.weight" for part in ("fn", "base", "scale")},
    **{f"ffn_hc.{part}": f"hc_ffn_{part}.weight" for part in ("fn", "base", "scale")},
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_norm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_proj.weight": "attn_kv.weight",
    "self_attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_a_proj.weight": "attn_output_a.weight",
    "self_attn.o_b_proj.weight": "attn_output_b.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "indexer.attn_q_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "indexer.proj.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
for theirs, ours in (("compressor", "attn"), ("compressor.indexer", "indexer")):
    INSIDE |= {
        f"self_attn.{theirs}.kv_proj.weight": f"{ours}_compressor_kv.weight",
        f"self_attn.{theirs}.gate_proj.weight": f"{ours}_compressor_gate.weight",
        f"self_attn.{theirs}.position_bias": f"{ours}_compressor_ape.weight",
        f"self_attn.{theirs}.kv_norm.weight": f"{ours}_compressor_norm.weight",
    }
# Matrices that llama.cpp's converter has in f32.
IN_F32 = ("mlp.gate.weight", "weights_proj.weight", "_hc.fn", "hc_head.hc_fn", "position_bias")


def pooled_values(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Returns random values of a weight of which all have an effect: matrices exact in f16."""
    normal = torch.randn_like(weight)
    if name.endswith(("norm.weight", "scale")):
        return 1 + 0.3 * normal
    if name.endswith(("base", "position_bias", "sinks")):
        return 2 * normal if name.endswith("_hc.base") else normal
    gain = {
        "embed_tokens.weight": 8.0,
        "lm_head.weight": 2.0,
        "gate_up_proj": 2.0,  # so large that limits apply
        "compressor.gate_proj.weight": 2.0,
        "_hc.fn": 2.0,  # so large that all iterations have an effect
        "hc_head.hc_fn": 3.0,
    }
    by = next((value for of, value in gain.items() if name.endswith(of)), 1.0)
    return (by * weight.shape[-1] ** -0.5 * normal).half().float()


def draw_tables(model: torch.nn.Module) -> None:
    """Chooses distinct experts for each token, in the layers without a choice by scores."""
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            of_tokens = torch.rand(len(table), model.config.n_routed_experts).argsort(-1)
            table.copy_(of_tokens[:, : table.shape[1]])


@torch.no_grad()
def least_gap(model: torch.nn.Module, tokens: list[int]) -> float:
    """Returns the smallest difference between the last chosen score and the next, of entries and of
    experts: rounding must not change a choice."""
    config, gaps = model.config, []

    def of_entries(_module: torch.nn.Module, _inputs: tuple, scores: torch.Tensor) -> None:
        n = config.index_topk
        for position, row in enumerate(scores[0]):
            best = row[: (position + 1) // RATES[KINDS[1]]].sort(descending=True).values
            if len(best) > n:
                gaps.append(best[n - 1] - best[n])

    def of_experts(router: torch.nn.Module, _inputs: tuple, outputs: tuple) -> None:
        scores = router.score_fn(outputs[0]) + router.e_score_correction_bias
        best = scores.sort(descending=True).values
        gaps.append((best[:, router.top_k - 1] - best[:, router.top_k]).min())

    kinds = {DeepseekV4IndexerScorer: of_entries, DeepseekV4TopKRouter: of_experts}
    choosing = [module for module in model.modules() if type(module) in kinds]
    hooks = [module.register_forward_hook(kinds[type(module)]) for module in choosing]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return float(min(gaps))


def pooled_tensors(model: torch.nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the weights in file format, with gate and up of the experts separate."""
    for name, weight in model.state_dict().items():
        kind = torch.float16 if weight.ndim > 1 and not name.endswith(IN_F32) else torch.float32
        kind = torch.int32 if name.endswith("tid2eid") else kind
        stored = weight.to(kind)
        assert torch.equal(stored.to(weight.dtype), weight), f"{name} is not exact in {kind}"
        if name in OUTSIDE:
            yield OUTSIDE[name], stored.numpy()
            continue
        _, _, layer, inside = name.split(".", 3)
        if inside == "mlp.experts.gate_up_proj":
            for part, half in zip(("gate", "up"), stored.chunk(2, dim=1)):
                yield f"blk.{layer}.ffn_{part}_exps.weight", half.contiguous().numpy()
        else:
            yield f"blk.{layer}.{INSIDE[inside]}", stored.numpy()


def write_pooled(writer: gguf.GGUFWriter, spec: Spec, _model: torch.nn.Module) -> None:
    """Writes the keys of the family, without a width of dense layers, since it has none."""
    arch, extra = spec.family.arch_name, spec.extra
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    # Of layers with pooling; the others have no scaling.
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(spec.rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(spec.rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(spec.rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(spec.rope["beta_slow"])
    writer.add_rope_freq_base(spec.theta)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(extra["n_routed_experts"])
    writer.add_expert_used_count(extra["num_experts_per_tok"])
    writer.add_uint32(f"{arch}.expert_gating_func", 4)  # the root of softplus
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(extra["qk_rope_head_dim"])
    writer.add_q_lora_rank(extra["q_lora_rank"])
    writer.add_sliding_window(extra["sliding_window"])
    writer.add_expert_feed_forward_length(extra["moe_intermediate_size"])
    writer.add_expert_shared_count(extra["n_shared_experts"])
    writer.add_expert_weights_scale(extra["routed_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_swiglu_clamp_exp([extra["swiglu_limit"]] * spec.layers)
    writer.add_swiglu_clamp_shexp([extra["swiglu_limit"]] * spec.layers)
    writer.add_indexer_head_count(extra["index_n_heads"])
    writer.add_indexer_key_length(extra["index_head_dim"])
    writer.add_indexer_top_k(extra["index_topk"])
    writer.add_uint32(f"{arch}.attention.output_group_count", extra["o_groups"])
    writer.add_uint32(f"{arch}.attention.output_lora_rank", extra["o_lora_rank"])
    rates = [RATES.get(kind, 0) for kind in extra["layer_types"]]
    writer.add_array(f"{arch}.attention.compress_ratios", rates)
    writer.add_float32(f"{arch}.attention.compress_rope_freq_base", extra["compress_rope_theta"])
    writer.add_uint32(f"{arch}.hyper_connection.count", extra["hc_mult"])
    writer.add_uint32(f"{arch}.hyper_connection.sinkhorn_iterations", extra["hc_sinkhorn_iters"])
    writer.add_float32(f"{arch}.hyper_connection.epsilon", extra["hc_eps"])
    writer.add_uint32(f"{arch}.hash_layer_count", extra["num_hash_layers"])
    writer.add_embedding_length_out(spec.hidden * extra["hc_mult"])
