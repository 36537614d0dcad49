"""Drives the serverless page in a headless Chromium and checks its behaviour.

    crates/web/build target/web-page
    cargo build -p kvant-cli
    python3 -m venv /tmp/page && /tmp/page/bin/pip install playwright
    /tmp/page/bin/python tools/page/check_web.py target/web-page target/debug/kvant [/usr/bin/chromium] [--shots DIR]

Serves the folder itself, on a local port. The program receives the same questions with the same
kernels, and must give the same answers, on the CPU and, if the browser can provide one, on a WebGPU
adapter, which is software here (SwiftShader) and slow. `--gguf FILE` names a model to drop on the
page. Has the requirements of `check.py`.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from driver import QUIET, Folder, Page, run, serve, sync_playwright

# The ten questions of the model's card, and a word of each answer.
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Peru?": "Lima",
    "Oslo is the capital of which country?": "Norway",
    "What is the opposite of hot?": "cold",
    "What color is the sky?": "blue",
    "Which day comes after Monday?": "Tuesday",
    "Which month comes before March?": "February",
    "How do you spell river?": "R-I-V-E-R",
    "Count to five.": "one, two, three, four, five.",
}
# Flags that provide a WebGPU adapter without a GPU.
WITH_ADAPTER = [flag for flag in QUIET if flag != "--disable-gpu"] + ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]
# Number of questions on WebGPU.
ON_ADAPTER = 4
MAX_BYTES = 8_000_000

CHECKS, GPU_CHECKS = [], []


def check(function):
    CHECKS.append(function)
    return function


def gpu_check(function):
    GPU_CHECKS.append(function)
    return function


def drop(p, name, *, path=None, size=0):
    """Drops a file on the page: the one at `path`, or one of `size` bytes with a model's magic."""
    p.page.evaluate("() => { const input = document.createElement('input'); input.type = 'file'; input.id = 'dropped'; document.body.append(input); }")
    with tempfile.TemporaryDirectory() as folder:
        dropped = pathlib.Path(folder) / name
        if path:
            dropped.symlink_to(pathlib.Path(path).resolve())
        else:
            with open(dropped, "wb") as file:
                file.write(b"GGUF" if size > 100 else b"text")
                file.truncate(size)
        p.page.set_input_files("#dropped", str(dropped))
        p.page.evaluate("""() => {
            const input = document.getElementById('dropped'), given = new DataTransfer();
            given.items.add(input.files[0]);
            for (const kind of ['dragover', 'drop']) document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: given, bubbles: true, cancelable: true }));
            input.remove();
        }""")
        p.page.locator("#notice", has_text=re.compile(f"^{re.escape(name)}")).wait_for(timeout=120_000)
        return p.page.locator("#notice").inner_text()


@check
def the_device_is_shown(p):
    p.page.locator("#runs", has_text="kernels in WebAssembly").wait_for()
    p.page.locator(".hello", has_text="Chats stay in this browser").wait_for()
    runs = p.page.locator("#runs").inner_text()
    assert re.search(r"\(CPU, simd128 kernels in WebAssembly; no WebGPU: this browser has no adapter\)", runs), runs
    p.shot("web-hello")


@check
def the_page_is_small(p):
    sizes = {file.name: file.stat().st_size for file in sorted(pathlib.Path(p.folder).iterdir())}
    print("        bytes:", ", ".join(f"{name} {size:,}" for name, size in sizes.items()), f"together {sum(sizes.values()):,}")
    assert sum(sizes.values()) < MAX_BYTES, sizes


@check
def ten_questions_are_answered_as_by_the_program(p):
    answer_as_the_program(p, QUESTIONS)


def answer_as_the_program(p, questions):
    p.press("Settings")
    p.page.fill("[name=temperature]", "0")
    p.page.keyboard.press("Escape")
    p.page.select_option("#kv", "turbo3")
    rates = []
    for question, expected in questions.items():
        p.new()
        p.send(question)
        output = p.answers().locator(".text").last.inner_text().strip()
        command = [p.program, "run", "-p", question, "-ctk", "turbo3", "-ctv", "turbo3", "--temp", "0", "--quiet"]
        expected_output = subprocess.run(command, env={**os.environ, "KVANT_ISA": p.isa}, capture_output=True, text=True, check=True).stdout.strip()
        assert output == expected_output and expected in output, (question, output, expected_output)
        cost = p.answers().locator(".cost").last.inner_text()
        assert re.match(r"turbo3: [\d.]+ \wiB \(f16 [\d.]+ \wiB, [\d.]+×\)", cost), cost
        rates.append(float(re.search(r"([\d.,]+) tok/s", cost)[1].replace(",", "")))
    print(f"        tokens per second: {min(rates)} to {max(rates)}")


@check
def a_conversation_continues_without_a_second_prefill(p):
    p.send("What is the capital of Japan?")
    cached = re.search(r"(\d+) of (\d+) prompt tokens cached", p.answers().locator(".cost").last.inner_text())
    assert int(cached[1]) > 10, cached[0]
    p.shot("web-answered")


@check
def the_meter_shows_bytes_and_their_f16_equivalent(p):
    p.page.wait_for_timeout(1500)
    n_bytes = int(p.page.locator("#m-bytes").get_attribute("title").split(" ")[0].replace(",", ""))
    assert n_bytes > 0
    assert re.search(r"[\d.]+ \wiB · [\d.]+×", p.page.locator("#m-f16").inner_text())
    assert "idle" in p.page.locator("#m-now").inner_text()
    assert re.search(r"[1-9]", p.page.locator("#m-rate").inner_text())


@check
def another_kv_type_is_compared_side_by_side(p):
    p.press("Again in …")
    p.page.locator("#types").get_by_role("button", name="f16", exact=True).click()
    p.page.locator(".beside .head", has_text="f16").wait_for()
    p.settle()
    sizes = [int(cost.get_attribute("data-bytes")) for cost in p.page.locator(".beside .cost").all()]
    assert len(sizes) == 2 and sizes[0] < sizes[1], sizes
    p.shot("web-beside")


@check
def escape_stops_an_answer_and_another_follows(p):
    p.new()
    p.page.fill("#input", "Tell me a story")
    p.page.keyboard.press("Enter")
    p.page.locator(".answer .text:not(:empty)").last.wait_for()
    p.page.keyboard.press("Escape")
    p.settle()
    assert p.answers().locator(".cost").last.inner_text() == "stopped"
    p.send("What is the capital of Peru?")
    assert "Lima" in p.answers().locator(".text").last.inner_text()


@check
def a_reload_keeps_everything(p):
    before = p.page.locator("#thread").inner_text()
    p.page.reload()
    p.page.locator("article").first.wait_for()
    assert p.page.locator("#thread").inner_text() == before
    p.send("What is the capital of France?")
    assert "Paris" in p.answers().locator(".text").last.inner_text()


@check
def invalid_models_are_rejected_in_one_line(p):
    assert drop(p, "text.gguf", size=100) == "text.gguf: not a GGUF file"
    broken = drop(p, "broken.gguf", size=1000)
    assert broken.startswith("broken.gguf: header at byte 4: GGUF version 0 is not supported"), broken
    large = drop(p, "large.gguf", size=5 << 30)
    assert large.startswith("large.gguf: header at byte 4: GGUF version 0 is not supported"), large
    p.send("What color is the sky?")
    assert "blue" in p.answers().locator(".text").last.inner_text()


@check
def a_dropped_model_answers(p):
    if not p.gguf:
        return print("        skipped: no --gguf")
    name = pathlib.Path(p.gguf).name
    assert drop(p, name, path=p.gguf) == f"{name} is open."
    p.page.locator("#model", has_text=name).wait_for()
    p.new()
    p.page.fill("#input", "What is the capital of France?")
    p.page.keyboard.press("Enter")
    p.page.locator(".answer .text:not(:empty)").last.wait_for(timeout=300_000)
    # Some models never end an answer.
    p.page.wait_for_timeout(5_000)
    p.page.keyboard.press("Escape")
    p.settle()
    print("       ", repr(p.answers().locator(".text").last.inner_text()), p.answers().locator(".cost").last.inner_text())
    p.shot("web-dropped")


@check
def narrow_dark_windows_have_no_overflow(p):
    p.page.set_viewport_size({"width": 360, "height": 720})
    p.page.emulate_media(color_scheme="dark")
    p.page.wait_for_timeout(300)
    width = p.page.evaluate("document.documentElement.scrollWidth")
    assert width <= 360, width
    p.shot("web-narrow")


@check
def no_foreign_requests_and_no_hidden_errors_occurred(p):
    assert {path.split("?")[0] for path in Folder.requested} <= {"/", "/worker.js", "/kvant.packed"}, Folder.requested
    assert not p.errors, p.errors
    assert not p.foreign, p.foreign


@gpu_check
def a_software_adapter_is_used_only_on_request(p):
    runs = p.page.locator("#runs")
    runs.filter(has_text="CPU, simd128").wait_for()
    assert "is a program on the CPU" in runs.inner_text(), runs.inner_text()
    p.page.goto(p.url + "?gpu=any")
    runs.filter(has_text=re.compile(r"\(webgpu: ")).wait_for()
    print("       ", runs.inner_text())


@gpu_check
def questions_are_answered_on_webgpu_as_by_the_program(p):
    answer_as_the_program(p, dict(list(QUESTIONS.items())[:ON_ADAPTER]))
    p.shot("web-gpu")


def with_worker(p, before):
    """Reloads the page, with a worker that runs `before` first."""
    script = pathlib.Path(p.folder, "worker.js").read_text()
    p.page.unroute("**/worker.js")
    p.page.route("**/worker.js", lambda route: route.fulfill(body=before + script, content_type="text/javascript"))
    p.page.reload()
    return p.page.locator("#runs")


@gpu_check
def missing_wgsl_features_are_reported_and_the_cpu_answers(p):
    runs = with_worker(p, "Object.defineProperty(navigator.gpu, 'wgslLanguageFeatures', { value: new Set() });\n")
    runs.filter(has_text="CPU, simd128").wait_for()
    assert "no WebGPU: this browser's WGSL lacks packed_4x8_integer_dot_product" in runs.inner_text(), runs.inner_text()
    with_worker(p, "").filter(has_text=re.compile(r"\(webgpu: ")).wait_for()


@gpu_check
def a_lost_gpu_is_reported_and_another_answers(p):
    p.new()
    p.page.fill("#input", "Count to five.")
    p.page.keyboard.press("Enter")
    p.page.locator(".answer .text:not(:empty)").last.wait_for()
    p.page.context.browser.new_browser_cdp_session().send("Browser.crashGpuProcess")
    p.settle()
    assert "the device is lost" in p.answers().last.inner_text(), p.answers().last.inner_text()
    p.send("What is the capital of Peru?")
    assert "Lima" in p.answers().locator(".text").last.inner_text()
    print("       ", p.page.locator("#runs").inner_text())


@gpu_check
def a_gpu_that_rejects_kernels_is_reported_and_cpu_answers(p):
    refuses = "GPUDevice.prototype.createComputePipelineAsync = async () => { throw new Error('too many notes'); };"
    runs = with_worker(p, refuses).filter(has_text="CPU, simd128")
    runs.wait_for()
    assert re.search(r"no WebGPU: wgpu: .*too many notes", runs.inner_text()), runs.inner_text()
    p.send("What is the capital of Japan?")
    assert "Tokyo" in p.answers().locator(".text").last.inner_text()


@gpu_check
def no_hidden_errors_occurred_on_webgpu(p):
    assert not p.errors, p.errors
    assert not p.foreign, p.foreign


def on_adapter(playwright, args, url):
    """Runs the checks on WebGPU; returns the number of failures."""
    browser = playwright.chromium.launch(executable_path=args.chromium, args=WITH_ADAPTER)
    p = Page(browser, url, args.shots)
    p.page.set_default_timeout(300_000)
    p.folder, p.program, p.isa = args.folder, args.program, args.isa
    if not p.page.evaluate("async () => Boolean(window.WebAssembly?.Suspending && await navigator.gpu?.requestAdapter())"):
        print("skipped: this browser has no adapter of WebGPU, or nothing in WebAssembly waits there")
        browser.close()
        return 0
    n_failed = run(GPU_CHECKS, p)
    browser.close()
    return n_failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("program")
    parser.add_argument("chromium", nargs="?", default="/usr/bin/chromium")
    parser.add_argument("--gguf", metavar="FILE")
    parser.add_argument("--isa", default="scalar", help="kernels of the program that equal those of the page")
    parser.add_argument("--shots", metavar="DIR")
    args = parser.parse_args()
    if args.shots:
        pathlib.Path(args.shots).mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=QUIET)
        url = serve(args.folder)
        page = Page(browser, url, args.shots)
        page.folder, page.program, page.gguf, page.isa = args.folder, args.program, args.gguf, args.isa
        n_failed = run(CHECKS, page)
        browser.close()
        n_failed += on_adapter(playwright, args, url)
    sys.exit(1 if n_failed else 0)


if __name__ == "__main__":
    main()
