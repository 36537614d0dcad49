"""Drives the server's chat page in a headless Chromium and checks its behaviour.

    kvant serve --port 8080 &
    python3 -m venv /tmp/page && /tmp/page/bin/pip install playwright
    /tmp/page/bin/python tools/page/check.py http://127.0.0.1:8080/ [/usr/bin/chromium] [--shots DIR]

Needs Playwright and a Chromium (Debian: `apt-get install chromium`), and a server without other
clients; without Playwright it prints `skipped` and exits with 0. The repository builds and passes
its tests without it. `--shots` writes screenshots of the page.
"""

import argparse
import json
import pathlib
import random
import re
import sys

import features
from driver import END, Page, chunk, conversation, run, sync_playwright

HOSTILE = """\
<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2"> <b>not bold</b>

[a link](javascript:window.hacked=3) [another](data:text/html,x) ![a picture](https://example.com/a.png)
[fine](https://example.com/a_(b)) and https://example.com/bare.

```html
<script>window.hacked = 4</script>
```
- **one** <svg onload="window.hacked=5">
- *two* `<i>`

| a | <script>window.hacked=6</script> |
|---|--:|
| 1 | 2 |
""" + "> " * 5000 + "deep\n\n" + "x" * 400

# Empties the storage of conversations.
EMPTY = """() => new Promise(resolve => {
    const request = indexedDB.open('kvant', 1);
    request.onsuccess = () => {
        const transaction = request.result.transaction('conversations', 'readwrite');
        transaction.objectStore('conversations').clear();
        transaction.oncomplete = () => { request.result.close(); resolve(); };
    };
})"""

CHECKS, LAST = [], []


def check(function):
    CHECKS.append(function)
    return function


def check_last(function):
    LAST.append(function)
    return function


@check
def a_question_is_answered_and_its_kv_bytes_are_shown(p):
    # A new question each time, so that no longer conversation with the same prefix is cached.
    p.send(f"What is the capital of France? {random.randrange(1_000_000)}")
    assert p.answers().locator(".text").last.inner_text().strip()
    cost = p.answers().locator(".cost").last.inner_text()
    assert re.search(r"\w+: [\d.]+ \wiB \(f16 [\d.]+ \wiB, [\d.]+×\)", cost), cost
    assert "prompt tokens cached" in cost, cost
    p.send("And of Italy?")
    cached = re.search(r"(\d+) of \d+ prompt tokens cached", p.answers().locator(".cost").last.inner_text())
    assert int(cached[1]) > 0, cached
    p.shot("light")


@check
def an_edit_creates_a_branch_and_keeps_the_original(p):
    p.page.keyboard.press("ArrowUp")
    p.page.locator(".edit textarea").fill("And of Spain?")
    p.page.keyboard.press("Enter")
    p.page.locator(".bubble", has_text="Spain").wait_for()
    p.settle()
    assert "2/2" in p.page.locator(".user .tools").last.inner_text()
    p.press("Version before")
    p.page.locator(".bubble", has_text="Italy").wait_for()
    p.press("Version after")
    p.page.locator(".bubble", has_text="Spain").wait_for()


@check
def regeneration_creates_a_branch(p):
    p.press("Answer again")
    p.settle()
    assert "2/2" in p.answers().locator(".tools").last.inner_text()


@check
def a_reload_keeps_everything(p):
    before = p.page.locator("#thread").inner_text()
    p.page.fill("#input", "half a thou")
    p.page.reload()
    p.page.locator("article").first.wait_for()
    assert p.page.locator("#thread").inner_text() == before
    assert p.page.input_value("#input") == "half a thou"
    p.page.fill("#input", "")


@check
def another_kv_type_is_compared_side_by_side(p):
    for kv_type in ("f16", "turbo2"):
        p.press("Again in …", 0 if kv_type == "f16" else 1)
        p.page.locator("#types").get_by_role("button", name=kv_type, exact=True).click()
        p.page.locator(".beside .head", has_text=kv_type).wait_for()
        p.settle()
    costs = p.page.locator(".beside .cost").all_inner_texts()
    assert len(costs) == 3 and any(text.startswith("f16: ") for text in costs), costs
    sizes = [int(cost.get_attribute("data-bytes")) for cost in p.page.locator(".beside .cost").all()]
    assert all(size > 0 for size in sizes) and max(sizes) > min(sizes), sizes
    assert p.page.locator(".beside .agree").inner_text()
    p.page.wait_for_timeout(300)
    p.shot("beside")
    p.press("Go on from here", 0)
    assert p.page.locator(".beside article").nth(1).get_attribute("class").endswith("picked")


@check
def the_meter_shows_the_servers_numbers(p):
    p.page.wait_for_timeout(2500)
    kv = json.loads(p.get("kv"))
    shown = int(p.page.locator("#m-bytes").get_attribute("title").split(" ")[0].replace(",", ""))
    assert shown == kv["bytes"] > 0, (shown, kv)
    metric = re.search(r"^kvant:kv_bytes (\d+)", p.get("metrics"), re.M)
    assert shown == int(metric[1]), (shown, metric)
    assert int(p.page.locator("#m-bar").get_attribute("aria-valuenow")) == shown
    away = kv["ram_bytes"] + kv["disk_bytes"]
    assert ("parked" in p.page.locator("#m-saved").inner_text()) == (away > 0), kv


@check
def escape_stops_an_answer_and_keeps_its_text(p):
    for _ in range(10):  # A small model may end its answer before the key is pressed.
        p.new()
        p.page.fill("#input", "Tell me a story")
        p.page.keyboard.press("Enter")
        p.page.locator(".answer .text:not(:empty)").last.wait_for()
        p.page.keyboard.press("Escape")
        p.settle()
        cost = p.answers().locator(".cost").last.inner_text()
        if "stopped" in cost:
            break
    assert cost == "stopped", cost
    assert p.answers().locator(".text").last.inner_text().strip()
    p.page.wait_for_timeout(1500)
    assert json.loads(p.get("kv"))["running"] == 0


@check
def errors_are_shown_and_no_text_is_lost(p):
    p.new()
    p.reply(json.dumps({"error": {"message": "all places are taken"}}), 429, {"retry-after": "7"})
    p.send("Is there room?")
    assert p.page.locator(".wrong").inner_text() == "all places are taken (try again in 7 s)"
    assert p.page.locator(".bubble").inner_text() == "Is there room?"
    p.reply(chunk(content="Half an ") + chunk(content="answer") + 'data: {"error":{"message":"it broke"}}\n\n')
    p.press("Answer again")
    p.page.locator(".wrong", has_text="it broke").wait_for()
    assert p.answers().locator(".text").last.inner_text() == "Half an answer"
    p.reply(chunk(content="cut off"))
    p.press("Answer again")
    p.page.locator(".wrong", has_text="the connection ended before the answer did").wait_for()


@check
def reasoning_is_folded(p):
    p.new()
    p.reply(chunk(content="<think>first ") + chunk(content="this</think>\n\nThen ") + chunk(content="that.") + END)
    p.send("Think.")
    assert p.answers().locator("> .text").inner_text() == "Then that."
    assert not p.page.locator("details .text").is_visible()
    assert p.page.locator("details .text").text_content() == "first this"
    p.reply(chunk(reasoning_content="apart") + chunk(content="Said.") + END)
    p.send("Think again.")
    assert p.page.locator("details .text").last.text_content() == "apart"


@check
def model_text_never_becomes_markup(p):
    p.load(conversation("hello", HOSTILE, "<script>window.hacked = 7</script>", "- one\n  1. two\n\n     more", name="hostile"))
    p.page.locator(".bubble", has_text="hacked = 7").wait_for()
    assert p.page.evaluate("window.hacked") is None
    assert p.page.locator("#thread :is(script, img, svg[onload], b, i)").count() == 0
    links = [link.get_attribute("href") for link in p.page.locator("#thread .text a").all()]
    assert links == ["https://example.com/a.png", "https://example.com/a_(b)", "https://example.com/bare"], links
    assert all("noopener" in link.get_attribute("rel") for link in p.page.locator("#thread .text a").all())
    assert "<script>window.hacked = 4</script>" == p.page.locator("#thread pre").inner_text()
    assert p.page.locator("#thread li strong").inner_text() == "one"
    assert p.page.locator("#thread ul ol li").inner_text().split() == ["two", "more"]
    assert p.page.locator("#thread td").all_inner_texts() == ["1", "2"]


@check
def an_answer_of_many_pieces_is_shown(p):
    answers = ["\\\\" * 100_000, "**a** " * 150_000, "|a|b|\n|-|-|\n" + "|x|y|\n" * 130_000]
    for answer, length in zip(answers, [100_000, 299_999, 260_002]):
        p.load(conversation("hello", answer, name="many-pieces"))
        assert len(p.page.locator("#thread .text").last.evaluate("node => node.textContent")) >= length


@check
def invalid_files_are_not_imported(p):
    before = p.export()
    for invalid in ({"id": "x"}, {**conversation("a"), "nodes": [None]}, {**conversation("a"), "nodes": [{"id": "n", "parent": "m"}]}):
        p.load(conversation("fine", name="fine"), invalid)
    assert p.export() == before


@check
def an_export_can_be_imported(p):
    before = p.export()
    assert len(before["conversations"]) >= 4
    p.load(*before["conversations"])
    assert p.export() == before
    p.page.evaluate(EMPTY)
    p.page.reload()
    p.page.locator(".hello").wait_for()
    p.load(*before["conversations"])
    assert p.export() == before


@check
def a_conversation_is_renamed_deleted_and_restored(p):
    p.act(p.page.locator("nav li").first, "Rename")
    p.page.keyboard.type("A new name")
    p.page.keyboard.press("Enter")
    item = p.page.locator("nav li", has_text="A new name")
    p.act(item, "Delete")
    item.wait_for(state="detached")
    p.press("Undo")
    item.wait_for()


@check
def keyboard_shortcuts_open_and_close_dialogs(p):
    p.page.keyboard.press("Control+/")
    p.page.locator("#keys").wait_for()
    p.shot("keys")
    p.page.keyboard.press("Escape")
    p.page.locator("#keys").wait_for(state="hidden")
    p.page.locator("#attach").focus()
    p.page.keyboard.press("?")
    p.page.locator("#keys").wait_for()
    p.page.keyboard.press("Escape")
    p.page.keyboard.press("Control+,")
    p.page.fill("[name=temperature]", "0")
    p.shot("settings")
    p.page.keyboard.press("Escape")
    p.page.keyboard.press("Control+k")
    p.page.keyboard.press("ArrowDown")
    assert p.page.evaluate("document.activeElement.matches('nav li:first-child .entry')")
    p.page.keyboard.press("ArrowUp")
    assert p.page.evaluate("document.activeElement.id") == "search"
    p.page.keyboard.press("Control+Shift+O")
    p.page.locator(".hello").wait_for()
    assert p.page.evaluate("document.activeElement.id") == "input"
    p.page.keyboard.type("?")
    assert p.page.input_value("#input") == "?"
    p.page.fill("#input", "")
    p.page.keyboard.type("one")
    p.page.keyboard.press("Shift+Enter")
    p.page.keyboard.type("two")
    assert p.page.input_value("#input") == "one\ntwo"
    p.page.fill("#input", "")


@check
def settings_are_sent(p):
    p.press("Settings")
    for name, value in {"max_tokens": "3", "seed": "5", "system": "Be brief.", "key": "sk-4f1d"}.items():
        p.page.fill(f"[name={name}]", value)
    p.page.keyboard.press("Escape")
    p.page.select_option("#kv", "q8_0/turbo3")
    with p.page.expect_request("**/v1/chat/completions") as request_info:
        p.send("Who are you?")
    body = request_info.value.post_data_json
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0, 3, 5), body
    assert body["kv_type"] == "q8_0/turbo3", body
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert request_info.value.headers["authorization"] == "Bearer sk-4f1d"
    assert "sk-4f1d" not in json.dumps(p.export())
    assert p.answers().locator(".cost").inner_text().startswith("q8_0/turbo3: ")
    p.page.select_option("#kv", "")


@check
def settings_are_reset(p):
    p.press("Settings")
    p.press("Reset sampling and reasoning")
    assert p.page.input_value("[name=seed]") == p.page.input_value("[name=max_tokens]") == ""
    assert p.page.input_value("[name=key]") == "sk-4f1d"
    for name in ("system", "key"):
        p.page.fill(f"[name={name}]", "")
    p.page.keyboard.press("Escape")


@check_last
def code_is_copied_verbatim(p):
    code = "if a < b:\n    print('&amp;')"
    p.load(conversation("code", f"```python\n{code}\n```", name="code"))
    p.press("Copy", 1)
    p.page.locator("figcaption .i-tick").wait_for()
    assert p.page.evaluate("navigator.clipboard.readText()") == code


@check_last
def a_rejected_key_is_reported(p):
    refused = {"status": 401, "body": json.dumps({"error": {"message": "this server requires an API key"}})}
    p.page.route("**/kv", lambda route: route.fulfill(**refused), times=1)
    p.page.locator("#status", has_text="this server requires an API key").wait_for()
    p.page.locator("#status:empty").wait_for(state="attached")


@check_last
def changes_of_another_window_are_applied(p):
    other = p.context.new_page()
    other.goto(p.url)
    other.locator("nav li").first.hover()
    other.locator("nav li [aria-label^=Actions]").first.click()
    other.locator("#actions button", has_text="Rename").click()
    other.keyboard.type("Named elsewhere")
    other.keyboard.press("Enter")
    p.page.locator("nav li", has_text="Named elsewhere").wait_for()
    other.close()


@check_last
def light_and_dark_are_switched(p):
    shades = []
    for _ in range(3):
        p.press("Light or dark")
        shades.append(p.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert shades[0] == shades[2] != shades[1], shades


@check_last
def narrow_dark_windows_have_no_overflow(p):
    p.page.set_viewport_size({"width": 360, "height": 720})
    p.page.emulate_media(color_scheme="dark")
    for i in range(p.page.locator("nav .entry").count()):
        p.press("Conversations", 0)
        title = p.page.locator("nav .entry").nth(i).get_attribute("title")
        if title == "many-pieces":  # Chromium takes half a minute for the layout of each.
            p.page.keyboard.press("Escape")
            continue
        p.page.locator("nav .entry").nth(i).click()
        p.page.wait_for_timeout(300)
        for element in ("document.documentElement", "document.getElementById('scroller')"):
            width, available = p.page.evaluate(f"[{element}.scrollWidth, {element}.clientWidth]")
            assert width <= available <= 360, (title, element, width, available)
        overflowing = p.page.evaluate("""[...document.querySelectorAll('main *')].filter(node => !node.closest('pre, .scroll, .unseen, .cut, svg, math')
            && node.getBoundingClientRect().right > 360.5).map(node => node.outerHTML.slice(0, 80))""")
        assert not overflowing, (title, overflowing)
        p.shot(f"narrow-{i}")
    p.press("Conversations", 0)
    p.page.wait_for_timeout(300)
    p.shot("drawer")


@check_last
def no_hidden_errors_occurred(p):
    assert not p.errors, p.errors
    assert not p.foreign, p.foreign


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("chromium", nargs="?", default="/usr/bin/chromium")
    parser.add_argument("--shots", metavar="DIR")
    args = parser.parse_args()
    if args.shots:
        pathlib.Path(args.shots).mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        page = Page(browser, args.url.rstrip("/") + "/", args.shots)
        n_failed = run(CHECKS + features.CHECKS + LAST, page)
        browser.close()
    sys.exit(1 if n_failed else 0)


if __name__ == "__main__":
    main()
