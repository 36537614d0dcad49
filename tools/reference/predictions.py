#!/usr/bin/env python3
"""Creates tiny random models with a multi-token prediction (MTP) layer, and its predictions.

`transformers` omits such layers. Here one is built from its parts: a model of one layer of the
family, whose input rows are made from a token's embedding and the previous token's hidden state,
`eh_proj [norm(embedding), norm(hidden state)]`, as in DeepSeek-V3 (arXiv 2412.19437) and vLLM. It
has its own norm, and the model's embedding and output matrix.

For every model two files are written to `crates/engine/tests/predictions`:

NAME.gguf         as `make_fixtures.py` writes them, with the layer after the others
NAME.predictions  little-endian:
                      u8  magic[4] = "KVPR"
                      u32 n_tokens, n_places, n_chain
                      i32 tokens [n_tokens]
                      i32 chains [n_places, n_chain]   the draft tokens after each of the last tokens: the most probable one,
                                                       the most probable one after that, and so on
                      f32 leads [n_places, n_chain]    margin of each logit over the second
"""

import argparse
import dataclasses
import struct
import zlib
from pathlib import Path

import gguf
import numpy as np
import torch
from make_fixtures import build_model, stored_tensors, write_file, write_metadata
from models import SPECS
from spec import N_VOCAB, Spec
from torch.nn.functional import rms_norm

N_TOKENS = 60
N_PLACES = 24
N_CHAIN = 4
MIN_LEAD = 0.02  # ten times the tests' tolerance
EPS = 1e-6

# Layers of one kind, all with experts if any.
ONE_LAYER = {"layer_types": ["full_attention"], "first_k_dense_replace": 0}
OF = ["qwen35-h64-g2-delta", "qwen35moe-h64-g2-delta-experts", "glm4moe-h64-g2-dense1", "glm4moelite-latent128"]


class Predictor:
    """Returns the MTP layer of a model."""

    def __init__(self, spec: Spec, model: torch.nn.Module) -> None:
        extra = {key: ONE_LAYER.get(key, value) for key, value in spec.extra.items()}
        if "q_lora_rank" in extra:  # whose configuration lists layer kinds besides their number
            extra["mlp_layer_types"] = ["sparse"]
        self.spec = dataclasses.replace(spec, name=f"{spec.name}-layer", layers=1, extra=extra)
        self.layer = build_model(self.spec)
        self.layer.model.embed_tokens.weight.data.copy_(model.model.embed_tokens.weight)
        self.layer.lm_head.weight.data.copy_(model.lm_head.weight)
        self.model = model
        n = spec.hidden
        self.eh_proj = ((2 * n) ** -0.5 * torch.randn(n, 2 * n)).half().float()
        self.enorm, self.hnorm = (1 + 0.3 * torch.randn(n) for _ in range(2))

    def run(self, tokens: list[int], streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits and hidden state of the last token; the inputs are tokens with the hidden
        states of
    the tokens before them."""
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        pairs = [rms_norm(x, (x.shape[-1],), norm, EPS) for x, norm in ((embedded, self.enorm), (streams, self.hnorm))]
        rows = torch.cat(pairs, dim=-1) @ self.eh_proj.T
        left = self.layer.model(inputs_embeds=rows[None]).last_hidden_state[0, -1]
        return self.layer.lm_head(left), left

    @torch.no_grad()
    def chain(self, tokens: list[int]) -> tuple[list[int], list[float]]:
        """Returns the chain of draft tokens after tokens, the last of which was not prefilled."""
        streams = self.model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        streams = torch.cat([torch.zeros(1, streams.shape[-1]), streams])
        tokens, chain, leads = list(tokens), [], []
        for _ in range(N_CHAIN):
            logits, left = self.run(tokens, streams)
            (first, second), (best, _) = logits.topk(2)
            chain.append(int(best))
            leads.append(float(first - second))
            tokens, streams = tokens + [int(best)], torch.cat([streams, left[None]])
        return chain, leads

    def tensors(self, index: int) -> dict[str, np.ndarray]:
        """Returns its weights by their names in the file."""
        own = {
            f"blk.{index}.nextn.eh_proj.weight": self.eh_proj.half().numpy(),
            f"blk.{index}.nextn.enorm.weight": self.enorm.numpy(),
            f"blk.{index}.nextn.hnorm.weight": self.hnorm.numpy(),
        }
        for name, stored in stored_tensors(self.spec, self.layer):
            if name.startswith("blk.0."):
                own[name.replace("blk.0.", f"blk.{index}.")] = stored
            elif name == "output_norm.weight":
                own[f"blk.{index}.nextn.shared_head_norm.weight"] = stored
        return own


def good_text(spec: Spec, predictor: Predictor) -> tuple[list[int], list[list[int]], list[list[float]]]:
    """Returns a text whose predictions have a margin over rounding, with these predictions."""
    random = np.random.default_rng(zlib.crc32(spec.name.encode()))
    for _ in range(100):
        tokens = random.integers(0, N_VOCAB, N_TOKENS).tolist()
        places = range(N_TOKENS - N_PLACES + 1, N_TOKENS + 1)
        chains, leads = zip(*(predictor.chain(tokens[:n]) for n in places))
        if min(min(row) for row in leads) >= MIN_LEAD:
            distinct = len({token for chain in chains for token in chain})
            assert distinct > 8, f"{spec.name}: {distinct} distinct predictions only"
            return tokens, chains, leads
    raise RuntimeError(f"{spec.name}: no good text; change the model")


def main() -> None:
    default = Path(__file__).resolve().parents[2] / "crates/engine/tests/predictions"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=default, help="folder to write to (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(exist_ok=True)
    for spec in SPECS:
        if spec.name not in OF:
            continue
        model = build_model(spec)
        predictor = Predictor(spec, model)
        tokens, chains, leads = good_text(spec, predictor)
        writer = gguf.GGUFWriter(args.out / f"{spec.name}.gguf", gguf.MODEL_ARCH_NAMES[spec.family.arch])
        write_metadata(writer, spec, model, 1)
        writer.add_nextn_predict_layers(1)
        for name, stored in [*stored_tensors(spec, model), *predictor.tensors(spec.layers).items()]:
            writer.add_tensor(name, stored)
        write_file(writer)
        header = struct.pack("<4sIII", b"KVPR", N_TOKENS, N_PLACES, N_CHAIN)
        values = np.array(tokens, "<i4").tobytes() + np.array(chains, "<i4").tobytes() + np.array(leads, "<f4").tobytes()
        (args.out / f"{spec.name}.predictions").write_bytes(header + values)
        print(f"{spec.name:30} least lead {min(min(row) for row in leads):.3f}")


if __name__ == "__main__":
    main()
