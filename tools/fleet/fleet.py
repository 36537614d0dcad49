"""Starts the programs of a fleet for the scripts of this folder, and sends them requests."""

import argparse
import atexit
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "crates/engine/assets/pocket-q8_0.gguf"
N_PROMPTS = 20
N_SHARED = 512  # Tokens that all prompts begin with.


def free_port():
    """Returns a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(what, condition, seconds=90, pause=0.1):
    """Waits until `condition` holds and returns its value; what it raises counts as not yet."""
    end, error = time.monotonic() + seconds, None
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except (OSError, http.client.HTTPException, ValueError, KeyError) as raised:
            error = raised
        time.sleep(pause)
    raise SystemExit(f"{what}: expected within {seconds} seconds, got {error or 'nothing'}")


def venv(folder, packages, *, alone=()):
    """Returns a Python with these packages; those of `alone` come without their dependencies."""
    python = folder / "bin/python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *packages], check=True)
        if alone:
            subprocess.run([*pip, "--no-deps", *alone], check=True)
        (folder / "ready").touch()
    return python


class Program:
    """A running program, which is ended with the script. Its output is in a file."""

    def __init__(self, name, command, log, environment=None):
        self.name, self.log = name, log
        with open(log, "wb") as out:
            environment = {**os.environ, **(environment or {})}
            command = [str(word) for word in command]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=log.parent)
        atexit.register(self.kill)

    def kill(self):
        """Ends it at once, as a crash would."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self, seconds=150):
        """Asks it to end, and returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


class Kvant(Program):
    """A `kvant serve`. In its options `{grpc}` and so on are free ports, which `ports` holds."""

    def __init__(self, args, name, *options):
        self.ports = {port: free_port() for port in ["http", "grpc", "events", "replay"]}
        self.url = f"http://127.0.0.1:{self.ports['http']}"
        options = ["--port", "{http}", "--kv-budget", "1G", "--log-level", "info", *options]
        command = [args.kvant, "serve", args.model, *(option.format(**self.ports) for option in options)]
        super().__init__(name, command, args.work / f"{name}.log")

    def is_ready(self):
        if self.process.poll() is not None:
            raise SystemExit(f"{self.name} ended: {self.log.read_text()[-600:]}")
        with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
            return answer.status == 200

    def metric(self, name):
        """Returns a number of its metrics."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)

    def n_answered(self):
        return self.metric("vllm:request_success_total")

    def n_running(self):
        return self.metric("vllm:num_requests_running")

    def tokens(self, text):
        """Returns the tokens of a text."""
        return post(self.url, "/tokenize", {"content": text})["tokens"]

    def text(self, tokens):
        """Returns the text of tokens."""
        return post(self.url, "/detokenize", {"tokens": tokens})["content"]


def get(url, path):
    """Returns the answer to a request."""
    with urllib.request.urlopen(url + path, timeout=30) as answer:
        return json.load(answer)


def post(url, path, body, timeout=600):
    """Sends a request and returns the answer."""
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


class Stream:
    """A streamed answer: its text so far, times, and whether it ended as it should."""

    def __init__(self, url, path, body):
        self.text, self.n_chunks, self.finish, self.usage, self.error = "", 0, None, None, None
        self.connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=600)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        self.sent = time.perf_counter()
        self.first = None
        self.connection.request("POST", path, json.dumps({**body, **options}), {"Content-Type": "application/json"})

    def chunks(self):
        """Receives the answer, and yields after each chunk with text."""
        answer = self.connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"expected a stream, got {answer.status}: {answer.read()[:400]}")
        for line in answer:
            if line.startswith(b"event: error") or line.startswith(b"data: {\"error"):
                self.error = line.decode()
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            self.error = self.error or chunk.get("error")
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk.get("choices", []):
                self.finish = choice.get("finish_reason") or self.finish
                text = choice.get("text") or (choice.get("delta") or {}).get("content")
                if text:
                    self.first = self.first or time.perf_counter()
                    self.text += text
                    self.n_chunks += 1
                    yield self

    def read(self):
        """Receives the answer to its end."""
        for _ in self.chunks():
            pass
        return self

    def ttft(self):
        """Returns the seconds until the first text."""
        return self.first - self.sent

    def leave(self):
        """Disconnects in the middle."""
        self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class Texts:
    """Prompts of this repository's documentation, none twice."""

    def __init__(self, kvant):
        documents = sorted((ROOT / "docs").rglob("*.md"))
        self.tokens = kvant.tokens("\n".join(path.read_text(encoding="utf-8") for path in documents))
        self.at = 0

    def take(self, n):
        """Returns the next `n` tokens."""
        if self.at + n > len(self.tokens):
            raise SystemExit(f"expected {n} more tokens of documentation, got {len(self.tokens) - self.at}")
        self.at += n
        return self.tokens[self.at - n : self.at]


def check(name, holds, figures):
    """Prints a line, and fails where it does not hold."""
    print(f"{'ok  ' if holds else 'FAIL'} {name}: {figures}", flush=True)
    if not holds:
        raise SystemExit(1)


def answered_by(workers, ask):
    """Returns the worker that answered a request."""
    before = [worker.n_answered() for worker in workers]
    ask()

    def found():
        return [worker for worker, n in zip(workers, before) if worker.n_answered() > n]

    # The count may follow the answer.
    return wait_for("an answer of a worker", found, pause=0.01)[0]


class WarmPrompts:
    """Prompts with a common beginning, each computed by one worker, of which no router knows."""

    def __init__(self, workers, texts, length):
        self.workers, self.share = workers, None
        shared = texts.take(N_SHARED)
        self.holders = [worker for worker in workers for _ in range(N_PROMPTS // len(workers))]
        random.Random(7).shuffle(self.holders)
        self.prompts = [shared + texts.take(length - N_SHARED) for _ in self.holders]
        for prompt, holder in zip(self.prompts, self.holders):
            post(holder.url, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
        time.sleep(2)  # Until routers have received the events.

    def n_cached(self):
        return sum(worker.metric("vllm:prefix_cache_hits_total") for worker in self.workers)

    def n_found(self, ask, texts):
        """Asks all prompts, continued, and returns how many reached their holder."""
        more, before = texts.take(8), self.n_cached()
        asked = [answered_by(self.workers, lambda: ask(prompt + more)) for prompt in self.prompts]
        self.share = (self.n_cached() - before) / sum(len(prompt) for prompt in self.prompts)
        return sum(worker is holder for worker, holder in zip(asked, self.holders))


def arguments(head):
    """Returns a parser of the options that the scripts share."""

    class Parser(argparse.ArgumentParser):
        def parse_args(self):
            args = super().parse_args()
            args.kvant, args.model = args.kvant.resolve(), args.model.resolve()
            args.work.mkdir(parents=True, exist_ok=True)
            # So that programs end with a script that is asked to end.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
            return args

    parser = Parser(description=head, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvant", required=True, type=pathlib.Path, help="program with the features grpc and kv-events")
    parser.add_argument("--model", type=pathlib.Path, default=BUNDLED, help="GGUF file (default: the bundled model)")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/kvant-fleet"), help="packages and logs")
    parser.add_argument("--prompt", type=int, default=1900, help="tokens of a prompt")
    return parser


def tokenizer_folder(python, model, to):
    """Writes the tokenizer of a model as a Hugging Face folder."""
    script = pathlib.Path(__file__).with_name("tokenizer.py")
    subprocess.run([python, script, model, to], check=True)
