#!/usr/bin/env python3
"""Tokens of RWKV's vocabulary "World" by its authors' package `rwkv`.

Writes crates/text/tests/fixtures/rwkv.json: {"tokens": [texts as in GGUF files, ...], "ids": [their
ids, ...], "cases": [{"text": ..., "ids": [...]}, ...]}. The tokens are all bytes, those that begin
anywhere in the texts, and some that begin alike: from these alone the texts have the same tokens.
"""

import json
import random
import runpy
from importlib.util import find_spec
from pathlib import Path

from encoders_texts import TEXTS

OUT = Path(__file__).parents[2] / "crates/text/tests/fixtures/rwkv.json"
FOLDER = Path(find_spec("rwkv").submodule_search_locations[0])
N_ALIKE = 150


def reference():
    """Loads the package's tokenizer alone, which does not need torch."""
    module = runpy.run_path(str(FOLDER / "rwkv_tokenizer.py"))
    return module["TRIE_TOKENIZER"](FOLDER / "rwkv_vocab_v20230424.txt")


def texts():
    random.seed(7)
    yield from (text[:400] for text in TEXTS)
    yield "User: hi\n\nAssistant: It's <b>\\n</b> 'quoted' \"twice\" \\' \\\\ <s></s>\r\n\r\n\n\n\n\tend   \n"
    yield "\n\n\n" + " " * 130 + "=" * 70 + "-" * 200
    yield "".join(map(chr, range(0x180)))
    ranges = [(32, 127), (0xA0, 0x250), (0x300, 0x700), (0x900, 0xE00), (0x3000, 0x3100), (0x4E00, 0x9FFF)]
    ranges += [(0xAC00, 0xD7A4), (0x1F300, 0x1F700), (1, 0x20)]
    words = " ".join(TEXTS).split()
    for n in range(50):
        start, end = ranges[n % len(ranges)]
        letters = "".join(chr(random.randrange(start, end)) for _ in range(random.randrange(1, 12)))
        yield " ".join([letters, random.choice(words)[:60], letters[:3] + random.choice(words)[:60]])


def main():
    tokenizer = reference()
    cases = [{"text": text, "ids": tokenizer.encode(text)} for text in texts()]
    source = b"\0".join(case["text"].encode() for case in cases)
    used = {id for case in cases for id in case["ids"]}
    inside = {id for id, token in tokenizer.idx2token.items() if len(token) == 1 or token in source}
    alike = [id for id, token in tokenizer.idx2token.items() if token[:-1] in source and id not in inside]
    ids = sorted(used | inside | set(random.sample(alike, N_ALIKE)))
    tokens = [repr(tokenizer.idx2token[id])[2:-1] for id in ids]
    OUT.write_text(json.dumps({"tokens": tokens, "ids": ids, "cases": cases}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
