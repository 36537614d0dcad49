"""Runs `kvant serve` as the workers of NVIDIA Dynamo on this machine, and checks routing by KV events,
migration, cancellation, drain and scaling.

    cargo build --release -p kvant-cli --features grpc,kv-events
    python3 tools/fleet/under_dynamo.py --kvant target/release/kvant [--model smollm2.gguf]

Dynamo's frontend and its own sidecar for vLLM, both unchanged, come from PyPI (`ai-dynamo`) and are
installed into a folder of their own (`--work`). Discovery is a folder, requests go over TCP, events
over ZeroMQ: no etcd, no NATS, no GPU. Prints a line per check with its figures, and fails with the
first that does not hold. The repository builds and passes its tests without it.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import threading
import time

from fleet import BUNDLED, ROOT, Kvant, Program, Stream, free_port, get, post, venv, wait_for

VERSION = "1.6.1"
# What the frontend, the sidecar and `tokenizer.py` import.
NEEDS = ["pydantic", "uvloop", "pyzmq", "msgspec", "prometheus-client", "packaging", "pyyaml", "gguf"]
ALONE = [f"ai-dynamo=={VERSION}", f"ai-dynamo-runtime=={VERSION}"]

N_PROMPTS = 20
N_STREAMS = 6


class Fleet:
    """The workers, each with its sidecar, and the frontends before them."""

    def __init__(self, args):
        self.args, self.model, self.workers = args, str(args.work / "model"), []
        store = args.work / "discovery"
        shutil.rmtree(store, ignore_errors=True)
        self.environment = {
            "DYN_FILE_KV": str(store),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_SELF_HOST_METADATA": "0",
            "HF_HUB_OFFLINE": "1",
        }

    def program(self, name, module, *options):
        command = [self.args.python, "-m", module, *options]
        return Program(name, command, self.args.work / f"{name}.log", self.environment)

    def kvant(self, name):
        """Starts a server that no router knows yet."""
        options = ["--grpc", "127.0.0.1:GRPC", "--kv-events", "tcp://*:EVENTS", "--kv-events-replay", "tcp://*:REPLAY"]
        return Kvant(self.args, name, ["--alias", self.model, *options])

    def join(self, kvant):
        """Starts the sidecar of a server, which registers it as a worker."""
        endpoint = ["--grpc-endpoint", f"127.0.0.1:{kvant.ports['GRPC']}"]
        kvant.sidecar = self.program(f"{kvant.name}-sidecar", "dynamo.vllm.sidecar", *endpoint)
        self.workers.append(kvant)

    def frontend(self, name, *options):
        """Starts a frontend and waits until it knows all workers."""
        port = free_port()
        address = ["--http-host", "127.0.0.1", "--http-port", port]
        frontend = self.program(name, "dynamo.frontend", *address, "--migration-limit", 3, *options)
        frontend.url = f"http://127.0.0.1:{port}"
        self.settle(frontend)
        return frontend

    def settle(self, frontend):
        """Waits until a frontend knows the workers and their blocks."""

        def is_complete():
            instances = get(frontend.url, "/health")["instances"]
            models = get(frontend.url, "/v1/models")["data"]
            return models and len(self.workers) == sum(one["endpoint"] == "generate" for one in instances)

        wait_for(f"{len(self.workers)} workers at {frontend.name}", is_complete)
        time.sleep(3)

    def request(self, prompt, n, **more):
        """Returns the body of a greedy completion of `n` tokens."""
        greedy = {"temperature": 0, "max_tokens": n, "min_tokens": n, "ignore_eos": True}
        return {"model": self.model, "prompt": prompt, **greedy, **more}

    def ask(self, url, prompt, n):
        return post(url, "/v1/completions", self.request(prompt, n))

    def streams(self, url, prompts, n):
        """Starts a stream for each prompt, and returns them with the threads that read them."""
        streams = [Stream(url, "/v1/completions", self.request(prompt, n)) for prompt in prompts]
        threads = [threading.Thread(target=stream.read) for stream in streams]
        for thread in threads:
            thread.start()
        return streams, threads


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
    after = [worker.n_answered() for worker in workers]
    return next(worker for worker, a, b in zip(workers, before, after) if b > a)


def routing(fleet, texts):
    """Prompts are computed at one worker each, unknown to the frontends: only events can tell."""
    workers = fleet.workers
    frontend = fleet.frontend("frontend-kv", "--router-mode", "kv")
    shared, holders = texts.take(512), [worker for worker in workers for _ in range(N_PROMPTS // 2)]
    random.Random(7).shuffle(holders)
    prompts = [shared + texts.take(fleet.args.prompt - 512) for _ in holders]
    for prompt, holder in zip(prompts, holders):
        fleet.ask(holder.url, prompt, 1)
    time.sleep(2)

    def n_found(url, more):
        asked = [answered_by(workers, lambda: fleet.ask(url, prompt + more, 4)) for prompt in prompts]
        return sum(worker is holder for worker, holder in zip(asked, holders))

    cached = sum(worker.metric("vllm:prefix_cache_hits_total") for worker in workers)
    found = n_found(frontend.url, texts.take(8))
    cached = sum(worker.metric("vllm:prefix_cache_hits_total") for worker in workers) - cached
    share = cached / sum(len(prompt) for prompt in prompts)
    check("to the holder of the prefix", found == N_PROMPTS, f"{found} of {N_PROMPTS}, {share:.0%} of the prompts cached")
    blind = fleet.frontend("frontend-blind", "--router-mode", "kv", "--no-router-kv-events")
    found = n_found(blind.url, texts.take(8))
    blind.kill()
    check("the same with events off", found <= 13, f"{found} of {N_PROMPTS}")
    return frontend


def follow_ups(fleet, texts, frontend):
    """Chats of three turns in text, in another order each turn: TTFT of the later turns."""
    other = fleet.frontend("frontend-rr", "--router-mode", "round-robin")
    means = {}
    for name, url in [("KV routing", frontend.url), ("round robin", other.url)]:
        chats = [[{"role": "user", "content": fleet.workers[0].text(texts.take(fleet.args.prompt - 600))}] for _ in range(6)]
        times = []
        for turn in range(3):
            random.Random(turn).shuffle(chats)
            for chat in chats:
                more = {"model": fleet.model, "messages": chat, "temperature": 0, "max_tokens": 24}
                stream = Stream(url, "/v1/chat/completions", more).read()
                if turn:
                    times.append(stream.ttft())
                chat.append({"role": "assistant", "content": stream.text})
                chat.append({"role": "user", "content": f"And what else is there to say, in the {turn}th place?"})
        means[name] = statistics.mean(times)
    other.kill()
    kv, rr = means.values()
    check("TTFT of follow-ups", kv <= rr / 3, ", ".join(f"{name} {mean * 1000:.0f} ms" for name, mean in means.items()))


def cancellation(fleet, texts, frontend):
    """A client leaves in the middle of its answer: seconds until no worker computes it."""
    times = []
    for _ in range(5):
        stream = Stream(frontend.url, "/v1/completions", fleet.request(texts.take(64), fleet.args.long))
        next(chunk for chunk in stream.chunks() if chunk.n_chunks >= 8)
        assert sum(worker.n_running() for worker in fleet.workers) == 1
        stream.leave()
        left = time.perf_counter()
        wait_for("a free row", lambda: not any(worker.n_running() for worker in fleet.workers), pause=0.002)
        times.append(time.perf_counter() - left)
    cancelled = sum(worker.metric("kvant:requests_cancelled_total") for worker in fleet.workers)
    worst = f"{max(times) * 1000:.0f} ms at most of {len(times)}, {cancelled:.0f} cancelled"
    check("row freed after a client left", max(times) < 0.2 and cancelled == len(times), worst)


def migration(fleet, texts, frontend, alone):
    """A worker is killed, with its sidecar, while six streams run: all end as `alone` answers."""
    prompts, n = [texts.take(64) for _ in range(N_STREAMS)], fleet.args.long
    victim = fleet.workers[-1]
    streams, threads = fleet.streams(frontend.url, prompts, n)
    wait_for("six streams", lambda: all(stream.n_chunks >= 4 for stream in streams), pause=0.01)
    held = victim.n_running()
    running = sum(stream.finish is None for stream in streams)
    victim.sidecar.kill()
    victim.kill()
    for thread in threads:
        thread.join()
    fleet.workers.remove(victim)
    same = 0
    for stream, prompt in zip(streams, prompts):
        answer = fleet.ask(alone.url, prompt, n)
        same += stream.text == answer["choices"][0]["text"] and stream.finish == "length" and not stream.error
    figures = f"{same} of {N_STREAMS} as one process answers; {held:.0f} of {running} were at the killed one"
    check("streams after SIGKILL", same == N_STREAMS and held > 0 and running == N_STREAMS, figures)


def scaling(fleet, texts, frontend, added):
    """A worker joins while the fleet runs, and takes work."""
    fleet.join(added)
    fleet.settle(frontend)
    before = [worker.n_answered() for worker in fleet.workers]
    _, threads = fleet.streams(frontend.url, [texts.take(256) for _ in range(N_STREAMS)], 32)
    for thread in threads:
        thread.join()
    counts = [worker.n_answered() - n for worker, n in zip(fleet.workers, before)]
    figures = f"{counts[-1]:.0f} of {N_STREAMS} requests to the added one"
    check("an added worker takes work", counts[-1] > 0 and sum(counts) == N_STREAMS, figures)


def drain(fleet, texts, frontend, alone):
    """A worker is asked to end while it streams: streams end whole, and new requests go elsewhere."""
    leaver, prompts, n = fleet.workers[0], [texts.take(64) for _ in range(N_STREAMS)], fleet.args.long
    streams, threads = fleet.streams(frontend.url, prompts, n)
    wait_for("six streams", lambda: all(stream.n_chunks >= 4 for stream in streams), pause=0.01)
    held = leaver.n_running()
    leaver.sidecar.process.send_signal(signal.SIGTERM)
    time.sleep(2)
    elsewhere = answered_by([alone], lambda: fleet.ask(frontend.url, texts.take(64), 4)) is alone
    for thread in threads:
        thread.join()
    statuses = [leaver.sidecar.process.wait(150), leaver.stop()]
    fleet.workers.remove(leaver)
    same = 0
    for stream, prompt in zip(streams, prompts):
        answer = fleet.ask(alone.url, prompt, n)
        same += stream.text == answer["choices"][0]["text"] and stream.finish == "length" and not stream.error
    figures = f"{same} of {N_STREAMS} streams whole, {held:.0f} of them at the leaving one; exit statuses {statuses}"
    check("drain", same == N_STREAMS and held > 0 and elsewhere and statuses == [0, 0], figures)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvant", required=True, type=pathlib.Path, help="program with the features grpc and kv-events")
    parser.add_argument("--model", type=pathlib.Path, default=BUNDLED, help="GGUF file (default: the bundled model)")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/kvant-fleet"), help="packages and logs")
    parser.add_argument("--prompt", type=int, default=1900, help="tokens of a prompt")
    parser.add_argument("--long", type=int, default=400, help="tokens of an answer that is interrupted")
    args = parser.parse_args()
    args.kvant, args.model = args.kvant.resolve(), args.model.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    args.python = venv(args.work / "dynamo", NEEDS, alone=ALONE)
    fleet = Fleet(args)
    tokenizer = pathlib.Path(__file__).with_name("tokenizer.py")
    subprocess.run([args.python, tokenizer, args.model, fleet.model], check=True)
    first, second, third = (fleet.kvant(f"kvant-{i}") for i in range(3))
    for kvant in (first, second, third):
        wait_for(kvant.name, kvant.is_ready)
    fleet.join(first)
    fleet.join(second)
    texts = Texts(first)
    print(f"Dynamo {VERSION}, {args.model.name}, {os.cpu_count()} cores", flush=True)
    frontend = routing(fleet, texts)
    follow_ups(fleet, texts, frontend)
    cancellation(fleet, texts, frontend)
    migration(fleet, texts, frontend, third)
    scaling(fleet, texts, frontend, third)
    drain(fleet, texts, frontend, third)


if __name__ == "__main__":
    main()
