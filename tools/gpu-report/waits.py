"""Finds where a warp of a CUDA kernel waits for memory, without a GPU.

    mkdir /tmp/trace
    KVANT_PTX_TRACE=/tmp/trace cargo test -p kvant-cuda rope_append
    python3 tools/gpu-report/waits.py /tmp/trace             # a line for each kernel, the longest first
    python3 tools/gpu-report/waits.py /tmp/trace append      # and where this one waits

The interpreter has noted the lines of PTX that the first thread of the first block of each launch
executes. An instruction is taken to issue one clock after the one before it, and not before its
operands are there, by the latencies below. That is the path of one warp alone, in the order of the
PTX: ptxas moves loads ahead within a block of code, though not across branches and stores. So two
loads that do not depend on each other and yet wait one after the other are worth a look: a branch
stands between them, or a store that could write what the second one reads.

A load from memory takes 500 clocks, wherever its data is; a load of the same line again takes as
long. Compare paths with each other, not with a clock.
"""

import argparse
import collections
import pathlib
import re

# Clocks until the result is there, by the beginning of the instruction; others take OTHER.
LATENCY = {
    "ld": 500, "atom": 700, "ld.param": 30, "ld.const": 30, "ld.shared": 30, "ld.local": 30, "shfl": 25, "redux": 25, "vote": 12, "bar": 30, "mma": 33, "wgmma": 33,
    "div.rn.f64": 150, "sqrt.rn.f64": 150, "rcp.rn.f64": 150, "div": 50, "rem": 120, "div.u": 120, "div.s": 120,
    "sqrt": 40, "rcp": 40, "ex2": 40, "cvt": 12,
}  # fmt: skip
OTHER = 5
# A wait that is longer than this is one for memory.
LONG = 150
REGISTER = re.compile(r"%[a-z]+\d+")
GUARD = re.compile(r"^@!?%p\d+\s+")
# They write no register, so that all they name are operands.
WITHOUT_RESULT = ("st", "bra", "bar", "cp", "red.", "griddepcontrol", "ret", "exit")


def latency(op):
    matching = [start for start in LATENCY if op.startswith(start)]
    return LATENCY[max(matching, key=len)] if matching else OTHER


class Code:
    """A file of PTX, its lines decoded when they are needed."""

    def __init__(self, path):
        self.lines = path.read_text().split("\n")
        self.decoded = {}

    def decode(self, number):
        """Returns instruction, written registers and read ones."""
        if number not in self.decoded:
            text = GUARD.sub("", self.lines[number - 1].strip())
            op, _, operands = text.partition(" ") if "\t" not in text else text.partition("\t")
            written, read = "", operands
            if not op.startswith(WITHOUT_RESULT):
                end = operands.find("}") if operands.strip().startswith("{") else operands.find(",")
                written, read = operands[:end], operands[end:]
            self.decoded[number] = op.rstrip(";"), REGISTER.findall(written), REGISTER.findall(read)
        return self.decoded[number]


def follow(code, path, waits):
    """Returns the clocks of a path, and how many waits for memory are in it; counts them by line."""
    ready, now, n_waits = {}, 0, 0
    for number in path:
        op, written, read = code.decode(number)
        issue = max([now] + [ready.get(register, 0) for register in read])
        if issue > now + LONG:
            waits[number] += 1
            n_waits += 1
        now = issue + (latency(op) if op.startswith("bar") else 1)
        for register in written:
            ready[register] = issue + latency(op)
    return now, n_waits


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where the tests have written to")
    parser.add_argument("kernels", nargs="*", help="kernels whose waits are listed")
    args = parser.parse_args()
    codes, waits = {}, collections.defaultdict(collections.Counter)
    launches = collections.defaultdict(list)
    with open(args.folder / "paths.txt") as paths:
        for row in paths:
            kernel, ptx, *path = row.split()
            code = codes[ptx] if ptx in codes else codes.setdefault(ptx, Code(args.folder / ptx))
            path = [int(line) for line in path]
            launches[kernel].append((len(path), *follow(code, path, waits[kernel, ptx])))
    for kernel, paths in sorted(launches.items(), key=lambda item: -sum(path[1] for path in item[1])):
        instructions, clocks, n_waits = (sum(column) / len(paths) for column in zip(*paths))
        longest = max(path[1] for path in paths)
        print(f"{kernel:24} {len(paths):5} launches {instructions:8.0f} instructions {clocks:8.0f} clocks, at most {longest:7}, {n_waits:5.1f} waits")
        for (of, ptx), lines in waits.items():
            if of == kernel and kernel in args.kernels:
                for number, n in lines.most_common(12):
                    print(f"    {n:5} {ptx[:6]} {number:6} {codes[ptx].lines[number - 1].strip()}")


if __name__ == "__main__":
    main()
