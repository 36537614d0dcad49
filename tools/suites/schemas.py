"""Tests structured output of a server with the JSON Schema test suite: finished answers must be
valid, and unsupported schemas must be rejected with the keyword.

    kvant serve --port 8080 &
    python3 tools/suites/schemas.py http://127.0.0.1:8080 [--draft draft2020-12] [--seeds 2] [--as answer|required|auto]

Each schema is requested at a high temperature with several seeds, so that the output explores all
that the schema permits: as the format of the answer, or of a tool's arguments, with a required or
automatic tool choice. Unenforced keywords of an automatic tool are listed in `warnings`, and its
call need not be valid; a rejection names the tool. The suite is in the source package of jsonschema
on PyPI, which also validates; both are installed into their own folder (`--folder`). The repository
builds and passes its tests without it.
"""

import argparse
import collections
import concurrent.futures
import json
import pathlib
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request


def run(*args):
    subprocess.run([str(arg) for arg in args], check=True)


def prepared(folder):
    """Restarts this script in a Python with its packages, and returns the folder of the suite."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "schemas/bin/python"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder / "schemas")
        run(python, "-m", "pip", "install", "--quiet", "jsonschema")
        run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema", "-d", folder, "jsonschema")
        with tarfile.open(next(folder.glob("jsonschema-*.tar.gz"))) as source:
            source.extractall(folder, filter="data")
    if pathlib.Path(sys.prefix).resolve() != (folder / "schemas").resolve():
        sys.exit(subprocess.run([str(python), *sys.argv], check=False).returncode)
    return next(path for path in folder.glob("jsonschema-*") if path.is_dir()) / "json/tests"


TOOL = "write"


def within(schema):
    """Returns a schema of arguments with a value of this schema."""
    schema = {key: value for key, value in schema.items() if key != "$schema"} if isinstance(schema, dict) else schema
    return {"type": "object", "properties": {"value": schema}, "required": ["value"], "additionalProperties": False}


def generate(url, schema, seed, way):
    """Returns finish reason and answer: `stop` requires validity; or `refused` and the error."""
    if way == "answer":
        more = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    else:
        tool = {"type": "function", "function": {"name": TOOL, "parameters": schema}}
        more = {"tools": [tool], "tool_choice": way, "parallel_tool_calls": False}
    question = "Write some JSON." if way == "answer" else f"Call the tool {TOOL} with any arguments."
    body = {
        "messages": [{"role": "user", "content": question}],
        # The template needs a tool call; long texts must end.
        "temperature": 1.5 if way == "answer" else 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": seed,
        "max_tokens": 200,
        **more,
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=900) as answer:
            answer = json.load(answer)
    except urllib.error.HTTPError as error:
        message = json.load(error)["error"]["message"]
        is_named = way == "answer" or TOOL in message
        return ("refused" if error.code == 400 and is_named else f"status {error.code}"), message
    choice = answer["choices"][0]
    if way == "answer":
        return choice["finish_reason"], choice["message"]["content"]
    calls = choice["message"].get("tool_calls") or []
    if not calls:
        return "no call", choice["message"]["content"]
    if choice["finish_reason"] != "tool_calls":
        return choice["finish_reason"], calls[0]["function"]["arguments"]
    is_held = not answer.get("warnings")
    return ("stop" if is_held else "held in part"), calls[0]["function"]["arguments"]


def is_valid(validator, text):
    try:
        return validator.is_valid(json.loads(text))
    except ValueError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of the server")
    parser.add_argument("--draft", default="draft2020-12")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tools", type=pathlib.Path, help="file with a list of tools in the format of MCP's tools/list, instead of the suite")
    parser.add_argument("--as", dest="way", choices=["answer", "required", "auto"], default="answer")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/kvant-suites"))
    args = parser.parse_args()
    suite = prepared(args.folder)
    import jsonschema

    kind = jsonschema.validators.validator_for({"$schema": f"https://json-schema.org/{args.draft.replace('draft', 'draft/')}/schema"})
    cases = []
    if args.tools:
        cases = [("tool", tool["name"], tool.get("inputSchema", tool.get("parameters"))) for tool in json.loads(args.tools.read_text())]
    else:
        for file in sorted((suite / args.draft).glob("*.json")):
            cases += [(file.stem, case["description"], case["schema"]) for case in json.loads(file.read_text())]
        if args.way != "answer":
            # References are relative to the whole schema.
            cases = [(keyword, name, within(schema)) for keyword, name, schema in cases if "Ref" not in json.dumps(schema) and "$ref" not in json.dumps(schema)]
    outcomes, refused, wrong = collections.Counter(), collections.Counter(), []

    def tried(case):
        return [generate(args.url, case[2], seed, args.way) for seed in range(args.seeds)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for (keyword, name, schema), answers in zip(cases, pool.map(tried, cases)):
            for outcome, text in answers:
                outcomes[outcome] += 1
                text = text or ""
                if outcome == "refused":
                    refused[keyword] += 1
                elif outcome.startswith("status") or (outcome == "stop" and not is_valid(kind(schema), text)):
                    wrong.append((keyword, name, text))
    print(f"{len(cases)} schemas of {args.draft} as {args.way}, {args.seeds} answers each:", *(f"{n} {o}," for o, n in outcomes.most_common()))
    print("refused:", ", ".join(f"{keyword} {n}" for keyword, n in refused.most_common()))
    for keyword, name, text in wrong:
        print(f"  WRONG {keyword}: {name}: {text[:200]!r}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
