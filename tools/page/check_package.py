"""Drives the example page of the npm package `kvant-web` in a headless Chromium, and its module.

    python3 tools/dist
    /tmp/page/bin/python tools/page/check_package.py target/dist/packages/kvant-web-0.1.0.tgz [/usr/bin/chromium] [--tsc FILE] [--gguf FILE]

Installs the package with npm in an empty folder, imports it in node, compiles a program against its
types where `--tsc` names TypeScript's compiler, and serves it as installed: the example answers, a
model comes from a URL, answers stop, and errors say why. Has the requirements of `check.py`, and node.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile

from driver import QUIET, Page, serve, sync_playwright

TYPED = """
import { Kvant, type Finished } from 'kvant-web';
const kvant = await Kvant.open({ model: new Blob([]), onDownload: (loaded, total) => console.log(loaded / total) });
for await (const event of kvant.chat([{ role: 'user', content: 'Hi' }], { kv_type: 'turbo3', signal: AbortSignal.timeout(1000) })) {
  if (event.text) console.log(event.text.length);
  if (event.finished) { const finished: Finished = event.finished; console.log(finished.kv_bytes); }
}
const answer = await kvant.complete([{ role: 'user', content: 'Hi' }]);
console.log(answer.text, answer.decode_per_second, kvant.about.n_ctx, (await kvant.kv()).bytes);
kvant.close();
"""
# What a wrong program must not compile to.
UNTYPED = "\n// @ts-expect-error\nawait kvant.chat('no messages');\n// @ts-expect-error\nKvant.open({ gpu: 'cuda' });\n"
ERRORS = """async () => {
  const { Kvant } = await import('/node_modules/kvant-web/index.js');
  const why = promise => promise.then(() => 'nothing', error => error.message);
  const kvant = await Kvant.open({ gpu: 'off' });
  const ask = [{ role: 'user', content: 'Count to five.' }];
  const first = await kvant.complete(ask, { temperature: 0 });
  const again = await kvant.complete(ask, { temperature: 0 });
  const abort = new AbortController(), events = [];
  const stopped = await why((async () => {
    for await (const event of kvant.chat(ask, { signal: abort.signal })) {
      events.push(event);
      if (event.text) abort.abort();
    }
  })());
  for await (const event of kvant.chat(ask)) if (event.text) break;
  const after = await kvant.complete(ask, { temperature: 0 });
  const wrongType = await why(kvant.complete(ask, { kv_type: 'turbo9' }));
  const kv = await kvant.kv();
  kvant.close();
  return {
    first, again, after, stopped, wrongType, kv, events: events.length, about: kvant.about,
    closed: await why(kvant.complete(ask)),
    noFile: await why(Kvant.open({ model: '/nothing.gguf' })),
    noGguf: await why(Kvant.open({ model: '/package.json' })),
  };
}"""
FROM_URL = """async () => {
  const { Kvant } = await import('/node_modules/kvant-web/index.js');
  const downloads = [];
  const kvant = await Kvant.open({ model: '/model.gguf', onDownload: (loaded, total) => downloads.push([loaded, total]) });
  const answer = await kvant.complete([{ role: 'user', content: 'What is the capital of France?' }], { temperature: 0, max_tokens: 8 });
  kvant.close();
  return { answer, name: kvant.about.name, last: downloads.at(-1), n: downloads.length };
}"""


def install(archive, folder):
    """Installs the package in an empty project, as its user does."""
    (folder / "package.json").write_text('{"type": "module"}\n')
    subprocess.run(["npm", "install", "--offline", "--silent", "--no-audit", archive], cwd=folder, check=True)
    code = "const { Kvant } = await import('kvant-web'); if (typeof Kvant.open !== 'function') process.exit(1);"
    subprocess.run(["node", "--input-type=module", "-e", code], cwd=folder, check=True)


def check_types(tsc, folder):
    (folder / "typed.ts").write_text(TYPED + UNTYPED)
    options = ["--noEmit", "--strict", "--target", "es2022", "--module", "nodenext", "--moduleResolution", "nodenext", "--lib", "es2022,dom,dom.iterable"]
    subprocess.run(["node", tsc, *options, "typed.ts"], cwd=folder, check=True)
    print("ok      types: a program compiles, wrong ones do not")


def check_example(page, url):
    page.goto(f"{url}node_modules/kvant-web/example.html")
    page.locator("#about", has_text="kvant-pocket").wait_for()
    page.press("[name=question]", "Enter")
    page.locator("#figures", has_text="tok/s").wait_for()
    assert "Paris" in page.locator("#answer").inner_text(), page.locator("#answer").inner_text()
    print("ok      example:", page.locator("#answer").inner_text(), "|", page.locator("#figures").inner_text())


def check_module(page):
    got = page.evaluate(ERRORS)
    assert got["first"]["text"].startswith("one, two, three"), got
    assert got["again"]["text"] == got["first"]["text"] == got["after"]["text"], got
    assert got["first"]["cached_tokens"] == 0 and got["again"]["cached_tokens"] > 0, got
    assert got["stopped"] == "stopped" and got["events"] >= 1, got
    assert "turbo9" in got["wrongType"], got
    assert 0 < got["kv"]["bytes"] <= got["kv"]["budget"], got
    assert (got["closed"], got["noFile"], got["noGguf"]) == ("closed", "/nothing.gguf: HTTP 404", "not a GGUF file"), got
    print("ok      module: equal answers, a cached prompt, stops, five errors:", got["wrongType"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=pathlib.Path)
    parser.add_argument("chromium", nargs="?", default="/usr/bin/chromium")
    parser.add_argument("--tsc", type=pathlib.Path, help="TypeScript's lib/tsc.js")
    parser.add_argument("--gguf", type=pathlib.Path, help="a model to open from a URL")
    args = parser.parse_args()
    if not shutil.which("npm"):
        print("skipped: there is no npm here")
        return
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        folder = pathlib.Path(folder)
        install(args.archive.resolve(), folder)
        if args.tsc:
            check_types(args.tsc.resolve(), folder)
        url = serve(folder)
        browser = playwright.chromium.launch(executable_path=args.chromium, args=QUIET)
        p = Page(browser, url, None)
        p.page.set_default_timeout(120_000)
        check_example(p.page, url)
        check_module(p.page)
        if args.gguf:
            (folder / "model.gguf").symlink_to(args.gguf.resolve())
            got = p.page.evaluate(FROM_URL)
            size = args.gguf.stat().st_size
            assert got["last"] == [size, size] and got["answer"]["completion_tokens"] > 0, got
            print("ok      from a URL:", got)
        browser.close()
    if p.errors or p.foreign:
        sys.exit(f"errors {p.errors}, requests elsewhere {p.foreign}")


if __name__ == "__main__":
    main()
