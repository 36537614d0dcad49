"""Tries the referee and `evaluator.py` with a scripted mutator: one good, one wrong and one slower change.

    python3 docs/lab/try_evaluator.py path/to/kvant

In a checkout of its own (target/lab/mutator) it commits a kernel that wastes time. To waste none is the good change, to
leave out one tensor the wrong one, to waste three times as much the slower one. Needs openevolve, git, cargo and, for the
first build, a quarter of an hour.
"""

import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LAB = ROOT / "target/lab"
CHECKOUT = LAB / "mutator"
FILE = "crates/cpu/src/ops/append/mod.rs"
TARGET = "append-turbo3t-128"
LINE = "        let part = &parts[index];\n"
WASTE = "        (0..4_000_000u64).for_each(|i| { std::hint::black_box(i); });\n"
SKIP = "        if item == 3 { return; }\n"
EXPECTED = {"good": "better", "wrong": "wrong", "slower": "worse"}


def git(*args):
    subprocess.run(["git", "-C", CHECKOUT, *args], check=True, capture_output=True)


def before(text, lines):
    """Returns the kernel with lines at the beginning of its loop."""
    assert text.count(LINE) == 1, "the kernel has another form"
    return text.replace(LINE, lines + LINE)


def prepare(text):
    """Makes the checkout, whose kernel wastes time."""
    if not CHECKOUT.exists():
        subprocess.run(["git", "-C", ROOT, "worktree", "prune"], check=True)
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", CHECKOUT, "HEAD"], check=True)
        # It is built where the checkout is, so that dependencies are built once.
        (CHECKOUT / "target").mkdir()
        (CHECKOUT / "target/lab").symlink_to(LAB)
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    git("checkout", "--quiet", "--force", "--detach", head.stdout.strip())
    (CHECKOUT / FILE).write_text(before(text, WASTE))
    git("-c", "user.name=lab", "-c", "user.email=lab@localhost", "commit", "--quiet", "--all", "-m", "lab: waste time")


def main(kvant):
    os.environ |= {"LAB_CHECKOUT": str(CHECKOUT), "LAB_FILE": FILE, "LAB_TARGET": TARGET, "LAB_KVANT": kvant}
    sys.path.insert(0, str(HERE))
    from evaluator import evaluate

    text = (ROOT / FILE).read_text()
    prepare(text)
    changes = {"good": text, "wrong": before(text, SKIP), "slower": before(text, 3 * WASTE)}
    program = LAB / "program.rs"
    failed = 0
    for name, change in changes.items():
        program.write_text(change)
        began = time.monotonic()
        result = evaluate(program)
        verdict, took = result.artifacts["verdict"], time.monotonic() - began
        metrics, reason = result.metrics, result.artifacts["reason"]
        print(f"{name}: {verdict} (expected {EXPECTED[name]}), {metrics}, {took:.0f} s: {reason}", flush=True)
        failed += verdict != EXPECTED[name]
    return failed


if __name__ == "__main__":
    sys.exit(main(os.path.abspath(sys.argv[1])))
