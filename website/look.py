"""Open pages in Chromium, as wide as a screen and as wide as a phone: ``python -m website.look [FOLDER OR FILE ...]``.

Reports pages that are wider than their window, errors that a page writes to the console or meets while it loads, and
requests to another host. By default it looks at the site that `make docs` has built; a run's report and its page of
rollouts can be named as well. Nothing but Chromium is needed: a local server hands out the pages in frames, and they
tell it what they measure.
"""

from __future__ import annotations

import http.server
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from website.build import ROOT

WIDTHS = (1280, 390)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Seconds for one page at one width; a page that takes longer is reported.
PATIENCE = 30

# Put at the beginning of each page, so that it sees all errors of the page's own scripts, and files that do not load.
_LISTENER = b"""<script>
  const missing = element => "does not load: " + (element.src || element.href);
  addEventListener("error", e => parent.heard.push(e.message || missing(e.target)), true);
  addEventListener("unhandledrejection", e => parent.heard.push(String(e.reason)));
  console.error = (...all) => parent.heard.push(all.join(" "));
</script>"""

_FRAMES = """<!doctype html><meta charset="utf-8"><body><script>
const pause = seconds => new Promise(done => setTimeout(done, 1000 * seconds));
window.heard = [];
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `border: 0; height: 900px; width: ${width}px`;
  const loaded = new Promise(done => frame.onload = () => done("loaded"));
  frame.src = page;
  window.heard = [];
  document.body.append(frame);
  const late = await Promise.race([loaded, pause(PATIENCE)]) !== "loaded";
  await pause(0.2);
  const view = frame.contentWindow, root = view.document.scrollingElement;
  const scrolls = e => e && e !== root && (getComputedStyle(e).overflowX !== "visible" || scrolls(e.parentElement));
  const sticking = e => e.getBoundingClientRect().right > root.clientWidth + 1 && !scrolls(e);
  const wide = root.scrollWidth > root.clientWidth;
  const culprit = wide ? [...view.document.body.querySelectorAll("*")].filter(sticking).pop() : null;
  const urls = view.performance.getEntriesByType("resource").map(entry => entry.name);
  const found = {
    page, width, errors: [...window.heard, ...(late ? ["it has not loaded"] : [])],
    overflow: root.scrollWidth - root.clientWidth, culprit: culprit ? culprit.outerHTML.slice(0, 120) : "",
    elsewhere: urls.filter(url => /^https?:/.test(url) && !url.startsWith(location.origin)),
  };
  frame.remove();
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
}
(async () => { for (const page of PAGES) for (const width of WIDTHS) await look(page, width); })();
</script>"""


def chromium() -> str | None:
    """The browser's path, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def served(folder: Path, frames: str) -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """A local server of the folder's files with the listener in each page; its address, and what it is told."""
    found: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def do_GET(self) -> None:
            path = Path(self.translate_path(self.path))
            if self.path == "/":
                self.answer(frames.encode())
            elif path.suffix == ".html" and path.is_file():
                self.answer(_LISTENER.join(_split_at_head(path.read_bytes())))
            else:
                super().do_GET()

        def do_POST(self) -> None:
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(b"")

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _split_at_head(page: bytes) -> tuple[bytes, bytes]:
    """The page before and after the place for a first script: behind ``<head>``, or at its very beginning."""
    start = page.find(b"<head>")
    cut = start + len(b"<head>") if start >= 0 else 0
    return page[:cut], page[cut:]


def look(folder: Path, pages: list[Path], browser: str) -> Iterator[dict[str, Any]]:
    """What Chromium finds on each page at each of `WIDTHS`."""
    names = [quote(str(page.relative_to(folder))) for page in pages]
    frames = _FRAMES.replace("PAGES", json.dumps(names)).replace("WIDTHS", json.dumps(WIDTHS))
    options = ["--headless", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1400,1000"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        served(folder, frames.replace("PATIENCE", str(PATIENCE))) as (address, found),
    ):
        command = [browser, *options, f"--user-data-dir={profile}", address]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(len(names) * len(WIDTHS)):
                yield found.get(timeout=4 * PATIENCE)
        except queue.Empty:
            raise RuntimeError(f"{browser} says nothing any more about the pages in {folder}.") from None
        finally:
            process.terminate()
            process.wait()


def faults(found: dict[str, Any]) -> list[str]:
    """A line for each thing that is wrong with a page at a width."""
    lines = [f"asks another host: {url}" for url in found["elsewhere"]] + found["errors"]
    if found["overflow"] > 0:
        lines.append(f"{found['overflow']} pixels too wide: {found['culprit']}")
    return [f"{found['page']} at {found['width']}: {line}" for line in lines]


def main(argv: list[str]) -> int:
    """Look at the pages; the exit code is 1 where one of them has a fault."""
    browser = chromium()
    if browser is None:
        print(f"No Chromium is installed (none of {', '.join(NAMES)}), so no page was looked at.")
        return 0
    places = [Path(each).resolve() for each in argv] or [ROOT / "build" / "website" / "site"]
    pages = [page for place in places for page in (sorted(place.rglob("*.html")) if place.is_dir() else [place])]
    if not pages or not all(page.is_file() for page in pages):
        raise SystemExit(f"{' '.join(map(str, places))}: there are no such pages. `make docs` builds the site.")
    folder = Path(os.path.commonpath([place if place.is_dir() else place.parent for place in places]))
    wrong = [line for found in look(folder, pages, browser) for line in faults(found)]
    print("\n".join([*wrong, f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} pixels, {len(wrong)} faults"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
