"""Holds Kvant to a GPU and times it there, in one go, and writes down all of it.

    python3 tools/card/report.py --out report
    python3 tools/card/report.py --out report --device wgpu:0 --minutes 30

What tells most comes first, so that ten minutes (`--minutes 9`) are of use: whether it is right (the doctor, the conformance suites in a
process each, answers and logits beside the CPU's), how fast it is (kernels, PyTorch's attention beside them where it is, models), and
then what looks closer (every type, two programs at once, a cache that cannot fit, compute-sanitizer where there is one, depths up to
131,072 tokens, the suites in every combination). The folder then has `report.md`, a table of steps and what each of them printed, and `log.txt`,
the same without any end cut off. A step that fails stops nothing; where time ends, the steps behind are named as left out. Ends with 1
where a step failed. Needs nothing but Python, and what was built or Cargo, which builds it: on a machine without Cargo give `--kvant`,
`--suites` (what `cargo test --release -p kvant-cuda --no-run` names) and `--kernels` (`cargo build --release -p kvant-cuda --example bench`).
"""

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

FIRST_TYPES = ["f16", "q8_0", "turbo3"]
OTHER_TYPES = ["f32", "bf16", "q4_0", "turbo4", "turbo2", "turbo3t", "turbo2t"]
QUESTION = ["run", "What is the capital of France?", "--temp", "0", "-n", "24"]
# The code of a command that was stopped.
STOPPED = 124
# Lines of a step's output that the report shows; the log has all of them.
SHOWN = 80
# What compute-sanitizer watches: one kernel of each kind. Watched kernels take up to a hundred times longer.
WATCHED = ["card::kv_append", "card::attend_types", "card::attend_steps", "card::project"]
# The attention of Llama-3-8B in PyTorch, and copies, as `kvant-cuda`'s example `bench` times its own.
TORCH = """
import sys, torch
import torch.nn.functional as F
tokens = int(sys.argv[1])
def best(work):
    work()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(); work(); end.record(); torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)
print("torch", torch.__version__, torch.cuda.get_device_name())
a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"); b = torch.empty_like(a)
print(f"copies at {2 * a.numel() / best(lambda: b.copy_(a)) / 1e6:.0f} GB/s, read and written")
def kv(n): return torch.randn(1, 8, n, 128, dtype=torch.float16, device="cuda")
def q(n): return torch.randn(1, 32, n, 128, dtype=torch.float16, device="cuda")
layers = [(kv(tokens), kv(tokens)) for _ in range(4)]
def walk(q, causal, end):
    for k, v in layers:
        F.scaled_dot_product_attention(q, k[:, :, :end], v[:, :, :end], is_causal=causal, enable_gqa=True)
for name, rows, causal, end in [("one row", 1, False, tokens), ("512 rows", 512, False, tokens), ("first 8192", 8192, True, 8192)]:
    rows_q = q(rows)
    print(f"{name:>12}: {best(lambda: walk(rows_q, causal, min(end, tokens))) / 4:.4f} ms a layer")
"""


@dataclasses.dataclass
class Step:
    """A command, or several that run at once, and what is expected of it."""

    name: str
    commands: list
    seconds: int = 120
    env: dict = dataclasses.field(default_factory=dict)
    # Looks at [(code, output), ...] and gives what is wrong, or nothing.
    judge: object = None
    # Why it is left out.
    why: str = ""


def succeeded(results):
    codes = [code for code, _ in results if code != 0]
    return f"ended with {codes[0]}" if codes else ""


def held(results):
    """A suite that finds no card says so and passes: then nothing was held to it. Each runs in a process, as one that spoils the
    card's context takes along whatever comes after it."""
    failed = sorted({name for _, text in results for name in re.findall(r"^test (\S+) \.\.\. FAILED", text, re.M)})
    broken = sum(1 for code, _ in results if code not in (0, 101))
    passed = sum(int(n) for _, text in results for n in re.findall(r"(\d+) passed", text))
    left_out = sum(len(re.findall(r"^skipped: (?!.* combinations of edge sizes)", text, re.M)) for _, text in results)
    if failed or broken:
        return ", ".join(["failed: " + " ".join(failed)] * bool(failed) + [f"{broken} ended otherwise"] * bool(broken))
    return succeeded(results) or ("" if passed > left_out else "nothing ran")


def all_alike(results):
    wrong = succeeded(results)
    texts = {text for _, text in results}
    return wrong or ("" if len(texts) == 1 else f"{len(texts)} different answers")


def refused(results):
    """A refusal is one line that says what to do, and no crash."""
    code, text = results[0]
    lines = [line for line in text.splitlines() if line.strip()]
    if code in (0, 101, 134, 139) or code < 0:
        return f"expected to be refused, ended with {code}"
    return "" if lines and lines[-1].startswith("error") else "no line says why"


class Report:
    """Runs steps while there is time, and writes down each of them at once."""

    def __init__(self, folder, minutes):
        self.folder, self.ends = folder, time.monotonic() + 60 * minutes
        self.rows, self.sections, self.failed = [], [], False
        folder.mkdir(parents=True, exist_ok=True)
        self.log = open(folder / "log.txt", "w", buffering=1)

    def run(self, step):
        left = self.ends - time.monotonic()
        if step.why or left < 5:
            return self.note(step, f"left out: {step.why or 'no time'}", 0, "")
        started = time.monotonic()
        results = run_all(step, min(step.seconds, left))
        seconds = time.monotonic() - started
        wrong = (step.judge or succeeded)(results)
        if any(code == STOPPED for code, _ in results):
            wrong = f"{wrong}; " * bool(wrong) + f"stopped after {seconds:.0f} s"
        self.failed |= bool(wrong)
        outputs = [
            (code, f"$ {' '.join(map(str, command))}\n{text}" + f"ended with {code}\n" * (code != 0))
            for command, (code, text) in zip(step.commands, results)
        ]
        self.log.write("\n".join([f"### {step.name}", *(text for _, text in outputs), ""]))
        # Of many, what went wrong first, and each from its beginning.
        is_many = len(outputs) > 3
        outputs.sort(key=lambda output: is_many and output[0] == 0)
        lines = [line for _, text in outputs for line in text.splitlines()]
        if len(lines) > SHOWN:
            lines = [*lines[:SHOWN], "..."] if is_many else [lines[0], "...", *lines[-SHOWN:]]
        self.note(step, f"**{wrong}**" if wrong else "ok", seconds, "\n".join(lines))

    def note(self, step, result, seconds, text):
        print(f"{step.name}: {result} ({seconds:.0f} s)", flush=True)
        self.rows.append(f"| {step.name} | {result} | {seconds:.0f} |")
        if text:
            self.sections.append(f"## {step.name}\n\n```\n{text}\n```\n")
        table = "\n".join(["| step | result | s |", "|---|---|---|", *self.rows])
        (self.folder / "report.md").write_text("\n".join(["# Kvant on a card\n", table, "", *self.sections]))


def run_all(step, seconds):
    """Code and output of each command; they run at once."""
    env = {**os.environ, **step.env}
    ends = time.monotonic() + seconds
    running = []
    for command in step.commands:
        try:
            # A group of its own: what a command starts ends with it, and holds its output open no longer.
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            running.append(subprocess.Popen(command, env=env, text=True, errors="replace", start_new_session=True, **pipes))
        except OSError as error:
            running.append(error)
    results = []
    for process in running:
        if isinstance(process, OSError):
            results.append((127, str(process)))
            continue
        try:
            output, _ = process.communicate(timeout=max(0.1, ends - time.monotonic()))
            results.append((process.returncode, output))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            results.append((STOPPED, process.communicate()[0] + f"\nstopped after {seconds:.0f} s\n"))
    return results


def suites_of(args, suites):
    """Commands that run one suite each, and all of the tests of a device that is none of CUDA's in one."""
    if not args.is_cuda:
        return [[*suites, "conformance", "--show-output"]]
    _, text = run_all(Step("list", [[*suites, "conformance::card::", "--list"]]), 120)[0]
    names = re.findall(r"^(\S+): test$", text, re.M)
    return [[*suites, "--exact", name, "--show-output"] for name in names] or [[*suites, "card::", "--show-output"]]


def first(args, kvant, suites, kernels):
    """What tells most."""
    on = ["--device", args.device]
    bench = [*kvant, "bench", *on]
    yield Step("doctor", [[*kvant, "doctor"]], 60)
    yield Step("suites, each size once", suites, 120, env={"KVANT_CUDA_COVERAGE": "each"}, judge=held)
    yield Step("answer on the CPU", [[*kvant, *QUESTION, "--device", "cpu"]], 60)
    for name in FIRST_TYPES:
        yield Step(f"answer, {name}", [[*kvant, *QUESTION, *on, "-ctk", name, "-ctv", name]], 30)
    for model in ["bundled", *args.models]:
        yield from logits(args, kvant, model)
    if args.is_cuda:
        yield Step("kernels", [[*kernels, str(args.tokens)]], 100)
    if args.is_cuda and importlib.util.find_spec("torch"):
        yield Step("PyTorch", [[sys.executable, "-c", TORCH, str(args.tokens)]], 60)
    pairs = ["-ctk", "f16,turbo3", "-ctv", "f16,turbo3"]
    for model in [[], *(["-m", model] for model in args.models)]:
        name = pathlib.Path(model[1]).name if model else "a bundled model"
        yield Step(f"speed of {name}", [[*bench, *model, "-p", "512", "-n", "64", "-r", "3", *pairs]], 60)
    depths = f"0,{args.tokens // 8}"
    yield Step(f"speed of {args.shape}", [[*bench, "--synthetic", args.shape, "-p", "512", "-n", "32", "-r", "3", "-d", depths, *pairs]])


def logits(args, kvant, model):
    """How far a model's logits are from those of the CPU."""
    name, base = pathlib.Path(model).name, str(args.out / "cpu.base")
    of = ["-m", model, "--weights", "f16", "-c", "256", "--chunks", "2", "--quiet"]
    yield Step(f"logits of the CPU, {name}", [[*kvant, "eval", "ppl", *of, "--device", "cpu", "--save-base", base]])
    types = ["-ctk", "f16,q8_0,turbo4,turbo3", "--device", args.device]
    yield Step(f"KLD from them, {name}", [[*kvant, "eval", "kld", *of, "--base", base, *types]])


def closer(args, kvant, suites):
    """What looks closer."""
    on = ["--device", args.device]
    for name in OTHER_TYPES:
        yield Step(f"answer, {name}", [[*kvant, *QUESTION, *on, "-ctk", name, "-ctv", name]], 30)
    yield Step("answer, two programs at once", [[*kvant, *QUESTION, *on, "-ctk", "turbo3", "-ctv", "turbo3"]] * 2, judge=all_alike)
    yield Step("answer, one layer on the card", [[*kvant, *QUESTION, *on, "-ngl", "1"]])
    yield Step("a cache that cannot fit", [[*kvant, *QUESTION, *on, "-c", "400000000"]], judge=refused)
    if args.is_cuda:
        yield Step("answer without graphs", [[*kvant, *QUESTION, *on]], env={"KVANT_CUDA_GRAPH": "0"})
    for model in args.models:
        answer = [*kvant, *QUESTION, "-m", model, "-ctk", "turbo3", "-ctv", "turbo3"]
        yield Step(f"answers of {pathlib.Path(model).name}, CPU and card", [[*answer, "--device", "cpu"], [*answer, *on]])
    sanitizer = shutil.which("compute-sanitizer")
    for tool in ["memcheck", "racecheck"] if args.is_cuda else []:
        if args.suites and sanitizer:
            watch = [sanitizer, "--tool", tool, "--error-exitcode", "9", args.suites, *WATCHED, "--test-threads", "1"]
            yield Step(tool, [watch], 100, env={"KVANT_CUDA_COVERAGE": "each"})
        else:
            yield Step(tool, [], why="no compute-sanitizer" if args.suites else "takes --suites")
    bench = [*kvant, "bench", *on]
    pairs = ["-ctk", "f16,q8_0,turbo4,turbo3,q8_0", "-ctv", "f16,q8_0,turbo4,turbo3,turbo3"]
    depths = f"{args.tokens},{2 * args.tokens}"
    profile = ["--profile", "-d", str(args.tokens), "-r", "3", *pairs]
    yield Step("stages of attention", [[*bench, "--synthetic", args.shape, *profile]])
    deep = ["--synthetic", args.shape, "-p", "512", "-n", "32", "-r", "3", "-d", depths, *pairs]
    yield Step(f"speed of {args.shape}, deep", [[*bench, *deep]], 300)
    if args.is_cuda:
        yield Step("suites, every combination", suites, 900, judge=held)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the report")
    parser.add_argument("--device", default="cuda:0", help="cuda:N or wgpu:N")
    parser.add_argument("--minutes", type=float, default=30, help="for all steps together")
    parser.add_argument("--kvant", help="the program; Cargo builds it where it is not given")
    parser.add_argument("--suites", help="the tests of the device's crate, built")
    parser.add_argument("--kernels", help="the example `bench` of kvant-cuda, built")
    parser.add_argument("--model", action="append", default=[], dest="models", help="a file to try as well, more than once")
    parser.add_argument("--shape", default="llama-3-8b:q4_0", help="as kvant bench --synthetic takes it")
    parser.add_argument("--tokens", type=int, default=65_536, help="depth that is timed; twice and an eighth of it too")
    args = parser.parse_args()
    args.is_cuda = args.device.startswith("cuda:")
    if not args.is_cuda and not args.device.startswith("wgpu:"):
        parser.error(f"--device: expected cuda:N or wgpu:N, got {args.device}")
    return args


def main():
    args = arguments()
    crate = "kvant-cuda" if args.is_cuda else "kvant-wgpu"
    cargo = ["cargo", "run", "--release", "--quiet"]
    kvant = [args.kvant] if args.kvant else [*cargo, "-p", "kvant-cli", *([] if args.is_cuda else ["--features", "wgpu"]), "--"]
    suites = [args.suites] if args.suites else ["cargo", "test", "--release", "--quiet", "-p", crate, "--lib", "--"]
    kernels = [args.kernels] if args.kernels else [*cargo, "-p", crate, "--example", "bench", "--"]
    report = Report(args.out, args.minutes)
    report.run(Step("machine", [["nvidia-smi"]] if args.is_cuda else [["uname", "-a"]]))
    # What Cargo has to build, it builds here.
    report.run(Step("program", [[*kvant, "--version"]], 1800))
    report.run(Step("suites that there are", [[*suites, "--list"]], 1800))
    each = suites_of(args, suites)
    for step in [*first(args, kvant, each, kernels), *closer(args, kvant, each)]:
        report.run(step)
    (args.out / "cpu.base").unlink(missing_ok=True)
    sys.exit(1 if report.failed else 0)


main()
