"""Tests and times Kvant on a GPU in one run, and writes a report.

    python3 tools/gpu-report/report.py --out report
    python3 tools/gpu-report/report.py --out report --device wgpu:0 --minutes 30
    python3 tools/gpu-report/report.py --out truth --steps truth --minutes 4

The most informative steps come first, so that ten minutes (`--minutes 9`) are useful: correctness
(the doctor, the conformance suites in a process each, answers and logits compared with the CPU's),
speed (kernels, PyTorch's attention for comparison where installed, models), and then details
(every type, two programs at once, a cache that cannot fit, compute-sanitizer where installed,
depths up to 131,072 tokens, the suites in every combination). The folder then contains `report.md`,
a table of steps and their output, and `log.txt`, the same without truncation. A failed step does
not stop the run; steps beyond the time limit are listed as skipped. On CUDA, `--steps` chooses a
run of four minutes instead: `truth` (what kernels, memory, batches and a first answer really take,
and the suites), `choice` (kernels under each `--variant`, races, draft tokens, steps without graphs)
and `record` (whole models by depth and by sequences, beside PyTorch and `--rival`); each has a folder
of its own. Exits with 1 if a step failed.
Needs only Python, and the binaries or Cargo, which builds them: on a machine without Cargo pass
`--kvant`, `--suites` (the binary that `cargo test --release -p kvant-cuda --no-run` names) and
`--kernels` (`cargo build --release -p kvant-cuda --example bench`).
"""

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

FIRST_TYPES = ["f16", "q8_0", "turbo3"]
OTHER_TYPES = ["f32", "bf16", "q4_0", "turbo4", "turbo2", "turbo3t", "turbo2t"]
REPEATED = "Write this line ten times: the quick brown fox jumps over the lazy dog while the band plays on."
QUESTION = ["run", "What is the capital of France?", "--temp", "0", "-n", "24"]
# Exit code of a command that was stopped.
STOPPED = 124
# Lines of a step's output in the report; the log has all of them.
MAX_LINES = 80
# Tests under compute-sanitizer: one kernel of each kind. It slows kernels by up to a factor of
# one hundred.
SANITIZED_TESTS = ["card::kv_append", "card::attend_types", "card::attend_steps", "card::project"]
# Attention of Llama-3-8B in PyTorch, and copies, timed as in `kvant-cuda`'s example `bench`.
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
def rival(name, attend):
    try: print(f"{name:>12}: {best(lambda: [attend(k, v) for k, v in layers]) / 4:.4f} ms a layer, one row")
    except Exception as error: print(f"{name:>12}: {error}")
def attend(q, causal, end):
    for k, v in layers:
        F.scaled_dot_product_attention(q, k[:, :, :end], v[:, :, :end], is_causal=causal, enable_gqa=True)
for name, rows, causal, end in [("one row", 1, False, tokens), ("512 rows", 512, False, tokens), ("first 8192", 8192, True, 8192)]:
    rows_q = q(rows)
    print(f"{name:>12}: {best(lambda: attend(rows_q, causal, min(end, tokens))) / 4:.4f} ms a layer")
try:
    from flash_attn import flash_attn_with_kvcache
    layers = [(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()) for k, v in layers]
    rows_q = q(1).transpose(1, 2).contiguous()
    rival("flash-attn", lambda k, v: flash_attn_with_kvcache(rows_q, k, v))
except ImportError as error: print("flash-attn:", error)
try:
    import flashinfer
    layers = [(kv(tokens)[0], kv(tokens)[0]) for _ in range(4)]
    row_q = q(1)[0, :, 0]
    rival("FlashInfer", lambda k, v: flashinfer.single_decode_with_kv_cache(row_q, k, v, kv_layout="HND"))
except ImportError as error: print("FlashInfer:", error)
"""


@dataclasses.dataclass
class Step:
    """A command, or several concurrent ones, with its check."""

    name: str
    commands: list
    seconds: int = 120
    env: dict = dataclasses.field(default_factory=dict)
    # Maps [(code, output), ...] to the fault, empty if there is no fault.
    judge: object = None
    # Reason for skipping the step.
    why: str = ""


def judge_exit_codes(results):
    codes = [code for code, _ in results if code != 0]
    return f"ended with {codes[0]}" if codes else ""


def judge_suites(results):
    """Checks conformance suites. A suite without a GPU passes and reports itself as skipped, which
    counts as not run. Each suite has its own process, since one that corrupts the CUDA context
    breaks all later ones."""
    failed = sorted({name for _, text in results for name in re.findall(r"^test (\S+) \.\.\. FAILED", text, re.M)})
    n_crashed = sum(1 for code, _ in results if code not in (0, 101))
    n_passed = sum(int(n) for _, text in results for n in re.findall(r"(\d+) passed", text))
    n_skipped = sum(len(re.findall(r"^skipped: (?!.* combinations of edge sizes)", text, re.M)) for _, text in results)
    if failed or n_crashed:
        return ", ".join(["failed: " + " ".join(failed)] * bool(failed) + [f"{n_crashed} ended otherwise"] * bool(n_crashed))
    return judge_exit_codes(results) or ("" if n_passed > n_skipped else "nothing ran")


def judge_equal_outputs(results):
    fault = judge_exit_codes(results)
    outputs = {text for _, text in results}
    return fault or ("" if len(outputs) == 1 else f"{len(outputs)} different answers")


def judge_rejection(results):
    """Checks that a command was rejected in one line, without a crash."""
    code, text = results[0]
    lines = [line for line in text.splitlines() if line.strip()]
    if code in (0, 101, 134, 139) or code < 0:
        return f"expected to be refused, ended with {code}"
    return "" if lines and lines[-1].startswith("error") else "no line says why"


class Report:
    """Runs steps within the time limit, and writes each result immediately."""

    def __init__(self, folder, minutes):
        self.folder, self.deadline = folder, time.monotonic() + 60 * minutes
        self.rows, self.sections, self.failed = [], [], False
        folder.mkdir(parents=True, exist_ok=True)
        self.log = open(folder / "log.txt", "w", buffering=1)

    def run(self, step):
        remaining = self.deadline - time.monotonic()
        if step.why or remaining < 5:
            return self.add_row(step, f"left out: {step.why or 'no time'}", 0, "")
        started = time.monotonic()
        results = run_all(step, min(step.seconds, remaining))
        seconds = time.monotonic() - started
        fault = (step.judge or judge_exit_codes)(results)
        if any(code == STOPPED for code, _ in results):
            fault = f"{fault}; " * bool(fault) + f"stopped after {seconds:.0f} s"
        self.failed |= bool(fault)
        outputs = [
            (code, f"$ {' '.join(map(str, command))}\n{text}" + f"ended with {code}\n" * (code != 0))
            for command, (code, text) in zip(step.commands, results)
        ]
        self.log.write("\n".join([f"### {step.name}", *(text for _, text in outputs), ""]))
        # Of several commands, the failed ones first, each from its beginning.
        is_many = len(outputs) > 3
        outputs.sort(key=lambda output: is_many and output[0] == 0)
        lines = [line for _, text in outputs for line in text.splitlines()]
        if len(lines) > MAX_LINES:
            lines = [*lines[:MAX_LINES], "..."] if is_many else [lines[0], "...", *lines[-MAX_LINES:]]
        self.add_row(step, f"**{fault}**" if fault else "ok", seconds, "\n".join(lines))

    def add_row(self, step, result, seconds, text):
        print(f"{step.name}: {result} ({seconds:.0f} s)", flush=True)
        self.rows.append(f"| {step.name} | {result} | {seconds:.0f} |")
        if text:
            self.sections.append(f"## {step.name}\n\n```\n{text}\n```\n")
        table = "\n".join(["| step | result | s |", "|---|---|---|", *self.rows])
        (self.folder / "report.md").write_text("\n".join(["# Kvant on a card\n", table, "", *self.sections]))


def run_all(step, seconds):
    """Returns code and output of each command; they run concurrently."""
    env = {**os.environ, **step.env}
    deadline = time.monotonic() + seconds
    running = []
    for command in step.commands:
        try:
            # A separate process group: children end with the command and close its output.
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
            output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            results.append((process.returncode, output))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            results.append((STOPPED, process.communicate()[0] + f"\nstopped after {seconds:.0f} s\n"))
    return results


def suites_of(args, suites):
    """Returns one command per suite on CUDA; on other devices one command for all tests."""
    if not args.is_cuda:
        return [[*suites, "conformance", "--show-output"]]
    _, text = run_all(Step("list", [[*suites, "conformance::card::", "--list"]]), 120)[0]
    names = re.findall(r"^(\S+): test$", text, re.M)
    return [[*suites, "--exact", name, "--show-output"] for name in names] or [[*suites, "card::", "--show-output"]]


def first_steps(args, kvant, suites, kernels):
    """Yields the most informative steps."""
    on = ["--device", args.device]
    bench = [*kvant, "bench", *on]
    yield Step("doctor", [[*kvant, "doctor"]], 60)
    yield Step("suites, each size once", suites, 120, env={"KVANT_CUDA_COVERAGE": "each"}, judge=judge_suites)
    yield Step("answer on the CPU", [[*kvant, *QUESTION, "--device", "cpu"]], 60)
    for name in FIRST_TYPES:
        yield Step(f"answer, {name}", [[*kvant, *QUESTION, *on, "-ctk", name, "-ctv", name]], 30)
    for model in ["bundled", *args.models]:
        yield from logit_steps(args, kvant, model)
    if args.is_cuda:
        yield Step("kernels", [[*kernels, args.contexts]], 150)
        yield from torch_steps(args)
    pairs = ["-ctk", "f16,turbo3", "-ctv", "f16,turbo3"]
    if not args.is_cuda:
        yield Step("kernels of a token", [[*bench, "--synthetic", args.shape, "--profile", "-d", "1024", "-r", "3", *pairs]])
    for model in [[], *(["-m", model] for model in args.models)]:
        name = pathlib.Path(model[1]).name if model else "a bundled model"
        yield Step(f"speed of {name}", [[*bench, *model, "-p", "512", "-n", "64", "-r", "3", *pairs]], 60)
    depths = f"0,{args.tokens // 8}"
    yield Step(f"speed of {args.shape}", [[*bench, "--synthetic", args.shape, "-p", "512", "-n", "32", "-r", "3", "-d", depths, *pairs]])
    many = ["-p", "0", "-n", "32", "-r", "1", "--parallel", "8,64", "-d", "2048"]
    yield Step(f"sequences of {args.shape}", [[*bench, "--synthetic", args.shape, *many, *pairs]])


def logit_steps(args, kvant, model):
    """Yields the comparison of a model's logits with those of the CPU."""
    name, base = pathlib.Path(model).name, str(args.out / "cpu.base")
    of = ["-m", model, "--weights", "f16", "-c", "256", "--chunks", "2", "--quiet"]
    yield Step(f"logits of the CPU, {name}", [[*kvant, "eval", "ppl", *of, "--device", "cpu", "--save-base", base]])
    types = ["-ctk", "f16,q8_0,turbo4,turbo3", "--device", args.device]
    yield Step(f"KLD from them, {name}", [[*kvant, "eval", "kld", *of, "--base", base, *types]])


def detailed_steps(args, kvant, suites):
    """Yields the detailed steps."""
    on = ["--device", args.device]
    for name in OTHER_TYPES:
        yield Step(f"answer, {name}", [[*kvant, *QUESTION, *on, "-ctk", name, "-ctv", name]], 30)
    yield Step("answer, two programs at once", [[*kvant, *QUESTION, *on, "-ctk", "turbo3", "-ctv", "turbo3"]] * 2, judge=judge_equal_outputs)
    yield Step("answer, one layer on the card", [[*kvant, *QUESTION, *on, "-ngl", "1"]])
    yield Step("a cache that cannot fit", [[*kvant, *QUESTION, *on, "-c", "400000000"]], judge=judge_rejection)
    if args.is_cuda:
        yield Step("answer without graphs", [[*kvant, *QUESTION, *on]], env={"KVANT_CUDA_GRAPH": "0"})
    for model in args.models:
        answer = [*kvant, *QUESTION, "-m", model, "-ctk", "turbo3", "-ctv", "turbo3"]
        yield Step(f"answers of {pathlib.Path(model).name}, CPU and card", [[*answer, "--device", "cpu"], [*answer, *on]])
    yield from sanitizer_steps(args)
    bench = [*kvant, "bench", *on]
    pairs = ["-ctk", "f16,q8_0,turbo4,turbo3,q8_0", "-ctv", "f16,q8_0,turbo4,turbo3,turbo3"]
    depths = f"{args.tokens},{2 * args.tokens}"
    profile = ["--profile", "-d", str(args.tokens), "-r", "3", *pairs]
    yield Step("stages of attention", [[*bench, "--synthetic", args.shape, *profile]])
    deep = ["--synthetic", args.shape, "-p", "512", "-n", "32", "-r", "3", "-d", depths, *pairs]
    yield Step(f"speed of {args.shape}, deep", [[*bench, *deep]], 300)
    if args.is_cuda:
        yield Step("suites, every combination", suites, 900, judge=judge_suites)


def all_steps(args, kvant, suites, kernels):
    yield from first_steps(args, kvant, suites, kernels)
    yield from detailed_steps(args, kvant, suites)


def first_answer_steps(args, kvant):
    """Yields a first answer, for which the driver compiles every kernel, and one after it."""
    caches = str(args.out / "caches")
    shutil.rmtree(caches, ignore_errors=True)
    env = {"XDG_CACHE_HOME": caches, "CUDA_CACHE_PATH": caches}
    answer = [*kvant, *QUESTION, "--device", args.device, "-ctk", "turbo3", "-ctv", "turbo3"]
    for name in ["with empty caches", "after it"]:
        yield Step(f"first answer {name}", [answer], 60, env=env)


def speculation_steps(args, kvant):
    """Yields an answer that repeats its text, without draft tokens and with them."""
    for model in ["bundled", *args.models]:
        question = ["run", REPEATED, "-m", model, "--temp", "0", "-n", "256", "--ignore-eos", "--device", args.device]
        for name, drafts in [("without draft tokens", ["--draft-max", "0"]), ("with draft tokens", [])]:
            yield Step(f"text that repeats, {pathlib.Path(model).name}, {name}", [[*kvant, *question, *drafts]], 40)


def truth_steps(args, kvant, suites, kernels):
    """Yields what four minutes tell of kernels, memory, batches and correctness."""
    yield Step("doctor", [[*kvant, "doctor"]], 60)
    yield from first_answer_steps(args, kvant)
    yield Step("kernels", [[*kernels, args.contexts, "0", "f16,q8_0,turbo4,turbo3,turbo2", "q4_0,q4_K,q6_K"]], 110)
    yield from torch_steps(args)
    turbo3 = ["-ctk", "turbo3", "-ctv", "turbo3"]
    yield Step("8 and 64 sequences", [[*synthetic_bench(args, kvant), "-p", "0", "-n", "32", "-r", "2", "--parallel", "8,64", "-d", "2048", *turbo3]], 60)
    if ncu := shutil.which("ncu"):
        sections = [flag for name in NCU_SECTIONS for flag in ("--section", name)]
        # The first launch after those that fill the cache and warm up.
        of_kernel = ["--kernel-name", "regex:decode|skinny_q8", "--launch-skip", "8", "--launch-count", "2", "--clock-control", "none"]
        yield Step("ncu", [[ncu, *sections, *of_kernel, *kernels, args.contexts, "0", "turbo3", "q4_0"]], 60)
    else:
        yield Step("ncu", [], why="no ncu")
    chosen = [command for command in suites if any(word in " ".join(command) for word in ("attend", "project"))]
    yield Step("suites of attention and products", chosen or suites, 60, env={"KVANT_CUDA_COVERAGE": "each"}, judge=judge_suites)


def choice_steps(args, kvant, suites, kernels):
    """Yields the kernels under each variant, and what could be wrong with the chosen one."""
    for variant in args.variants or [""]:
        env = dict([variant.split("=", 1)]) if variant else {}
        yield Step(f"kernels, {variant or 'as they are'}", [[*kernels, args.contexts, "0", "turbo3,turbo4", "q4_0"]], 60, env=env)
    yield from sanitizer_steps(args)
    yield from speculation_steps(args, kvant)
    turbo3 = ["-ctk", "turbo3", "-ctv", "turbo3"]
    for name, env in [("with graphs", {}), ("without graphs", {"KVANT_CUDA_GRAPH": "0"})]:
        bench = [*synthetic_bench(args, kvant), "-p", "0", "-n", "64", "-r", "2", "--parallel", "1,64", "-d", "2048", *turbo3]
        yield Step(f"steps {name}", [bench], 60, env=env)


def record_steps(args, kvant, suites, kernels):
    """Yields the rows of a record: by depth, by sequences, and those of others."""
    types = "f16,q8_0,turbo3"
    deep = ["-p", "512", "-n", "64", "-r", "3", "-d", f"0,{args.contexts}", "-ctk", types, "-ctv", types]
    yield Step(f"speed of {args.shape}", [[*synthetic_bench(args, kvant), *deep]], 100)
    many = ["-p", "0", "-n", "64", "-r", "1", "--parallel", "1,8,64,256", "-d", "2048,8192,32768", "-ctk", "turbo3,f16", "-ctv", "turbo3,f16"]
    yield Step("sequences", [[*synthetic_bench(args, kvant), *many]], 120)
    yield from torch_steps(args)
    if args.rival:
        yield Step("rival", [shlex.split(args.rival)], 60)


# What tells whether a kernel waits for memory, issues, or has too few warps.
NCU_SECTIONS = ["SpeedOfLight", "WarpStateStats", "SchedulerStats", "Occupancy"]
RUNS = {"all": all_steps, "truth": truth_steps, "choice": choice_steps, "record": record_steps}


def synthetic_bench(args, kvant):
    return [*kvant, "bench", "--device", args.device, "--synthetic", args.shape]


def torch_steps(args):
    """Yields PyTorch's attention, where installed."""
    has_torch = args.is_cuda and importlib.util.find_spec("torch")
    yield Step("PyTorch", [[sys.executable, "-c", TORCH, str(args.tokens)]] if has_torch else [], 60, why="" if has_torch else "no torch")


def sanitizer_steps(args):
    """Yields one kernel of each kind under compute-sanitizer, where installed."""
    sanitizer = shutil.which("compute-sanitizer")
    for tool in ["memcheck", "racecheck"] if args.is_cuda else []:
        if args.suites and sanitizer:
            watch = [sanitizer, "--tool", tool, "--error-exitcode", "9", args.suites, *SANITIZED_TESTS, "--test-threads", "1"]
            yield Step(tool, [watch], 100, env={"KVANT_CUDA_COVERAGE": "each"})
        else:
            yield Step(tool, [], why="no compute-sanitizer" if args.suites else "takes --suites")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the report")
    parser.add_argument("--device", default="cuda:0", help="cuda:N or wgpu:N")
    parser.add_argument("--minutes", type=float, default=30, help="time limit of all steps together")
    parser.add_argument("--kvant", help="the program [default: built by Cargo]")
    parser.add_argument("--suites", help="the tests of the device's crate, built")
    parser.add_argument("--kernels", help="the example `bench` of kvant-cuda, built")
    parser.add_argument("--model", action="append", default=[], dest="models", help="a further model file; may be repeated")
    parser.add_argument("--shape", default="llama-3-8b:q4_0", help="as for kvant bench --synthetic")
    parser.add_argument("--tokens", type=int, default=65_536, help="context depth of the timing; also twice and an eighth of it")
    parser.add_argument("--steps", choices=RUNS, default="all", help="a run of four minutes on CUDA instead of all steps")
    parser.add_argument("--variant", action="append", default=[], dest="variants", metavar="NAME=VALUE", help="with --steps choice: an environment variable for the kernels; may be repeated")
    parser.add_argument("--rival", help="with --steps record: another program's command, such as llama-batched-bench")
    args = parser.parse_args()
    args.contexts = f"{args.tokens // 8},{args.tokens},{2 * args.tokens}"
    if bad := [variant for variant in args.variants if "=" not in variant]:
        parser.error(f"--variant: expected NAME=VALUE, got {bad[0]}")
    args.is_cuda = args.device.startswith("cuda:")
    if not args.is_cuda and not args.device.startswith("wgpu:"):
        parser.error(f"--device: expected cuda:N or wgpu:N, got {args.device}")
    if args.steps != "all" and not args.is_cuda:
        parser.error(f"--steps {args.steps}: expected --device cuda:N, got {args.device}")
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
    # Builds with Cargo where needed.
    report.run(Step("program", [[*kvant, "--version"]], 1800))
    report.run(Step("suites that there are", [[*suites, "--list"]], 1800))
    each = suites_of(args, suites)
    for step in RUNS[args.steps](args, kvant, each, kernels):
        report.run(step)
    (args.out / "cpu.base").unlink(missing_ok=True)
    shutil.rmtree(args.out / "caches", ignore_errors=True)
    sys.exit(1 if report.failed else 0)


main()
