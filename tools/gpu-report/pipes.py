"""Counts the machine code of CUDA kernels without a GPU: registers, spills, and the instructions of
each loop by execution pipe.

    cargo test -p kvant-cuda every_kernel        # leaves PTX in the folder kvant-cuda-tests of the temporary files
    python3 tools/gpu-report/pipes.py /tmp/kvant-cuda-tests --of gemm.cu TYPE=4

`ptxas` and `nvdisasm` come from NVIDIA's toolkit, or from the PyPI packages nvidia-cuda-nvcc and
triton (`--ptxas`, `--nvdisasm`). An older ptxas rejects PTX of a newer NVRTC.

On compute capability 9.0 a multiprocessor issues four warp instructions per clock, one per quarter.
An integer instruction (`alu`: additions, comparisons, logic, shifts, permutations, selections)
occupies its quarter's pipe for two clocks, and so does `imad` (integer products, dp4a) its own;
`fma` and `half` (floats, pairs of halves) one; `mma` of 16 x 8 x 16 halves about seven. A loop
takes as long as its fullest pipe, unless it waits for memory.
"""

import argparse
import collections
import pathlib
import re
import subprocess
import tempfile

PIPES = {
    "alu": "LOP3 LOP SHF SHL SHR PRMT IADD3 IADD ISETP IMNMX LEA FMNMX FSETP SEL FSEL IABS PLOP3 MOV VIADD VIMNMX VIMNMX3 VIADDMNMX "
    "SGXT BMSK P2R R2P FSET FCHK CS2R HSETP2 HMNMX2 I2FP F2FP",
    "imad": "IMAD IDP",
    "fma": "FFMA FMUL FADD",
    "half": "HADD2 HMUL2 HFMA2",
    "mma": "HMMA IMMA",
    "rare": "MUFU I2F F2I F2F FRND POPC FLO BREV",
    "memory": "LD LDG LDS LDSM LDC LDL LDGSTS LDGDEPBAR ST STG STS STL SHFL ATOM ATOMS ATOMG RED CCTL DEPBAR",
    "control": "BRA BRX EXIT CALL RET BREAK BSYNC BSSY WARPSYNC BAR NOP YIELD MEMBAR ERRBAR VOTE VOTEU",
}
PIPE_OF = {op: pipe for pipe, ops in PIPES.items() for op in ops.split()}
LABEL = re.compile(r"(\.L\w+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)([^;]*);")


def tool(*command):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{command[0]}: {result.stderr.strip()}")
    return result.stdout + result.stderr


def kernels(listing):
    """Returns name and code of each kernel: labels, and operations with their operands."""
    code_of = {}
    code = None
    for line in listing.splitlines():
        if section := re.match(r"\.text\.(\w+):", line):
            code = code_of.setdefault(section[1], [])
        elif code is not None and (label := LABEL.match(line.strip())):
            code.append((label[1], None))
        elif code is not None and (instruction := INSTRUCTION.search(line)):
            code.append((instruction[1], instruction[2]))
    return code_of


def loops(code):
    """Returns first and last index of each range that ends with a backward branch."""
    labels = {name: at for at, (name, operands) in enumerate(code) if operands is None}
    for at, (op, operands) in enumerate(code):
        if op == "BRA" and (target := re.search(r"\((\.L\w+)\)", operands or "")) and labels.get(target[1], at) < at:
            yield labels[target[1]], at


def count_pipes(code):
    pipes = collections.Counter(PIPE_OF.get(op, "other") for op, operands in code if operands is not None)
    return f"{sum(pipes.values()):5}  " + "  ".join(f"{pipe} {n}" for pipe, n in pipes.most_common())


def report(ptx, arch, args):
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/kernel.cubin"
        log = tool(args.ptxas, "-v", f"-arch=sm_{arch}", str(ptx), "-o", cubin)
        code_of = kernels(tool(args.nvdisasm, "-c", cubin))
    for part in log.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]
        registers, spilled = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes spill stores", part)
        code = code_of[name]
        print(f"  {name}: {registers[1]} registers, {spilled[1]} bytes spilled, instructions {count_pipes(code)}")
        for start, end in sorted(loop for loop in set(loops(code)) if loop[1] - loop[0] > 1):
            print(f"    {start:5} to {end:5}: {count_pipes(code[start:end])}")


def add_arguments(parser):
    """Adds the arguments that choose builds and tools."""
    parser.add_argument("folder", type=pathlib.Path, help="folder with PTX and sources")
    parser.add_argument("--of", nargs="+", default=[], metavar="WORD", help="required source file and macros of a build")
    parser.add_argument("--arch", type=int, default=90, help="compute capability, times ten")
    parser.add_argument("--ptxas", default="ptxas")
    parser.add_argument("--nvdisasm", default="nvdisasm")


def builds(args):
    """Returns source file with macros, and PTX, of each build that `args` choose."""
    newest = {}
    for ptx in sorted(args.folder.glob("*.ptx"), key=lambda ptx: ptx.stat().st_mtime):
        # The first line of the source has its compile options; the newest build of each counts.
        build = ptx.with_suffix(".cu").read_text().splitlines()[0].split()[1:]
        names = build[:1] + [word.removeprefix("--define-macro=") for word in build if "--define-macro" in word]
        if f"--gpu-architecture=compute_{args.arch}" in build and all(word in names for word in args.of):
            newest[" ".join(names)] = ptx
    return sorted(newest.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    for names, ptx in builds(args):
        print(names)
        report(ptx, args.arch, args)


if __name__ == "__main__":
    main()
