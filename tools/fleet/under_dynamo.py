"""Runs `kvant serve` as the workers of NVIDIA Dynamo on this machine, and checks routing by KV events,
migration, cancellation, drain and scaling.

    cargo build --release -p kvant-cli --features grpc,kv-events
    python3 tools/fleet/under_dynamo.py --kvant target/release/kvant [--model smollm2.gguf]

Dynamo's frontend and its own sidecar for vLLM, both unchanged, come from PyPI (`ai-dynamo`) and are
installed into a folder of their own (`--work`). Discovery is a folder, requests go over TCP, events
over ZeroMQ: no etcd, no NATS, no GPU. Prints a line per check with its figures, and fails with the
first that does not hold. The repository builds and passes its tests without it.
"""

import os
import random
import shutil
import signal
import statistics
import threading
import time

from fleet import N_PROMPTS, Kvant, Program, Stream, Texts, WarmPrompts
from fleet import answered_by, arguments, check, free_port, get, post, tokenizer_folder, venv, wait_for

VERSION = "1.6.1"
# What the frontend, the sidecar and `tokenizer.py` import.
NEEDS = ["pydantic", "uvloop", "pyzmq", "msgspec", "prometheus-client", "packaging", "pyyaml", "gguf"]
ALONE = [f"ai-dynamo=={VERSION}", f"ai-dynamo-runtime=={VERSION}"]

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
            # After SIGTERM a sidecar waits so long for running answers, and cuts off the rest.
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "40",
            "HF_HUB_OFFLINE": "1",
        }

    def program(self, name, module, *options):
        command = [self.args.python, "-m", module, *options]
        return Program(name, command, self.args.work / f"{name}.log", self.environment)

    def kvant(self, name):
        """Starts a server that no router knows yet."""
        events = ["--kv-events", "tcp://*:{events}", "--kv-events-replay", "tcp://*:{replay}"]
        return Kvant(self.args, name, "--alias", self.model, "--grpc", "127.0.0.1:{grpc}", *events)

    def join(self, kvant):
        """Starts the sidecar of a server, which registers it as a worker."""
        endpoint = ["--grpc-endpoint", f"127.0.0.1:{kvant.ports['grpc']}"]
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


def routing(fleet, texts):
    """Workers have computed prompts that no frontend has seen: only events tell who has which."""
    frontend = fleet.frontend("frontend-kv", "--router-mode", "kv")
    prompts = WarmPrompts(fleet.workers, texts, fleet.args.prompt)

    def n_found(url):
        return prompts.n_found(lambda prompt: fleet.ask(url, prompt, 4), texts)

    found, share = n_found(frontend.url), prompts.share
    check("to the holder of the prefix", found == N_PROMPTS, f"{found} of {N_PROMPTS}, {share:.0%} of the prompts cached")
    blind = fleet.frontend("frontend-blind", "--router-mode", "kv", "--no-router-kv-events")
    found = n_found(blind.url)
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
    parser = arguments(__doc__)
    parser.add_argument("--long", type=int, default=400, help="tokens of an answer that is interrupted")
    args = parser.parse_args()
    args.python = venv(args.work / "dynamo", NEEDS, alone=ALONE)
    fleet = Fleet(args)
    tokenizer_folder(args.python, args.model, fleet.model)
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
