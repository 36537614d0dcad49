#!/usr/bin/env python3
"""Writes the grids of GGUF's load-only types, and blocks of them with the values that PyPI `gguf`
decodes.

crates/gguf/src/load_only/grids.bin    the level indices of each grid, consecutively, the first in the lowest bits: two bits
                                    each for iq2_xxs, iq2_xs, iq2_s and iq1 (whose levels are three), four for iq3_xxs and iq3_s
crates/gguf/src/load_only/vectors.bin  for each type its GGUF id (u32), and twice a block and its 256
values (f32), little-endian
"""

from pathlib import Path

import gguf
import numpy as np
from gguf import quants

OUT = Path(__file__).resolve().parents[2] / "crates/gguf/src/packed"
GRIDS = [(quants.IQ2_XXS, 2), (quants.IQ2_XS, 2), (quants.IQ2_S, 2), (quants.IQ1_S, 2), (quants.IQ3_XXS, 4), (quants.IQ3_S, 4)]
TYPES = "IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ3_S IQ2_S IQ1_M TQ1_0 TQ2_0".split()
# Offset of a block's f16 scale; that of iq1_m is in the upper four bits of its last four words.
SCALE_AT = {"TQ1_0": 52, "TQ2_0": 64}


def levels(kind: type, bits: int) -> bytes:
    kind.init_grid()
    values = np.asarray(kind.grid).reshape(-1)
    numbers = np.array([kind.grid_map.index(int(value)) for value in values], dtype=np.uint8)
    each = 8 // bits
    shifts = np.arange(each, dtype=np.uint8) * bits
    return (numbers.reshape(-1, each) << shifts).sum(axis=1, dtype=np.uint8).tobytes()


def block(name: str, n_bytes: int, random: np.random.Generator) -> np.ndarray:
    codes = random.integers(0, 256, n_bytes, dtype=np.uint8)
    scale = np.array([0.003 + 0.5 * random.random()], dtype=np.float16)
    if name == "IQ1_M":
        words, bits = codes[-8:].view(np.uint16), int(scale.view(np.uint16)[0])
        words[:] = (words & 0x0FFF) | np.array([bits << 12, bits << 8, bits << 4, bits], dtype=np.uint32).astype(np.uint16) & 0xF000
    else:
        at = SCALE_AT.get(name, 0)
        codes[at : at + 2] = scale.view(np.uint8)
    return codes


def main() -> None:
    (OUT / "grids.bin").write_bytes(b"".join(levels(kind, bits) for kind, bits in GRIDS))
    random, out = np.random.default_rng(1), b""
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        n_values, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        assert n_values == 256
        out += int(kind).to_bytes(4, "little")
        for _ in range(2):
            codes = block(name, n_bytes, random)
            values = quants.dequantize(codes.reshape(1, -1), kind).reshape(-1).astype("<f4")
            assert values.size == 256 and np.isfinite(values).all()
            out += codes.tobytes() + values.tobytes()
    (OUT / "vectors.bin").write_bytes(out)


if __name__ == "__main__":
    main()
