"""A page in a headless Chromium, as the checks beside this file drive it."""

import functools
import http.server
import json
import pathlib
import sys
import tempfile
import threading
import urllib.request

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    print("skipped: there is no Playwright here (pip install playwright)")
    sys.exit(0)

# The end of a streamed answer.
END = 'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


# Flags that stop Chromium's own network requests.
QUIET = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync""".split()


class Folder(http.server.SimpleHTTPRequestHandler):
    """Serves files, and records the requested ones."""

    requested = []

    def log_message(self, *_):
        self.requested.append(self.path)


def serve(folder):
    handler = functools.partial(Folder, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


class Page:
    """The page and its events."""

    def __init__(self, browser, url, shots):
        self.url, self.shots = url, shots
        self.context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.errors, self.foreign = [], []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self.on_console)
        self.context.on("request", self.on_request)
        self.page.goto(url)

    def on_console(self, message):
        # Chromium logs every rejected request; `errors_are_shown_and_no_text_is_lost` causes those.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def on_request(self, request):
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.foreign.append(request.url)

    def shot(self, name):
        if self.shots:
            self.page.screenshot(path=f"{self.shots}/{name}.png")

    def get(self, path):
        with urllib.request.urlopen(self.url + path) as response:
            return response.read().decode()

    def answers(self):
        return self.page.locator("article.answer")

    def settle(self):
        self.page.locator("[aria-busy=true]").first.wait_for(state="detached")

    def send(self, text):
        self.page.fill("#input", text)
        self.page.keyboard.press("Enter")
        self.page.locator(".bubble", has_text=text).last.wait_for()
        self.settle()

    def new(self):
        self.page.click("#new")
        self.page.locator(".hello").wait_for()

    def press(self, label, at=-1):
        self.page.get_by_role("button", name=label, exact=True).nth(at).click()

    def load(self, *conversations):
        """Imports conversations."""
        export = {"format": "kvant-conversations", "version": 1, "conversations": conversations}
        self.page.evaluate("document.getElementById('notice').replaceChildren()")
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(export, file)
            file.flush()
            self.page.set_input_files("#file", file.name)
            self.page.locator("#notice:not(:empty)").wait_for(state="attached", timeout=120_000)

    def act(self, item, action):
        """Chooses an action of a listed conversation."""
        item.hover()
        item.locator("[aria-label^=Actions]").click()
        self.page.locator("#actions").get_by_role("button", name=action, exact=True).click()

    def props(self, **changes):
        """Reloads the page with changed properties of the server."""
        given = {**json.loads(self.get("props")), **changes}
        self.page.route("**/props", lambda route: route.fulfill(json=given))
        self.page.reload()
        self.page.locator("#model:not(:empty)").wait_for()

    def export(self):
        with self.page.expect_download() as download:
            self.press("Export all conversations")
        return json.loads(pathlib.Path(download.value.path()).read_text())

    def reply(self, body, status=200, headers=None):
        """Answers the next request instead of the server."""
        kind = "text/event-stream" if status == 200 else "application/json"
        answer = {"status": status, "body": body, "headers": {"content-type": kind, **(headers or {})}}
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer), times=1)


def conversation(*texts, name="given"):
    nodes = [
        {"id": f"{name}{i}", "parent": f"{name}{i - 1}" if i else "", "role": "assistant" if i % 2 else "user",
         "text": text, "end": "stop", "pick": f"{name}{i + 1}"}
        for i, text in enumerate(texts)
    ]
    return {"id": name, "title": name, "created": 1, "updated": 1, "pick": f"{name}0", "nodes": nodes}


def chunk(**delta):
    return "data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": None}]}) + "\n\n"


def run(checks, page):
    """Runs checks on a page; returns the number of failures."""
    n_failed = 0
    for function in checks:
        name = function.__name__.replace("_", " ")
        try:
            function(page)
            print(f"ok      {name}", flush=True)
        except Exception as error:  # Any error: the remaining checks still run.
            n_failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
            try:
                page.shot(f"failed-{function.__name__}")
            except Exception as cause:  # A page that is busy for long has no screenshot.
                print(f"        no screenshot: {type(cause).__name__}", flush=True)
    return n_failed
