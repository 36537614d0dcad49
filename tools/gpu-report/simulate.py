"""Simulates how the warps of one scheduler issue the machine code of a kernel, without a GPU.

    cargo test -p kvant-cuda every_kernel        # leaves PTX in the folder kvant-cuda-tests of the temporary files
    python3 tools/gpu-report/simulate.py /tmp/kvant-cuda-tests --of decode.cu K_TYPE=6 V_TYPE=6 K_DIM=128 V_DIM=128 CAPPED=0 \\
        --trips 2,0,0,2 --units 3 --blocks 344 --unit-bytes 12800

Takes what ptxas has decided (order, stall counts, scoreboards) and the latencies and pipes of
compute capability 9.0 below, and follows one path: work loops, the innermost ones with products of
matrices, run as often as `--trips` says in the order of the code (0: skipped), the loop around them
`--units` times. Other forward branches fall through, except those around slow paths and those that
all lanes agree on. `--list` prints loops and branches.

The prediction is `--fixed` microseconds (launch, ramp, join of the splits: what one scheduler does
not show) plus the clocks of the busiest multiprocessor. docs/benchmarks/2026-12-01-simulator.md
holds the calibration.
"""

import argparse
import collections
import dataclasses
import pathlib
import re
import subprocess
import tempfile

import pipes

MHZ = 1980
SCHEDULERS = 4
# Clocks that an instruction occupies its pipe.
OCCUPANCY = {"alu": 2, "imad": 2, "fma": 1, "half": 1, "mma": 6.5, "rare": 8, "other": 2, "control": 0}
# Clocks until the result of an instruction with a scoreboard is there.
LATENCY = {"mma": 33, "rare": 20, "shared": 30, "shuffle": 25, "level2": 280, "atomic": 700, "system": 25, "barrier": 30}
# Clocks of a load from memory on a busy device; fitted.
MEMORY_LATENCY = 800
# Clocks that a store or a load holds its operands.
OPERANDS = {"load": 12, "shared": 12, "store": 12, "shuffle": 12}
# Bytes that the load-store unit moves per clock for one scheduler.
LOAD_BYTES = 32
KINDS = {
    "load": "LDG", "shared": "LDS LDSM", "store": "ST STG STS", "shuffle": "SHFL",
    "atomic": "ATOM ATOMS ATOMG RED MEMBAR CCTL ERRBAR", "system": "S2R S2UR LDC ULDC", "barrier": "BAR ACQBULK",
}  # fmt: skip
KIND_OF = {op: kind for kind, ops in KINDS.items() for op in ops.split()}
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;?\s+/\* 0x[0-9a-f]{16} \*/")
SECOND_HALF = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")


@dataclasses.dataclass
class Instruction:
    address: int
    text: str
    op: str
    # Index of the target of a branch.
    target: int = None
    is_conditional: bool = False
    # From the control bits: clocks until the next one, scoreboards that are set at the result and
    # when the operands are read (7: none), and the mask of those to wait for.
    stall: int = 1
    result: int = 7
    read: int = 7
    waits: tuple = ()

    @property
    def kind(self):
        return KIND_OF.get(self.op.split(".")[0]) or pipes.PIPE_OF.get(self.op.split(".")[0], "other")

    @property
    def streams(self):
        """Whether it loads from memory what no kernel of this step writes."""
        return self.kind == "load" and "CONSTANT" in self.op

    @property
    def bytes(self):
        return 32 * (16 if ".128" in self.op else 8 if ".64" in self.op else 4)


def disassemble(ptx, args):
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/kernel.cubin"
        pipes.tool(args.ptxas, f"-arch=sm_{args.arch}", str(ptx), "-o", cubin)
        return pipes.tool(args.nvdisasm, "-c", "-hex", cubin)


def parse(listing, kernel):
    """Returns the instructions of `kernel`."""
    code, labels, targets, is_here = [], {}, {}, False
    for line in listing.splitlines():
        if section := re.match(r"\.text\.(\w+):", line):
            is_here = section[1] == kernel
        elif not is_here:
            continue
        elif label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif found := INSTRUCTION.search(line):
            predicate, body = re.match(r"(@!?U?P\w+\s+)?(.*)", found[2]).groups()
            op = body.split()[0]
            is_conditional = bool(predicate) or bool(re.match(r"BRA\s+!?U?P\d", body))
            code.append(Instruction(int(found[1], 16), found[2], op, is_conditional=is_conditional))
            if op == "BRA" and (target := re.search(r"`\((\.L\w+)\)", body)):
                targets[len(code) - 1] = target[1]
        elif code and (half := SECOND_HALF.match(line)):
            set_control(code[-1], int(half[1], 16))
    for at, label in targets.items():
        code[at].target = labels[label]
    return code


def set_control(instruction, half):
    instruction.stall = max(1, half >> 41 & 15)
    instruction.result, instruction.read = half >> 46 & 7, half >> 49 & 7
    instruction.waits = tuple(n for n in range(6) if half >> 52 + n & 1)


def backward_branches(code):
    # What follows the last exit is out of line: its branches lead back to where a warp left.
    end = max(at for at, one in enumerate(code) if one.op == "EXIT")
    return [(one.target, at) for at, one in enumerate(code[:end]) if one.target is not None and one.target <= at]


def has_products(code, first, last):
    return any(one.kind == "mma" for one in code[first : last + 1])


def work_loops(code):
    """Returns the innermost loops with products of matrices, as first and last index, in order, and
    the smallest loop around all of those but the ones before it."""
    loops = [loop for loop in backward_branches(code) if has_products(code, *loop)]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    streams = lambda loop: sum(one.streams for one in code[loop[0] : loop[1]])
    around = max(loops, key=lambda loop: (streams(loop), loop[0] - loop[1]))
    return [loop for loop in inner if around[0] <= loop[0] and loop[1] <= around[1]], around


def is_taken(code, at, trips):
    """Whether a forward branch is taken; `trips` has those of each work loop, by its last index."""
    skipped = code[at + 1 : code[at].target]
    if any(one.op.startswith("CALL") for one in skipped[:8]):
        return True
    inside = [n for last, n in trips.items() if at < last < code[at].target]
    if inside:
        return not any(inside)
    # What all lanes agree on spares them the masks of the first and the last unit.
    return any(one.op.startswith("VOTE.ALL") for one in code[max(0, at - 3) : at])


def trace(code, trips, around, units, until=None):
    """Returns the indices that a warp executes from the start, or from the loop `around` to its
    end (`until`)."""
    left, executed, at = {}, [], 0 if until is None else around[0]
    repeats = {**trips, around[1]: units}
    while True:
        one = code[at]
        executed.append(at)
        if at == until or one.op == "EXIT" and (not one.is_conditional or at > around[1]):
            return executed
        following = at + 1
        if one.target is not None and not one.is_conditional:
            following = one.target
        elif one.target is not None and one.target <= at:
            left[at] = left.get(at, repeats.get(at, 1)) - 1
            if left[at] > 0:
                following = one.target
            else:
                del left[at]
        elif one.target is not None and is_taken(code, at, trips):
            following = one.target
        at = following
        if len(executed) > 1_000_000:
            raise SystemExit("the path does not end")


class Scheduler:
    """A quarter of a multiprocessor: warps with the same path, pipes, and a share of the memory."""

    def __init__(self, code, warps, bytes_per_clock):
        self.code, self.bytes_per_clock = code, bytes_per_clock
        self.next = [0.0] * warps
        self.scoreboards = [[0.0] * 8 for _ in range(warps)]
        self.pipes = collections.defaultdict(float)
        self.memory_free = 0.0

    def earliest(self, warp, one):
        """Returns when `warp` can issue `one`."""
        waits = max((self.scoreboards[warp][n] for n in one.waits), default=0.0)
        return max(self.next[warp], waits, self.pipes[self.pipe(one)])

    def pipe(self, one):
        return "memory" if one.kind in ("load", "shared", "store", "shuffle", "atomic") else one.kind

    def issue(self, warp, one, now):
        done = now + 6
        if one.kind in ("load", "shared", "store"):
            self.pipes["memory"] = now + max(4, one.bytes / LOAD_BYTES)
        elif one.kind in ("shuffle", "atomic"):
            self.pipes["memory"] = now + 4
        else:
            self.pipes[one.kind] = now + OCCUPANCY.get(one.kind, 0)
        if one.streams:
            self.memory_free = max(self.memory_free, now) + one.bytes / self.bytes_per_clock
            done = self.memory_free + MEMORY_LATENCY
        elif one.kind == "load":
            done = now + LATENCY["level2"]
        elif one.kind == "shared":
            done = now + LATENCY["shared"] + one.bytes / LOAD_BYTES
        elif one.kind in LATENCY:
            done = now + LATENCY[one.kind]
        boards = self.scoreboards[warp]
        boards[one.result] = max(boards[one.result], done)
        boards[one.read] = max(boards[one.read], now + OPERANDS.get(one.kind, 6))
        self.next[warp] = now + max(one.stall, LATENCY["barrier"] if one.kind == "barrier" else 1)

    def run(self, executed):
        """Returns the clocks until all warps have executed the indices."""
        position, live, now, last = [0] * len(self.next), list(range(len(self.next))), 0.0, 0
        while live:
            at = {warp: self.earliest(warp, self.code[executed[position[warp]]]) for warp in live}
            now = max(now, min(at.values()))
            # The warp that issued last goes on while it can.
            ready = [warp for warp in live if at[warp] <= now]
            last = last if last in ready else ready[0]
            self.issue(last, self.code[executed[position[last]]], now)
            now += 1
            position[last] += 1
            if position[last] == len(executed):
                live.remove(last)
        return now


def simulate(ptx, args):
    code = parse(disassemble(ptx, args), args.kernel)
    inner, around = work_loops(code)
    if args.list:
        for number, (first, last) in enumerate(inner):
            print(f"  work loop {number}: {code[first].address:x} to {code[last].address:x}, {last - first + 1} instructions")
        print(f"  around: {code[around[0]].address:x} to {code[around[1]].address:x}")
    if len(args.trips) != len(inner):
        raise SystemExit(f"--trips: expected one number for each of {len(inner)} work loops, got {len(args.trips)}")
    trips = {last: n for (_, last), n in zip(inner, args.trips)}
    unit = trace(code, trips, around, 1, until=around[1])
    whole = trace(code, trips, around, args.units)
    asked = sum(code[at].bytes for at in unit if code[at].streams)
    # The busiest multiprocessor has more blocks than the average, and that share of the bandwidth.
    at_once = -(-args.blocks // args.sms)
    warps = at_once * args.threads // (32 * SCHEDULERS)
    share = args.bandwidth * 1e3 / (args.sms * SCHEDULERS) / MHZ * at_once * args.sms / args.blocks
    # Lanes ask for some bytes together, which come once.
    share *= asked / args.unit_bytes
    steady = Scheduler(code, warps, share).run(unit * 12) / 12 / warps
    clocks = Scheduler(code, warps, share).run(whole)
    microseconds = args.fixed + clocks / MHZ
    ideal = args.blocks * args.units * args.threads / 32 * args.unit_bytes / (args.bandwidth * 1e3)
    print(
        f"  {len(unit)} instructions a unit, {steady:.0f} clocks of a scheduler with {warps} warps; "
        f"whole warp {len(whole)}, {clocks / MHZ:.1f} us; with {args.fixed} us: {microseconds:.1f} us, {ideal / microseconds:.0%} of copies"
    )


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pipes.add_arguments(parser)
    parser.add_argument("--kernel", default="decode", help="name of the kernel")
    parser.add_argument("--trips", type=lambda text: [int(n) for n in text.split(",")], default=[], help="of each work loop, in order")
    parser.add_argument("--units", type=int, default=1, help="trips of the loop around them")
    parser.add_argument("--unit-bytes", type=int, required=True, help="bytes from memory in one of its trips, by a warp")
    parser.add_argument("--blocks", type=int, required=True, help="blocks of the launch")
    parser.add_argument("--threads", type=int, default=128, help="threads of a block")
    parser.add_argument("--sms", type=int, default=132, help="multiprocessors")
    parser.add_argument("--bandwidth", type=float, default=3000, help="of copies, in GB/s")
    parser.add_argument("--fixed", type=float, default=18.5, help="microseconds that one scheduler does not show")
    parser.add_argument("--list", action="store_true", help="print the loops")
    return parser.parse_args()


def main():
    args = arguments()
    for names, ptx in pipes.builds(args):
        print(names)
        simulate(ptx, args)


if __name__ == "__main__":
    main()
