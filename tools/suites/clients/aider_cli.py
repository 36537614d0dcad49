# /// script
# dependencies = ["aider-chat"]
# requires-python = ">=3.10,<3.13"
# [tool.kvant]
# seconds = 900
# ///
"""aider on the command line: edits a file"""

import shared

path = shared.write_greeting()
QUIET = [
    "--yes-always",
    "--analytics-disable",
    "--no-check-update",
    "--no-show-model-warnings",
    "--no-gitignore",
    "--no-detect-urls",
]
shared.shell(
    "aider", "--model", f"openai/{shared.MODEL}", *QUIET, "--message", shared.EDIT_TASK, path.name, OPENAI_API_BASE=shared.API
)
shared.check_greeting(path)
