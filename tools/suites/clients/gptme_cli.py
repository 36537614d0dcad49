# /// script
# dependencies = ["gptme"]
# [tool.kvant]
# seconds = 900
# ///
"""gptme on the command line, tools as tool calls: runs a command and reads its output"""

import shared

shared.write_stock()
MODE = ["--non-interactive", "--no-stream", "--tool-format", "tool", "--tools", "shell,complete"]
answer = shared.shell("gptme", "--model", f"local/{shared.MODEL}", *MODE, shared.READ_TASK)
shared.check_stock(answer)
