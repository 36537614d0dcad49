"""Runs LangChain's tests for chat models against a server, through its OpenAI client.

    kvant serve model.gguf --port 8080 &
    python3 tools/suites/langchain.py http://127.0.0.1:8080

Some of the tests require a capable model (a voluntary tool call, a copied emoji): with a small
model those fail because of its output, and the report explains that. Packages are installed from
PyPI into their own folder (`--folder`). The repository builds and passes its tests without it.
"""

import argparse
import collections
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as xml

NEEDS = ["pytest", "pytest-asyncio", "pytest-socket", "pytest-timeout", "langchain-openai", "langchain-tests"]

TESTS = '''
import os
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestKvant(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    chat_model_params = {
        "model": os.environ["KVANT_SUITE_NAME"],
        "base_url": os.environ["KVANT_SUITE_URL"] + "/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 200,
        "stream_usage": True,
    }
    supports_json_mode = True
'''

# Errors that the model causes, or that concern an absent feature.
KNOWN = [
    (r"LengthFinishReasonError|length limit", "the model does not end within its tokens"),
    (r"where \[\] = |tool call|tool_calls|test_agent_loop|isinstance\(None", "the model makes no call, or does not end it"),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of the server")
    parser.add_argument("--name", default="any", help="the model's name")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/kvant-suites"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    python = args.folder / "langchain/bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(args.folder / "langchain")], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *NEEDS], check=True)
    tests, report = args.folder / "test_langchain.py", args.folder / "langchain.xml"
    tests.write_text(TESTS, encoding="utf-8")
    environment = {**os.environ, "KVANT_SUITE_URL": args.url.rstrip("/"), "KVANT_SUITE_NAME": args.name}
    # One event loop for all tests: clients keep their connections between tests.
    loops = [f"asyncio_default_{what}_loop_scope=session" for what in ("test", "fixture")]
    options = [part for option in ["asyncio_mode=auto", *loops] for part in ("-o", option)]
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "--timeout=180", f"--junitxml={report}", tests]
    subprocess.run([str(arg) for arg in pytest], env=environment, stdout=subprocess.DEVNULL, check=False)
    outcomes, reasons, unknown = collections.Counter(), collections.defaultdict(list), 0
    for case in xml.parse(report).iter("testcase"):
        found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if found is None else found.tag
        outcomes[outcome] += 1
        if outcome in ("failure", "error"):
            line = (found.get("message") or "").strip().splitlines()[0]
            why = next((why for mark, why in KNOWN if re.search(mark, found.text or line)), None)
            unknown += why is None
            reasons[why or f"UNKNOWN: {line}"].append(case.get("name"))
    print("langchain:", ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common()))
    for why, names in reasons.items():
        print(f"  {len(names)} failed: {why}: {', '.join(names)}")
    sys.exit(1 if unknown else 0)


if __name__ == "__main__":
    main()
