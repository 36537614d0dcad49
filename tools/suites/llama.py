"""Runs the tests of llama.cpp's server against `kvant serve`, and lists failures and skipped tests
with their reasons.

    cargo build -p kvant-cli
    python3 tools/suites/llama.py --kvant target/debug/kvant --model model.gguf [--rival LLAMA_SERVER]

The tests are in llama.cpp's source, which the source package of llama-cpp-python on PyPI contains;
it and the packages of the tests are installed into their own folder (`--folder`, or `--tests` for
existing tests). They are written for a small model of the hub. Here they run on any model: with
`--rival`, llama.cpp's own server runs each test first to learn its token counts on that model;
without, any count is accepted. Expected words of the small model are not compared, only required to
be non-empty. The repository builds and passes its tests without it.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as xml

NEEDS = ["scikit-build-core", "pytest", "pytest-timeout", "requests", "openai", "wget", "filelock", "aiohttp", "numpy", "prometheus-client"]

# Skipped tests, by the name of their file, with the reason.
LEFT_OUT = {
    "test_vision_api": "no images",
    "test_mcp_servers": "no server-side tools",
    "test_tools_builtin": "no server-side tools",
    "test_proxy": "no proxy",
    "test_router": "other models are named by --also, not by a folder",
    "test_stream": "streams cannot be resumed",
    "test_rerank": "its model has bidirectional attention",
    "test_lora": "its adapter belongs to a small model of the hub, and changes experts",
    "test_speculative": "no speculative decoding in the server",
    "test_sleep": "no sleep",
    "test_slot_save": "no slots: --kv-disk stores conversations by their content",
    "test_kv_keep_only_active": "no slots",
    "test_compat_gcp": "not supported",
}

# Flags of llama-server with a value, and their names here; None if they have no effect.
VALUES = {
    "--port": "--port",
    "--host": "--host",
    "--temp": "--temp",
    "--seed": "--seed",
    "--alias": "--alias",
    "--parallel": "--parallel",
    "--ctx-size": "-c",
    "--api-key": "--api-key",
    "--model": "--model",
    "--chat-template": "--chat-template",
    "--chat-template-file": "--chat-template",
    "--batch-size": None,
    "--ubatch-size": None,
    "--n-predict": None,
    "--reasoning-format": None,
    "--reasoning": "--think",
    "--threads": None,
    "--pooling": "--pooling",
    "-fa": "-fa",
}
SWITCHES = {"--offline", "--no-slots", "--slots", "--metrics", "--jinja", "--no-jinja", "--verbose", "--kv-unified", "--cont-batching", "--embedding"}
# Exit code of the stand-in for unsupported flags.
ABSENT = 77

# Known failures: a pattern of the test's name or message, and its explanation.
SHORT = "the model ends its answer before the expected length"
KNOWN = [
    (r"test_server_slots|test_metrics_disabled", "endpoints that llama-server must enable are always enabled"),
    (r"test_access_static_assets", "the page is one file"),
    (r"test_chat_completion_cached_tokens|test_completion_prompt_cache|test_embedding_usage", "token counts of one model"),
    (r"test_nocache_long_input|test_ctx_shift_disabled_long", "the prompt has fewer tokens with this model, and fits"),
    (r"test_completion_unified|test_completion_parallel_slots|'stop' == 'length'", SHORT),
    (r"test_chat_completion\[.*(length-False|length-True|chatml)|test_ctx_shift_disabled_short", SHORT),
    (r"'<s> I believ|test_tokenize_with_bos", "the first token of one model"),
    (r"test_completion_with_response_format.*3000", "a schema that names no type lets any value pass"),
    (r"test_embedding_mixed_input\[-", "an empty text has no token with this model"),
    (r"'too large' in", "the error of a long input has another wording"),
    (r"test_cors_options", "no page may send requests unless --cors-origin names it; no cookies, no DELETE"),
    (r"Process-Start-Time-Unix", "not in the headers of /metrics"),
    (r"__verbose", "prompts are not repeated in answers: /apply-template returns them"),
    (r"model_path", "paths of the server are not exposed"),
    (r"test_server_multiple_addresses", "one address"),
    (r"test_invalid_chat_completion_req\[messages7\]", "two assistant messages in a row are left to the template"),
    (r"test_ignore_eos_populates", "an end token is generated and ignored, not excluded"),
    (r"test_return_progress", "the scheduler determines the size of prefill chunks"),
    (r"continue_final_message", "no assistant prefill by the client"),
    (r"test_infill_with", "the model has no fill-in-the-middle tokens"),
    (r"test_date_inside_prompt", "the template needs a date, which llama-server provides"),
    (r"400 == 500", "an image is a client error (400), not a server error (500)"),
    (r"test_anthropic_empty_messages", "a conversation without messages is rejected"),
    (r"test_anthropic_thinking_history", "the model's template does not render reasoning"),
    (r"test_responses_stream_with_llama_telemetry", "no progress and no times in /v1/responses"),
]


def as_server(args):
    """Stands in for llama-server: translates its flags to those of `kvant serve`."""
    options, at = {}, 0
    while at < len(args):
        flag = args[at]
        if flag == "--reasoning":
            # llama-server enables reasoning unless it is off.
            options[flag], at = "off" if args[at + 1] == "off" else "on", at + 2
        elif flag == "--pooling" and args[at + 1] not in ("mean", "last"):
            absent(f"{flag} {args[at + 1]}")
        elif flag in SWITCHES:
            options[flag], at = True, at + 1
        elif flag in VALUES:
            options[flag], at = args[at + 1], at + 2
        else:
            absent(f"{flag} {args[at + 1] if at + 1 < len(args) else ''}".strip())
    n_parallel = int(options.get("--parallel", 1))
    if "--ctx-size" in options and "--kv-unified" not in options:
        # Per conversation here, for all together in llama-server.
        options["--ctx-size"] = str(int(options["--ctx-size"]) // n_parallel)
    template = options.get("--chat-template")
    if template and template not in ("chatml", "llama3", "gemma", "mistral", "phi3"):
        if re.fullmatch(r"[\w-]+", template):
            absent(f"the chat template {template} by its name")
        with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as file:
            file.write(template)
        options["--chat-template"] = file.name
    mapped = [[VALUES[flag], str(value)] for flag, value in options.items() if VALUES.get(flag)]
    kvant = os.environ["KVANT_SUITE_BINARY"]
    os.execv(kvant, [kvant, "serve", "--device", "cpu", *sum(mapped, [])])


def absent(what):
    pathlib.Path(os.environ["KVANT_SUITE_REASON"]).write_text(what, encoding="utf-8")
    sys.exit(ABSENT)


def run(*args, **more):
    return subprocess.run([str(arg) for arg in args], check=True, **more)


def prepared(folder: pathlib.Path, tests: pathlib.Path | None):
    """Returns a Python with the packages of the tests, and the tests."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "llama/bin/python"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder / "llama")
        run(python, "-m", "pip", "install", "--quiet", *NEEDS)
    if tests is None:
        if not list(folder.glob("llama_cpp_python-*.tar.gz")):
            run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", folder, "llama-cpp-python")
        archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
        source = folder / archive.name.removesuffix(".tar.gz")
        if not source.exists():
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
        tests = source / "vendor/llama.cpp/tools/server/tests"
    return python, tests


def tried(python, tests, environment, learned, mode, choice):
    """Returns outcome and message of each test."""
    report = pathlib.Path(environment["KVANT_SUITE_REASON"]).with_suffix(f".{mode}.xml")
    files = sorted(path for path in tests.glob("unit/test_*.py") if path.stem not in LEFT_OUT)
    own = {**environment, "KVANT_SUITE_LEARNED": str(learned), "KVANT_SUITE_MODE": mode}
    arguments = ["-q", "-o", "addopts=", "-m", "not slow", "-p", "llama_plugin", "--timeout=180", f"--junitxml={report}"]
    arguments += ["-k", choice] if choice else []
    command = [str(python), "-m", "pytest", *arguments, *map(str, files)]
    with open(report.with_suffix(".log"), "w", encoding="utf-8") as log:
        subprocess.run(command, cwd=tests, env=own, stdout=log, stderr=subprocess.STDOUT, check=False)
    outcomes = {}
    for case in xml.parse(report).iter("testcase"):
        name = f"{case.get('classname').split('.')[-1]}::{case.get('name')}"
        found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        text = "" if found is None else (found.get("message") or found.text or "")
        outcomes[name] = ("passed" if found is None else found.tag, text)
    return outcomes


def main():
    if sys.argv[1:2] == ["--as-server"]:
        as_server(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvant", required=True, type=pathlib.Path, help="the program")
    parser.add_argument("--model", required=True, type=pathlib.Path, help="a GGUF file")
    parser.add_argument("--rival", type=pathlib.Path, help="llama.cpp's server, to learn token counts")
    parser.add_argument("--tests", type=pathlib.Path, help="tools/server/tests of llama.cpp")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/kvant-suites"))
    parser.add_argument("-k", dest="choice", help="only tests whose name matches")
    args = parser.parse_args()
    python, tests = prepared(args.folder, args.tests)
    stand_in = args.folder / "llama-server"
    stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{pathlib.Path(__file__).resolve()}" --as-server "$@"\n')
    stand_in.chmod(0o755)
    learned = args.folder / "learned.json"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{pathlib.Path(__file__).resolve().parent}{os.pathsep}{tests}",
        "KVANT_SUITE_BINARY": str(args.kvant.resolve()),
        "KVANT_SUITE_MODEL": str(args.model.resolve()),
        "KVANT_SUITE_REASON": str(args.folder / "reason"),
    }
    if args.rival:
        learned.unlink(missing_ok=True)
        theirs = {**environment, "LLAMA_SERVER_BIN_PATH": str(args.rival.resolve())}
        outcomes = tried(python, tests, theirs, learned, "learn", args.choice)
        print("llama-server:", *(f"{n} {what}" for what, n in collections.Counter(o for o, _ in outcomes.values()).items()))
        failed_there = {name for name, (outcome, _) in outcomes.items() if outcome in ("failure", "error")}
    else:
        failed_there = set()
    ours = {**environment, "LLAMA_SERVER_BIN_PATH": str(stand_in)}
    outcomes = tried(python, tests, ours, learned, "check", args.choice)
    reasons, unknown = collections.defaultdict(list), 0
    for name, (outcome, text) in outcomes.items():
        if outcome == "passed":
            continue
        line = text.strip().splitlines()[0] if text.strip() else ""
        why = next((why for mark, why in KNOWN if re.search(mark, name) or re.search(mark, line)), None)
        if outcome == "skipped":
            why = line
        elif name in failed_there and why is None:
            why = "fails with llama-server on this model too"
        elif why is None:
            why, unknown = f"UNKNOWN: {line}", unknown + 1
        reasons[("left out" if outcome == "skipped" else "failed", why)].append(name)
    n_passed = sum(outcome == "passed" for outcome, _ in outcomes.values())
    print(f"kvant: {n_passed} of {len(outcomes)} passed")
    for (outcome, why), names in sorted(reasons.items()):
        print(f"  {len(names)} {outcome}: {why}")
        print("".join(f"      {name}\n" for name in names), end="")
    for file, why in LEFT_OUT.items():
        print(f"  all of {file} left out: {why}")
    sys.exit(1 if unknown else 0)


if __name__ == "__main__":
    main()
