"""Runs the tests of OpenAI's and Anthropic's Python clients against a server, and explains
failures.

    kvant serve --port 8080 &
    python3 tools/suites/sdks.py http://127.0.0.1:8080

The tests are in the clients' source packages on PyPI; they and their packages are installed into
their own folder (`--folder`). The repository builds and passes its tests without it.
"""

import argparse
import collections
import pathlib
import re
import subprocess
import sys
import tarfile

NEEDS = ["pytest", "pytest-asyncio", "respx", "rich", "inline_snapshot", "http_snapshot", "openai", "anthropic"]

# Client, suffix of its base URL, its tests, and the selection of relevant ones.
SUITES = [
    (
        "openai",
        "/v1",
        ["chat", "test_completions.py", "test_models.py", "test_embeddings.py", "responses", "test_responses.py"],
        "(create or list or retrieve) and strict and not Async and not sync_client",
    ),
    ("anthropic", "", ["test_messages.py"], "not Async and not batches"),
]

# Known failures: a pattern of the error, and its explanation.
KNOWN = [
    (r"404 - there is no /v1/(responses|chat/completions)/", "no answer is stored here"),
    (r"405 - /v1/chat/completions does not take GET", "no answer is stored here"),
    (r"404 - there is no model", "it requests a model of OpenAI by name"),
    (r"input: expected", "it requests a response without input"),
    (r"previous_response_id", "no answer is stored here"),
    (r"CreateEmbeddingResponse|Data returned by API invalid", "under strict validation, the base64 that the client requests is not a list of numbers"),
    (r"suffix: expected nothing", "/infill is the fill-in-the-middle endpoint"),
    (r"audio: expected nothing", "answers are text"),
    (r"truncation: expected disabled", "no context is truncated"),
    (r"container: expected nothing", "the server runs no containers"),
]


def run(*args, **more):
    return subprocess.run([str(arg) for arg in args], check=True, **more)


def prepared(folder: pathlib.Path) -> pathlib.Path:
    """Returns a Python with the packages of the tests, and their sources."""
    python = folder / "venv/bin/python"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder / "venv")
        run(python, "-m", "pip", "install", "--quiet", *NEEDS)
        clients = [client for client, *_ in SUITES]
        run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "-d", folder, *clients)
        for archive in folder.glob("*.tar.gz"):
            with tarfile.open(archive) as source:
                source.extractall(folder, filter="data")
    return python


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of the server")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/kvant-suites"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    python = prepared(args.folder)
    unknown = 0
    for client, path, tests, choice in SUITES:
        source = next(folder for folder in args.folder.glob(f"{client}-*") if folder.is_dir())
        paths = [f"tests/api_resources/{test}" for test in tests]
        pytest = [python, "-m", "pytest", "-q", "-o", "addopts=", "-k", choice, *paths]
        environment = {"TEST_API_BASE_URL": args.url.rstrip("/") + path, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [str(arg) for arg in pytest], cwd=source, env=environment, capture_output=True, text=True, check=False
        )
        print(f"{client}: {done.stdout.strip().splitlines()[-1]}")
        reasons = collections.Counter()
        for line in re.findall(r"^E +(\S.*(?:Error|Exception).*)$", done.stdout, re.MULTILINE):
            why = next((why for mark, why in KNOWN if re.search(mark, line)), None)
            unknown += why is None
            reasons[why or f"UNKNOWN: {line}"] += 1
        for why, n in reasons.most_common():
            print(f"  {n} failed: {why}")
    sys.exit(1 if unknown else 0)


if __name__ == "__main__":
    main()
