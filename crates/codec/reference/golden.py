"""Checksums of block formats by the `gguf` Python package, independent of this crate.

    pip install gguf && python golden.py

prints the tables of the tests `decodes_as_the_gguf_package_does` and
`encodes_as_the_gguf_package_does` in `src/block.rs`. Blocks and values come from SplitMix64
alone, so that Rust generates the same ones.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import quants

MASK = (1 << 64) - 1


def splitmix(seed):
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def fnv1a(data):
    h = 0xCBF29CE484222325
    for b in data:
        h = ((h ^ b) * 0x100000001B3) & MASK
    return h


# Format, block bytes, offsets of the f16 scales: set to 0.0123 (0x224c), then 0.0456 (0x29d6).
DECODE = [
    (T.Q8_0, 34, [0]),
    (T.Q4_0, 18, [0]),
    (T.Q4_1, 20, [0, 2]),
    (T.Q5_0, 22, [0]),
    (T.Q5_1, 24, [0, 2]),
    (T.Q2_K, 84, [80, 82]),
    (T.Q3_K, 110, [108]),
    (T.Q4_K, 144, [0, 2]),
    (T.Q5_K, 176, [0, 2]),
    (T.Q6_K, 210, [208]),
    (T.IQ4_NL, 18, [0]),
    (T.IQ4_XS, 136, [0]),
    (T.MXFP4, 17, []),
    (T.NVFP4, 36, []),
]
# One-byte scales: random, except for the bits that would make them NaN or exceed f32.
BYTE_SCALES = {T.MXFP4: (1, 0x7F), T.NVFP4: (4, 0x77)}
ENCODE = [T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1]
BLOCKS = 16

for kind, size, scales in DECODE:
    bits = splitmix(size)
    data = np.array([next(bits) & 0xFF for _ in range(size * BLOCKS)], dtype=np.uint8).reshape(BLOCKS, size)
    for offset, half in zip(scales, [b"\x4c\x22", b"\xd6\x29"]):
        data[:, offset : offset + 2] = np.frombuffer(half, dtype=np.uint8)
    count, mask = BYTE_SCALES.get(kind, (0, 0))
    data[:, :count] &= mask
    values = quants.dequantize(data, kind).astype("<f4")
    print(f"decode {kind.name} 0x{fnv1a(values.tobytes()):016x}")

bits = splitmix(1)
values = np.array([((next(bits) >> 40) - (1 << 23)) / (1 << 20) for _ in range(32 * 64)], dtype=np.float32)
for kind in ENCODE:
    data = quants.quantize(values.reshape(1, -1), kind)
    print(f"encode {kind.name} 0x{fnv1a(data.tobytes()):016x}")
