"""Encodes texts with Hugging Face `tokenizers`, with normalizers and all properties of added
tokens.

Writes crates/hf/tests/tokenizers.json: [{"name", "file": a tokenizer.json, "texts": [...], "ids":
[[...], ...]}]. The vocabularies are created here: bytes, a few merges, and added tokens with each
property.
"""

import json
import pathlib
import random

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

OUT = pathlib.Path(__file__).parents[2] / "crates/hf/tests/tokenizers.json"

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
MARK = "\u2581"

# Vietnamese, Korean and others in both forms, ligatures, compatibility characters, marks in the
# wrong order.
PIECES = [
    "Ti\u1ebfng Vi\u1ec7t", "Tie\u0302\u0301ng Vie\u0323\u0302t", "\u1112\u1161\u11ab\u1100\u116e\u11a8", "\ud55c\uad6d",
    "cafe\u0301", "CAF\u00c9", "e\u0301", "\u00e9", "a\u0302\u0323", "a\u0323\u0302", "\ufb01n", "\uff21\uff42", "\u00bd", "\u212b", "\u2126",
    "\u0130\u0131", "\u1e9b\u0323", "\u0958", "\u0915\u093c", "\u0344", ">\u0338", "\u0301", " ", "  ", "\n", "\t", "\u00a0", "\u2003",
    "word", "words", "swords", "_words", "word,", "x", "'s", "12", ".",
]


def added(first, tokens):
    flags = ["single_word", "lstrip", "rstrip", "normalized", "special"]
    return [
        {"id": first + n, "content": text, **{flag: flag in has for flag in flags}}
        for n, (text, has) in enumerate(tokens)
    ]


def byte_level(normalizer, pre, tokens):
    alphabet = sorted(ByteLevel.alphabet())
    spell = lambda text: "".join(word for word, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text))
    vocab, merges = {c: n for n, c in enumerate(alphabet)}, []
    for text in ["\u00e9", "e\u0301", "wo", "rd", "word", "\u1ebf", "\u00bd", "fi"]:
        symbols = list(spell(text))
        while len(symbols) > 1:
            joined = symbols[0] + symbols[1]
            if joined not in vocab:
                vocab[joined] = len(vocab)
                merges.append([symbols[0], symbols[1]])
            symbols[:2] = [joined]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added(len(vocab), tokens),
        "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": None, "decoder": None,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocab, "merges": merges,
        },
    }


def marked(normalizers, tokens):
    vocab = {"<unk>": 0, **{f"<0x{n:02X}>": n + 1 for n in range(256)}}
    for c in MARK + "wordsx\u00e9e\u1ebfn":
        vocab[c] = len(vocab)
    merges = []
    for left, right in [("w", "o"), ("r", "d"), ("wo", "rd"), (MARK, "word"), (MARK, MARK)]:
        vocab[left + right] = len(vocab)
        merges.append([left, right])
    marks = [
        {"type": "Prepend", "prepend": MARK},
        {"type": "Replace", "pattern": {"String": " "}, "content": MARK},
    ]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added(len(vocab), tokens),
        "normalizer": {"type": "Sequence", "normalizers": normalizers + marks}, "pre_tokenizer": None,
        "post_processor": None, "decoder": None,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocab, "merges": merges,
        },
    }


TOKENS = [
    ("<|im_end|>", ["special"]), ("<call>", []), ("[left]", ["lstrip"]), ("[right]", ["rstrip", "special"]),
    ("[both]", ["lstrip", "rstrip", "special"]), ("words", ["single_word"]), ("<\u00e9>", ["normalized"]),
    ("<E\u0301>", ["normalized", "special"]), ("[Both\u00bd]", ["normalized", "lstrip", "rstrip", "single_word"]),
    ("<e\u0301", []), ("n\u00e9>", ["normalized"]),
]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
QWEN = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False},
        {**BYTES, "use_regex": False},
    ],
}


def sequence(*steps):
    return {"type": "Sequence", "normalizers": list(steps)}


def replace(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


FILES = {
    "none": byte_level(None, QWEN, TOKENS),
    "nfc": byte_level({"type": "NFC"}, QWEN, TOKENS),
    "nfd": byte_level({"type": "NFD"}, BYTES, TOKENS),
    "nfkc, lower": byte_level(sequence({"type": "NFKC"}, {"type": "Lowercase"}), BYTES, TOKENS),
    "no accents": byte_level(sequence({"type": "NFKD"}, sequence({"type": "StripAccents"})), BYTES, TOKENS),
    "strip, replace, prepend": byte_level(
        sequence(
            {"type": "Strip", "strip_left": True, "strip_right": False}, replace("word", "x"), {"type": "Prepend", "prepend": "e"},
            {"type": "Strip", "strip_left": False, "strip_right": True}, replace("x", "xx"),
        ),
        BYTES, TOKENS,
    ),
    "marked": marked([], [(text, has) for text, has in TOKENS if "normalized" not in has]),
    "marked, nfkc": marked([{"type": "NFKC"}], [(text, has) for text, has in TOKENS if "normalized" not in has]),
}


def main():
    draw = random.Random(1)
    pieces = PIECES + [text for text, _ in TOKENS]
    written = []
    for name, file in FILES.items():
        tokenizer = Tokenizer.from_str(json.dumps(file))
        assert all(tokenizer.token_to_id(token["content"]) == token["id"] for token in file["added_tokens"])
        texts = ["".join(draw.choices(pieces, k=draw.randint(1, 12))) for _ in range(60)] + ["", " ", *pieces]
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        written.append({"name": name, "file": file, "texts": texts, "ids": ids})
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(written, separators=(",", ":"), ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
