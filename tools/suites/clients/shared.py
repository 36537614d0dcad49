"""What the programs beside this share: where the server listens, a tool and a file, and whether they were used."""

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
# A number that no model guesses.
COUNT = 4371
# Small models call a tool again and again unless its result says what to do with it.
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
    """Whether the tool was called with what the question asks for, and its result is in the answer."""
    assert '"arguments"' not in answer, f"a call came as text: {answer!r}"
    assert calls, f"no tool was called; the answer was {answer!r}"
    assert set(calls) == {("M8", 7)}, f"the tool was called with {calls}"
    assert str(COUNT) in answer.replace(",", ""), f"no {COUNT} in {answer!r}"


READ_TASK = "Run the command: cat stock.txt. How many pieces does it list?"


def write_stock():
    """A file whose content must reach the answer."""
    pathlib.Path("stock.txt").write_text(RESULT + "\n", encoding="utf-8")
    commit()


def check_stock(answer: str):
    assert str(COUNT) in answer.replace(",", ""), f"no {COUNT} in {answer[-300:]!r}"


EDIT_TASK = 'In greet.py, change "Hello" to "Goodbye".'


def write_greeting() -> pathlib.Path:
    """A file to be edited."""
    path = pathlib.Path("greet.py")
    path.write_text('def greet(name):\n    return "Hello, " + name\n', encoding="utf-8")
    commit()
    return path


def check_greeting(path: pathlib.Path):
    """Whether the file says what it was to say, and still runs."""
    text, names = path.read_text(encoding="utf-8"), {}
    exec(compile(text, path.name, "exec"), names)
    said = names["greet"]("Ada")
    assert said == "Goodbye, Ada", f"the file greets with {said!r}: {text!r}"


def commit():
    """Makes the work folder a repository, as coding agents want one."""
    git = ["git", "-c", "user.name=suite", "-c", "user.email=suite@localhost"]
    for args in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "begin"]):
        subprocess.run([*git, *args], check=True)


def shell(*args, **environment) -> str:
    """Runs a command line client; returns what it printed."""
    more = {**os.environ, **environment}
    done = subprocess.run(args, env=more, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n", flush=True)
    assert done.returncode == 0, f"{args[0]} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-200:]!r}"
    return done.stdout
