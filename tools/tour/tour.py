"""Runs the commands of docs/tour.md and draws a figure of each step's output.

    python3 tools/tour/tour.py target/release/kvant MODEL.gguf

Each `sh` block runs in one temporary folder, where `model.gguf` is MODEL and `docs` this
repository's; a block that ends in `&` is a server, which ends with the tour. A command that fails
ends the tour. The figures are docs/tour/N.svg, one for each step that shows one.
"""

import argparse
import html
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOUR = ROOT / "docs" / "tour.md"
COLUMNS, MAX_LINES = 112, 32
# Size of a character and distance of lines in pixels, as the font below is drawn.
ADVANCE, LEADING, MARGIN = 7.8, 19, 16


def steps(text):
    """Returns (number, block, whether a figure follows) of each step."""
    found = []
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        block = re.search(r"```sh\n(.*?)```", section, flags=re.S)
        number = re.match(r"(\d+)\.", section)
        if block and number:
            found.append((int(number[1]), block[1], f"tour/{number[1]}.svg" in section))
    return found


def wrapped(text):
    """Returns lines of at most COLUMNS columns, divided at spaces; long output loses its middle."""
    lines = []
    for line in text.expandtabs().splitlines():
        while len(line) > COLUMNS:
            end = line.rfind(" ", len(line) - len(line.lstrip()), COLUMNS + 1)
            end = end if end > 0 else COLUMNS
            lines.append(line[:end])
            line = "    " + line[end:].lstrip()
        lines.append(line)
    if len(lines) > MAX_LINES:
        half = MAX_LINES // 2
        lines = lines[:half] + ["..."] + lines[-half:]
    return lines


def figure(block, output):
    """Returns an SVG of the commands and their output, for light and dark pages."""
    commands = block.strip().splitlines()
    lines = [("$ " if at == 0 else "  ") + line for at, line in enumerate(commands)]
    rows = [(line, "command") for text in lines for line in wrapped(text)]
    rows += [(line, "output") for line in wrapped(output)]
    width, height = MARGIN * 2 + COLUMNS * ADVANCE, MARGIN * 2 + len(rows) * LEADING
    body = "".join(
        f'<text class="{kind}" x="{MARGIN}" y="{MARGIN + (at + 0.75) * LEADING:.0f}">{html.escape(line)}</text>\n'
        for at, (line, kind) in enumerate(rows)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">
<style>
text {{ font: 13px ui-monospace, Menlo, Consolas, monospace; white-space: pre; fill: #24292f }}
.command {{ font-weight: 600 }}
rect {{ fill: #f6f5f2; stroke: #d8d5cd }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #dcdad4 }}
  rect {{ fill: #1d1f21; stroke: #3a3c3f }}
}}
</style>
<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="8"/>
{body}</svg>
"""


def wait_for(url, server):
    for _ in range(600):
        if server.poll() is not None:
            sys.exit("the server ended early")
        try:
            return urllib.request.urlopen(url, timeout=5).read()
        except OSError:
            time.sleep(0.1)
    sys.exit(f"{url}: no answer")


def run(block, folder, environment):
    done = subprocess.run(
        ["bash", "-ec", block],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{block}exit {done.returncode}\n{done.stdout}")
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvant", type=pathlib.Path)
    parser.add_argument("model", type=pathlib.Path)
    args = parser.parse_args()
    servers = []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "kvant").symlink_to(args.kvant.resolve())
        (folder / "model.gguf").symlink_to(args.model.resolve())
        (folder / "docs").symlink_to(ROOT / "docs")
        # Mesa complains on stderr about a missing folder of the session.
        own = {"PATH": f"{folder}:{os.environ['PATH']}", "NO_COLOR": "1", "XDG_RUNTIME_DIR": str(folder)}
        environment = {**os.environ, **own}
        try:
            for number, block, is_shown in steps(TOUR.read_text()):
                began = time.monotonic()
                if block.rstrip().endswith("&"):
                    command = block.strip().removesuffix("&").split()
                    servers.append(subprocess.Popen(command, cwd=folder, env=environment))
                    port = command[command.index("--port") + 1]
                    wait_for(f"http://127.0.0.1:{port}/health", servers[-1])
                    output = ""
                else:
                    output = run(block, folder, environment)
                print(f"step {number}: {time.monotonic() - began:.1f} s")
                if is_shown:
                    path = TOUR.parent / "tour" / f"{number}.svg"
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(figure(block, output))
        finally:
            for server in servers:
                server.terminate()
                server.wait()


if __name__ == "__main__":
    main()
