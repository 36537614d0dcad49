# /// script
# dependencies = ["gptme"]
# [tool.kvant]
# seconds = 600
# ///
"""gptme on the command line: runs a command that writes a file"""

import pathlib

import shared

TASK = f"Run this shell command: echo {shared.COUNT} > count.txt"
options = ["--non-interactive", "--tools", "shell,complete"]
shared.shell("gptme", "--model", f"local/{shared.MODEL}", *options, TASK)
text = pathlib.Path("count.txt").read_text(encoding="utf-8")
assert text == f"{shared.COUNT}\n", text
