"""Nanbeige 4.2, whose layers run several times; `transformers` lacks it."""

from copy import deepcopy

import torch
from spec import Spec
from transformers import LlamaConfig, LlamaForCausalLM

LOOPED = [
    Spec(
        "nanbeige-h64-g2-loops3",
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=64,
        theta=1e6,
        extra={"num_loops": 3, "skip_loop_final_norm": False},
        without=({"skip_loop_final_norm": True},),
    ),
    Spec(
        "nanbeige-h64-g2-loops2-plain",
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=64,
        tied=True,
        extra={"num_loops": 2, "skip_loop_final_norm": True},
        without=({"skip_loop_final_norm": False},),
    ),
]


class NanbeigeForCausalLM(LlamaForCausalLM):
    """The layers of a checkpoint, which run once unless they are `repeated`."""


def repeated(config: LlamaConfig) -> LlamaForCausalLM:
    """Returns a model with a copy of the layers for each run, of the same weights, and the final
    norm between runs."""
    model = NanbeigeForCausalLM._from_config(config)
    layers, n = model.model.layers, config.num_hidden_layers
    for run in range(1, config.num_loops):
        for layer in list(layers[:n]):
            copy = deepcopy(layer)
            copy.self_attn.layer_idx += run * n
            for ours, its in zip(layer.modules(), copy.modules()):
                its._parameters.update(ours._parameters)
            layers.append(copy)
    if not config.skip_loop_final_norm:
        for run in range(1, config.num_loops):
            layers[run * n - 1].register_forward_hook(lambda _layer, _inputs, output: model.model.norm(output))
    model.config.num_hidden_layers = len(layers)
    return model


def once(model: NanbeigeForCausalLM) -> NanbeigeForCausalLM:
    """Returns the model as its checkpoints have it."""
    config = deepcopy(model.config)
    config.num_hidden_layers //= config.num_loops
    checkpoint = NanbeigeForCausalLM._from_config(config)
    checkpoint.load_state_dict({name: model.state_dict()[name] for name in checkpoint.state_dict()})
    return checkpoint.eval()
