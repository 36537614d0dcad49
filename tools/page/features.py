"""Checks of single features of the chat page, run by `check.py`: reasoning, models, files, search,
code, math, the KV meter, and accessibility.
"""

import json
import pathlib
import random
import re

from driver import END, chunk, conversation

# Returns the visible texts whose contrast with their background is below 4.5.
FAINT = """() => {
    const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const over = (color, below) => {
        context.fillStyle = `rgb(${below})`;
        context.fillRect(0, 0, 1, 1);
        context.fillStyle = color;
        context.fillRect(0, 0, 1, 1);
        return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const ground = node => node ? over(getComputedStyle(node).backgroundColor, ground(node.parentElement)) : [255, 255, 255];
    const light = rgb => rgb.map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), faint = [];
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !node.checkVisibility({ opacityProperty: true }) || node.closest('script, :disabled, .unseen')) continue;
        const below = ground(node), [a, b] = [light(over(getComputedStyle(node).color, below)), light(below)].sort((x, y) => y - x);
        const contrast = (a + .05) / (b + .05);
        if (contrast < 4.5) faint.push(`${walker.currentNode.data.slice(0, 40)}: ${contrast.toFixed(2)}`);
    }
    return faint;
}"""

# Maximum size of the page.
MAX_BYTES = 120_000
# An image of one pixel.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def request_of(p, text):
    """Sends a text, answers it with a word, and returns the request."""
    p.reply(chunk(content="Yes.") + END)
    with p.page.expect_request("**/v1/chat/completions") as request_info:
        p.send(text)
    return request_info.value.post_data_json


@check
def reasoning_is_set_where_the_template_has_it(p):
    assert not p.page.locator("[name=reasoning]").is_visible()
    p.props(chat_template="{% if enable_thinking %}<think>{% endif %}")
    p.new()
    for choice, expected in {"off": {"enable_thinking": False}, "high": {"reasoning_effort": "high"}}.items():
        p.press("Settings")
        p.page.select_option("[name=reasoning]", choice)
        p.page.fill("[name=thinking_budget_tokens]", "64")
        p.page.keyboard.press("Escape")
        body = request_of(p, f"Reason {choice}")
        assert {**expected, "thinking_budget_tokens": 64}.items() <= body.items() and "reasoning" not in body, body
    p.press("Settings")
    p.press("Reset sampling and reasoning")
    p.page.keyboard.press("Escape")
    p.page.unroute("**/props")


@check
def models_are_chosen(p):
    assert not p.page.locator("#models").is_visible()
    data = json.loads(p.get("v1/models"))["data"] + [{"id": "a second model", "status": {"value": "unloaded"}}]
    p.page.route("**/v1/models", lambda route: route.fulfill(json={"data": data}))
    p.page.reload()
    p.page.select_option("#models", "a second model")
    p.page.locator("#model", has_text="a second model").wait_for()
    p.new()
    assert request_of(p, "Which model?")["model"] == "a second model"
    assert "a second model" in p.answers().locator(".cost").inner_text()
    p.page.unroute("**/v1/models")
    p.page.reload()
    p.new()
    assert "model" not in request_of(p, "And now?")


@check
def files_are_attached_by_choice_drop_and_paste(p):
    p.props(modalities={"vision": True})
    p.new()
    p.page.set_input_files("#upload", [{"name": "notes.md", "mimeType": "text/markdown", "buffer": b"# Notes\n```\ncode\n```"}])
    transfer = """([name, type, data, event]) => {
        const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0)), given = new DataTransfer();
        given.items.add(new File([bytes], name, { type }));
        const fields = { bubbles: true, cancelable: true };
        document.body.dispatchEvent(event === 'paste' ? new ClipboardEvent(event, { ...fields, clipboardData: given }) : new DragEvent(event, { ...fields, dataTransfer: given }));
    }"""
    p.page.locator("#files .file").wait_for()
    p.page.evaluate(transfer, ["a.png", "image/png", PIXEL, "dragover"])
    p.page.locator("#drop").wait_for()
    p.page.evaluate(transfer, ["a.png", "image/png", PIXEL, "drop"])
    p.page.evaluate(transfer, ["b.png", "image/png", PIXEL, "paste"])
    p.page.wait_for_function("document.querySelectorAll('#files img').length === 2")
    assert not p.page.locator("#drop").is_visible()
    p.press("Remove b.png")
    p.page.set_input_files("#upload", [{"name": "raw.bin", "mimeType": "", "buffer": b"\x00\xff"}])
    p.page.locator("#notice", has_text="raw.bin: neither text nor an image").wait_for()
    p.shot("files")
    image, text = request_of(p, "What is in these?")["messages"][-1]["content"]
    assert image == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}, image
    assert text["text"] == "notes.md:\n````\n# Notes\n```\ncode\n```\n````\n\nWhat is in these?", text
    assert not p.page.locator("#files .file").count() and p.page.locator(".user .file").count() == 2
    p.page.reload()
    p.page.locator(".user img").wait_for()
    exported = next(c for c in p.export()["conversations"] if c["title"] == "What is in these?")
    exported["id"], exported["title"] = "foreign", "foreign"
    exported["nodes"][0]["files"][1]["image"] = "https://example.com/a.png"
    p.load(exported)
    assert p.page.locator(".user .file").count() == 1
    p.page.unroute("**/props")
    p.page.reload()
    p.page.locator("#model:not(:empty)").wait_for()
    p.page.set_input_files("#upload", [{"name": "a.png", "mimeType": "image/png", "buffer": b"x"}])
    p.page.locator("#notice", has_text="a.png: this model reads no images").wait_for()


@check
def large_images_are_scaled_down(p):
    p.props(modalities={"vision": True})
    p.new()
    size = p.page.evaluate("""async () => {
        const canvas = Object.assign(document.createElement('canvas'), { width: 4000, height: 1000 });
        canvas.getContext('2d').fillRect(0, 0, 9, 9);
        const blob = await new Promise(resolve => canvas.toBlob(resolve)), given = new DataTransfer();
        given.items.add(new File([blob], 'wide.png', { type: 'image/png' }));
        document.body.dispatchEvent(new DragEvent('drop', { dataTransfer: given, bubbles: true, cancelable: true }));
        for (;;) {
            const image = document.querySelector('#files img');
            if (image?.naturalWidth) return [image.naturalWidth, image.naturalHeight];
            await new Promise(resolve => setTimeout(resolve, 50));
        }
    }""")
    assert size == [1536, 384], size
    p.press("Remove wide.png")
    p.page.unroute("**/props")


@check
def conversations_are_searched_in_titles_and_texts(p):
    p.load(conversation("A question", "The quick brown fox jumps", name="foxes"), conversation("Another", "Nothing here", name="other"))
    p.page.fill("#search", "BROWN fox")
    assert p.page.locator("nav .entry").count() == 1
    assert p.page.locator("nav .entry mark").inner_text() == "brown fox"
    assert p.page.locator("#live").text_content() == "1 conversation"
    p.page.fill("#search", "foxes")
    assert p.page.locator("nav .entry").all_inner_texts() == ["foxes"]
    p.page.fill("#search", "no such words")
    assert p.page.locator("nav").inner_text() == "Nothing found."
    p.page.fill("#search", "")
    with p.page.expect_download() as download:
        p.act(p.page.locator("nav li", has_text="foxes"), "Export as Markdown")
    assert pathlib.Path(download.value.path()).read_text() == "# foxes\n\n## You\n\nA question\n\n## Kvant\n\nThe quick brown fox jumps\n"


CODE = """\
```python
def f(x):  # a comment
    return "a string" + 0x1F
```
```unknown
def f
```
"""


@check
def code_is_highlighted(p):
    p.load(conversation("code", CODE, name="highlighted"))
    kinds = {kind: p.page.locator(f"#thread .c-{kind}").all_inner_texts() for kind in ("key", "comment", "string", "number")}
    assert kinds == {"key": ["def", "return"], "comment": ["# a comment"], "string": ['"a string"'], "number": ["0x1F"]}, kinds
    assert p.page.locator("#thread pre").first.inner_text() == CODE.split("```")[1].removeprefix("python\n").rstrip()


FORMULAS = r"""Inline $\frac{a}{b}$, \(\sqrt[3]{x_i^2}\), $\alpha \le \mathbb{R}$ cost $5 and $10, `$x$`, $\unheard{x}$, $\frac{a$.

$$\sum_{k=0}^{n} k = \begin{pmatrix} a & b \\ c & d \end{pmatrix}$$

\[
\left( \int_0^1 f'(x)\,dx \right)
\]
"""


@check
def formulas_become_mathml(p):
    p.load(conversation("math", FORMULAS, name="formulas"))
    shown = lambda selector: p.page.locator(f"#thread math {selector}").all_text_contents()
    assert shown("mfrac") == ["ab"] and shown("mroot") == ["xi23"], (shown("mfrac"), shown("mroot"))
    assert shown("munderover") == ["∑k=0n"] and shown("mtd") == list("abcd"), (shown("munderover"), shown("mtd"))
    assert shown("msubsup") == ["xi2", "∫01"] and shown("msup") == ["f′"], (shown("msubsup"), shown("msup"))
    assert shown(".unknown") == ["\\unheard"] and "α≤ℝ" in shown("> mrow")
    text = p.page.locator("#thread .text").last
    assert "cost $5 and $10" in text.text_content()
    assert text.locator("code").all_inner_texts() == ["$x$", "$\\frac{a$"], text.locator("code").all_inner_texts()
    assert p.page.locator("#thread math[display=block]").count() == 2
    p.page.wait_for_timeout(5500)  # The notice covers it.
    p.shot("formulas")


@check
def the_horizon_is_the_cache_of_the_conversation(p):
    p.new()
    assert not p.page.locator("#horizon").is_visible()
    p.send(f"What is the capital of Peru? {random.randrange(1_000_000)}")
    cost = p.answers().locator(".cost").inner_text()
    size, f16, ratio = re.search(r": ([\d.]+ \wiB) \(f16 ([\d.]+ \wiB), ([\d.]+)×", cost).groups()
    header = p.page.locator("#figures").inner_text()
    assert size in header and f"of {f16} in f16" in header and "tok/s" in header, (header, cost)
    assert re.search(r"TTFT \d+\.\d\d s", cost), cost
    assert f"{size}; f16 would take {f16}" in p.page.locator("#horizon").get_attribute("aria-label")
    p.page.wait_for_timeout(500)
    outer, inner = p.page.evaluate("['.turn', '.turn > i'].map(part => document.querySelector('#horizon ' + part).getBoundingClientRect().height)")
    assert abs(outer / inner - float(ratio)) < .5, (outer, inner, ratio)
    assert p.page.locator("#horizon .turn").count() == 2
    p.page.click("#figures")
    p.page.locator("#cache").wait_for()
    p.shot("cache")
    p.page.keyboard.press("Escape")


@check
def streams_are_announced_and_shown_as_they_come(p):
    p.new()
    # A response in three parts, the last one on demand.
    p.page.evaluate("""parts => {
        const real = window.fetch;
        window.fetch = async (path, options) => {
            if (!String(path).endsWith('completions')) return real(path, options);
            window.fetch = real;
            const encoder = new TextEncoder();
            const body = new ReadableStream({ async start(controller) {
                controller.enqueue(encoder.encode(parts[0]));
                await new Promise(resolve => { window.proceed = resolve; });
                controller.enqueue(encoder.encode(parts[1]));
                controller.close();
            } });
            return new Response(body);
        };
    }""", [chunk(content="A first sentence. And a sec"), chunk(content="ond.") + END])
    p.page.fill("#input", "Stream.")
    p.page.keyboard.press("Enter")
    p.page.locator("#live", has_text="A first sentence.").wait_for(state="attached")
    assert p.page.locator("#live").text_content().strip() == "A first sentence."
    assert p.page.get_by_role("button", name="Stop", exact=True).is_visible()
    assert "live" in p.page.locator("#horizon").get_attribute("class")
    p.page.evaluate("window.proceed()")
    p.settle()
    assert p.page.locator("#live").text_content().strip() == "And a second."


@check
def focus_moves_in_reading_order(p):
    p.load(conversation("one", "two", name="focus"))
    seen = []
    for _ in range(150):
        p.page.keyboard.press("Tab")
        seen.append(p.page.evaluate("(({ id, className, ariaLabel }) => id || ariaLabel || className)(document.activeElement)"))
    expected = ["new", "search", "entry", "Settings", "figures", "Answer again", "input", "attach", "kv"]
    seen = seen[seen.index("new"):]
    places = [seen.index(name) for name in expected if name in seen]
    missing = [name for name in expected if name not in seen]
    assert not missing and places == sorted(places), (missing, seen)


@check
def motion_is_reduced_on_request(p):
    transition = "getComputedStyle(document.querySelector('.bar i')).transitionDuration"
    assert p.page.evaluate(transition) != "0s"
    p.page.emulate_media(reduced_motion="reduce")
    assert p.page.evaluate(transition) == "0s"
    p.page.emulate_media(reduced_motion="no-preference")


@check
def text_has_contrast_in_both_themes(p):
    p.load(conversation("one", CODE + FORMULAS, name="contrast"))
    for scheme in ("light", "dark"):
        p.page.emulate_media(color_scheme=scheme)
        p.page.wait_for_timeout(400)
        assert not p.page.evaluate(FAINT), (scheme, p.page.evaluate(FAINT))
        for dialog in ("settings", "keys"):
            p.page.evaluate(f"document.getElementById('{dialog}').showModal()")
            assert not p.page.evaluate(FAINT), (scheme, dialog, p.page.evaluate(FAINT))
            p.page.keyboard.press("Escape")
    p.page.emulate_media(color_scheme="light")


@check
def the_page_is_small(p):
    size = len(p.get("").encode())
    print(f"        bytes: {size:,}")
    assert size < MAX_BYTES, size
