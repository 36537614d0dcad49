"""Renders every chat template of a folder with Hugging Face `transformers`.

Writes crates/text/tests/fixtures/chat_templates.json: {"cases": {case: context}, "templates":
{file: {case: {"text": ...} or {"error": ...}, and "lenient": ... where that differs}}}. The clock
is fixed, and the tokens are <BOS> and <EOS>, so every run writes the same bytes.

"lenient" is the output without accidents of Python's types, as in Kvant: a missing list of tools is
an empty one where Python fails on None, a generator is rendered as its list, and text marked as
safe does not cause HTML escaping of appended text. A case with an error and without "lenient" fails
in both.
"""

import datetime
import inspect
import json
import pathlib
import sys

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template

OUT = pathlib.Path(__file__).parents[2] / "crates/text/tests/fixtures/chat_templates.json"
NOW = datetime.datetime(2026, 1, 2, 15, 4, 5)

# Quotes, HTML characters, non-ASCII and a union type: tojson and str treat these differently.
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
QUESTION = {"role": "user", "content": "What is 2 + 2?\nThink  twice."}
ANSWER = {"role": "assistant", "content": "It is 4."}
AGAIN = {"role": "user", "content": 'And <b>3</b> & "3"?'}
CASES = {
    "user": {"messages": [QUESTION], "add_generation_prompt": True},
    "turns": {"messages": [QUESTION, ANSWER, AGAIN], "add_generation_prompt": True},
    "system": {"messages": [SYSTEM, QUESTION, ANSWER], "add_generation_prompt": False},
    "tools": {"messages": [SYSTEM, QUESTION], "add_generation_prompt": True, "tools": [TOOL]},
    "no_thinking": {"messages": [QUESTION], "add_generation_prompt": True, "enable_thinking": False},
}


def context(case, tools):
    given = {"tools": tools, "documents": None, "bos_token": "<BOS>", "eos_token": "<EOS>"}
    given["strftime_now"] = NOW.strftime
    return given | json.loads(json.dumps(case))  # templates may modify their input


def render(source, case):
    template = _compile_jinja_template(source)
    try:
        text = template.render(**context(case, None))
    except jinja2.TemplateError as error:  # mostly raise_exception: the message is compared
        return {"error": f"{type(error).__name__}: {error}"}
    except Exception as error:
        return {"error": type(error).__name__} | lenient(template, source, context(case, []))
    result = lenient(template, source, context(case, None))
    return {"text": text} | (result if result["lenient"] != text else {})


def lenient(template, source, given):
    environment = template.environment.overlay()
    tojson = environment.filters["tojson"]
    environment.filters = environment.filters | {
        "tojson": lambda x, *args, **how: tojson(list(x) if inspect.isgenerator(x) else x, *args, **how),
        "safe": str,
    }
    try:
        return {"lenient": environment.from_string(source).render(**given)}
    except Exception:
        return {}


def main():
    templates = {}
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.jinja")):
        source = path.read_text()
        templates[path.name] = {name: render(source, case) for name, case in CASES.items()}
    golden = {"cases": CASES, "templates": templates}
    OUT.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
