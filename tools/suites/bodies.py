"""Sends generated request bodies (schemathesis), valid and invalid ones, for minutes: no response
may be a server error (5xx).

    kvant serve --port 8080 &
    python3 tools/suites/bodies.py --minutes 10 http://127.0.0.1:8080

The schemas of requests are written below, for the endpoints that accept bodies. schemathesis is
installed from PyPI into its own folder. The repository builds and passes its tests without it.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

TEXT = {"type": "string", "maxLength": 60}
FEW = {"type": "integer", "minimum": 1, "maximum": 4}
PROBABILITY = {"type": "number", "minimum": 0, "maximum": 1}
ANYTHING = {"type": "object", "maxProperties": 4}


def listed(item, max_items=3):
    return {"type": "array", "items": item, "maxItems": max_items}


def fields(required, **properties):
    return {"type": "object", "required": required, "properties": properties}


MESSAGE = fields(["role", "content"], role={"enum": ["system", "developer", "user", "assistant", "tool"]}, content=TEXT)
TOOL = fields(
    ["type", "function"], type={"const": "function"}, function=fields(["name"], name=TEXT, description=TEXT, parameters=ANYTHING)
)
FORM = fields(["type"], type={"enum": ["text", "json_object", "json_schema"]}, json_schema=fields(["name"], name=TEXT, schema=ANYTHING))
SAMPLING = {
    "stream": {"type": "boolean"},
    "n": {"type": "integer", "minimum": 1, "maximum": 2},
    "seed": {"type": "integer"},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": PROBABILITY,
    "min_p": PROBABILITY,
    "top_k": {"type": "integer", "minimum": 0},
    "stop": {"anyOf": [TEXT, listed(TEXT)]},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}, "maxProperties": 3},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "response_format": FORM,
    "grammar": TEXT,
    "kv_type": TEXT,
}
TOKENS = listed({"type": "integer", "minimum": 0, "maximum": 2000}, 8)
PROMPT = {"anyOf": [TEXT, TOKENS, listed(TEXT)]}
BODIES = {
    "/v1/chat/completions": fields(
        ["messages", "max_tokens"], messages=listed(MESSAGE), max_tokens=FEW, tools=listed(TOOL, 2), tool_choice=TEXT, logprobs={"type": "boolean"}, **SAMPLING
    ),
    "/v1/completions": fields(["prompt", "max_tokens"], prompt=PROMPT, max_tokens=FEW, echo={"type": "boolean"}, logprobs=FEW, **SAMPLING),
    "/v1/responses": fields(["input", "max_output_tokens"], input={"anyOf": [TEXT, listed(MESSAGE)]}, instructions=TEXT, max_output_tokens=FEW),
    "/v1/messages": fields(["messages", "max_tokens"], messages=listed(MESSAGE), system=TEXT, max_tokens=FEW, tools=listed(ANYTHING)),
    "/v1/messages/count_tokens": fields(["messages"], messages=listed(MESSAGE), system=TEXT),
    "/v1/embeddings": fields(["input"], input=PROMPT, dimensions={"type": "integer"}, encoding_format={"enum": ["float", "base64"]}, kv_type=TEXT),
    "/embedding": fields(["content"], content=PROMPT, embd_normalize={"type": "integer", "minimum": -1, "maximum": 2}),
    "/api/embed": fields(["input"], input=PROMPT),
    "/completion": fields(["prompt", "n_predict"], prompt=PROMPT, n_predict=FEW, n_probs=FEW, **SAMPLING),
    "/api/chat": fields(["messages", "options"], messages=listed(MESSAGE), options=fields(["num_predict"], num_predict=FEW)),
    "/api/generate": fields(["prompt", "options"], prompt=TEXT, options=fields(["num_predict"], num_predict=FEW)),
    "/tokenize": fields(["content"], content=TEXT, add_special={"type": "boolean"}),
    "/detokenize": fields(["tokens"], tokens=TOKENS),
    "/apply-template": fields(["messages"], messages=listed(MESSAGE)),
}


def specification():
    def post(body):
        content = {"application/json": {"schema": body}}
        return {"post": {"requestBody": {"required": True, "content": content}, "responses": {"200": {"description": "an answer"}}}}

    paths = {path: post(body) for path, body in BODIES.items()}
    return {"openapi": "3.1.0", "info": {"title": "kvant serve", "version": "1"}, "paths": paths}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/kvant-suites/bodies"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    schemathesis = args.folder / "venv/bin/schemathesis"
    if not schemathesis.exists():
        subprocess.run([sys.executable, "-m", "venv", args.folder / "venv"], check=True)
        subprocess.run([args.folder / "venv/bin/pip", "install", "--quiet", "schemathesis==4.32.5"], check=True)
    specified = args.folder / "openapi.json"
    specified.write_text(json.dumps(specification()))
    until, seed, failed = time.time() + 60 * args.minutes, 0, 0
    while time.time() < until:
        seed += 1
        command = ["run", specified, "--url", args.url, "--checks", "not_a_server_error", "--mode", "all"]
        command += ["--max-examples", "30", "--seed", str(seed), "--request-timeout", "60", "--phases", "examples,coverage,fuzzing"]
        run = subprocess.run([schemathesis, *map(str, command)], cwd=args.folder, capture_output=True, text=True)
        tail = [line.strip() for line in run.stdout.splitlines() if "generated," in line or "Server error" in line]
        print(f"round {seed}:", *tail, flush=True)
        if run.returncode != 0:
            failed += 1
            (args.folder / f"round-{seed}.txt").write_text(run.stdout + run.stderr)
    print(f"{seed} rounds, {failed} with faults")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
