"""Writes the tokenizer of a GGUF file as a Hugging Face folder, which Dynamo's frontend reads.

    python3 tools/fleet/tokenizer.py model.gguf DIR

Byte-level BPE of the kinds `gpt-2` and `smollm` only; others are refused by name. Needs the package
`gguf`.
"""

import json
import pathlib
import sys

from gguf import GGUFReader

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
SPLITS = {"gpt-2": BYTES, "smollm": {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}}
CONTROL = (3, 4)  # Token types of control and user-defined tokens.


def folder(reader):
    """Returns the files of the folder by name."""

    def value(key):
        return reader.fields[key].contents()

    kind = value("tokenizer.ggml.pre")
    if kind not in SPLITS:
        raise SystemExit(f"tokenizer.ggml.pre: expected one of {sorted(SPLITS)}, got {kind}")
    tokens, types = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    bos, eos = value("tokenizer.ggml.bos_token_id"), value("tokenizer.ggml.eos_token_id")
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    added = [
        {"id": i, "content": token, "special": True, **flags}
        for i, (token, kind_of) in enumerate(zip(tokens, types))
        if kind_of in CONTROL
    ]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": SPLITS[kind],
        "post_processor": None,
        "decoder": BYTES,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": value("tokenizer.ggml.merges")},
    }
    length = value(f"{value('general.architecture')}.context_length")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(tokens)}
    ends = {"eos_token_id": eos, "bos_token_id": bos}
    texts = {"eos_token": tokens[eos], "bos_token": tokens[bos]}
    return {
        "tokenizer.json": tokenizer,
        "config.json": {**config, **ends, "max_position_embeddings": length},
        "generation_config.json": ends,
        "tokenizer_config.json": {**texts, "chat_template": value("tokenizer.chat_template")},
    }


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    to = pathlib.Path(sys.argv[2])
    to.mkdir(parents=True, exist_ok=True)
    for name, content in folder(GGUFReader(sys.argv[1])).items():
        (to / name).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
