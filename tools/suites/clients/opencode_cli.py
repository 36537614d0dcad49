# /// script
# dependencies = []
# [tool.kvant]
# npm = ["opencode-ai"]
# seconds = 1800
# ///
"""opencode run: runs a command and reads its output"""

import json
import pathlib

import shared

shared.write_stock()
model = {"name": shared.MODEL, "tool_call": True, "limit": {"context": 16384, "output": 1024}}
provider = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "kvant",
    "options": {"baseURL": shared.API, "apiKey": "none"},
    "models": {"kvant": model | {"id": shared.MODEL}},
}
config = {
    "provider": {"kvant": provider},
    "model": "kvant/kvant",
    "small_model": "kvant/kvant",
    "share": "disabled",
    "autoupdate": False,
}
pathlib.Path("opencode.json").write_text(json.dumps(config), encoding="utf-8")
shared.check_stock(shared.shell("opencode", "run", shared.READ_TASK))
