"""Holds Kvant to a GPU and times it there, in one go, and writes down all of it.

    python3 tools/card/report.py --out report
    python3 tools/card/report.py --out report --device wgpu:0 --minutes 30

First whether it is right (the doctor, the conformance suites, answers and logits beside the CPU's, splits, two programs at once, a
cache that cannot fit, compute-sanitizer where there is one), then how fast it is (kernels, whole models at depths up to 131,072 tokens,
PyTorch's attention beside them where it is). The folder then has `report.md`, a table of steps and what each of them printed, and `log.txt`,
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
import subprocess
import sys
import time

TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "turbo4", "turbo3", "turbo2", "turbo3t", "turbo2t"]
QUESTION = ["run", "What is the capital of France?", "--temp", "0", "-n", "24"]
# Lines of a step's output that the report shows; the log has all of them.
SHOWN = 80
# What compute-sanitizer watches: one kernel of each kind. Watched kernels take up to a hundred times longer.
WATCHED = ["card::kv_append", "card::attend_types", "card::project", "card::top_k"]
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


def succeeded(results):
    codes = [code for code, _ in results if code != 0]
    return f"ended with {codes[0]}" if codes else ""


def held(results):
    """A suite that finds no card says so and passes: then nothing was held to it."""
    wrong = succeeded(results)
    passed = sum(int(n) for _, text in results for n in re.findall(r"(\d+) passed", text))
    left_out = sum(text.count("skipped: ") for _, text in results)
    return wrong or ("" if passed > left_out else "nothing ran")


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
        if left < 5:
            return self.note(step, "left out: no time", 0, "")
        started = time.monotonic()
        results = run_all(step, min(step.seconds, left))
        seconds = time.monotonic() - started
        wrong = (step.judge or succeeded)(results)
        self.failed |= bool(wrong)
        shown = "\n".join(" ".join(map(str, command)) for command in step.commands)
        output = "\n".join(text for _, text in results)
        self.log.write(f"### {step.name}\n{shown}\n{output}\n")
        lines = output.splitlines()
        cut = ["..."] if len(lines) > SHOWN else []
        self.note(step, f"**{wrong}**" if wrong else "ok", seconds, "\n".join(["$ " + shown, *cut, *lines[-SHOWN:]]))

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
            running.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True, errors="replace")
            )
        except OSError as error:
            running.append(error)
    results = []
    for process in running:
        if isinstance(process, OSError):
            results.append((127, str(process)))
            continue
        try:
            output, _ = process.communicate(timeout=max(1, ends - time.monotonic()))
            results.append((process.returncode, output))
        except subprocess.TimeoutExpired:
            process.kill()
            results.append((124, process.communicate()[0] + f"\nstopped after {seconds:.0f} s"))
    return results


def checks(args, kvant, suites):
    """Whether it is right."""
    on = ["--device", args.device]
    base = str(args.out / "cpu.base")
    yield Step("doctor", [[*kvant, "doctor"]])
    of_card = "card::" if args.is_cuda else "conformance"
    yield Step("conformance suites", [[*suites, of_card, "--show-output"]], 300, judge=held)
    yield Step("answer on the CPU", [[*kvant, *QUESTION, "--device", "cpu"]])
    for name in TYPES:
        yield Step(f"answer, {name}", [[*kvant, *QUESTION, *on, "-ctk", name, "-ctv", name]])
    yield Step("answer, two programs at once", [[*kvant, *QUESTION, *on, "-ctk", "turbo3", "-ctv", "turbo3"]] * 2, judge=all_alike)
    yield Step("answer, one layer on the card", [[*kvant, *QUESTION, *on, "-ngl", "1"]])
    yield Step("a cache that cannot fit", [[*kvant, *QUESTION, *on, "-c", "400000000"]], judge=refused)
    if args.is_cuda:
        yield Step("answer without graphs", [[*kvant, *QUESTION, *on]], env={"KVANT_CUDA_GRAPH": "0"})
    for model in args.models:
        answer = [*kvant, *QUESTION, "-m", model, "-ctk", "turbo3", "-ctv", "turbo3"]
        yield Step(f"answers of {pathlib.Path(model).name}, CPU and card", [[*answer, "--device", "cpu"], [*answer, *on]])
    for model in ["bundled", *args.models]:
        of = ["-m", model, "--weights", "f16", "-c", "256", "--chunks", "2", "--quiet"]
        yield Step(f"logits of the CPU, {pathlib.Path(model).name}", [[*kvant, "eval", "ppl", *of, "--device", "cpu", "--save-base", base]])
        types = ["-ctk", "f16,q8_0,turbo4,turbo3", *on]
        yield Step(f"KLD from them, {pathlib.Path(model).name}", [[*kvant, "eval", "kld", *of, "--base", base, *types]])
    sanitizer = shutil.which("compute-sanitizer")
    if args.is_cuda and args.suites and sanitizer:
        for tool in ["memcheck", "racecheck"]:
            watch = [sanitizer, "--tool", tool, "--error-exitcode", "9", args.suites, *WATCHED, "--test-threads", "1"]
            yield Step(tool, [watch], 100)


def timings(args, kvant, kernels):
    """How fast it is."""
    bench = [*kvant, "bench", "--device", args.device]
    if args.is_cuda:
        yield Step("kernels", [[*kernels, str(args.tokens)]], 240)
    if args.is_cuda and importlib.util.find_spec("torch"):
        yield Step("PyTorch", [[sys.executable, "-c", TORCH, str(args.tokens)]], 90)
    yield Step("a bundled model", [[*bench, "-p", "512", "-n", "64", "-r", "3", "-ctk", "f16,turbo3", "-ctv", "f16,turbo3"]])
    for model in args.models:
        yield Step(f"speed of {pathlib.Path(model).name}", [[*bench, "-m", model, "-p", "512", "-n", "64", "-r", "3", "-ctk", "f16,turbo3", "-ctv", "f16,turbo3"]])
    pairs = ["-ctk", "f16,q8_0,turbo4,turbo3,q8_0", "-ctv", "f16,q8_0,turbo4,turbo3,turbo3"]
    depths = ",".join(str(depth) for depth in [0, args.tokens // 8, args.tokens, 2 * args.tokens])
    yield Step(
        f"speed of {args.shape}", [[*bench, "--synthetic", args.shape, "-p", "512", "-n", "32", "-r", "3", "-d", depths, *pairs]], 300
    )
    profile = ["--profile", "-d", str(args.tokens), "-r", "3", *pairs]
    yield Step("stages of attention", [[*bench, "--synthetic", args.shape, *profile]])


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
    kvant = [args.kvant] if args.kvant else [*cargo, "-p", "kvant-cli", "--"]
    suites = [args.suites] if args.suites else ["cargo", "test", "--release", "--quiet", "-p", crate, "--lib", "--"]
    kernels = [args.kernels] if args.kernels else [*cargo, "-p", crate, "--example", "bench", "--"]
    report = Report(args.out, args.minutes)
    report.run(Step("machine", [["nvidia-smi"]] if args.is_cuda else [["uname", "-a"]]))
    # What Cargo has to build, it builds here.
    report.run(Step("program", [[*kvant, "--version"]], 1800))
    report.run(Step("suites that there are", [[*suites, "--list"]], 1800))
    for step in [*checks(args, kvant, suites), *timings(args, kvant, kernels)]:
        report.run(step)
    (args.out / "cpu.base").unlink(missing_ok=True)
    sys.exit(1 if report.failed else 0)


main()
