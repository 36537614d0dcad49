#!/usr/bin/env python3
"""Tokens of the vocabulary of XLM-RoBERTa by Hugging Face's `tokenizers`.

    python unigram.py VOCAB.gguf       writes VOCAB.json: texts and their tokens

VOCAB.gguf is llama.cpp's models/ggml-vocab-nomic-bert-moe.gguf; needs `gguf` and `tokenizers`.
"""

import json
import random
import sys
from pathlib import Path

import gguf
from encoders_texts import TEXTS
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers


def values(reader, key):
    field = reader.fields[f"tokenizer.ggml.{key}"]
    return [field.parts[i] for i in field.data]


def tokenizer(path):
    """Returns the tokenizer that transformers would make of a vocabulary."""
    reader = gguf.GGUFReader(path)
    texts = [bytes(text).decode() for text in values(reader, "tokens")]
    scores = [float(score[0]) for score in values(reader, "scores")]
    charsmap = bytes(int(byte[0]) for byte in values(reader, "precompiled_charsmap"))
    all = Tokenizer(models.Unigram(list(zip(texts, scores, strict=True)), 3, False))
    all.normalizer = normalizers.Precompiled(charsmap)
    all.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    all.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True)])
    return all


def random_texts(n):
    """Returns texts of characters from every script, and of those that SentencePiece maps."""
    random.seed(5)
    ranges = [(32, 127), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x700), (0x900, 0xE00), (0x1100, 0x1200), (0x1E00, 0x2100)]
    ranges += [(0x2100, 0x2C00), (0x3000, 0x3400), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xF900, 0xFE10), (0xFE10, 0xFFF0), (0x1F300, 0x1F700)]
    words = " ".join(TEXTS).split()
    for _ in range(n):
        start, end = random.choice(ranges)
        letters = "".join(chr(random.randrange(start, end)) for _ in range(random.randrange(1, 30)))
        yield " ".join([letters, random.choice(words), letters[:3] + random.choice(["", " ", "\t\u3000", "\r\n"]) + random.choice(words)])


def main():
    path = Path(sys.argv[1])
    words = tokenizer(path)
    lines = [line for line in sys.stdin.read().splitlines() if line.strip()] if not sys.stdin.isatty() else []
    texts = [*TEXTS, *random_texts(2000), *lines]
    tokens = [words.encode(text, add_special_tokens=False).ids for text in texts]
    path.with_suffix(".json").write_text(json.dumps({"texts": texts, "tokens": tokens}))


if __name__ == "__main__":
    main()
