"""Checks the Grafana dashboard: a Prometheus scrapes a `kvant serve` under load, and every expression and
every variable of `dashboard.json` must return data.

    apt-get install prometheus
    python3 tools/fleet/dashboard.py --kvant target/release/kvant

Expressions run as Grafana sends them, with all instances selected. Grafana itself is not started. The
repository builds and passes its tests without it.
"""

import json
import math
import pathlib
import re
import shutil
import threading
import urllib.parse

from fleet import Kvant, Program, Stream, Texts, arguments, check, free_port, get, post, wait_for

DASHBOARD = pathlib.Path(__file__).with_name("dashboard.json")
INTERVAL = "20s"


class Prometheus(Program):
    """A Prometheus that scrapes one server each second."""

    def __init__(self, program, work, target):
        config, store = work / "prometheus.yml", work / "prometheus"
        shutil.rmtree(store, ignore_errors=True)
        scrape = {"job_name": "kvant", "static_configs": [{"targets": [target]}]}
        # YAML reads JSON.
        config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = [f"--config.file={config}", f"--storage.tsdb.path={store}", f"--web.listen-address=127.0.0.1:{port}"]
        super().__init__("prometheus", [program, *options], work / "prometheus.log")

    def query(self, expression):
        """Returns the values of an expression."""
        answer = get(self.url, "/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        return [float(series["value"][1]) for series in answer["data"]["result"]]

    def labels(self, name, selector):
        """Returns the values of a label."""
        query = urllib.parse.urlencode({"match[]": selector})
        return get(self.url, f"/api/v1/label/{name}/values?{query}")["data"]


def selected(expression):
    """Returns an expression with the variables as Grafana sets them for all instances."""
    expression = expression.replace("$__rate_interval", INTERVAL)
    return re.sub(r"\$(job|instance)\b", ".*", expression)


def load(kvant, texts):
    """Makes the server do all that has a metric: answers, cached prompts, a client that leaves."""
    prompt = texts.take(600)
    for _ in range(8):
        post(kvant.url, "/v1/completions", {"prompt": prompt + texts.take(8), "max_tokens": 16})
    stream = Stream(kvant.url, "/v1/completions", {"prompt": prompt, "max_tokens": 400, "ignore_eos": True})
    next(stream.chunks())
    stream.leave()


def main():
    args = arguments(__doc__).parse_args()
    program = shutil.which("prometheus")
    if program is None:
        raise SystemExit("expected the program prometheus (Debian: apt-get install prometheus)")
    kvant = Kvant(args, "kvant-scraped")
    wait_for(kvant.name, kvant.is_ready)
    prometheus = Prometheus(program, args.work, kvant.url.removeprefix("http://"))
    wait_for("a scrape", lambda: prometheus.query("vllm:num_requests_running"))
    texts = Texts(kvant)
    ends = threading.Event()

    def work():
        while not ends.is_set():
            load(kvant, texts)

    worker = threading.Thread(target=work)
    worker.start()
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    wait_for("a client that left", lambda: sum(prometheus.query("kvant:requests_cancelled_total")) >= 2)
    failed, n = [], 0
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            n += 1
            values = prometheus.query(selected(target["expr"]))
            if not values or not all(map(math.isfinite, values)):
                failed.append(f"{panel['title']}: {target['expr']}: {values}")
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            n += 1
            selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()
            if not prometheus.labels(label, selected(selector)):
                failed.append(f"variable {variable['name']}: no values")
    share = sum(prometheus.query(selected(expression_of(dashboard, "prefix cache"))))
    ends.set()
    worker.join()
    check("dashboard", not failed, "\n".join(failed) or f"{n} expressions and variables return data")
    check("share of the prefix cache", 0.5 < share <= 1, f"{share:.2f} of the prompt tokens")


def expression_of(dashboard, title):
    """Returns the first expression of the panel with these words in its title."""
    return next(panel["targets"][0]["expr"] for panel in dashboard["panels"] if title in panel["title"])


if __name__ == "__main__":
    main()
