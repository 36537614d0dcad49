"""Runs lm-eval (EleutherAI's evaluation harness) against a server, through its `local-completions`:
logprobs of sentence endings, of a whole text, and generated answers.

    kvant serve model.gguf --port 8080 -c 2048 &
    python3 tools/suites/lm.py http://127.0.0.1:8080 [--text FILE]

The tokenizer is the server's (`/tokenizer_info`, as in vLLM); tasks are written below, so that only
lm-eval itself is downloaded, from PyPI, into its own folder. The repository builds and passes its
tests without it.
"""

import argparse
import json
import pathlib
import subprocess
import sys

VERSION = "lm-eval[api]==0.4.13"
# A context and its continuations, the correct one first.
ENDS = [
    ("The capital of France is", [" Paris", " London", " Rome", " Berlin"]),
    ("Water freezes at zero degrees", [" Celsius", " banana", " miles", " pounds"]),
    ("The opposite of hot is", [" cold", " warm", " fire", " sun"]),
    ("Two plus two equals", [" four", " nine", " ten", " seven"]),
    ("The sun rises in the", [" east", " west", " moon", " sea"]),
    ("A dog says", [" woof", " meow", " moo", " quack"]),
]
# Bytes per chunk of the text, and number of chunks.
PIECE, PIECES = 4000, 6


def task(name, data, kind, metrics, **more):
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": kind,
        "metric_list": [{"metric": metric} for metric in metrics],
        "metadata": {"version": 1.0},
        **more,
    }


def written(folder, text):
    """Writes data and tasks, and returns the names of the tasks."""
    ends, whole = folder / "ends.jsonl", folder / "text.jsonl"
    ends.write_text("".join(json.dumps({"text": begin, "choices": ends_}) + "\n" for begin, ends_ in ENDS))
    generation = {"until": ["\n", "."], "max_gen_toks": 8, "temperature": 0}
    tasks = [
        task("ends", ends, "multiple_choice", ["acc"], doc_to_text="{{text}}", doc_to_choice="{{choices}}", doc_to_target=0),
        task("said", ends, "generate_until", ["exact_match"], doc_to_text="{{text}}", doc_to_target="{{choices[0]}}", generation_kwargs=generation),
    ]
    if text:
        words = pathlib.Path(text).read_text(encoding="utf-8")
        whole.write_text("".join(json.dumps({"text": words[i * PIECE : (i + 1) * PIECE]}) + "\n" for i in range(PIECES)))
        tasks.append(task("text", whole, "loglikelihood_rolling", ["byte_perplexity"], doc_to_text="", doc_to_target="{{text}}"))
    for one in tasks:
        # JSON is YAML.
        (folder / f"{one['task']}.yaml").write_text(json.dumps(one))
    return [one["task"] for one in tasks]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--text", help="text for the whole-text measurement")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/kvant-suites"))
    args = parser.parse_args()
    folder = args.folder.resolve() / "lm"
    tasks = folder / "tasks"
    tasks.mkdir(parents=True, exist_ok=True)
    program = folder / "venv/bin/lm_eval"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        subprocess.run([folder / "venv/bin/python", "-m", "pip", "install", "--quiet", VERSION], check=True)
    model = f"model=any,base_url={args.url}/v1/completions,num_concurrent=4,max_length=2048"
    command = [program, "run", "--model", "local-completions", "--model_args", model]
    command += ["--include_path", tasks, "--tasks", ",".join(written(tasks, args.text))]
    sys.exit(subprocess.run([str(part) for part in command], check=False).returncode)


if __name__ == "__main__":
    main()
