#!/usr/bin/env python3
"""Creates tiny random models with EAGLE-3 (arXiv 2503.01840) and DFlash (arXiv 2602.06036) draft
heads, and their predictions.

`transformers` has no such heads. Here the layer of an EAGLE-3 head is built from a Llama of one
layer, whose rotary embedding, feed-forward layer and norms are used, those of a DFlash head from a
Qwen3; the features are taken from a `transformers` model by hooks.

In `crates/engine/tests/heads` a folder is written for every model:

model.gguf        as `make_fixtures.py` writes it
HEAD.gguf         by the conventions of llama.cpp's converter
HEAD.predictions  as of `predictions.py`
HEAD.json         the folder in which trainers save the head, as `folders.py` describes folders; values with a "dtype"
                  are not in the GGUF file
"""

import json
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from folders import find, rows_of
from make_fixtures import build_model, stored_tensors, to_interleaved, write_file, write_gguf, write_metadata
from predictions import N_CHAIN, N_PLACES, N_TOKENS, good_text
from spec import CONTEXT, LLAMA3, N_VOCAB, Spec
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

OUT = Path(__file__).resolve().parents[2] / "crates/engine/tests/heads"
EPS = 1e-6


@dataclass(frozen=True)
class HeadSpec:
    """One head of a model."""

    layer: Spec
    layers: tuple[int, ...] = ()  # whose input it reads; empty: the default ones, without a key
    n_draft_vocab: int | None = None  # None: that of the model, whose output matrix it has
    has_embedding: bool = False
    before_residual: bool = False
    before_fc: bool = False
    prefix: str = "midlayer."  # of the layer in a folder
    config: dict[str, Any] = field(default_factory=dict)  # what the folder has besides sizes

    @property
    def name(self) -> str:
        return self.layer.name.split("-")[-1]


def layer(name: str, **sizes: Any) -> Spec:
    return Spec(f"llama-{name}", **{"hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 64, "layers": 1, **sizes})


LLAMA = Spec("llama-h64-g2-six", hidden=32, heads=2, kv_heads=1, head_dim=64, layers=6)
QWEN3 = Spec("qwen3-h64-g2-five", hidden=32, heads=2, kv_heads=1, head_dim=64, layers=5, tied=True)
HEADS = [
    (LLAMA, [
        # As SafeAILab saves it, with the model's embedding and output matrix.
        HeadSpec(layer("plain"), config={"architectures": ["LlamaForCausalLM"], "draft_vocab_size": N_VOCAB}),
        # As speculators saves it: of another width, with an embedding and a vocabulary of its own.
        HeadSpec(
            layer("own", hidden=48, heads=4, kv_heads=2, head_dim=32),
            layers=(1, 3, 6),
            n_draft_vocab=40,
            has_embedding=True,
            before_residual=True,
            before_fc=True,
            prefix="layers.0.",
            config={
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "draft_vocab_size": 40,
                "target_hidden_size": 32,
                "norm_before_residual": True,
                "norm_before_fc": True,
                "fc_norm": False,
                "norm_output": False,
                "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
            },
        ),
    ]),
    (QWEN3, [
        # As SpecForge saves it; numbers of layers are nested there, and those of outputs.
        HeadSpec(
            layer("part", heads=4, theta=500_000.0, rope=LLAMA3),
            layers=(1, 4),
            n_draft_vocab=48,
            config={
                "architectures": ["LlamaForCausalLMEagle3"],
                "draft_vocab_size": 48,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3], "use_aux_hidden_state": True},
            },
        ),
    ]),
]


# Tokens of a block that Kvant drafts at once, the last known one included.
N_BLOCK = 8
MASK = 63


@dataclass(frozen=True)
class BlockSpec:
    """A DFlash head of a model."""

    layer: Spec
    layers: tuple[int, ...]  # whose input it reads

    @property
    def name(self) -> str:
        return self.layer.name.split("-")[-1]


BLOCKS = {
    "llama-h64-g2-six": [
        BlockSpec(Spec("qwen3-h64-g2-block", hidden=32, heads=2, kv_heads=1, head_dim=64, layers=2), (1, 3, 5)),
    ],
}


def features_of(model: torch.nn.Module, layers: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    """Returns the residual stream before some layers of a model, `[tokens, layers * hidden]`."""
    found = {}
    inner = model.model
    places = [*inner.layers, inner.norm]

    def keep(index: int) -> Any:
        return lambda _, args, kwargs: found.update({index: (args or (kwargs["hidden_states"],))[0][0]})

    hooks = [places[index].register_forward_pre_hook(keep(index), with_kwargs=True) for index in set(layers)]
    inner(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([found[index] for index in layers], dim=-1)


class BlockHead:
    """A DFlash head of a model, whose embedding and output matrix it has."""

    def __init__(self, spec: BlockSpec, model: torch.nn.Module) -> None:
        self.spec, self.model = spec, model
        self.qwen = build_model(spec.layer)
        for layer in self.qwen.model.layers:  # a mask is what it attends to: few tokens, and much of them
            layer.self_attn.q_norm.weight.data *= 3.0
            layer.self_attn.o_proj.weight.data *= 2.0
        m, n = spec.layer.hidden, len(spec.layers) * model.config.hidden_size
        self.fc = (n**-0.5 * torch.randn(m, n)).half().float()
        self.hidden_norm = 1 + 0.3 * torch.randn(m)

    @torch.no_grad()
    def chain(self, tokens: list[int]) -> tuple[list[int], list[float]]:
        """Returns the draft tokens after tokens, the last of which was not prefilled."""
        known = len(tokens) - 1
        f = features_of(self.model, self.spec.layers, tokens[:-1])
        c = rms_norm(f @ self.fc.T, self.hidden_norm.shape, self.hidden_norm, EPS)
        block = torch.tensor([tokens[-1], *(N_BLOCK - 1) * [MASK]])
        x = self.model.model.embed_tokens.weight[block]
        places = torch.arange(known + N_BLOCK)[None]
        cos, sin = self.qwen.model.rotary_emb(x[None], places)
        for layer in self.qwen.model.layers:
            own, n = layer.self_attn, layer.input_layernorm(x)
            both = torch.cat([c, n])
            heads = (1, -1, self.qwen.config.num_key_value_heads, self.qwen.config.head_dim)
            q = own.q_norm(own.q_proj(n).view(1, N_BLOCK, -1, heads[-1])).transpose(1, 2)
            k = own.k_norm(own.k_proj(both).view(heads)).transpose(1, 2)
            v = own.v_proj(both).view(heads).transpose(1, 2)
            q, _ = apply_rotary_pos_emb(q, q, cos[:, known:], sin[:, known:])
            k, _ = apply_rotary_pos_emb(k, k, cos, sin)
            attended = scaled_dot_product_attention(q, k, v, enable_gqa=True)
            x = x + own.o_proj(attended.transpose(1, 2).reshape(N_BLOCK, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = self.qwen.model.norm(x[1 : N_CHAIN + 1]) @ self.model.lm_head.weight.T
        best = logits.topk(2)
        return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()

    def write(self, path: Path) -> None:
        """Writes it as GGUF."""
        writer = gguf.GGUFWriter(path, "dflash")
        write_metadata(writer, self.spec.layer, self.qwen, 0)
        writer.add_uint32("dflash.block_size", 16)
        writer.add_array("dflash.target_layers", list(self.spec.layers))
        writer.add_mask_token_id(MASK)
        writer.add_tensor("fc.weight", self.fc.half().numpy())
        writer.add_tensor("enc.output_norm.weight", self.hidden_norm.numpy())
        for name, stored in stored_tensors(self.spec.layer, self.qwen):
            if name not in ("token_embd.weight", "output.weight"):
                writer.add_tensor(name, stored)
        write_file(writer)

    def describe(self, path: Path) -> None:
        """Writes the description of its folder beside the GGUF file `path`."""
        sizes = self.spec.layer
        config = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.ffn,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "rope_theta": sizes.theta,
            "max_position_embeddings": CONTEXT,
            "vocab_size": N_VOCAB,
            "tie_word_embeddings": False,
            "block_size": 16,
            # Numbers are those of layers whose output is read.
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [index - 1 for index in self.spec.layers]},
        }
        named = {"fc.weight": self.fc, "hidden_norm.weight": self.hidden_norm}
        kept = {name.removeprefix("model."): weight for name, weight in self.qwen.named_parameters()}
        named |= {name: weight.detach() for name, weight in kept.items() if "embed" not in name and "lm_head" not in name}
        write_description(path, config, list_tensors(path, named))


def list_tensors(path: Path, named: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Returns the tensors of a folder with the places of their values in the GGUF file `path`."""
    tensors = {name: rows for name, rows in rows_of(path).items() if name != "d2t"}
    places = {name: {row.tobytes(): i for i, row in enumerate(rows)} for name, rows in tensors.items()}
    listed = []
    for name, weight in named.items():
        place = find(weight.numpy(), tensors, places)
        assert place, name
        listed.append({"name": name, "shape": list(weight.shape), **place})
    return listed


def write_description(path: Path, config: dict[str, Any], listed: list[dict[str, Any]]) -> None:
    """Writes the description of a folder beside the GGUF file `path`."""
    lines = ",\n".join(json.dumps(tensor, separators=(",", ":")) for tensor in listed)
    text = f'{{"config": {json.dumps(config, separators=(",", ":"))},\n"tensors": [\n{lines}\n]}}\n'
    path.with_suffix(".json").write_text(text)


class Head:
    """An EAGLE-3 head of a model."""

    def __init__(self, spec: HeadSpec, model: torch.nn.Module) -> None:
        self.spec, self.model = spec, model
        self.llama = build_model(spec.layer)
        self.layer = self.llama.model.layers[0]
        m, n, heads = spec.layer.hidden, model.config.hidden_size, spec.layer
        n_layers = model.config.num_hidden_layers
        self.layers = spec.layers or (2, n_layers // 2, n_layers - 3)
        k = len(self.layers)

        def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
            return (gain * columns**-0.5 * torch.randn(rows, columns)).half().float()

        def norm(width: int) -> torch.Tensor:
            return 1 + 0.3 * torch.randn(width)

        self.fc, self.fc_norm, self.hidden_norm = matrix(m, k * n, 1.0), norm(k * n), norm(m)
        self.q = matrix(heads.heads * heads.head_dim, 2 * m, 1.4)
        self.k = matrix(heads.kv_heads * heads.head_dim, 2 * m, 1.4)
        self.v = matrix(heads.kv_heads * heads.head_dim, 2 * m, 1.0)
        embedding, output = model.model.embed_tokens.weight, model.lm_head.weight
        self.embedding = self.llama.model.embed_tokens.weight if spec.has_embedding else embedding
        self.output = matrix(spec.n_draft_vocab, m, 2.0) if spec.n_draft_vocab else output
        # Tokens of the model in ascending order, as trainers number them.
        self.ids = torch.randperm(N_VOCAB)[: self.output.shape[0]].sort().values
        if not spec.n_draft_vocab:
            self.ids = torch.arange(N_VOCAB)

    def run(self, tokens: list[int], g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits and residual stream of the last token; the inputs are tokens with the
        hidden states of
    the tokens before them."""
        layer, config = self.layer, self.llama.config
        embedded = self.embedding[torch.tensor(tokens)]
        normed = rms_norm(g, g.shape[-1:], self.hidden_norm, EPS)
        a = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        shape = (1, len(tokens), -1, config.head_dim)
        q, k, v = ((a @ w.T).view(shape).transpose(1, 2) for w in (self.q, self.k, self.v))
        turns = self.llama.model.rotary_emb(a[None], torch.arange(len(tokens))[None])
        q, k = apply_rotary_pos_emb(q, k, *turns)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = normed if self.spec.before_residual else g
        x = x + layer.self_attn.o_proj(attended.transpose(1, 2).reshape(len(tokens), -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.llama.model.norm(x[-1]) @ self.output.T, x[-1]

    @torch.no_grad()
    def chain(self, tokens: list[int]) -> tuple[list[int], list[float]]:
        """Returns the chain of draft tokens after tokens, the last of which was not prefilled."""
        f = features_of(self.model, self.layers, tokens[:-1])
        g = (rms_norm(f, f.shape[-1:], self.fc_norm, EPS) if self.spec.before_fc else f) @ self.fc.T
        tokens, chain, leads = tokens[1:], [], []
        for _ in range(N_CHAIN):
            logits, left = self.run(tokens, g)
            (first, second), (best, _) = logits.topk(2)
            chain.append(int(self.ids[best]))
            leads.append(float(first - second))
            tokens, g = [*tokens, chain[-1]], torch.cat([g, left[None]])
        return chain, leads

    def own(self) -> dict[str, torch.Tensor]:
        """Returns its weights by their names in a folder, without the prefix of the layer."""
        named = {f"layer.{name}": weight for name, weight in self.layer.named_parameters()}
        named |= {f"layer.self_attn.{name}_proj.weight": getattr(self, name) for name in "qkv"}
        named |= {"layer.hidden_norm.weight": self.hidden_norm, "fc.weight": self.fc}
        named["norm.weight"] = self.llama.model.norm.weight
        if self.spec.before_fc:
            named["input_norm.weight"] = self.fc_norm
        if self.spec.has_embedding:
            named["embed_tokens.weight"] = self.embedding
        if self.spec.n_draft_vocab:
            named["lm_head.weight"] = self.output
        return {name: weight.detach() for name, weight in named.items()}

    def write(self, path: Path) -> None:
        """Writes it as GGUF."""
        spec = self.spec
        writer = gguf.GGUFWriter(path, "eagle3")
        write_metadata(writer, spec.layer, self.llama, 0)
        if spec.layers:
            writer.add_array("eagle3.target_layers", list(spec.layers))
        writer.add_uint32("eagle3.target_hidden_size", self.model.config.hidden_size)
        writer.add_bool("eagle3.norm_before_residual", spec.before_residual)
        writer.add_bool("eagle3.norm_before_fc", spec.before_fc)
        own = {
            "fc.weight": self.fc.half().numpy(),
            "blk.0.attn_norm_2.weight": self.hidden_norm.numpy(),
            "blk.0.attn_q.weight": to_interleaved(self.q, spec.layer.heads).half().numpy(),
            "blk.0.attn_k.weight": to_interleaved(self.k, spec.layer.kv_heads).half().numpy(),
            "blk.0.attn_v.weight": self.v.half().numpy(),
        }
        if spec.before_fc:
            own["enc.output_norm.weight"] = self.fc_norm.numpy()
        if spec.n_draft_vocab:
            own |= {"output.weight": self.output.half().numpy(), "d2t": self.ids.numpy()}
        left_out = {"output.weight"} | (set() if spec.has_embedding else {"token_embd.weight"})
        for name, stored in stored_tensors(spec.layer, self.llama):
            if name not in own and name not in left_out:
                writer.add_tensor(name, stored)
        for name, stored in own.items():
            writer.add_tensor(name, stored)
        write_file(writer)

    def describe(self, path: Path) -> None:
        """Writes the description of its folder beside the GGUF file `path`."""
        spec, sizes = self.spec, self.spec.layer
        config = {
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.ffn,
            "num_hidden_layers": 1,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "rope_theta": sizes.theta,
            "max_position_embeddings": CONTEXT,
            "vocab_size": N_VOCAB,
            "tie_word_embeddings": False,
        } | ({"rope_scaling": sizes.rope} if sizes.rope else {})
        if "speculators_model_type" in spec.config:
            config = {"transformer_layer_config": {"model_type": "llama", **config}}
        config |= spec.config
        own = self.own().items()
        named = {name.replace("layer.", spec.prefix, 1) if name.startswith("layer.") else name: weight for name, weight in own}
        listed = list_tensors(path, named)
        if spec.n_draft_vocab:
            differences = (self.ids - torch.arange(len(self.ids))).tolist()
            is_used = [int(token in self.ids) for token in range(N_VOCAB)]
            listed.append({"name": "d2t", "shape": [len(differences)], "dtype": "I64", "values": differences})
            listed.append({"name": "t2d", "shape": [N_VOCAB], "dtype": "BOOL", "values": is_used})
        write_description(path, config, listed)


def main() -> None:
    torch.set_num_threads(1)
    for target, heads in HEADS:
        folder = OUT / target.name
        folder.mkdir(parents=True, exist_ok=True)
        model = build_model(target)
        write_gguf(folder / "model.gguf", target, model)
        blocks = [BlockHead(spec, model) for spec in BLOCKS.get(target.name, [])]
        for head in [*(Head(spec, model) for spec in heads), *blocks]:
            spec = head.spec
            tokens, chains, leads = good_text(replace(spec.layer, name=f"{target.name}-{spec.name}"), head)
            path = folder / f"{spec.name}.gguf"
            head.write(path)
            head.describe(path)
            header = struct.pack("<4sIII", b"KVPR", N_TOKENS, N_PLACES, N_CHAIN)
            values = np.array(tokens, "<i4").tobytes() + np.array(chains, "<i4").tobytes()
            path.with_suffix(".predictions").write_bytes(header + values + np.array(leads, "<f4").tobytes())
            print(f"{target.name:20} {spec.name:8} least lead {min(min(row) for row in leads):.3f}")


if __name__ == "__main__":
    main()
