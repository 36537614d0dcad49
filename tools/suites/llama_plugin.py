"""Runs the tests of llama.cpp's server on another model: see llama.py, which loads this into
pytest."""

import json
import os
import pathlib

import pytest
import utils

MODEL = os.environ["KVANT_SUITE_MODEL"]
REASON = pathlib.Path(os.environ["KVANT_SUITE_REASON"])
LEARNED = pathlib.Path(os.environ["KVANT_SUITE_LEARNED"])
LEARNS = os.environ["KVANT_SUITE_MODE"] == "learn"

# Small models of the hub that any other may replace.
STORIES = ("stories260K", "tinyllamas/stories260K.gguf", "stories260K-infill", "bert-bge-small")
# Content that every model must produce: the other expectations are words of the small model.
FORMS = ['"42"', '"foooooo"', "a{5,5}", "[ -3000 ]", r"(\{|John)+"]
# Counts that depend on the model.
COUNTS = ("n_prompt", "n_token_output")

known = json.loads(LEARNED.read_text()) if LEARNED.exists() else {}


class Count:
    """A token count learned from llama.cpp's server; any count if unknown."""

    def __init__(self, name):
        self.name = name

    def __eq__(self, count):
        if LEARNS:
            known[self.name] = count
            return True
        return count == known[self.name] if self.name in known else count > 0

    def __repr__(self):
        return f"<{known.get(self.name, 'any count')}>"


def pytest_collection_modifyitems(items):
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        for name in COUNTS:
            if name in params:
                params[name] = Count(f"{item.nodeid} {name}")


def pytest_sessionfinish():
    if LEARNS:
        LEARNED.write_text(json.dumps(known))


def match_regex(regex, text):
    return original_match(regex, text) if regex in FORMS else isinstance(text, str)


def start(self, *args, **more):
    repo = f"{self.model_hf_repo} {self.model_hf_file}"
    if self.model_file is None and any(name in repo for name in STORIES):
        self.model_file, self.model_hf_repo, self.model_hf_file = MODEL, None, None
    elif self.model_hf_repo or self.model_url:
        pytest.skip(f"needs a model of the hub: {repo if self.model_hf_repo else self.model_url}")
    REASON.unlink(missing_ok=True)
    try:
        return original_start(self, *args, **more)
    except RuntimeError:
        if REASON.exists():
            pytest.skip(f"not there: {REASON.read_text()}")
        raise


utils.ServerPreset.load_all = staticmethod(lambda: None)
original_match, utils.match_regex = utils.match_regex, match_regex
original_start, utils.ServerProcess.start = utils.ServerProcess.start, start
