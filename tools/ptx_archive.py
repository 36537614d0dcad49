"""Compiles every CUDA kernel ahead and writes the archive that Kvant's binary contains.

    python3 tools/ptx_archive.py

Run it when a kernel, a header or `builds()` has changed, which a test of kvant-cuda tells. It
writes `crates/cuda/assets/ptx.index` and `ptx.zst`. NVRTC and zstd are the wheels nvidia-cuda-nvrtc-cu12
and zstandard of PyPI, in `target/ptx-archive`, where compiled kernels are cached too: only changed
ones are compiled again. NVRTC is of CUDA 12.0, whose PTX 8.0 every driver that Kvant accepts loads.
"""

import collections
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ASSETS = ROOT / "crates/cuda/assets"
WORK = ROOT / "target/ptx-archive"
NVRTC = "12.0"
WHEELS = [f"nvidia-cuda-nvrtc-cu12=={NVRTC}.*", "zstandard==0.25.*"]
TEST = ["--package", "kvant-cuda", "--lib", "--", "--ignored", "--exact", "module::tests::the_archive_is_written"]
# The variants of a source are alike over their whole length. A frame is decoded up to the variant
# that is needed, which takes a hundredth of a second for these bytes.
LEVEL, WINDOW_LOG, FRAME = 19, 24, 8 << 20
# A register or a label: its kind and its number.
NUMBERED = re.compile(r"(%[a-z]+|\$L__BB\d*_)(-?\d+)")


def install(folder):
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, *WHEELS], check=True)
    sys.path.insert(0, str(folder))


def compile_all(wheels, folder):
    """Leaves SOURCE.ptx and SOURCE.index of every source in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "cache").symlink_to(WORK / "cache")
    (WORK / "cache").mkdir(exist_ok=True)
    library = str(wheels / "nvidia/cuda_nvrtc/lib")
    environment = os.environ | {"LD_LIBRARY_PATH": library, "KVANT_PTX_ARCHIVE": str(folder)}
    subprocess.run(["cargo", "test", "--quiet", *TEST], cwd=ROOT, env=environment, check=True)


def renumbered(text, encodes):
    """Writes the number of each register and label as the difference from the last one of its kind,
    or restores it: code that differs in nothing else becomes equal, and takes half the bytes."""
    last = collections.defaultdict(int)

    def write(found):
        kind, number = found[1], int(found[2])
        before = last[kind]
        last[kind] = number if encodes else before + number
        return f"{kind}{number - before if encodes else last[kind]}"

    return NUMBERED.sub(write, text)


def variants(path):
    """Yields the text and the line of the index of each variant of a source, renumbered."""
    text, at = path.read_text(), 0
    for line in path.with_suffix(".index").read_text().splitlines():
        key, length, name = line.split(" ", 2)
        ptx = text[at : at + int(length)]
        at += int(length)
        piece = renumbered(ptx, True)
        assert renumbered(piece, False) == ptx, f"{name} is not restored"
        yield piece, f"{key} {len(piece)} {name}"


def encode(path):
    """Returns the frames of a source, and its lines of the index."""
    import zstandard

    parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, window_log=WINDOW_LOG, enable_ldm=True)
    frames, index, pieces, lines = [], [], [], []

    def end_frame():
        if pieces:
            frames.append(zstandard.ZstdCompressor(compression_params=parameters).compress("".join(pieces).encode()))
            index.extend([f"frame {len(frames[-1])}", *lines])
            pieces.clear(), lines.clear()

    for piece, line in variants(path):
        if sum(map(len, pieces)) + len(piece) > FRAME:
            end_frame()
        pieces.append(piece)
        lines.append(line)
    end_frame()
    return b"".join(frames), index


def read():
    """Yields name and PTX of each variant in the archive."""
    import zstandard

    frames, at = (ASSETS / "ptx.zst").read_bytes(), 0
    for line in (ASSETS / "ptx.index").read_text().splitlines()[1:]:
        key, length, *name = line.split(" ")
        if key == "frame":
            texts = zstandard.ZstdDecompressor().decompress(frames[at : at + int(length)]).decode()
            at, start = at + int(length), 0
        else:
            yield " ".join(name), renumbered(texts[start : start + int(length)], False)
            start += int(length)


def main():
    wheels, folder = WORK / "wheels", WORK / "sources"
    install(wheels)
    compile_all(wheels, folder)
    with concurrent.futures.ProcessPoolExecutor() as pool:
        frames, lines = zip(*pool.map(encode, sorted(folder.glob("*.ptx"))))
    index = [f"nvrtc {NVRTC}", *(line for part in lines for line in part)]
    (ASSETS / "ptx.index").write_text("\n".join(index) + "\n")
    (ASSETS / "ptx.zst").write_bytes(b"".join(frames))
    n_variants = sum(not line.startswith("frame") for line in index[1:])
    print(f"{n_variants} variants of {len(frames)} sources, {sum(map(len, frames)):,} bytes")


if __name__ == "__main__":
    main()
