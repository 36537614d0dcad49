"""Measures the reaction of servers to events, the same for all of them, in turn.

    kvant serve model.gguf --port 8080 &
    python3 tools/suites/events.py --text FILE ours=http://127.0.0.1:8080 [theirs=http://127.0.0.1:8081]

A long prompt (about `--long` tokens of the text) arrives while another client streams an answer:
the median ITL before it, and the longest afterwards. A client disconnects during the prefill of its
long prompt: seconds until the server is idle (`/metrics`, which llama-server has with `--metrics`).
Needs only Python. The repository builds and passes its tests without it.
"""

import argparse
import http.client
import json
import statistics
import threading
import time
import urllib.parse
import urllib.request

COLUMNS = ["gap p50", "longest gap", "until it is free"]


def post(url, body):
    """Returns a connection that has sent `body`."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def busy(url):
    """Returns the number of running requests."""
    with urllib.request.urlopen(url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("llamacpp:requests_processing"))


def gaps(url, prompt, n_out):
    """Returns the median ITL, and the longest after a long prompt arrives."""
    body = {"prompt": "Once upon a time", "max_tokens": n_out, "temperature": 0, "stream": True, "ignore_eos": True}
    times, sent = [], []

    def enter():
        sent.append(time.perf_counter())
        post(url, {"prompt": prompt, "max_tokens": 1}).getresponse().read()

    other = threading.Thread(target=enter)
    for line in post(url, body).getresponse():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            if len(times) == 64:
                other.start()
    other.join()
    pauses = [(b - a, b) for a, b in zip(times, times[1:])]
    before = [pause for pause, at in pauses if at < sent[0]]
    return statistics.median(before), max(pause for pause, at in pauses if at >= sent[0])


def leave(url, prompt):
    """Returns the seconds until the server is idle after a disconnect during prefill."""
    connection = post(url, {"prompt": prompt, "max_tokens": 8, "stream": True})
    while not busy(url):
        time.sleep(0.01)
    time.sleep(0.5)
    assert busy(url), "prefill ended before the disconnect: use a longer prompt"
    connection.sock.close()
    left = time.perf_counter()
    while busy(url):
        time.sleep(0.005)
    return time.perf_counter() - left


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", help="NAME=URL")
    parser.add_argument("--text", required=True, help="long text as the source of prompts")
    parser.add_argument("--long", type=int, default=7000)
    parser.add_argument("--out", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    servers = [server.split("=", 1) for server in args.servers]
    text = open(args.text, encoding="utf-8").read()
    size = 4 * args.long
    rows = {name: [] for name, _ in servers}
    for turn in range(args.rounds):
        # New prompts, which no server has cached.
        entering, left = (text[(2 * turn + i) * size // 4 :][:size] for i in range(2))
        for name, url in servers:
            rows[name].append([*gaps(url, entering, args.out), leave(url, left)])
    print("| server | " + " | ".join(COLUMNS) + " |")
    print("|---|" + "---|" * len(COLUMNS))
    for name, rounds in rows.items():
        medians = [statistics.median(column) for column in zip(*rounds)]
        print(f"| {name} | " + " | ".join(f"{median:.3g}" for median in medians) + " |")


if __name__ == "__main__":
    main()
