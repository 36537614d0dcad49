"""What the encoders that `transformers` lacks have in common: a file of llama.cpp's converter, and
golden vectors of a torch model of their own (nomic_experts.py, neo_bert.py)."""

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from converted_encoders import change, run_converter
from encoders import BERT, OUT, tokenizer
from encoders_texts import TEXTS

# Vectors have length 1, and the tests' tolerance is 1e-5.
MAX_ROUNDING_ERROR = 2e-6
MIN_EFFECT = 0.02  # of a feature on a value of some vector


def tokenized(n_ctx):
    """Returns a tokenizer for contexts of this many tokens, the size of its vocabulary, and the
    tokens of TEXTS."""
    words, n_vocab = tokenizer(BERT)
    words.model_max_length = n_ctx
    return words, n_vocab, [words(text, truncation=True, max_length=n_ctx)["input_ids"] for text in TEXTS]


def turn(x, theta, are_neighbours=False):
    """Rotates halves of heads [heads, tokens, values], or neighbouring values, against each other,
    by position (RoPE)."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, dtype=torch.float64) / half
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * theta**-steps
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = (x[..., ::2], x[..., 1::2]) if are_neighbours else (x[..., :half], x[..., half:])
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.stack(turned, -1).flatten(-2) if are_neighbours else torch.cat(turned, -1)


def attend(q, k, v):
    """Returns rows [tokens, values of all heads] of attention without a mask to k and v of heads
    [heads, tokens, values]."""
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def difference(model, tokens, vectors):
    """Returns the difference of a value of a vector in the text where it is least, and in all."""
    of_texts = [float((model(ids) - vector).abs().max()) for ids, vector in zip(tokens, vectors, strict=True)]
    return min(of_texts), max(of_texts)


def check(model, sizes, tokens, vectors, effects):
    """Rejects golden data that is inexact or insensitive to mistakes; prints the figures. `effects`
    are changes of sizes, and the least effect of each."""
    _, rounding = difference(model.double(), tokens, vectors)
    model.float()
    assert rounding <= MAX_ROUNDING_ERROR, f"rounding error {rounding}"
    print(f"rounding {rounding:.1e}")
    for changes, min_effect in effects:
        other = type(model)(replace(sizes, **changes)).eval()
        other.load_state_dict(model.state_dict())
        least, most = difference(other, tokens, vectors)
        print(f"{changes}: {least:.5f} to {most:.5f}")
        assert most >= min_effect, f"{changes} change vectors by {most} only"


def write(name, llama_cpp, words, tokens, vectors, save):
    """Writes what the converter makes of the tokenizer and of what `save` writes into a folder, and
    golden.json as encoders.py does."""
    out = OUT / name
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder, gguf = Path(scratch) / name, Path(scratch) / "model.gguf"
        folder.mkdir()
        save(folder)
        words.save_pretrained(folder)
        change(folder / "tokenizer_config.json", "TokenizersBackend", "BertTokenizer")
        run_converter(llama_cpp, "bert-bge", folder, gguf)
        shutil.copyfile(gguf, out / "model.gguf")
    golden = {"texts": TEXTS, "tokens": tokens, "vectors": [vector.tolist() for vector in vectors]}
    (out / "golden.json").write_text(json.dumps(golden))
