"""Runs many clients against a server with memory for few of them, for minutes: only lack of memory
may cause failures, and answers must not be mixed up.

    kvant serve model.gguf --port 8080 --kv-budget 64M &
    python3 tools/suites/crowd.py --text FILE --minutes 10 http://127.0.0.1:8080 $!

Each client sends one request after the other: a new prompt with a prefix that others share, or a
repeated one; it reads the streamed answer, or disconnects in the middle. The answer to a repeated
prompt must be identical. Prints, per minute, the counts of answers, rejections (429) and faults,
and the server's resident memory. Needs only Python. The repository builds and passes its tests
without it.
"""

import argparse
import collections
import http.client
import json
import random
import threading
import time
import urllib.parse


class Crowd:
    """The shared state of all clients."""

    def __init__(self, url, text, until):
        self.host = urllib.parse.urlsplit(url).netloc
        self.text, self.until = text, until
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.answers = {}  # (prompt, n): text
        self.wrong = []

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def prompt(self, chance):
        """Returns an answered prompt, or a new one: one of eight prefixes, and up to 1,200 further
        tokens."""
        with self.lock:
            if self.answers and chance.random() < 0.3:
                return chance.choice(list(self.answers))
        begin, at = chance.randrange(8) * 2000, chance.randrange(20_000, len(self.text) - 6000)
        return self.text[begin : begin + 2000] + self.text[at : at + chance.randrange(20, 4800)], chance.choice([4, 16, 64])

    def complete(self, chance):
        prompt, n = self.prompt(chance)
        leaves = chance.random() < 0.1
        body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "stream": True, "ignore_eos": True}
        connection = http.client.HTTPConnection(self.host, timeout=900)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            message = answer.read().decode(errors="replace")
            self.count(f"status {answer.status}")
            if answer.status != 429:
                self.wrong.append(f"{answer.status}: {message[:200]}")
            else:
                time.sleep(min(float(answer.headers.get("Retry-After", 1)), 5))
            return
        pieces, ended = [], False
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                ended = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.wrong.append(f"in a stream: {chunk['error']}")
                    return
                pieces += [choice["text"] for choice in chunk["choices"]]
                if leaves and len(pieces) > n / 2:
                    connection.close()
                    return self.count("left")
        if not ended:
            return self.wrong.append("a stream that was cut")
        text = "".join(pieces)
        with self.lock:
            known = self.answers.setdefault((prompt, n), text)
            self.counts["answers"] += 1
            self.counts["answers known before"] += known is not text
        if known != text:
            self.wrong.append(f"another answer to the same prompt: {text[:80]!r}, before {known[:80]!r}")

    def client(self, seed):
        chance = random.Random(seed)
        while time.time() < self.until:
            try:
                self.complete(chance)
            except Exception as error:  # broken connections are faults
                self.wrong.append(f"{type(error).__name__}: {error}")
                time.sleep(1)


def resident(pid):
    """Returns the resident MiB of a process."""
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("pid", type=int)
    parser.add_argument("--text", required=True, help="long text as the source of prompts")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    args = parser.parse_args()
    text = open(args.text, encoding="utf-8").read()
    crowd = Crowd(args.url, text, time.time() + 60 * args.minutes)
    threads = [threading.Thread(target=crowd.client, args=(seed,)) for seed in range(args.clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        print(f"{resident(args.pid):8.1f} MiB resident; {dict(crowd.counts)}; wrong: {len(crowd.wrong)}", flush=True)
        for _ in range(60):
            time.sleep(1)
            if not any(thread.is_alive() for thread in threads):
                break
    print(f"{resident(args.pid):8.1f} MiB resident; {dict(crowd.counts)}")
    for what, n in collections.Counter(crowd.wrong).most_common(20):
        print(f"WRONG, {n} times: {what}")
    raise SystemExit(1 if crowd.wrong or not crowd.counts["answers"] else 0)


if __name__ == "__main__":
    main()
