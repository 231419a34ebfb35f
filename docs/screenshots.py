"""Makes docs/images/*.png from real runs: `make screenshots`, or `python docs/screenshots.py --chromium PATH`.

Two demonstration runs in `--work` (kept: a second call takes them as they are). In the first a producer and the learner
are killed, and `asyncrl top` is drawn while it runs. Pictures: top, the head of the report, its time and fault
chapters, tokens of samples, the comparison of both runs. Needs a Chromium; no network. (No TensorBoard: without a
driver of the browser nothing says when its page is drawn.)
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from asyncrl.monitor.screen import screen
from asyncrl.monitor.snapshot import snapshot
from asyncrl.monitor.source import FileSource, Observed
from asyncrl.report import write_comparison, write_report
from asyncrl.runtime.run_dir import RunDir

IMAGES = Path(__file__).parent / "images"
MOST_BYTES = 300_000
RUN_S = 1200.0
CHROMIUM_S = 120.0
LOOPBACK = "127.0.0.1"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
)
#: When (step) which process is killed; the picture of `top` is taken at step TOP_AT.
KILLS = ((10, "producer-1"), (18, "learner"))
TOP_AT = 24
TOP_WIDTH = 1180
SEEN = "top.json"  # what a look at the running system found


def main() -> int:
    """Make the runs, then every picture."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--work", type=Path, default=Path("runs/screenshots"), help="folder of the runs")
    words.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome") or "chromium")
    args = words.parse_args()
    IMAGES.mkdir(exist_ok=True)
    work = args.work.resolve()
    picture = Pictures(args.chromium)
    faulty = demo(
        work / "killed", "learner.steps=40", "run.name=killed", "log.samples_per_step=4", watch=watch_and_kill
    )
    other = demo(work / "bound-0", "learner.steps=40", "run.name=bound-0", "buffer.max_staleness=0")
    terminal, height = draw_top(faulty.root.parent)
    picture.take(terminal.as_uri(), "top", width=TOP_WIDTH, height=height)
    page = write_report(faulty)
    picture.take(part(page, work).as_uri(), "report", width=1280, height=900)
    picture.take(part(page, work, "time").as_uri(), "report-time", width=1280, height=1000)
    picture.take(part(page, work, "faults").as_uri(), "report-faults", width=1280, height=640)
    picture.take(part(page, work, "samples").as_uri(), "report-samples", width=1280, height=640)
    compared = write_comparison([faulty, other], out=work / "comparison.html")
    picture.take(part(compared, work, "curves").as_uri(), "comparison", width=1280, height=760)
    tensorboard(faulty, picture)
    return picture.say()


# ---------------------------------------------------------------- runs


def demo(
    folder: Path, *settings: str, watch: Callable[[RunDir, subprocess.Popen[bytes]], None] | None = None
) -> RunDir:
    """The demonstration in a folder of its own, unless it is there."""
    run = RunDir(folder / "runs" / "demo-running_sum")
    if run.result.exists():
        return run
    folder.mkdir(parents=True, exist_ok=True)
    overrides = [word for setting in settings for word in ("--set", setting)]
    with (folder / "demo.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", "demo", *overrides], cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            if watch is not None:
                watch(run, child)
            child.wait(timeout=RUN_S)
        finally:
            child.terminate()
    return run


def watch_and_kill(run: RunDir, child: subprocess.Popen[bytes]) -> None:
    """Kill what `KILLS` says, and draw `top` in between."""
    for step, name in KILLS:
        until(lambda step=step: steps_of(run) >= step, child)  # type: ignore[misc]
        lines = [json.loads(line) for line in run.processes.read_text().splitlines()]
        os.kill([line["pid"] for line in lines if line["name"] == name][-1], signal.SIGKILL)
    source = FileSource(run)
    until(lambda: steps_of(run) >= TOP_AT, child)
    (run.root.parent / SEEN).write_bytes(msgspec.json.encode(source.look()))


def until(condition: Callable[[], bool], child: subprocess.Popen[bytes]) -> None:
    """Wait for it while the run goes on."""
    deadline = time.monotonic() + RUN_S
    while not condition():
        if child.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the run has ended before its picture was taken: see demo.log")
        time.sleep(0.1)


def steps_of(run: RunDir) -> int:
    """The newest step that the learner has written."""
    path = run.metrics / "learner.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].endswith("}") else 0


# ---------------------------------------------------------------- pages


def draw_top(folder: Path) -> tuple[Path, int]:
    """The terminal as a page, from what was seen while the run went on; and its height."""
    seen = msgspec.json.decode((folder / SEEN).read_bytes(), type=Observed)
    console = Console(record=True, width=128, file=io.StringIO(), force_terminal=True)
    console.print(screen(snapshot(seen)))
    text = console.export_svg(title="asyncrl top runs/my")
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert box is not None
    text = re.sub(r"@font-face *\{.*?\}", "", text, flags=re.DOTALL)  # rich's own fonts come from the network
    path = folder / "top.html"
    path.write_text(f"<style>body{{margin:0}}svg{{width:100%;display:block}}</style>{text}")
    return path, math.ceil(TOP_WIDTH * float(box[2]) / float(box[1]))


def part(page: Path, work: Path, chapter: str = "") -> Path:
    """A copy of a page that shows one chapter of it, and no folder of this machine."""
    text = page.read_text().replace(f"{work}/", "")
    rules = (("", "block"), ("+p", "block"), ("+p+.cards", "grid"))
    shown = "".join(f"main>#{chapter}{rest}{{display:{how}!important}}" for rest, how in rules)
    style = f"<style>main>*{{display:none!important}}{shown}main>h2{{margin-top:0}}</style>" if chapter else ""
    path = page.with_name(f"part-{page.stem}-{chapter}.html")
    path.write_text(text.replace("</head>", f"{style}</head>"))
    return path


def tensorboard(run: RunDir, picture: Pictures) -> None:
    """TensorBoard's page of the run, by a server of its own; the page shows the folder that it is given."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tensorboard.main",
            "--logdir",
            run.tensorboard.name,
            "--host",
            LOOPBACK,
            "--port",
            str(port),
        ],
        cwd=run.tensorboard.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: answers(port), server)
        picture.take(f"http://{LOOPBACK}:{port}/#custom_scalars", "tensorboard", width=1280, height=1000, load_ms=25000)
    finally:
        server.terminate()
        server.wait(timeout=30)


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()
    except OSError:
        return False
    return True


# ---------------------------------------------------------------- pictures


class Pictures:
    """Takes pictures of pages; `say` tells how large they became."""

    def __init__(self, chromium: str) -> None:
        self._chromium = chromium
        self._taken: list[Path] = []

    def take(self, address: str, name: str, *, width: int, height: int, load_ms: int = 3000) -> None:
        """One picture, once the page has had that much of its own time. Raises SystemExit where it is missing or too
        large for a repository."""
        target = IMAGES / f"{name}.png"
        target.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as profile:
            subprocess.run(
                [
                    self._chromium,
                    *FLAGS,
                    f"--user-data-dir={profile}",
                    f"--screenshot={target}",
                    f"--window-size={width},{height}",
                    f"--virtual-time-budget={load_ms}",
                    address,
                ],
                check=False,
                timeout=CHROMIUM_S,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        if not target.exists() or target.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{target}: missing, or larger than {MOST_BYTES} bytes")
        self._taken.append(target)

    def say(self) -> int:
        """What was made."""
        for path in self._taken:
            print(
                f"{path.stat().st_size:>8} {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"
            )
        return 0


if __name__ == "__main__":
    sys.exit(main())
