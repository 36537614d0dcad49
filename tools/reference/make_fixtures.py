#!/usr/bin/env python3
"""Creates tiny random models and their golden outputs with Hugging Face `transformers`.

Build and tests of Kvant do not need it: the outputs are committed in `crates/model/tests/fixtures`.
For every model of `models.py` two files are written:

NAME.gguf    weights and metadata by the conventions of llama.cpp's converter. Matrices are f16, norms and biases
             f32; there is no tokenizer (`tokenizer.ggml.model = "none"`).
NAME.golden  the f32 output of `transformers` for exactly those weights, little-endian:
                 u8  magic[4] = "KVGD"
                 u32 n_prompt, n_steps, n_vocab
                 i32 tokens [n_prompt + n_steps]             the prompt, then the greedy continuation
                 f32 logits [n_prompt + n_steps, n_vocab]    row t: after tokens 0..=t were read
             Prompt rows come from one pass over the prompt, the others from one-token steps on its cache.

Each pair is validated as a test before it is written: greedy choices have a margin, the f32 result
is near the f64 result, decoding agrees with one pass over all tokens, and features such as RoPE
scaling, windows and soft caps have a detectable effect.
"""

import argparse
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from connected import CONNECTIONS, LAST, connected_parts, is_connection, write_connections
from heads_by_layer import heads_of_layers
from hybrids import delta_parts, has_kimi_delta, is_gate_of_state, kimi_parts, multiplied, space_parts, write_states
from kimi_k3 import BEHIND, OF_LAYERS, is_of_kimi_k3, kimi_k3_parts, write_kimi_k3
from latent import is_absorbed, write_latent
from looped import repeated
from models import SPECS
from muse import MuseGlimmerForCausalLM
from ngrams import least_block_gap, ngram_tensors, ngram_values, write_ngrams
from pooled import draw_tables, least_gap, pooled_tensors, pooled_values, write_pooled
from rwkv import IN_F32, rwkv_parts, rwkv_values, write_rwkv
from spec import EPS, LAYER_EPS, N_VOCAB, Spec
from text_models import OF_CONFIG
from transformers import AutoModelForCausalLM, Mistral4Config, MuseGlimmerTextConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM
from windowed_latent import has_windowed_latent, is_of_windowed_latent, least_index_gap, windowed_latent_parts, write_windowed_latent

N_PROMPT = 64
N_STEPS = 16
MAX_PROMPTS = 500

# The tests' tolerance on a logit is 2e-3. Each threshold has a margin to it.
MIN_GREEDY_MARGIN = 0.05  # between the best two logits at every chosen token
MIN_DISTINCT_TOKENS = 5  # among the chosen ones: one repeated token would prove little
# Between the scores of the last choice and the next, where few are chosen.
GAPS = {"deepseek_v4": (least_gap, 2e-3), "dots3_note_text": (least_index_gap, 5e-4), "qwen4_exp_text": (least_block_gap, 5e-4)}
MAX_ROUNDING_ERROR = 1e-4  # of the f32 logits against f64, and of decode against one pass
# The laws of weights, and the keys, of models with their own.
DRAWN = {"rwkv7": (rwkv_values, write_rwkv), "deepseek_v4": (pooled_values, write_pooled), "qwen4_exp_text": (ngram_values, write_ngrams)}
MIN_EFFECT = 0.5  # largest change of a logit without a feature, such as RoPE scaling

# Models whose files have gate and up of the experts in one tensor.
FUSED_EXPERTS = ("gemma4_text", "mistral4")
# A selection bias that is a parameter without gradients.
UNTRAINED = "gate.e_score_correction_bias"


def norm_offset(spec: Spec, name: str) -> float:
    """Returns the offset of a norm's weight."""
    # All but the norms before and after sublayers.
    is_plain_muse = spec.name.startswith("museglimmer") and not name.endswith("layernorm.weight")
    is_plain = "linear_attn" in name or is_plain_muse
    return 0.0 if is_plain else spec.family.norm_offset


def model_of(config: PreTrainedConfig) -> torch.nn.Module:
    """Returns a new model of this configuration."""
    if isinstance(config, MuseGlimmerTextConfig):
        return MuseGlimmerForCausalLM._from_config(config)
    if isinstance(config, Mistral4Config):
        return Mistral4ForCausalLM._from_config(config)
    if hasattr(config, "num_loops"):
        return repeated(config)
    if type(config) in OF_CONFIG:
        return OF_CONFIG[type(config)]._from_config(config)
    return AutoModelForCausalLM.from_config(config)


def build_model(spec: Spec) -> torch.nn.Module:
    """Returns a model with varied logits, norms and attention, and matrices exact in f16."""
    torch.manual_seed(zlib.crc32(spec.name.encode()))
    model = model_of(spec.to_config(spec.rope)).eval()
    for name, weight in model.named_parameters():
        if model.config.model_type in DRAWN:
            values = DRAWN[model.config.model_type][0](name, weight)
        elif name.endswith(("norm.weight", "norm_f.weight")):
            values = 1 + 0.3 * torch.randn_like(weight)
            if name == "model.norm.weight":
                values *= spec.family.quiet
            if spec.family.unscaled and name.endswith(("q_norm.weight", "k_norm.weight")):
                values *= 1.2 * weight.shape[-1] ** -0.25
            values -= norm_offset(spec, name)
        elif name.endswith(("router.scale", "per_expert_scale", "correct_output_scale", ".D", "_hc.scale", "hc_scale")):
            values = 1 + 0.3 * torch.randn_like(weight)
        elif name.endswith("A_log"):  # decay time of states: about ten tokens
            values = 0.5 * torch.randn_like(weight) - 2.0
        elif name.endswith(("bias", "sinks")):
            # Large ones of the final norm and the head would choose the same token everywhere.
            scale = 0.15 if name.endswith(("norm.bias", "lm_head.bias")) else 0.5
            values = scale * torch.randn_like(weight)
        else:
            # Output spread for unit inputs: scores of about +-2 after the division by
            # sqrt(head_dim).
            gain = 1.4 if "q_proj" in name or "k_proj" in name else 2.0 if "embed" in name or "lm_head" in name else 1.0
            n_in = weight.shape[-2 if spec.family.transposed_experts and "experts." in name else -1]
            if "experts." in name:  # a few selected ones, each with a weight
                gain = 1.4
                if hasattr(model.config, "swiglu_limit"):  # so large that limits apply, and back
                    gain = 4.0 if "gate_up" in name else 0.15
            if name.endswith("_res_proj.weight"):  # scores of streams of about +-2
                gain = 2.0
            if "router.proj" in name:  # whose input is divided by the root of its width
                gain = 1.4 * n_in**0.5
            if "_coefs" in name:  # of streams, which grow with each layer
                gain = 0.25
            if "modality_router" in name:  # whose input is divided by its width
                gain = 1.4 * n_in
            mean = 0.0
            if "embed_tokens_per_layer" in name:  # of which each layer reads its part
                gain = spec.layers**0.5
            elif "embed" in name:
                gain /= spec.family.quiet
                mean = spec.family.mean * weight.shape[-1] ** -0.5
            values = (gain * n_in**-0.5 * torch.randn_like(weight) + mean).half().float()
        weight.data.copy_(values)
    for name, selection_bias in selection_biases_of(model):
        selection_bias.data.copy_(0.3 * torch.randn_like(selection_bias))
    for slope in numbers_of_xielu(model, "beta"):
        slope.data.copy_(0.2 + 0.6 * torch.rand_like(slope))
    for _, scalar in layer_scalars_of(model):
        scalar.data.copy_(0.6 + 0.8 * torch.rand_like(scalar))
    draw_tables(model)
    return model


def layer_scalars_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns the factor on a layer's output."""
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("layer_scalar"))


def numbers_of_xielu(model: torch.nn.Module, name: str) -> list[torch.Tensor]:
    """Returns a number of the activation of each layer, if it is xIELU."""
    return [weight for key, weight in model.state_dict().items() if key.endswith(f"act_fn.{name}")]


def selection_biases_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns the router's selection biases: buffers, since they are not trained by gradients."""
    ends = ("expert_bias", "e_score_correction_bias")
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(ends))
    yield from ((name, weight) for name, weight in model.named_parameters() if name.endswith(UNTRAINED))


@torch.no_grad()
def forward(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Returns logits `[tokens, vocab]` from one pass."""
    return model(torch.tensor([tokens])).logits[0]


@torch.no_grad()
def decode_greedily(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Returns the prompt with its continuation, and the logits after every token, decoded with a
    cache."""
    step = model(torch.tensor([prompt]), use_cache=True)
    tokens, rows = list(prompt), [step.logits[0]]
    for _ in range(N_STEPS):
        tokens.append(int(rows[-1][-1].argmax()))
        step = model(torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values, use_cache=True)
        rows.append(step.logits[0])
    return tokens, torch.cat(rows)


def greedy_margin(logits: torch.Tensor) -> float:
    """Returns the smallest margin of a chosen token over the second."""
    best, second = logits[N_PROMPT - 1 : -1].topk(2).values.unbind(-1)
    return float((best - second).min())


def decode_good_prompt(spec: Spec, model: torch.nn.Module) -> tuple[list[int], torch.Tensor]:
    """Returns the golden output of the first random prompt with a varied, rounding-proof
    continuation."""
    random = np.random.default_rng(zlib.crc32(spec.name.encode()))
    for _ in range(MAX_PROMPTS):
        tokens, logits = decode_greedily(model, random.integers(0, N_VOCAB, N_PROMPT).tolist())
        varied = len(set(tokens[N_PROMPT:])) >= MIN_DISTINCT_TOKENS
        if varied and greedy_margin(logits) >= MIN_GREEDY_MARGIN:
            gap, least = GAPS.get(model.config.model_type, (None, 0.0))
            if gap is None or gap(model, tokens) >= least:
                return tokens, logits
    raise RuntimeError(f"{spec.name}: no good prompt among {MAX_PROMPTS}; change the model")


def check_worth(spec: Spec, model: torch.nn.Module, tokens: list[int], logits: torch.Tensor) -> None:
    """Rejects golden data that is inexact or insensitive to mistakes; prints the figures."""
    others = [forward(model, tokens), forward(model.double(), tokens)]
    model.float()
    rounding = max(float((other - logits).abs().max()) for other in others)
    assert rounding <= MAX_ROUNDING_ERROR, f"{spec.name}: rounding error {rounding}"
    effects = []
    turned_otherwise = [spec.to_config(rope) for rope in spec.rope_without] if spec.rope else []
    for config in turned_otherwise + [spec.to_config(spec.rope, less) for less in spec.without]:
        plain = model_of(config).eval()
        plain.load_state_dict(model.state_dict())
        effects.append(float((forward(plain, tokens) - logits).abs().max()))
        assert effects[-1] >= MIN_EFFECT, f"{spec.name}: a feature changes logits by {effects[-1]} only"
    for end in spec.less:
        plain = model_of(spec.to_config(spec.rope)).eval()
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
    """Reorders the rows of each head from halves to alternating, as llama.cpp's converter does."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_metadata(writer: gguf.GGUFWriter, spec: Spec, model: torch.nn.Module, n_behind: int) -> None:
    """Returns the keys of llama.cpp's converter for these families, with a number of extra
    layers."""
    config = model.config
    writer.add_name(spec.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(N_VOCAB)
    writer.add_block_count(spec.layers + n_behind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(spec.hidden)
    if config.model_type in DRAWN:
        return DRAWN[config.model_type][1](writer, spec, model)
    n_shared = spec.extra.get("num_kv_shared_layers", 0)
    kinds = spec.extra.get("layer_types", [])
    is_halved = "mamba_num_heads" in spec.extra
    if is_halved:
        width = spec.extra.get("moe_intermediate_size", spec.ffn)
        writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    elif spec.extra.get("use_double_wide_mlp"):
        writer.add_feed_forward_length([spec.ffn] * (spec.layers - n_shared) + [2 * spec.ffn] * n_shared)
    else:
        dense = spec.extra.get("prefix_dense_intermediate_size", spec.extra.get("dense_intermediate_size"))
        writer.add_feed_forward_length(dense or spec.ffn)
    writer.add_head_count(heads_of_layers(spec))
    if "conv" in kinds or "mamba" in kinds or is_halved or has_kimi_delta(spec):
        attends = ("attention", "full_attention")
        n_kv_heads = 1 if "kv_lora_rank" in spec.extra else spec.kv_heads
        writer.add_head_count_kv([n_kv_heads if kind in attends else 0 for kind in kinds])
        if "conv" in kinds:
            writer.add_shortconv_l_cache(config.conv_L_cache)
    elif "attention_value_scale" in spec.extra:  # MiMo, whose layers with windows have twice as many
        of_kind = {"sliding_attention": 2 * spec.kv_heads, "full_attention": spec.kv_heads}
        writer.add_head_count_kv([of_kind[kind] for kind in kinds])
    elif spec.extra.get("num_global_key_value_heads"):
        of_kind = {"sliding_attention": spec.kv_heads, "full_attention": spec.extra["num_global_key_value_heads"]}
        writer.add_head_count_kv([of_kind[kind] for kind in kinds])
    else:
        writer.add_head_count_kv(1 if spec.extra.get("q_lora_rank") else spec.kv_heads)
    if "prefix_dense_intermediate_size" in spec.extra:
        writer.add_expert_feed_forward_length(spec.ffn)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    if spec.extra.get("rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    elif hasattr(type(config), "layer_norm_eps") or type(config) in LAYER_EPS:
        writer.add_layer_norm_eps(getattr(config, LAYER_EPS.get(type(config), "layer_norm_eps")))
    else:
        writer.add_layer_norm_rms_eps(getattr(config, EPS.get(type(config), "rms_norm_eps")))
    writer.add_rope_freq_base(spec.theta)
    if spec.head_dim is not None:
        head_dim = spec.extra.get("global_head_dim", spec.head_dim)
        writer.add_key_length(head_dim)
        if "kv_lora_rank" not in spec.extra:
            head_dim = spec.extra.get("v_head_dim", head_dim)
        writer.add_value_length(head_dim)
        if spec.family.arch == gguf.MODEL_ARCH.LLAMA:
            writer.add_rope_dimension_count(spec.head_dim)
    if spec.partial != 1.0 and "num_sliding_attention_heads" not in spec.extra:
        writer.add_rope_dimension_count(int(spec.partial * (spec.head_dim or spec.hidden // spec.heads)))
    write_extra(writer, spec, model)
    write_rope_scaling(writer, spec, model)


def write_extra(writer: gguf.GGUFWriter, spec: Spec, model: torch.nn.Module) -> None:
    """Returns the families' additional keys."""
    if spec.local_theta is not None:
        writer.add_rope_freq_base_swa(spec.local_theta)
    if "global_head_dim" in spec.extra:
        writer.add_key_length_swa(spec.head_dim)
        writer.add_value_length_swa(spec.head_dim)
        writer.add_rope_dimension_count(spec.extra["global_head_dim"])
        writer.add_rope_dimension_count_swa(spec.head_dim)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in spec.extra["layer_types"]])
        writer.add_shared_kv_layers(spec.extra.get("num_kv_shared_layers", 0))
    for name, add in {
        "sliding_window": writer.add_sliding_window,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "attention_multiplier": writer.add_attention_scale,
        "logits_scaling": writer.add_logit_scale,
        "num_experts": writer.add_expert_count,
        "moe_num_experts": writer.add_expert_count,
        "moe_k": writer.add_expert_used_count,
        "moe_topk": writer.add_expert_used_count,
        "moe_num_shared_experts": writer.add_expert_shared_count,
        "moe_layer_start_index": writer.add_leading_dense_block_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "top_k_experts": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "moe_shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "moe_latent_size": writer.add_moe_latent_size,
        "logit_scale": writer.add_logit_scale,
        "output_multiplier": writer.add_logit_scale,
        "num_dense_layers": writer.add_leading_dense_block_count,
        "num_shared_experts": writer.add_expert_shared_count,
        "route_scale": writer.add_expert_weights_scale,
        "router_scaling_factor": writer.add_expert_weights_scale,
        "moe_routed_scaling_factor": writer.add_expert_weights_scale,
        "moe_router_scaling_factor": writer.add_expert_weights_scale,
        "share_expert_dim": writer.add_expert_shared_feed_forward_length,
        "n_routed_experts": writer.add_expert_count,
        "n_shared_experts": writer.add_expert_shared_count,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "q_lora_rank": writer.add_q_lora_rank,
        "kv_lora_rank": writer.add_kv_lora_rank,
        "hidden_size_per_layer_input": writer.add_embedding_length_per_layer_input,
        "altup_num_inputs": writer.add_altup_num_inputs,
        "qk_rope_head_dim": writer.add_rope_dimension_count,
        "index_n_heads": writer.add_indexer_head_count,
        "index_head_dim": writer.add_indexer_key_length,
        "index_topk": writer.add_indexer_top_k,
        "index_topk_blocks": writer.add_indexer_top_k,
    }.items():
        if spec.extra.get(name) is not None:
            add(spec.extra[name])
    if "altup_num_inputs" in spec.extra:
        writer.add_altup_active_idx(model.config.altup_active_idx)
        writer.add_shared_kv_layers(spec.extra["num_kv_shared_layers"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in spec.extra["layer_types"]])
        sparsity = torch.tensor(spec.extra["activation_sparsity_pattern"])
        writer.add_activation_sparsity_scale(torch.distributions.normal.Normal(0, 1).icdf(sparsity).tolist())
    if "layer_rope_theta" in spec.extra:
        writer.add_array(f"{spec.family.arch_name}.attention.rope_pattern", [int(bool(theta)) for theta in spec.extra["layer_rope_theta"]])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in spec.extra["layer_types"]])
    if "indexer_types" in spec.extra:
        arch = spec.family.arch_name or gguf.MODEL_ARCH_NAMES[spec.family.arch]
        writer.add_array(f"{arch}.attention.indexer.types", [kind == "full" for kind in spec.extra["indexer_types"]])
    for name, add in {
        "alpha_p": writer.add_xielu_alpha_p,
        "alpha_n": writer.add_xielu_alpha_n,
        "beta": writer.add_xielu_beta,
        "eps": writer.add_xielu_eps,
    }.items():
        if numbers := numbers_of_xielu(model, name):
            add([number.item() for number in numbers])
    write_states(writer, spec)
    if "num_loops" in spec.extra:
        writer.add_uint32("nanbeige.num_loops", spec.extra["num_loops"])
        writer.add_bool("nanbeige.skip_loop_final_norm", spec.extra["skip_loop_final_norm"])
    if "kv_lora_rank" in spec.extra:
        write_latent(writer, spec)
    elif "n_routed_experts" in spec.extra:
        writer.add_expert_weights_norm(spec.extra.get("norm_topk_prob", True))
    if has_windowed_latent(model.config):
        write_windowed_latent(writer, spec)
    if "hc_mult" in spec.extra:
        write_connections(writer, spec)
    if "attn_res_block_size" in spec.extra:
        write_kimi_k3(writer, model.config)
    if "index_block_size" in spec.extra:  # MiniMax M3
        arch = spec.family.arch_name
        writer.add_uint32(f"{arch}.attention.indexer.block_size", spec.extra["index_block_size"])
        writer.add_uint32(f"{arch}.attention.indexer.local_blocks", spec.extra["index_local_blocks"])
        writer.add_expert_shared_count(1)
        writer.add_expert_feed_forward_length(spec.ffn)
    if "num_attention_heads_per_layer" in spec.extra:  # Laguna, whose readers know which layers have windows
        writer.add_rope_dimension_count_swa(spec.head_dim)
    if "num_sliding_attention_heads" in spec.extra:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in spec.extra["layer_types"]])
        writer.add_swiglu_clamp_exp([limit or 0.0 for limit in spec.extra["swiglu_limits"]])
        writer.add_swiglu_clamp_shexp([limit or 0.0 for limit in spec.extra["swiglu_limits_shared"]])
    if any(selection_biases_of(model)):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "moe_topk" in spec.extra:
        writer.add_expert_feed_forward_length(spec.ffn)
        writer.add_expert_shared_feed_forward_length(spec.ffn)
    if spec.extra.get("num_local_experts") and "shared_intermediate_size" in spec.extra:
        writer.add_expert_shared_feed_forward_length(spec.extra["shared_intermediate_size"])
    if "attention_value_scale" in spec.extra:
        writer.add_float32("mimo2.attention.value_scale", spec.extra["attention_value_scale"])
        # Numbers instead of flags, and no number of dense layers.
        writer.add_sliding_window_pattern([int(kind == "sliding_attention") for kind in spec.extra["layer_types"]])
    elif "mlp_layer_types" in spec.extra:
        writer.add_leading_dense_block_count(spec.extra["mlp_layer_types"].count("dense"))
    if "mlp_only_layers" in spec.extra:
        writer.add_leading_dense_block_count(len(spec.extra["mlp_only_layers"]))


def write_rope_scaling(writer: gguf.GGUFWriter, spec: Spec, model: torch.nn.Module) -> None:
    """Adds RoPE scaling: keys for linear and YaRN, tensors of frequency divisors for LongRoPE,
    llama3 and pairs without rotation."""
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
                per = 0.1 if "kv_lora_rank" in spec.extra else 1.0
                writer.add_rope_scaling_yarn_log_mul(per * spec.rope["mscale_all_dim"])
            if "llama_4_scaling_beta" in spec.rope:
                writer.add_attn_temperature_scale(spec.rope["llama_4_scaling_beta"])
            if "attention_factor" in spec.rope and spec.name.startswith("laguna"):
                writer.add_rope_scaling_yarn_attn_factor(spec.rope["attention_factor"])
            elif "attention_factor" in spec.rope:
                # `transformers` replaces the default magnitude 1 + 0.1 ln(factor), this key
                # multiplies it.
                default = 1 + 0.1 * np.log(spec.rope["factor"])
                writer.add_rope_scaling_attn_factors(spec.rope["attention_factor"] / default)
        case "longrope":
            original = spec.rope["original_max_position_embeddings"]
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
            writer.add_rope_scaling_orig_ctx_len(original)
            magnitude = np.sqrt(1 + np.log(model.config.max_position_embeddings / original) / np.log(original))
            writer.add_rope_scaling_attn_factors(float(magnitude))
            for length in ("long", "short"):
                divisors = np.array(spec.rope[f"{length}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{length}.weight", divisors)
        case "proportional":
            dim = spec.extra["global_head_dim"]
            turned = np.arange(dim // 2) < int(dim * spec.rope["partial_rotary_factor"] // 2)
            writer.add_tensor("rope_freqs.weight", np.where(turned, 1.0, 1e30).astype(np.float32))
        case "llama3" if "num_sliding_attention_heads" in spec.extra:  # of the pairs that rotate, and ones
            scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, device="cpu", layer_type="full_attention")
            n_rot = int(spec.partial * spec.head_dim)
            plain = spec.theta ** (-torch.arange(0, n_rot, 2, dtype=torch.float64) / n_rot)
            divisors = torch.ones(spec.head_dim // 2)
            divisors[: n_rot // 2] = (plain / scaled.double()).float()
            writer.add_tensor("rope_freqs.weight", divisors.numpy())
        case "llama3":
            scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, device="cpu")
            plain = spec.theta ** (-torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim)
            writer.add_tensor("rope_freqs.weight", (plain / scaled.double()).float().numpy())


def in_files(config: PreTrainedConfig, name: str) -> str:
    """Renames the model as in files of Nemotron."""
    return name.replace("model.", "backbone.") if config.model_type == "nemotron_h" else name


def parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights in file format: separate gate and up of the experts, the shared gate as a
    vector."""
    for name, weight in model.named_parameters():
        weight = multiplied(model.config, name, weight)
        name = in_files(model.config, name.replace("block_sparse_moe", "mlp"))  # the latter in Granite
        if name.endswith(UNTRAINED):  # with the other selection biases
            pass
        elif model.config.model_type == "rwkv7":
            yield from rwkv_parts(model, name, weight)
        elif model.config.model_type == "kimi_k3" and is_of_kimi_k3(name):
            yield from kimi_k3_parts(model, name, weight)
        elif hasattr(model.config, "hc_mult") and (is_connection(name) or ".self_attn." in name and "sinks" not in name and "kv_b_proj" not in name):
            yield from connected_parts(model.config, name, weight)
        elif is_of_windowed_latent(model.config, name):
            yield from windowed_latent_parts(model.config, name, weight)
        elif "linear_attn" in name:
            yield from delta_parts(model.config, name, weight)
        elif "self_attn.conv1d" in name or "forget_gate" in name or is_gate_of_state(model.config, name):
            yield from kimi_parts(name, weight)
        elif ".mamba." in name or ".mixer." in name:
            yield from space_parts(model.config, name, weight)
        elif "conv.conv." in name:
            yield name, weight.squeeze(1)
        elif "moe_statics" in name:  # ERNIE
            yield name.replace("gate.moe_statics", "moe_statics").replace("_bias", ".bias"), weight.squeeze(0)
        elif "act_fn." in name:  # numbers in keys
            pass
        elif name.endswith("projections.0.weight") and "altup_" in name:  # of all streams, in one tensor
            of = name.removesuffix(".0.weight")
            all_of = [model.get_parameter(f"{of}.{i}.weight") for i in range(model.config.altup_num_inputs - 1)]
            yield f"{of}.weight", torch.stack(all_of)
        elif "projections." in name and "altup_" in name:
            pass
        elif name.endswith("correct_output_scale"):
            yield f"{name}.weight", weight
        elif name.endswith("sinks"):
            yield f"{name}.weight", weight
        elif name.endswith("mlp.expert_bias"):
            yield f"{name}.bias", weight
        elif "experts." in name and model.config.model_type == "gpt_oss":
            part, suffix = name.removesuffix("_bias"), ".bias" if name.endswith("_bias") else ".weight"
            rows = weight if suffix == ".bias" else weight.transpose(1, 2)
            if part.endswith("gate_up_proj"):
                for half, of in enumerate(("gate_proj", "up_proj")):
                    yield part.replace("gate_up_proj", of) + suffix, rows[:, half::2].contiguous()
            else:
                yield part + suffix, rows.contiguous()
        elif name.endswith("mlp.gate_up_proj.weight") or name.endswith("shared_experts.gate_up_proj.weight"):
            if "minimax" not in model.config.model_type:
                yield name, weight
                continue
            for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2)):
                yield name.replace("gate_up_proj", part), half.contiguous()
        elif name.endswith("experts.gate_up_proj") and model.config.model_type in FUSED_EXPERTS:
            yield f"{name}.weight", weight
        elif "shared_mlp" in name:  # Granite 4
            shared = "mlp.shared_expert" if model.config.num_local_experts else "mlp"
            if "input_linear" in name:
                for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2)):
                    yield name.replace("shared_mlp.input_linear", f"{shared}.{part}"), half.contiguous()
            else:
                yield name.replace("shared_mlp.output_linear", f"{shared}.down_proj"), weight
        elif name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1)):
                yield name.replace("gate_up_proj", f"{part}.weight"), half.contiguous()
        elif "kv_b_proj" in name and is_absorbed(model.config):
            heads = weight.reshape(model.config.num_attention_heads, -1, weight.shape[-1])
            k_dim = model.config.qk_nope_head_dim
            yield name.replace("kv_b", "k_b"), heads[:, :k_dim].transpose(1, 2).contiguous()
            yield name.replace("kv_b", "v_b"), heads[:, k_dim:].contiguous()
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", weight
        else:
            yield name, weight.squeeze(0) if "shared_expert_gate" in name else weight
    for name, selection_bias in selection_biases_of(model):
        name = in_files(model.config, name)
        yield name.removesuffix("_bias") + (".bias" if "e_score" in name else "_bias.bias"), selection_bias
    for name, scalar in layer_scalars_of(model):
        yield f"{name}.weight", scalar
    if hasattr(model.config, "qk_scale_factor"):  # Muse Glimmer's norms have no weights
        for layer in range(model.config.num_hidden_layers):
            ones = torch.ones(model.config.head_dim)
            yield f"model.layers.{layer}.self_attn.q_norm.weight", model.config.qk_scale_factor * ones
            yield f"model.layers.{layer}.self_attn.k_norm.weight", ones


def write_gguf(path: Path, spec: Spec, model: torch.nn.Module) -> None:
    """Returns the model as a GGUF file."""
    writer = gguf.GGUFWriter(path, spec.family.arch_name or gguf.MODEL_ARCH_NAMES[spec.family.arch])
    write_metadata(writer, spec, model, 0)
    own = {"deepseek_v4": pooled_tensors, "qwen4_exp_text": ngram_tensors}.get(model.config.model_type)
    for name, stored in own(model) if own else stored_tensors(spec, model):
        writer.add_tensor(name, stored)
    write_file(writer)


def write_file(writer: gguf.GGUFWriter) -> None:
    """Writes the content to its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_tensors(spec: Spec, model: torch.nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the weights in file format: matrices in f16 (exactly), vectors in f32."""
    arch = spec.family.arch
    names = gguf.get_tensor_name_map(arch, spec.layers)
    dense = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, spec.layers)  # of dense layers among MoE layers
    scales = {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "sinks.weight": "attn_sinks.weight",
        "self_attn.g_proj.weight": "attn_gate.weight",
        "self_attn.gate_proj.weight": "attn_gate.weight",
        "k_rope_only_layernorm.weight": "attn_k_norm.weight",
        **CONNECTIONS,
        **OF_LAYERS,
        "attention.lerp_fused.weight": "time_mix_lerp_fused.weight",
        "indexer.wq_b.weight": "indexer.attn_q_b.weight",
        "indexer.wk.weight": "indexer.attn_k.weight",
        "indexer.q_proj.weight": "indexer.q_proj.weight",
        "indexer.k_proj.weight": "indexer.k_proj.weight",
        "indexer.q_norm.weight": "indexer.q_norm.weight",
        "indexer.k_norm.weight": "indexer.k_norm.weight",
        "indexer.k_norm.bias": "indexer.k_norm.bias",
        "indexer.weights_proj.weight": "indexer.proj.weight",
    }
    for name, weight in parts(model):  # a tied head is listed once, as the embedding
        if spec.family.interleaved_rope and ("q_proj" in name or "k_proj" in name):
            weight = to_interleaved(weight, spec.heads if "q_proj" in name else spec.kv_heads)
        if name.endswith("norm.weight"):
            weight = weight + norm_offset(spec, name)
        is_router = name.endswith(("mlp.gate.weight", "mlp.gate.wg.weight", "mixer.gate.weight", "feed_forward.gate.weight", "router.weight", "router.proj.weight", "router.gate.weight"))
        is_vector = name.endswith(("bias", "norm.weight", ".A_log", ".D", *IN_F32)) or "conv" in name.split(".")[-2]
        is_matrix = weight.ndim >= 2 and not is_vector
        is_exact = is_matrix and not is_router and not is_connection(name) and spec.family.arch != gguf.MODEL_ARCH.FALCON_H1  # inexact after their factors
        kind = torch.float16 if is_exact else torch.float32
        stored = weight.detach().to(kind)
        assert torch.equal(stored.float(), weight), f"{name} is not exact in {kind}"
        suffixes = {"try_suffixes": (".weight", ".bias")}
        given = names.get_name(name, **suffixes) or dense.get_name(name, **suffixes)
        for end, called in scales.items():
            if name.endswith(end):
                given = f"blk.{name.split('.')[2]}.{called}"
        yield (LAST | BEHIND).get(name, given), stored.numpy()


def write_golden(path: Path, tokens: list[int], logits: torch.Tensor) -> None:
    """Writes the golden file; see the top of this file for its layout."""
    assert logits.shape == (N_PROMPT + N_STEPS, N_VOCAB)
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
