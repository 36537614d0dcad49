#!/usr/bin/env python3
"""Trains an EAGLE-3 head (arXiv 2503.01840) for the bundled model, in minutes on a CPU.

Writes crates/engine/tests/heads/pocket-q8_0.gguf. The text is the model's own, sampled behind
beginnings of conversations. As in the paper, the head is trained on its own hidden states too: in
the second and third step it reads those of the step before in place of features. A row then attends
to the rows of earlier steps as in decode: features up to a token, predicted states behind it.
"""

import argparse
import time
from pathlib import Path

import gguf
import numpy as np
import torch
from make_fixtures import to_interleaved, write_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from torch.nn.functional import cross_entropy, linear, rms_norm, silu
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "crates/engine/assets/pocket-q8_0.gguf"
OUT = ROOT / "crates/engine/tests/heads/pocket-q8_0.gguf"
LAYERS = (1, 3, 5)  # whose input the head reads; 5 is the output of the last one
N_TEXTS, N_TOKENS, N_BATCH, N_STEPS = 1536, 128, 16, 3
EPS, THETA = 1e-6, 1e5


def load() -> Qwen3ForCausalLM:
    """Returns the bundled model in f32."""
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(MODEL).tensors}
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        rms_norm_eps=EPS,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 5)
    for name, weight in model.named_parameters():
        weight.data.copy_(torch.from_numpy(tensors[names.get_name(name, try_suffixes=(".weight",))].copy()))
    return model


@torch.no_grad()
def texts(model: Qwen3ForCausalLM) -> torch.Tensor:
    """Returns texts of the model, `[texts, tokens]`: half of them sampled at a lower temperature."""
    fields = gguf.GGUFReader(MODEL).fields
    words, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    bpe = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [tuple(merge.split(" ")) for merge in merges]))
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    start = torch.tensor([[words.index("<|im_start|>"), *bpe.encode("user\n").ids]])
    rows = start.repeat(N_TEXTS, 1)
    cool = torch.arange(N_TEXTS) % 2 == 0
    step = model(rows, use_cache=True)
    while rows.shape[1] < N_TOKENS:
        # The beginning differs between the texts at any temperature.
        heat = torch.where(cool & (rows.shape[1] > 24), 0.3, 1.0)[:, None]
        token = torch.multinomial((step.logits[:, -1] / heat).softmax(-1), 1)
        rows = torch.cat([rows, token], dim=1)
        step = model(token, past_key_values=step.past_key_values, use_cache=True)
    return rows


@torch.no_grad()
def observe(model: Qwen3ForCausalLM, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the features of tokens, and the logits behind them."""
    found = {}
    places = [*model.model.layers, model.model.norm]

    def keep(index: int):
        return lambda _, args, kwargs: found.update({index: args[0] if args else kwargs["hidden_states"]})

    hooks = [places[index].register_forward_pre_hook(keep(index), with_kwargs=True) for index in LAYERS]
    logits = model(rows, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return torch.cat([found[index] for index in LAYERS], dim=-1), logits


class Head(nn.Module):
    """The head, with names of GGUF."""

    def __init__(self, m: int = 256, heads: int = 2, dim: int = 128, ffn: int = 640) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(columns**-0.5 * torch.randn(rows, columns))

        self.fc = matrix(m, len(LAYERS) * m)
        self.attn_q, self.attn_k, self.attn_v = (matrix(n * dim, 2 * m) for n in (heads, 1, 1))
        self.attn_output, self.ffn_down = matrix(m, heads * dim), matrix(m, ffn)
        self.ffn_gate, self.ffn_up = matrix(ffn, m), matrix(ffn, m)
        self.attn_norm, self.attn_norm_2, self.ffn_norm, self.output_norm = (nn.Parameter(torch.ones(m)) for _ in range(4))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Applies RoPE to `[batch, heads, rows, dim]`."""
        angles = torch.arange(x.shape[2])[:, None] * THETA ** (-torch.arange(0, self.dim, 2) / self.dim)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    def step(self, e: torch.Tensor, g: torch.Tensor, before: list) -> torch.Tensor:
        """Returns the residual stream of rows with embeddings and hidden states; `before` has keys
        and values of earlier steps."""
        norm = lambda x, weight: rms_norm(x, x.shape[-1:], weight, EPS)  # noqa: E731
        a = torch.cat([norm(e, self.attn_norm), norm(g, self.attn_norm_2)], dim=-1)
        split = lambda x: x.unflatten(-1, (-1, self.dim)).transpose(1, 2)  # noqa: E731
        q, k, v = (split(linear(a, w)) for w in (self.attn_q, self.attn_k, self.attn_v))
        q, k = self.turned(q), self.turned(k)
        before.append((k, v))
        n, rows = len(before), a.shape[1]
        # Features up to n - 1 rows before, then one row of each step.
        place = torch.arange(rows)
        scores = (q @ before[0][0].transpose(-1, -2)).masked_fill(place > place[:, None] - (n - 1), float("-inf"))
        shifted = lambda x, by: torch.roll(x, by, dims=2)  # noqa: E731
        later = [(shifted(k, n - t), shifted(v, n - t)) for t, (k, v) in enumerate(before[1:], start=2)]
        columns = [(q * k).sum(-1, keepdim=True) for k, _ in later]
        weights = (torch.cat([scores, *columns], dim=-1) * self.dim**-0.5).softmax(-1)
        mixed = weights[..., :rows] @ before[0][1]
        for index, (_, v) in enumerate(later):
            mixed = mixed + weights[..., rows + index, None] * v
        x = g + linear(mixed.transpose(1, 2).flatten(2), self.attn_output)
        y = norm(x, self.ffn_norm)
        return x + linear(silu(linear(y, self.ffn_gate)) * linear(y, self.ffn_up), self.ffn_down)

    def loss(self, model: Qwen3ForCausalLM, rows: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        """Returns the loss, and the rate of agreement with the model's most probable token in each
        step."""
        features, logits = observe(model, rows)
        table = model.model.embed_tokens.weight.detach()
        e, g, wanted = table[rows[:, 1:]], linear(features[:, :-1], self.fc), logits[:, 1:]
        best, loss, rates, before = wanted.argmax(-1), 0.0, [], []
        for step in range(N_STEPS):
            x = self.step(e, g, before)
            out = linear(rms_norm(x, x.shape[-1:], self.output_norm, EPS), table)
            # Rows at the beginning lack states of the step before.
            got, want = out[:, step:], wanted[:, step:]
            loss = loss + 0.8**step * cross_entropy(got.flatten(0, 1), want.softmax(-1).flatten(0, 1))
            rates.append(float((got.argmax(-1) == best[:, step:]).float().mean()))
            g = torch.roll(x, 1, dims=1)
        return loss, rates


def write(head: Head) -> None:
    """Writes the head, matrices in q8_0."""
    writer = gguf.GGUFWriter(OUT, "eagle3")
    writer.add_name("kvant-pocket EAGLE-3")
    writer.add_block_count(1)
    writer.add_context_length(2048)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(640)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(128)
    writer.add_array("eagle3.target_layers", list(LAYERS))
    writer.add_uint32("eagle3.target_hidden_size", 256)
    writer.add_bool("eagle3.norm_before_residual", False)
    writer.add_bool("eagle3.norm_before_fc", False)
    for name, weight in head.named_parameters():
        weight = weight.detach()
        if name in ("attn_q", "attn_k"):
            weight = to_interleaved(weight, weight.shape[0] // head.dim)
        full = f"{name}.weight" if name in ("fc", "output_norm") else f"blk.0.{name}.weight"
        if weight.ndim == 1:
            writer.add_tensor(full, weight.numpy())
        else:
            q8_0 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(full, gguf.quants.quantize(np.ascontiguousarray(weight.numpy()), q8_0), raw_dtype=q8_0)
    write_file(writer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4, help="time of training (default: %(default)s)")
    args = parser.parse_args()
    torch.manual_seed(1)
    model = load()
    rows = texts(model)
    test, train = rows[:64], rows[64:]
    head = Head()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    started, share, n = time.monotonic(), 0.0, 0
    while share < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (n + 1) / 50, 1.02 - share)
        loss, rates = head.loss(model, train[torch.randint(len(train), (N_BATCH,))])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        share, n = (time.monotonic() - started) / (60 * args.minutes), n + 1
        if n % 50 == 0:
            print(f"step {n:5} loss {float(loss):.3f} agreement {' '.join(f'{rate:.2f}' for rate in rates)}", flush=True)
    with torch.no_grad():
        print("other texts:", head.loss(model, test)[1])
    write(head)


if __name__ == "__main__":
    main()
