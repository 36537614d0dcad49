"""Measures the effect of a hostile API key on the requests of another one: TTFT and ITL.

    kvant serve model.gguf --port 8080 -c 8192 --api-key polite --api-key hostile &
    python3 tools/suites/neighbour.py --text FILE http://127.0.0.1:8080

The polite key chats: one prompt of 200 to 2,000 tokens after the other, none repeated. Meanwhile
the hostile key repeatedly sends one kind of request at a time: grammars, bodies and queues that
have brought servers down. Prints, per kind, TTFT and ITL of the polite key (p50, p99), the ratio of
TTFT to that without load, and its errors. Fails if there are any errors. Needs only Python. The
repository builds and passes its tests without it.
"""

import argparse
import contextlib
import dataclasses
import http.client
import json
import random
import socket
import threading
import time
import urllib.parse

TOKENS = 24


@dataclasses.dataclass
class Seen:
    """Measurements of the polite key for one kind, in seconds."""

    first: list
    between: list
    errors: list


class Client:
    """A client with an API key."""

    def __init__(self, url, key):
        parts = urllib.parse.urlsplit(url)
        self.address, self.key = (parts.hostname, parts.port), key

    def post(self, path, body, seconds=300):
        """Returns the connection and the response to a body: bytes verbatim, other values as
        JSON."""
        connection = http.client.HTTPConnection(*self.address, timeout=seconds)
        heads = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), heads)
        return connection, connection.getresponse()

    def fetch(self, path, body, seconds=300):
        connection, answer = self.post(path, body, seconds)
        with contextlib.closing(connection):
            return answer.status, answer.read()


def percentile(times, share):
    return sorted(times)[min(int(len(times) * share), len(times) - 1)] if times else float("nan")


def chat(client, prompt, seen):
    """Runs one chat and records its times."""
    began = last = time.perf_counter()
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    connection, answer = client.post("/v1/chat/completions", body)
    with contextlib.closing(connection):
        if answer.status != 200:
            return seen.errors.append(f"{answer.status} {answer.read()[:120]}")
        is_first = True
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return seen.errors.append(str(chunk["error"])[:120])
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                now = time.perf_counter()
                (seen.first if is_first else seen.between).append(now - (began if is_first else last))
                is_first, last = False, now


# Each kind is a function of a client and a text that sends one request; several threads run it.


def long_prompts(client, text, chance):
    at = chance.randrange(len(text) - 16_000)
    client.fetch("/v1/completions", {"prompt": text[at : at + 16_000], "max_tokens": 1})


def many_answers(client, text, chance):
    client.fetch("/v1/completions", {"prompt": "Go on.", "n": 64, "max_tokens": 4000, "ignore_eos": True}, 20)


def full_queue(client, text, chance):
    at = chance.randrange(len(text) - 400_000)
    prompts = [text[at + i : at + i + 40] for i in range(0, 400_000, 400)]
    client.fetch("/v1/completions", {"prompt": prompts, "max_tokens": 8}, 20)


def wide_grammar(client, text, chance):
    ways = " | ".join(['"a" root "b"'] * chance.choice([1900, 5000]))
    client.fetch("/completion", {"prompt": "hi", "n_predict": 200, "grammar": f'root ::= {ways} | "c"\n'}, 3)


def deep_schema(client, text, chance):
    def nested(depth, inner):
        return {"items": nested(depth - 1, inner)} if depth else inner

    links = {str(i): nested(chance.choice([0, 40, 110]), {"$ref": f"#/$defs/{i + 1}"}) for i in range(300)}
    schema = {"$defs": links | {"300": {}}, "$ref": "#/$defs/0"}
    client.fetch("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "guided_json": schema})


def large_choice(client, text, chance):
    choice = [str(chance.random()) for _ in range(chance.choice([2000, 100_000]))]
    client.fetch("/v1/completions", {"prompt": "hi", "max_tokens": 2, "guided_choice": choice})


def nested_body(client, text, chance):
    body = chance.choice([b'{"prompt":[' + b",".join([b"[0]"] * 7_000_000) + b"]}", b'{"x":' + b"[" * 127 + b"0," * 10_000_000 + b"0" + b"]" * 127 + b"}"])
    client.fetch("/v1/completions", body)


def long_text(client, text, chance):
    client.fetch("/tokenize", {"content": chance.choice([" ", "a"]) * chance.choice([7_000_000, 30_000_000])})


def stalled(client, sent, seconds):
    """Opens connections that send a partial request and stall."""
    sockets = []
    for _ in range(300):
        with contextlib.suppress(OSError):
            sockets.append(socket.create_connection(client.address, timeout=5))
            sockets[-1].sendall(sent)
    time.sleep(seconds)
    for one in sockets:
        one.close()


def stalled_bodies(client, text, chance):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {client.key}\r\nContent-Length: 99\r\n\r\n"
    stalled(client, head.encode(), 12)


def stalled_heads(client, text, chance):
    stalled(client, b"POST /v1/completions HTTP/1.1\r\nHost:", 12)


def gone_clients(client, text, chance):
    at = chance.randrange(len(text) - 16_000)
    with contextlib.suppress(TimeoutError):
        client.fetch("/v1/completions", {"prompt": text[at : at + 16_000], "max_tokens": 500}, 0.3)


KINDS = [long_prompts, many_answers, full_queue, wide_grammar, deep_schema, large_choice, nested_body, long_text]
KINDS += [stalled_bodies, stalled_heads, gone_clients]
THREADS = {long_prompts: 64, gone_clients: 16, stalled_bodies: 4, stalled_heads: 4}


def beside(kind, args, text):
    """Returns the measurements of the polite key under a kind of load, or alone."""
    done = threading.Event()
    hostile = Client(args.url, args.hostile)

    def send(seed):
        chance = random.Random(seed)
        while not done.is_set():
            try:
                kind(hostile, text, chance)
            except OSError:
                # Errors of hostile requests are expected.
                done.wait(0.05)

    threads = [threading.Thread(target=send, args=(seed,), daemon=True) for seed in range(THREADS.get(kind, 4) if kind else 0)]
    for thread in threads:
        thread.start()
    time.sleep(3 if kind else 0)
    seen, polite = Seen([], [], []), Client(args.url, args.polite)
    # The same lengths each time, with new text.
    lengths, places = random.Random(7), random.Random(time.time())
    for _ in range(args.chats):
        at = places.randrange(len(text) - 8000)
        try:
            chat(polite, text[at : at + lengths.randrange(800, 8000)], seen)
        except OSError as error:
            seen.errors.append(f"{type(error).__name__}: {error}")
    done.set()
    # Waits for the hostile requests, which would otherwise affect the next kind.
    for thread in threads:
        thread.join()
    return seen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--text", required=True, help="long text as the source of prompts")
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--polite", default="polite", help="the polite API key")
    parser.add_argument("--hostile", default="hostile", help="the hostile API key")
    parser.add_argument("--kind", action="append", choices=[kind.__name__ for kind in KINDS])
    args = parser.parse_args()
    text = open(args.text, encoding="utf-8").read()
    kinds = [kind for kind in KINDS if not args.kind or kind.__name__ in args.kind]
    print("| beside | TTFT p50, ms | p99 | times alone | ITL p50, ms | p99 | errors |\n|---|---|---|---|---|---|---|")
    alone, n_errors = None, 0
    for kind in [None, *kinds]:
        seen = beside(kind, args, text)
        alone = alone or seen
        times = percentile(seen.first, 0.99) / percentile(alone.first, 0.99)
        numbers = [1000 * percentile(part, share) for part in (seen.first, seen.between) for share in (0.5, 0.99)]
        name = kind.__name__.replace("_", " ") if kind else "none"
        print(f"| {name} | {numbers[0]:.0f} | {numbers[1]:.0f} | {times:.1f} | {numbers[2]:.1f} | {numbers[3]:.1f} | {len(seen.errors)} |", flush=True)
        for error in seen.errors[:3]:
            print(f"  {error}", flush=True)
        n_errors += len(seen.errors)
        time.sleep(5)
    raise SystemExit(n_errors > 0)


if __name__ == "__main__":
    main()
