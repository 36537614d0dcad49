# /// script
# dependencies = []
# [tool.kvant]
# npm = ["@continuedev/cli"]
# seconds = 1800
# ///
"""Continue's cn -p: runs a command and reads its output"""

import json
import pathlib

import shared

shared.write_stock()
model = {
    "name": "kvant",
    "provider": "openai",
    "model": shared.MODEL,
    "apiBase": shared.API,
    "apiKey": "none",
    "roles": ["chat"],
    "capabilities": ["tool_use"],
}
config = pathlib.Path("config.yaml")
# JSON is YAML.
config.write_text(json.dumps({"name": "suite", "version": "1.0.0", "schema": "v1", "models": [model]}), encoding="utf-8")
shared.check_stock(shared.shell("cn", "-p", shared.READ_TASK, "--config", str(config.resolve()), "--auto"))
