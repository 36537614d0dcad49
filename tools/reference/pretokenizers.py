"""Splits texts into words with Hugging Face `tokenizers` and each model's own patterns.

Writes crates/text/tests/fixtures/pretokenizers.json: {"texts": [...], "words": {name: [[characters
of each word, ...] for each text]}}. Patterns are those of the models' tokenizer.json files.
"""

import json
import pathlib
import random

from tokenizers import Regex, pre_tokenizers

OUT = pathlib.Path(__file__).parents[2] / "crates/text/tests/fixtures/pretokenizers.json"

SPACES = r"|\s+(?!\S)|\s+"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + SPACES
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + SPACES
TAIL_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+" + SPACES
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
NO_HAN = r"&&[^\p{Han}]"


def cased(upper, lower, suffix):
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}[{upper}]*[{lower}]+{suffix}|{lead}[{upper}]+[{lower}]*{suffix}"


PATTERNS = {
    "gpt-2": [GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "llama-bpe": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL],
    "qwen2": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL],
    "qwen35": [
        CONTRACTIONS
        + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
        + SPACES
    ],
    "tekken": [cased(UPPER, LOWER, "") + r"|\p{N}" + TAIL_SLASH],
    "gpt-4o": [cased(UPPER, LOWER, CONTRACTIONS + "?") + r"|\p{N}{1,3}" + TAIL_SLASH],
    "kimi-k2": [
        r"[\p{Han}]+|"
        + cased(UPPER + NO_HAN, LOWER + NO_HAN, CONTRACTIONS + "?")
        + r"|\p{N}{1,3}"
        + TAIL
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+" + SPACES,
    ],
    "bailingmoe": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
        + SPACES
    ],
    "seed-coder": [
        CONTRACTIONS
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
        + SPACES
    ],
    "exaone-moe": [
        CONTRACTIONS
        + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
        + SPACES
    ],
    "afmoe": [
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        "[\u4E00-\u9FFF\u3400-\u4DBF\uF900-\uFAFF\u3040-\u30FF\uFF65-\uFF9F\u2F00-\u2FDF\u0E40-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF\uAC00-\uD7AF\u1100-\u11FF]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+" + SPACES,
    ],
    "jais-2": [
        CONTRACTIONS
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
        + r"|\s{1}"
    ],
    "bloom": [r" ?[^(\s|[.,!?…。，、।۔،])]+"],
}

# Letters of every case, marks, digits, white space, and a letter that folds to ASCII (the long s).
ALPHABET = "aBcLsSsdt1²Ⅷ \n\r\t  \u00a0\u2003\u0085\u2028''.,!?-_/éßſǅʰªำ你中अि\u0301\u200d🚀"


def main():
    draw = random.Random(1)
    texts = ["".join(draw.choices(ALPHABET, k=draw.randint(1, 40))) for _ in range(200)]
    words = {}
    for name, patterns in PATTERNS.items():
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        cut = pre_tokenizers.Sequence(cuts)
        words[name] = [[len(word) for word, _ in cut.pre_tokenize_str(text)] for text in texts]
    golden = json.dumps({"texts": texts, "words": words}, separators=(",", ":"), ensure_ascii=True)
    OUT.write_text(golden + "\n")


if __name__ == "__main__":
    main()
