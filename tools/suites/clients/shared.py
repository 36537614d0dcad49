"""Shared parts of the programs: the server's address, a tool and a file, and their checks."""

import os
import pathlib
import subprocess

URL = os.environ["KVANT_URL"]
API = URL + "/v1"
MODEL = os.environ["KVANT_MODEL"]

QUESTION = "How many pieces of part M8 are on shelf 7?"
DESCRIPTION = "Counts the pieces of a part on a shelf of the warehouse."
PARAMETERS = {
    "type": "object",
    "properties": {"part": {"type": "string"}, "shelf": {"type": "integer"}},
    "required": ["part", "shelf"],
}
# A number that no model produces by chance.
COUNT = 4371
# Small models repeat the tool call unless the result contains an instruction.
RESULT = f"{COUNT} pieces. Answer the question with this number, in a sentence."

calls = []


def count_pieces(part: str, shelf: int) -> str:
    """Counts the pieces of a part on a shelf of the warehouse.

    Args:
        part: The name of the part.
        shelf: The number of the shelf.
    """
    calls.append((part, shelf))
    return RESULT


def check_answer(answer: str):
    """Checks that the tool was called with the question's arguments, and its result is in the
    answer."""
    assert '"arguments"' not in answer, f"a call came as text: {answer!r}"
    assert calls, f"no tool was called; the answer was {answer!r}"
    assert set(calls) == {("M8", 7)}, f"the tool was called with {calls}"
    assert str(COUNT) in answer.replace(",", ""), f"no {COUNT} in {answer!r}"


READ_TASK = "Run the command: cat stock.txt. How many pieces does it list?"


def write_stock():
    """Writes a file whose content must occur in the answer."""
    pathlib.Path("stock.txt").write_text(RESULT + "\n", encoding="utf-8")
    commit()


def check_stock(answer: str):
    assert str(COUNT) in answer.replace(",", ""), f"no {COUNT} in {answer[-300:]!r}"


EDIT_TASK = 'In greet.py, change "Hello" to "Goodbye".'


def write_greeting() -> pathlib.Path:
    """Writes a file to edit."""
    path = pathlib.Path("greet.py")
    path.write_text('def greet(name):\n    return "Hello, " + name\n', encoding="utf-8")
    commit()
    return path


def check_greeting(path: pathlib.Path):
    """Checks that the file has the requested change, and still runs."""
    text, names = path.read_text(encoding="utf-8"), {}
    exec(compile(text, path.name, "exec"), names)
    greeting = names["greet"]("Ada")
    assert greeting == "Goodbye, Ada", f"the file greets with {greeting!r}: {text!r}"


def commit():
    """Makes the work folder a git repository, which coding agents require."""
    git = ["git", "-c", "user.name=suite", "-c", "user.email=suite@localhost"]
    for args in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "begin"]):
        subprocess.run([*git, *args], check=True)


def shell(*args, **environment) -> str:
    """Runs a command-line client; returns its output."""
    more = {**os.environ, **environment}
    done = subprocess.run(args, env=more, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n", flush=True)
    assert done.returncode == 0, f"{args[0]} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-200:]!r}"
    return done.stdout
