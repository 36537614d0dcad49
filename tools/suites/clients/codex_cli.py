# /// script
# dependencies = []
# [tool.kvant]
# npm = ["@openai/codex"]
# seconds = 1800
# ///
"""codex exec through Responses: runs a command and reads its output"""

import pathlib

import shared

shared.write_stock()
provider = f'{{name="kvant", base_url="{shared.API}", wire_api="responses", stream_idle_timeout_ms=1500000}}'
options = [
    "-c",
    f"model_providers.kvant={provider}",
    "-c",
    'model_provider="kvant"',
    "-m",
    shared.MODEL,
    "-c",
    'web_search="disabled"',
]
shared.shell("codex", "exec", *options, "--output-last-message", "answer", shared.READ_TASK)
shared.check_stock(pathlib.Path("answer").read_text(encoding="utf-8"))
