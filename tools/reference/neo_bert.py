#!/usr/bin/env python3
"""A tiny random NeoBERT (arXiv 2502.19587), as a GGUF file of llama.cpp's converter.

    python neo_bert.py LLAMA_CPP      writes crates/engine/tests/encoders/neobert

`transformers` has no NeoBERT, whose code is on the hub alone: here is one with the names of
published checkpoints. The converter leaves the rows of `qkv` in the order of checkpoints, head by
head; llama.cpp reads all of Q, all of K, then all of V, so its vectors differ from the golden ones,
which follow the published code.

model.gguf         the file
golden.json        as that of encoders.py
"""

import json
import sys
from dataclasses import dataclass

import torch
from encoders import spread
from own_encoders import MIN_EFFECT, attend, check, tokenized, turn, write
from safetensors.torch import save_file
from torch.nn import Embedding, Linear, Module, ModuleList, RMSNorm
from torch.nn.functional import normalize, silu

NAME = "neobert"
N_CTX = 512

# As published ones: beside larger embeddings, epsilons of 1e-6 and 1e-5 would hardly differ.
EMBEDDING_STD = 0.02

EFFECTS = [
    ({"is_by_kind": True}, MIN_EFFECT),
    ({"are_neighbours": False}, MIN_EFFECT),
    ({"is_gate_first": False}, MIN_EFFECT),
    ({"theta": 1000.0}, MIN_EFFECT),
    ({"eps": 1e-5}, MIN_EFFECT),
]


@dataclass
class Sizes:
    n_vocab: int
    hidden: int = 64
    heads: int = 4
    layers: int = 3
    intermediate: int = 144
    eps: float = 1e-6
    theta: float = 10_000.0
    # How the family arranges rows and pairs.
    is_by_kind: bool = False
    are_neighbours: bool = True
    is_gate_first: bool = True

    def ffn(self):
        """Returns the width of gate and up. The published code rounds it up to a multiple of 8;
        the converter does not."""
        width = 2 * self.intermediate // 3
        assert width % 8 == 0, f"a width of {width}"
        return width


class Ffn(Module):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.w12 = Linear(sizes.hidden, 2 * sizes.ffn(), bias=False)
        self.w3 = Linear(sizes.ffn(), sizes.hidden, bias=False)

    def forward(self, x):
        first, second = self.w12(x).chunk(2, -1)
        gate, up = (first, second) if self.sizes.is_gate_first else (second, first)
        return self.w3(silu(gate) * up)


class Layer(Module):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.qkv = Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.wo = Linear(sizes.hidden, sizes.hidden, bias=False)
        self.ffn = Ffn(sizes)
        self.attention_norm = RMSNorm(sizes.hidden, sizes.eps)
        self.ffn_norm = RMSNorm(sizes.hidden, sizes.eps)

    def forward(self, x):
        x = x + self.wo(attend(*self.heads(self.attention_norm(x))))
        return x + self.ffn(self.ffn_norm(x))

    def heads(self, x):
        """Returns Q, K and V, of heads [heads, tokens, values]."""
        if self.sizes.is_by_kind:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.sizes.heads, -1)).permute(1, 2, 0, 3)
        else:
            q, k, v = self.qkv(x).unflatten(-1, (self.sizes.heads, 3, -1)).permute(2, 1, 0, 3)
        turned = [turn(part, self.sizes.theta, self.sizes.are_neighbours) for part in (q, k)]
        return *turned, v


class Encoder(Module):
    def __init__(self, sizes):
        super().__init__()
        self.model = Module()
        self.model.encoder = Embedding(sizes.n_vocab, sizes.hidden)
        self.model.transformer_encoder = ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.model.layer_norm = RMSNorm(sizes.hidden, sizes.eps)

    @torch.no_grad()
    def forward(self, ids):
        """Returns the vector of one text: the first token's."""
        x = self.model.encoder(torch.tensor(ids))
        for layer in self.model.transformer_encoder:
            x = layer(x)
        return normalize(self.model.layer_norm(x)[0], dim=0)


def save(folder, model, sizes):
    """Writes weights and configuration as published folders have them."""
    weights = dict(model.state_dict())
    # The head, which the converter drops.
    weights["decoder.weight"] = torch.zeros(sizes.n_vocab, sizes.hidden)
    weights["decoder.bias"] = torch.zeros(sizes.n_vocab)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["NeoBERTLMHead"],
        "model_type": "neobert",
        "vocab_size": sizes.n_vocab,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.intermediate,
        "dim_head": sizes.hidden // sizes.heads,
        "max_length": N_CTX,
        "norm_eps": sizes.eps,
        "embedding_init_range": EMBEDDING_STD,
        "decoder_init_range": 0.02,
        "pad_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def main():
    torch.set_num_threads(1)
    words, n_vocab, tokens = tokenized(N_CTX)
    sizes = Sizes(n_vocab)
    model = spread(Encoder(sizes))
    torch.nn.init.normal_(model.model.encoder.weight, std=EMBEDDING_STD)
    vectors = [model(ids) for ids in tokens]
    check(model, sizes, tokens, vectors, EFFECTS)
    write(NAME, sys.argv[1], words, tokens, vectors, lambda folder: save(folder, model, sizes))


main()
