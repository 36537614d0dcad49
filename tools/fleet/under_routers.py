"""Runs two `kvant serve` behind vLLM's router and behind SMG on this machine, and checks where requests
go.

    cargo build --release -p kvant-cli --features grpc,kv-events
    python3 tools/fleet/under_routers.py --kvant target/release/kvant [--model smollm2.gguf]

Both routers, unchanged, come from PyPI (`vllm-router`, `smg`) and are installed into folders of their
own (`--work`). vLLM's router drives the workers by gRPC and follows their KV events, which it asks them
for (`kv_aware`); over HTTP both guess from what they have sent where (`cache_aware`). Prints a line per
check with its figures, and fails with the first that does not hold. The repository builds and passes
its tests without it.
"""

from concurrent.futures import ThreadPoolExecutor

from fleet import N_PROMPTS, Kvant, Program, Texts, WarmPrompts
from fleet import arguments, check, free_port, get, post, tokenizer_folder, venv, wait_for

ROUTER, SMG = "vllm-router==0.1.17", "smg==1.13.0"


class Routers:
    """Two workers, and routers before them, one at a time."""

    def __init__(self, args):
        self.args, self.model = args, str(args.work / "model")
        self.python = {"vllm-router": venv(args.work / "vllm-router", [ROUTER, "gguf"]), "smg": venv(args.work / "smg", [SMG])}
        tokenizer_folder(self.python["vllm-router"], args.model, self.model)
        events = ["--kv-events", "tcp://*:{events}", "--kv-events-replay", "tcp://*:{replay}"]
        options = ["--alias", self.model, "--grpc", "127.0.0.1:{grpc}", *events]
        self.workers = [Kvant(args, f"kvant-{i}", *options) for i in range(2)]
        for worker in self.workers:
            wait_for(worker.name, worker.is_ready)

    def start(self, name, policy, scheme):
        """Starts a router before the workers, and waits until it serves their model."""
        port = free_port()
        urls = [f"{scheme}://127.0.0.1:{worker.ports['grpc' if scheme == 'grpc' else 'http']}" for worker in self.workers]
        command = [self.python[name].with_name(name), *(["launch"] if name == "smg" else [])]
        command += ["--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port(), "--policy", policy]
        log = self.args.work / f"{name}-{policy}-{scheme}.log"
        router = Program(name, [*command, "--worker-urls", *urls], log)
        router.url = f"http://127.0.0.1:{port}"
        wait_for(f"the model at {name}", lambda: get(router.url, "/v1/models")["data"])
        return router

    def post(self, router, prompt):
        """Returns the answer to a prompt."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        return post(router.url, "/v1/completions", body)

    def ask(self, router, prompt):
        """Returns the text of the answer."""
        return self.post(router, prompt)["choices"][0]["text"]


def exact(routers, texts):
    """vLLM's router by gRPC: workers have computed prompts that it has not seen."""
    router = routers.start("vllm-router", "kv_aware", "grpc")
    prompts = WarmPrompts(routers.workers, texts, routers.args.prompt)
    found = prompts.n_found(lambda prompt: routers.ask(router, prompt), texts)
    figures = f"{found} of {N_PROMPTS}, {prompts.share:.0%} of the prompts cached"
    check("vLLM's router, gRPC, kv_aware: to the holder of the prefix", found == N_PROMPTS, figures)
    prompt = texts.take(100)
    direct = routers.workers[0]
    same = routers.ask(router, prompt) == routers.ask(direct, prompt)
    check("vLLM's router, gRPC: the answer of one process", same, "equal texts" if same else "texts differ")
    router.kill()
    other = routers.start("vllm-router", "round_robin", "grpc")
    found = prompts.n_found(lambda prompt: routers.ask(other, prompt), texts)
    other.kill()
    check("vLLM's router, gRPC, round_robin: the same", found <= 13, f"{found} of {N_PROMPTS}")


def approximate(routers, texts, name):
    """A router by HTTP: prompts that it has spread over the workers return to where they are cached."""
    router = routers.start(name, "cache_aware", "http")
    workers = routers.workers
    prompts = [workers[0].text(texts.take(routers.args.prompt // 2)) for _ in range(N_PROMPTS // 2)]
    before = [worker.n_answered() for worker in workers]
    with ThreadPoolExecutor(len(prompts)) as clients:
        list(clients.map(lambda prompt: routers.ask(router, prompt), prompts))
    spread = [worker.n_answered() - n for worker, n in zip(workers, before)]
    shares = [cached_share(routers.post(router, prompt + " And then")) for prompt in prompts]
    router.kill()
    found = sum(share > 0.9 for share in shares)
    figures = f"{found} of {len(prompts)} found their prompt cached, {spread[0]:.0f} and {spread[1]:.0f} at the workers"
    check(f"{name}, HTTP, cache_aware: follow-ups", found == len(prompts) and all(spread), figures)


def cached_share(answer):
    """Returns the share of the prompt that was in the prefix cache."""
    usage = answer["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]


def main():
    routers = Routers(arguments(__doc__).parse_args())
    texts = Texts(routers.workers[0])
    print(f"{ROUTER}, {SMG}, {routers.args.model.name}", flush=True)
    exact(routers, texts)
    approximate(routers, texts, "vllm-router")
    approximate(routers, texts, "smg")


if __name__ == "__main__":
    main()
