"""Prefills a prompt on one `kvant serve` and decodes on another, on this machine, and checks tokens,
bytes and what happens when the prefill worker dies or stalls.

    cargo build --release -p kvant-cli
    python3 tools/fleet/prefill_decode.py --kvant target/release/kvant [--model smollm2.gguf --prompt 8192]

What a router does between them (`kv_transfer_params`) is done here by hand. Prints a line per check with
its figures, and fails with the first that does not hold.
"""

import os
import signal
import time

from fleet import Kvant, Texts, arguments, check, get, post, wait_for

N_TOKENS = 64
KV = ["-ctk", "turbo3", "-ctv", "turbo3"]
MAX_SHARE = 0.22  # Of the bytes of f16.


def ask(kvant, prompt, n, params=None):
    """Returns the answer to a prompt, and the seconds until it was there."""
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    start = time.perf_counter()
    answer = post(kvant.url, "/v1/completions", {**body, "kv_transfer_params": params})
    return answer, time.perf_counter() - start


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def prefill(kvant, prompt):
    """Has a prompt read, and returns the parameters for the decode worker."""
    answer, seconds = ask(kvant, prompt, 1, {"do_remote_decode": True})
    return answer["kv_transfer_params"], seconds


def transfer(prefill_worker, decode_worker, alone, prompt):
    """A prompt goes through both workers: tokens as of one, in few bytes."""
    expected, _ = ask(alone, prompt, N_TOKENS)
    params, prefilled = prefill(prefill_worker, prompt)
    before = decode_worker.metric("kvant:kv_fetched_bytes_total")
    answer, seconds = ask(decode_worker, prompt, N_TOKENS, params)
    same = tokens(answer) == tokens(expected)
    figures = f"{len(prompt)} tokens, {cached(answer)} from the fetched cache; prefill {prefilled:.1f} s, rest {seconds:.1f} s"
    check("tokens of one process", same and cached(answer) + 512 > len(prompt), figures)
    moved = decode_worker.metric("kvant:kv_fetched_bytes_total") - before
    kv = get(decode_worker.url, "/kv")
    f16 = kv["idle_bytes_f16"] * len(prompt) / (len(prompt) + N_TOKENS - 1)
    share = moved / f16
    check("bytes moved", share <= MAX_SHARE, f"{moved / 1e6:.1f} MB, {share:.3f} of f16's {f16 / 1e6:.1f} MB")
    wait_for("a released cache", lambda: get(prefill_worker.url, "/kv")["transfer_bytes"] == 0)


def failure(name, prefill_worker, decode_worker, alone, prompt, end):
    """The prefill worker ends by `end` before its cache is fetched: the answer comes, and a line says so."""
    expected, _ = ask(alone, prompt, N_TOKENS)
    params, _ = prefill(prefill_worker, prompt)
    end(prefill_worker)
    before = decode_worker.metric("kvant:kv_fetch_failures_total")
    answer, seconds = ask(decode_worker, prompt, N_TOKENS, params)
    n_failed = decode_worker.metric("kvant:kv_fetch_failures_total") - before
    n_lines = decode_worker.log.read_text().count("a cache cannot be fetched")
    holds = tokens(answer) == tokens(expected) and cached(answer) == 0 and n_failed == 1
    check(name, holds and n_lines == before + 1, f"answered in {seconds:.1f} s, {n_lines} lines in the log")


def main():
    args = arguments(__doc__).parse_args()
    size = ["-c", str(args.prompt + N_TOKENS + 8), *KV]
    prefill_worker = Kvant(args, "prefill", "--kv-transfer", "1G", *size)
    decode_worker = Kvant(args, "decode", "--kv-peer", "127.0.0.1", *size)
    alone = Kvant(args, "alone", *size)
    for kvant in (prefill_worker, decode_worker, alone):
        wait_for(kvant.name, kvant.is_ready)
    texts = Texts(alone)
    print(f"{args.model.name}, {os.cpu_count()} cores", flush=True)
    transfer(prefill_worker, decode_worker, alone, texts.take(args.prompt))
    few = min(args.prompt, 1024)
    stall = lambda kvant: kvant.process.send_signal(signal.SIGSTOP)
    failure("a peer that stalls", prefill_worker, decode_worker, alone, texts.take(few), stall)
    prefill_worker.process.send_signal(signal.SIGCONT)
    failure("a peer that was killed", prefill_worker, decode_worker, alone, texts.take(few), Kvant.kill)


if __name__ == "__main__":
    main()
