# /// script
# dependencies = ["llm"]
# ///
"""llm (Simon Willison's) on the command line: a tool from a file, and structured output"""

import json
import pathlib

import shared

TOOL = f"""
def count_pieces(part: str, shelf: int) -> str:
    "Counts the pieces of a part on a shelf of the warehouse."
    open("calls", "a").write(f"{{part}} {{shelf}}\\n")
    return {shared.RESULT!r}
"""

home = pathlib.Path("llm")
home.mkdir()
model = {"model_id": "kvant", "model_name": shared.MODEL, "api_base": shared.API, "supports_tools": True, "supports_schema": True}
# JSON is YAML.
(home / "extra-openai-models.yaml").write_text(json.dumps([model]), encoding="utf-8")
pathlib.Path("tool.py").write_text(TOOL, encoding="utf-8")
answer = shared.shell("llm", "-m", "kvant", "--functions", "tool.py", shared.QUESTION, LLM_USER_PATH=str(home))
log = pathlib.Path("calls")
shared.calls[:] = [(part, int(shelf)) for part, shelf in map(str.split, log.read_text().splitlines())] if log.exists() else []
shared.check_answer(answer)

answer = shared.shell("llm", "-m", "kvant", "--schema", "name, age int", "Ada is 37 years old.", LLM_USER_PATH=str(home))
assert json.loads(answer) == {"name": "Ada", "age": 37}, answer
