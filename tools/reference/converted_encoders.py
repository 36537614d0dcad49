#!/usr/bin/env python3
"""What llama.cpp's converter makes of the text encoders of encoders.py.

    python converted_encoders.py LLAMA_CPP      writes crates/engine/tests/encoders/NAME/llama-cpp.json

keys         the hyper-parameters of the GGUF file
tensors      names, shapes in GGUF's order, and hashes of the values in f32 (FNV-1a, 64 bits)
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gguf import GGUFReader

ENCODERS = Path(__file__).resolve().parents[2] / "crates/engine/tests/encoders"
# The names of pre-tokenizers, which the converter knows by the tokens of published vocabularies.
FAMILIES = {
    "eurobert": "jina-v5-nano",
    "gemma-embedding": "default",
    "jina-bert-v2": "jina-v2-en",
    "modern-bert": "modern-bert",
    "modern-bert-ranker": "modern-bert",
}
# Sets the name and runs the converter.
CONVERT = """
import runpy, sys
from pathlib import Path
llama_cpp, name = sys.argv.pop(1), sys.argv.pop(1)
sys.path.insert(0, llama_cpp)
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: name
sys.argv[0] = str(Path(llama_cpp) / "convert_hf_to_gguf.py")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def fnv(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def as_published(folder):
    """Changes settings to what the converter expects of published folders."""
    if folder.name == "jina-bert-v2":
        change(folder / "tokenizer_config.json", "TokenizersBackend", "BertTokenizer")
    # It refuses what EuroBERT's head reads by default. Embedders have no head.
    change(folder / "config.json", "late", "mean")


def change(path, old, new):
    path.write_text(path.read_text().replace(f'"{old}"', f'"{new}"'))


def run_converter(llama_cpp, pre, folder, out):
    options = ["--outfile", out, "--outtype", "f32", "--sentence-transformers-dense-modules"]
    subprocess.run([sys.executable, "-c", CONVERT, llama_cpp, pre, folder, *options], check=True)


def convert(llama_cpp, name, pre):
    with tempfile.TemporaryDirectory() as scratch:
        folder, out = Path(scratch) / name, Path(scratch) / "out.gguf"
        shutil.copytree(ENCODERS / name, folder)
        as_published(folder)
        run_converter(llama_cpp, pre, folder, out)
        reader = GGUFReader(out)
        arch = reader.fields["general.architecture"].contents()
        keys = {key: field.contents() for key, field in reader.fields.items() if key.startswith(f"{arch}.")}
        tensors = {
            tensor.name: {"shape": [int(n) for n in tensor.shape], "hash": f"{fnv(tensor.data.tobytes()):016x}"} for tensor in reader.tensors
        }
    (ENCODERS / name / "llama-cpp.json").write_text(json.dumps({"keys": keys, "tensors": tensors}, indent=1) + "\n")


if __name__ == "__main__":
    for name, pre in FAMILIES.items():
        convert(sys.argv[1], name, pre)
