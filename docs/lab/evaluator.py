"""Evaluator for OpenEvolve (PyPI: openevolve): the score of a program is what the referee says of it.

LAB_CHECKOUT is a checkout that may be changed, LAB_FILE the file of it that evolves, LAB_TARGET the target,
LAB_KVANT the judge (docs/lab/program.md). One evaluation at a time: `parallel_evaluations: 1`.
"""

import json
import os
import pathlib
import shutil
import subprocess

from openevolve.evaluation_result import EvaluationResult


def evaluate(program_path):
    """Puts the program in its place, judges the checkout against its commit, and returns the ratio."""
    checkout = pathlib.Path(os.environ["LAB_CHECKOUT"])
    shutil.copyfile(program_path, checkout / os.environ["LAB_FILE"])
    command = [os.environ.get("LAB_KVANT", "kvant"), "lab", "eval", "--json", "--quiet", "--base", "HEAD"]
    done = subprocess.run(
        [*command, "--target", os.environ["LAB_TARGET"]], cwd=checkout, capture_output=True, text=True, check=False
    )
    if not done.stdout:
        raise RuntimeError(done.stderr.strip())
    report = json.loads(done.stdout)
    race = report["race"] or {}
    # The lower end of the interval: noise is no progress. What is equal scores 1, what is wrong nothing.
    score = {"better": race.get("low"), "equal": 1.0, "worse": min(race.get("ratio", 0.0), 0.98)}
    metrics = {"combined_score": score.get(report["verdict"], 0.0), "ratio": race.get("ratio", 0.0)}
    return EvaluationResult(metrics, {"verdict": report["verdict"], "reason": report["reason"]})
