"""Drives real programs, most of them agents, against a running server and checks their results.

    kvant serve qwen2.5-coder-1.5b.gguf --port 8080 -c 16384 --temp 0 &
    python3 tools/suites/clients http://127.0.0.1:8080 [NAME ..]

Each program is a file in this folder: its first line describes it, its header lists its packages.
It uses the client's own defaults (no forced tool choice) and succeeds only if the tool was called
with the right arguments and its result was used, or the file on disk has changed. Agents execute
model output with your privileges: use a disposable machine. Packages, homes and work folders are
below `--folder`, one environment per program. The repository builds and passes its tests without
it.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request

HERE = pathlib.Path(__file__).parent
QUIET = {"OTEL_SDK_DISABLED": "true", "DO_NOT_TRACK": "1", "NO_COLOR": "1", "TERM": "dumb", "CI": "true"}


@dataclasses.dataclass
class Program:
    """A file of this folder, with its header."""

    path: pathlib.Path
    does: str
    python: str
    packages: list[str]
    npm: list[str]
    seconds: int

    @classmethod
    def read(cls, path: pathlib.Path):
        text = path.read_text(encoding="utf-8")
        header = re.search(r"(?m)^# /// script\n((?:#.*\n)*?)# ///$", text).group(1)
        metadata = tomllib.loads(re.sub(r"(?m)^# ?", "", header))
        own = metadata.get("tool", {}).get("kvant", {})
        does = re.search(r'"""(.*?)(?:\n|""")', text).group(1)
        python = metadata.get("requires-python", ">=3.11")
        return cls(path, does, python, metadata["dependencies"], own.get("npm", []), own.get("seconds", 300))

    @property
    def name(self):
        return self.path.stem


@dataclasses.dataclass
class Result:
    program: Program
    version: str
    error: str
    seconds: float

    def row(self):
        outcome = f"FAILED: {self.error}" if self.error else "passed"
        return f"| {self.program.name} | {self.version} | {self.program.does} | {outcome} | {self.seconds:.0f} |"


class Place:
    """The folder of one program: packages, home and work folder."""

    def __init__(self, program: Program, folder: pathlib.Path, uv: pathlib.Path):
        self.program, self.root, self.uv = program, folder / program.name, uv
        self.python = self.root / "venv/bin/python"

    def install(self):
        self.root.mkdir(exist_ok=True)
        cached = {**os.environ, "UV_CACHE_DIR": str(self.root.parent / "uv-cache")}
        if not self.python.exists():
            run(self.uv, "venv", "-q", "--python", self.program.python, self.root / "venv", env=cached)
        if self.program.packages:
            run(self.uv, "pip", "install", "-q", "--python", self.python, *self.program.packages, env=cached)
        if self.program.npm:
            run("npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", self.root, *self.program.npm)

    def version(self) -> str:
        """Returns the installed version of the first package in the header."""
        if self.program.npm:
            package = self.root / "node_modules" / self.program.npm[0] / "package.json"
            return json.loads(package.read_text(encoding="utf-8"))["version"]
        name = re.match(r"[\w.-]+", self.program.packages[0]).group(0)
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        return run(self.python, "-c", code, capture_output=True, text=True).stdout.strip()

    def environment(self, url: str, model: str) -> dict[str, str]:
        """Returns an environment with the server's address for all clients, without the caller's
        accounts."""
        paths = [self.root / "venv/bin", self.root / "node_modules/.bin", os.environ["PATH"]]
        return QUIET | {
            "PATH": ":".join(map(str, paths)),
            "HOME": str(self.root / "home"),
            "KVANT_URL": url,
            "KVANT_MODEL": model,
            "OPENAI_BASE_URL": url + "/v1",
            "OPENAI_API_KEY": "none",
        }

    def run(self, url: str, model: str) -> str:
        """Runs the program in an empty folder; returns its error line, or an empty string."""
        for name in ("home", "work"):
            shutil.rmtree(self.root / name, ignore_errors=True)
            (self.root / name).mkdir()
        with open(self.root / "log", "w+", encoding="utf-8") as log:
            process = subprocess.Popen(
                [str(self.python), str(self.program.path)],
                cwd=self.root / "work",
                env=self.environment(url, model),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(self.program.seconds)
            except subprocess.TimeoutExpired:
                return f"not done after {self.program.seconds} s ({log.name})"
            finally:
                # Includes its child processes.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            log.seek(0)
            lines = [line.strip() for line in log if line.strip()] or ["no output"]
            return "" if code == 0 else f"{lines[-1][:200]} (exit {code}, {log.name})"


def run(*args, **more):
    return subprocess.run([str(arg) for arg in args], check=True, **more)


def find_uv(folder: pathlib.Path) -> pathlib.Path:
    """Returns uv from the path, or from PyPI: it creates an environment in seconds."""
    if found := shutil.which("uv"):
        return pathlib.Path(found)
    bin = folder / "uv/bin"
    if not (bin / "uv").exists():
        run(sys.executable, "-m", "venv", folder / "uv")
        run(bin / "python", "-m", "pip", "install", "--quiet", "uv")
    return bin / "uv"


def drive(program: Program, folder: pathlib.Path, uv: pathlib.Path, url: str, model: str) -> Result:
    place, began = Place(program, folder, uv), time.monotonic()
    try:
        place.install()
        version = place.version()
    except subprocess.CalledProcessError as error:
        return Result(program, "none", f"cannot be installed: {error}", time.monotonic() - began)
    began = time.monotonic()
    return Result(program, version, place.run(url, model), time.monotonic() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of the server")
    parser.add_argument("names", nargs="*", help="programs to run [default: all]")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/kvant-suites/clients"))
    args = parser.parse_intermixed_args()
    programs = [Program.read(path) for path in sorted(HERE.glob("*.py")) if path.stem not in ("__main__", "shared")]
    if unknown := set(args.names) - {program.name for program in programs}:
        parser.error(f"no such program: {', '.join(sorted(unknown))}")
    chosen = [program for program in programs if not args.names or program.name in args.names]
    folder, url = args.folder.resolve(), args.url.rstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    uv = find_uv(folder)
    print(f"| client | version | what it does | {model} | s |\n|---|---|---|---|---|", flush=True)
    failed = 0
    for program in chosen:
        result = drive(program, folder, uv, url, model)
        failed += bool(result.error)
        print(result.row(), flush=True)
    print(f"\n{len(chosen) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
