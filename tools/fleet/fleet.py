"""Starts the programs of a fleet for the scripts of this folder, and sends them requests."""

import atexit
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "crates/engine/assets/pocket-q8_0.gguf"


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
    """A `kvant serve`. Names of ports in its options (`GRPC`) become free ports, in `ports`."""

    def __init__(self, args, name, options=()):
        self.ports = {port: free_port() for port in ["HTTP", "GRPC", "EVENTS", "REPLAY"]}
        self.url = f"http://127.0.0.1:{self.ports['HTTP']}"
        command = [args.kvant, "serve", args.model, "--port", "HTTP", "--kv-budget", "1G", "--log-level", "info", *options]
        command = [re.sub("HTTP|GRPC|EVENTS|REPLAY", lambda port: str(self.ports[port[0]]), str(word)) for word in command]
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
