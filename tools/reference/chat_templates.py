"""Renders every chat template of a folder as Hugging Face `transformers` does.

Writes crates/text/tests/fixtures/chat_templates.json: {"cases": {case: context},
"templates": {file: {case: {"text": ...} or {"error": ...}}}}. The clock stands still, and the tokens
are <BOS> and <EOS>, so every run writes the same bytes.
"""

import datetime
import json
import pathlib
import sys

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template

OUT = pathlib.Path(__file__).parents[2] / "crates/text/tests/fixtures/chat_templates.json"
NOW = datetime.datetime(2026, 1, 2, 15, 4, 5)

# Quotes, HTML characters, non-ASCII and a union type: what tojson and str treat in their own ways.
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a <city> & its \"suburbs\": é.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city's name"},
                "days": {"type": ["integer", "null"], "default": 1},
                "unit": {"type": "string", "enum": ["c", "f"]},
            },
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "You are brief. "}
ASK = {"role": "user", "content": "What is 2 + 2?\nThink  twice."}
ANSWER = {"role": "assistant", "content": "It is 4."}
AGAIN = {"role": "user", "content": 'And <b>3</b> & "3"?'}
CASES = {
    "user": {"messages": [ASK], "add_generation_prompt": True},
    "turns": {"messages": [ASK, ANSWER, AGAIN], "add_generation_prompt": True},
    "system": {"messages": [SYSTEM, ASK, ANSWER], "add_generation_prompt": False},
    "tools": {"messages": [SYSTEM, ASK], "add_generation_prompt": True, "tools": [TOOL]},
    "no_thinking": {"messages": [ASK], "add_generation_prompt": True, "enable_thinking": False},
}


def render(source, case):
    context = {"tools": None, "documents": None, "bos_token": "<BOS>", "eos_token": "<EOS>"}
    context["strftime_now"] = NOW.strftime
    context.update(json.loads(json.dumps(case)))  # templates may change what they are given
    try:
        return {"text": _compile_jinja_template(source).render(**context)}
    except jinja2.TemplateError as error:  # raise_exception, mostly: the words count
        return {"error": f"{type(error).__name__}: {error}"}
    except Exception as error:
        return {"error": type(error).__name__}


def main():
    templates = {}
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.jinja")):
        source = path.read_text()
        templates[path.name] = {name: render(source, case) for name, case in CASES.items()}
    golden = {"cases": CASES, "templates": templates}
    OUT.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
