# /// script
# dependencies = []
# [tool.kvant]
# npm = ["@qwen-code/qwen-code"]
# seconds = 1800
# ///
"""Qwen Code: runs a command and reads its output"""

import shared

shared.write_stock()
options = ["--auth-type", "openai", "--openai-base-url", shared.API, "--openai-api-key", "none", "-m", shared.MODEL, "--yolo"]
shared.check_stock(shared.shell("qwen", *options, shared.READ_TASK))
