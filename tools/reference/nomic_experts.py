#!/usr/bin/env python3
"""A tiny random text encoder of Nomic's with experts, as a GGUF file of llama.cpp's converter.

    python nomic_experts.py LLAMA_CPP      writes crates/engine/tests/encoders/nomicmoe

`transformers` has Nomic's encoder without experts (nomic-embed-text-v2-moe, arXiv 2502.07972): here
is one with them, with the names of published checkpoints.

model.gguf         the file
golden.json        as that of encoders.py
"""

import json
import sys
from dataclasses import dataclass
from itertools import count

import torch
from encoders import save_pooling
from own_encoders import MIN_EFFECT, attend, check, tokenized, turn, write
from safetensors.torch import save_file
from torch.nn import Embedding, LayerNorm, Linear, Module, ModuleList, Parameter
from torch.nn.functional import gelu, normalize

NAME = "nomicmoe"
# Published configurations have 2048 positions, of which the converter keeps those of training.
N_CTX = 512

MIN_EFFECT_OF_GELU = 5e-5  # of its approximation by tanh
# Between the scores of the last expert in use and the next one: of all tokens, and of those of
# texts of few tokens, where a single one has a share in the vector.
MIN_MARGIN, FEW, MIN_MARGIN_OF_FEW = 5e-4, 40, 5e-3
# Of the tokens of all texts, those that choose an expert.
MIN_SHARE_OF_EXPERT = 0.05

EFFECTS = [({name: value}, MIN_EFFECT) for name, value in [("used", 1), ("used", 3), ("is_normalized", True), ("theta", 1000.0), ("eps", 0.1)]]
EFFECTS.append(({"gelu": "tanh"}, MIN_EFFECT_OF_GELU))


@dataclass
class Sizes:
    n_vocab: int
    hidden: int = 64
    heads: int = 4
    layers: int = 4
    ffn: int = 96
    experts: int = 6
    used: int = 2
    moe_every: int = 2
    eps: float = 1e-5
    theta: float = 10_000.0
    # What the family does not do.
    is_normalized: bool = False
    gelu: str = "none"


class Attention(Module):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.Wqkv = Linear(sizes.hidden, 3 * sizes.hidden)
        self.out_proj = Linear(sizes.hidden, sizes.hidden)

    def forward(self, x):
        parts = self.Wqkv(x).unflatten(-1, (3, self.sizes.heads, -1))
        q, k, v = parts.permute(1, 2, 0, 3)
        q, k = turn(q, self.sizes.theta), turn(k, self.sizes.theta)
        return self.out_proj(attend(q, k, v))


class Mlp(Module):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.fc1 = Linear(sizes.hidden, sizes.ffn)
        self.fc2 = Linear(sizes.ffn, sizes.hidden)

    def forward(self, x):
        return self.fc2(gelu(self.fc1(x), approximate=self.sizes.gelu))


class Weights(Module):
    """The matrices of all experts, below each other. The second ones have a row for each value
    between the two."""

    def __init__(self, sizes):
        super().__init__()
        for name in ("w1", "w2"):
            self.register_parameter(name, Parameter(torch.zeros(sizes.experts * sizes.ffn, sizes.hidden)))


class Experts(Module):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.router = Module()
        self.router.layer = Linear(sizes.hidden, sizes.experts, bias=False)
        self.experts = Module()
        self.experts.mlp = Weights(sizes)
        self.inputs, self.margins, self.chosen = None, None, None

    def forward(self, x):
        self.inputs, scores, used = x, self.router.layer(x), self.sizes.used
        best = scores.sort(descending=True).values
        self.margins = best[:, used - 1] - best[:, used]
        shares, self.chosen = scores.softmax(-1).topk(used)
        if self.sizes.is_normalized:
            shares = shares / shares.sum(-1, keepdim=True)
        # All experts, most of them with a share of 0.
        of_experts = torch.zeros_like(scores).scatter(-1, self.chosen, shares)
        w1, w2 = (weight.unflatten(0, (self.sizes.experts, -1)) for weight in self.experts.mlp.parameters())
        inner = gelu(torch.einsum("td,ehd->teh", x, w1), approximate=self.sizes.gelu)
        return torch.einsum("te,teh,ehd->td", of_experts, inner, w2)


class Layer(Module):
    def __init__(self, sizes, index):
        super().__init__()
        has_experts = index % sizes.moe_every == 1
        self.attn = Attention(sizes)
        self.norm1 = LayerNorm(sizes.hidden, sizes.eps)
        self.mlp = Experts(sizes) if has_experts else Mlp(sizes)
        self.norm2 = LayerNorm(sizes.hidden, sizes.eps)

    def forward(self, x):
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class Encoder(Module):
    def __init__(self, sizes):
        super().__init__()
        self.embeddings = Module()
        self.embeddings.word_embeddings = Embedding(sizes.n_vocab, sizes.hidden)
        self.embeddings.token_type_embeddings = Embedding(1, sizes.hidden)
        self.emb_ln = LayerNorm(sizes.hidden, sizes.eps)
        self.encoder = Module()
        self.encoder.layers = ModuleList(Layer(sizes, i) for i in range(sizes.layers))

    @torch.no_grad()
    def forward(self, ids):
        """Returns the vector of one text."""
        x = self.embeddings.word_embeddings(torch.tensor(ids)) + self.embeddings.token_type_embeddings.weight[0]
        x = self.emb_ln(x)
        for layer in self.encoder.layers:
            x = layer(x)
        return normalize(x.mean(0), dim=0)

    def routers(self):
        """Returns the layers that choose experts."""
        return [layer.mlp for layer in self.encoder.layers if isinstance(layer.mlp, Experts)]


def random_model(sizes, tokens, seed):
    """Returns a model in which every weight has a size that shows in the result."""
    torch.manual_seed(seed)
    model = Encoder(sizes)
    for name, weight in model.named_parameters():
        is_norm = name.endswith(("norm1.weight", "norm2.weight", "emb_ln.weight"))
        std = 1.0 if "word_embeddings" in name else 0.2 if is_norm or weight.ndim == 2 else 0.1
        torch.nn.init.normal_(weight, mean=1.0 if is_norm else 0.0, std=std)
    # Experts are chosen by what tells tokens apart, not by what all have in common.
    for layer in model.routers():
        means = []
        for ids in tokens:
            model(ids)
            means.append(layer.inputs.mean(0))
        mean = normalize(torch.stack(means).mean(0), dim=0)
        rows = layer.router.layer.weight.data
        rows -= torch.outer(rows @ mean, mean)
    return model.eval()


def is_good(model, sizes, tokens):
    """Whether choices of experts are rounding-proof and various."""
    n_chosen, least = torch.zeros(len(model.routers()), sizes.experts), torch.inf
    # Texts of few tokens first, which decide soonest.
    for ids in sorted(tokens, key=len):
        model(ids)
        margin = min(float(layer.margins.min()) for layer in model.routers())
        if margin < (MIN_MARGIN_OF_FEW if len(ids) <= FEW else MIN_MARGIN):
            return False
        least = min(least, margin)
        n_chosen += torch.stack([layer.chosen.flatten().bincount(minlength=sizes.experts) for layer in model.routers()])
    shares = n_chosen / sum(map(len, tokens))
    print(f"least margin {least:.4f}, tokens of experts {shares.min():.2f} to {shares.max():.2f}", flush=True)
    return float(shares.min()) >= MIN_SHARE_OF_EXPERT


def good_model(sizes, tokens):
    """Returns the first model whose choices are good."""
    return next(model for model in (random_model(sizes, tokens, seed) for seed in count()) if is_good(model, sizes, tokens))


def save(folder, model, sizes):
    """Writes the folder as published ones are."""
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    for i, layer in enumerate(model.encoder.layers):
        if hasattr(layer.mlp, "experts"):
            # Behind the sum of all experts; the converter drops it.
            weights[f"encoder.layers.{i}.mlp.experts.bias"] = torch.zeros(sizes.hidden)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    # Without a `model_type`: by that, `transformers` reads other names than published ones.
    config = {
        "architectures": ["NomicBertModel"],
        "vocab_size": sizes.n_vocab,
        "n_embd": sizes.hidden,
        "n_head": sizes.heads,
        "n_layer": sizes.layers,
        "n_inner": sizes.ffn,
        "n_positions": 2048,
        "max_trained_positions": 2048,
        "type_vocab_size": 1,
        "activation_function": "gelu",
        "layer_norm_epsilon": sizes.eps,
        "causal": False,
        "prenorm": False,
        "parallel_block": False,
        "use_rms_norm": False,
        "qkv_proj_bias": True,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "rotary_emb_base": sizes.theta,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "moe_every_n_layers": sizes.moe_every,
        "moe_normalize_expert_weights": False,
        "moe_top_k": sizes.used,
        "num_experts": sizes.experts,
        "pad_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_pooling(folder, "mean", N_CTX, n_embd=sizes.hidden)


def main():
    torch.set_num_threads(1)
    words, n_vocab, tokens = tokenized(N_CTX)
    sizes = Sizes(n_vocab)
    model = good_model(sizes, tokens)
    vectors = [model(ids) for ids in tokens]
    check(model, sizes, tokens, vectors, EFFECTS)
    write(NAME, sys.argv[1], words, tokens, vectors, lambda folder: save(folder, model, sizes))


main()
