"""Weights of models whose sublayers read and write several residual streams, as in files."""

from collections.abc import Iterator

import gguf
import torch
from spec import Spec
from transformers import PreTrainedConfig

# Ends of names in files, by those in `transformers`.
CONNECTIONS = {
    f"{theirs}.{part}.weight": f"{ours}_{part}.weight"
    for theirs, ours in (("attn_hc", "hc_attn"), ("ffn_hc", "hc_ffn"))
    for part in ("fn", "scale", "base")
}
# Names of the tensors behind the last layer.
LAST = {f"model.hc_head.hc_{part}.weight": f"output_hc_{part}.weight" for part in ("fn", "scale", "base")}


def is_connection(name: str) -> bool:
    """Returns whether a parameter belongs to the connections."""
    return "_hc." in name or "hc_head." in name


def connected_parts(config: PreTrainedConfig, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a weight in file format: RoPE rotates neighbours there, in the last rows of heads."""
    if is_connection(name):
        yield f"{name}.weight", weight
        return
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    of_heads = {
        "self_attn.q_b_proj.weight": config.qk_head_dim,
        "kv_a_proj_with_mqa.weight": latent,
        "indexer.wq_b.weight": config.index_head_dim,
        "indexer.wk.weight": config.index_head_dim,
        "indexer.k_norm.weight": config.index_head_dim,
        "indexer.k_norm.bias": config.index_head_dim,
    }
    dim = next((dim for end, dim in of_heads.items() if name.endswith(end)), None)
    if dim is None:
        yield name, weight
        return
    heads = weight.reshape(-1, dim, *weight.shape[1:])
    plain, turned = heads.split([dim - config.qk_rope_head_dim, config.qk_rope_head_dim], dim=1)
    neighbours = torch.stack(turned.chunk(2, dim=1), dim=2).flatten(1, 2)
    yield name, torch.cat((plain, neighbours), dim=1).reshape(weight.shape)


def write_connections(writer: gguf.GGUFWriter, spec: Spec) -> None:
    """Writes the keys of connections."""
    arch = spec.family.arch_name
    writer.add_uint32(f"{arch}.hyper_connection.count", spec.extra["hc_mult"])
    writer.add_float32(f"{arch}.hyper_connection.epsilon", spec.extra["hc_eps"])
    writer.add_float32(f"{arch}.hyper_connection.magnitude", spec.extra["hc_magnitude"])
    writer.add_swiglu_clamp_exp([spec.extra["swiglu_limit"]] * spec.layers)
