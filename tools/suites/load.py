"""Measures servers under load with many clients: the same for all of them, in turn.

    kvant serve model.gguf --port 8080 &
    python3 tools/suites/load.py --text FILE ours=http://127.0.0.1:8080 [theirs=http://127.0.0.1:8081]

Each client sends a completion whose prompt has a prefix common to all (about `--shared` tokens of
the text) and its own suffix, and streams `--out` tokens. Each round has a new prefix, so that no
server has it cached from the round before; servers take turns. Needs only Python. The repository
builds and passes its tests without it.
"""

import argparse
import concurrent.futures
import json
import os
import statistics
import time
import urllib.request

COLUMNS = ["tok/s", "first p50", "first max", "gap p50", "gap max", "prompt tokens read", "CPU s/token"]


def complete(url, prompt, n_out):
    """Returns TTFT in seconds, the times of all tokens, and the number of cached prompt tokens."""
    body = {"prompt": prompt, "max_tokens": n_out, "temperature": 0, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started, times, usage = time.perf_counter(), [], {}
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if any(choice.get("text") for choice in chunk["choices"]):
                times.append(time.perf_counter() - started)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return times, usage["prompt_tokens"], usage["completion_tokens"], cached


def cpu_seconds(pid):
    """Returns the CPU seconds of a process; NaN without a process id."""
    if pid is None:
        return float("nan")
    with open(f"/proc/{pid}/stat") as stat:
        user, system = stat.read().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def a_round(url, pid, shared, n_clients, n_out):
    """Returns the values of COLUMNS; times in seconds."""
    started, before = time.perf_counter(), cpu_seconds(pid)
    with concurrent.futures.ThreadPoolExecutor(n_clients) as pool:
        prompts = [f"{shared}\n\nNumber {i} goes on like this:" for i in range(n_clients)]
        answers = list(pool.map(lambda prompt: complete(url, prompt, n_out), prompts))
    seconds = time.perf_counter() - started
    first = sorted(times[0] for times, *_ in answers)
    gaps = [b - a for times, *_ in answers for a, b in zip(times, times[1:])]
    n_answered = sum(n for _, _, n, _ in answers)
    read = sum(n - cached for _, n, _, cached in answers)
    cpu = (cpu_seconds(pid) - before) / n_answered
    return [n_answered / seconds, statistics.median(first), first[-1], statistics.median(gaps), max(gaps), read, cpu]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", help="NAME=URL or NAME=URL=PID")
    parser.add_argument("--text", required=True, help="long text as the source of prompts")
    parser.add_argument("--clients", default="1,2,4,8,16")
    parser.add_argument("--shared", type=int, default=2048, help="approximate tokens of the common prefix")
    parser.add_argument("--out", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    servers = [(server.split("=") + [None])[:3] for server in args.servers]
    text = open(args.text, encoding="utf-8").read()
    # About four characters per token.
    size, at = 4 * args.shared, 0
    print("| clients | server | " + " | ".join(COLUMNS) + " |")
    print("|---|---|" + "---|" * len(COLUMNS))
    for n_clients in map(int, args.clients.split(",")):
        rows = {name: [] for name, *_ in servers}
        for _ in range(args.rounds):
            for name, url, pid in servers:
                rows[name].append(a_round(url, pid, text[at : at + size], n_clients, args.out))
            at = (at + size) % (len(text) - size)
        for name, rounds in rows.items():
            medians = [statistics.median(column) for column in zip(*rounds)]
            print(f"| {n_clients} | {name} | " + " | ".join(f"{median:.3g}" for median in medians) + " |", flush=True)


if __name__ == "__main__":
    main()
