"""Counts the machine code of CUDA kernels without a GPU: registers, spills, shared memory, and the
instructions of each loop by execution pipe.

    cargo test -p kvant-cuda every_kernel        # leaves PTX in the folder kvant-cuda-tests of the temporary files
    python3 tools/gpu-report/pipes.py /tmp/kvant-cuda-tests --of gemm.cu TYPE=4

    python3 tools/gpu-report/pipes.py --check    # a table of all kernels in the binary, on every architecture

`--check` compiles the PTX in `crates/cuda/assets` (which takes the PyPI package zstandard) and
fails on spills beyond those in `spills.txt` (`--accept` writes that file), and on static shared
memory beyond an architecture's. Dynamic shared memory is chosen at the launch, for the card at
hand; the tests on the interpreter check it.

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
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import ptx_archive

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
SPILLS = pathlib.Path(__file__).with_name("spills.txt")
# Shared memory of a block by architecture, in bytes: the table of compute capabilities in the CUDA
# C++ programming guide.
SHARED = {"80": 163 << 10, "86": 99 << 10, "89": 99 << 10, "90": 227 << 10, "90a": 227 << 10, "120": 99 << 10}
# The architectures that run the PTX of a target.
RUN_BY = {"80": ["80", "86", "89"], "90": ["90", "120"], "90a": ["90a"]}
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


Resources = collections.namedtuple("Resources", "name registers spilled shared")


def resources(log):
    """Returns what each kernel takes, from what `ptxas -v` prints."""
    for part in log.split("Compiling entry function ")[1:]:
        found = [re.search(of, part) for of in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes smem")]
        yield Resources(part.split("'")[1], *(int(number[1]) if number else 0 for number in found))


def compile_build(ptxas, arch, name, ptx):
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        file.write(ptx.encode())
        file.flush()
        log = tool(ptxas, "-v", f"-arch=sm_{arch}", file.name, "-o", os.devnull)
    return [(f"{name} {kernel.name} sm_{arch}", kernel) for kernel in resources(log)]


def check(ptxas, accepts):
    """Prints a row for each kernel and architecture. Returns whether none takes too much."""
    jobs = []
    for name, ptx in ptx_archive.read():
        target = re.search(r"\.target sm_(\w+)", ptx)[1]
        # The name begins with the target.
        jobs += [(arch, name.split(" ", 1)[1], ptx) for arch in RUN_BY[target]]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = [row for build in pool.map(lambda job: compile_build(ptxas, *job), jobs) for row in build]
    if accepts:
        SPILLS.write_text("".join(f"{name} {kernel.spilled}\n" for name, kernel in sorted(rows) if kernel.spilled))
    accepted, faults = dict(line.rsplit(" ", 1) for line in SPILLS.read_text().splitlines()), []
    print("registers  spilled  shared  kernel")
    for name, kernel in sorted(rows):
        print(f"{kernel.registers:9}  {kernel.spilled:7}  {kernel.shared:6}  {name}")
        if kernel.spilled > int(accepted.get(name, 0)):
            faults.append(f"{name} {kernel.spilled}")
        if kernel.shared > SHARED[name.rsplit("_", 1)[1]]:
            faults.append(f"{name}: {kernel.shared} bytes of shared memory")
    if faults:
        print("spills that spills.txt does not have, or too much shared memory:", *faults, sep="\n", file=sys.stderr)
    return not faults


def report(ptx, arch, args):
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/kernel.cubin"
        log = tool(args.ptxas, "-v", f"-arch=sm_{arch}", str(ptx), "-o", cubin)
        code_of = kernels(tool(args.nvdisasm, "-c", cubin))
    for kernel in resources(log):
        code = code_of[kernel.name]
        print(f"  {kernel.name}: {kernel.registers} registers, {kernel.spilled} bytes spilled, instructions {count_pipes(code)}")
        for start, end in sorted(loop for loop in set(loops(code)) if loop[1] - loop[0] > 1):
            print(f"    {start:5} to {end:5}: {count_pipes(code[start:end])}")


def add_arguments(parser):
    """Adds the arguments that choose builds and tools."""
    parser.add_argument("folder", type=pathlib.Path, nargs="?", help="folder with PTX and sources")
    parser.add_argument("--of", nargs="+", default=[], metavar="WORD", help="required source file and macros of a build")
    parser.add_argument("--arch", type=int, default=90, help="compute capability, times ten")
    parser.add_argument("--ptxas", default="ptxas")
    parser.add_argument("--nvdisasm", default="nvdisasm")


def builds(args):
    """Returns source file with macros, and PTX, of each build that `args` choose."""
    if args.folder is None:
        raise SystemExit("the folder with PTX and sources is missing")
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
    parser.add_argument("--check", action="store_true", help="check the kernels of the binary on every architecture")
    parser.add_argument("--accept", action="store_true", help="with --check: write spills.txt")
    add_arguments(parser)
    args = parser.parse_args()
    if args.check:
        sys.exit(not check(args.ptxas, args.accept))
    for names, ptx in builds(args):
        print(names)
        report(ptx, args.arch, args)


if __name__ == "__main__":
    main()
