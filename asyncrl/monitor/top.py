"""`asyncrl top RUN`: the live view.

Guarantees:
1. it only observes: roles notice nothing but the questions of `asyncrl.monitor.source`;
2. `q`, Ctrl-C or the end of its input end it at once, and the terminal is restored;
3. without a terminal, or with `--plain`, it writes plain lines, one block per poll;
4. a late answer does not block the keys: a thread asks the questions. The exit code is 0 if the run answers or has
   ended, else 69.
"""

from __future__ import annotations

import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from asyncrl.errors import AsyncRLError
from asyncrl.monitor.plain import plain
from asyncrl.monitor.snapshot import Snapshot, snapshot
from asyncrl.monitor.source import FileSource, ServiceSource, open_source

KEY_POLL_S = 0.1
EXIT_SILENT = 69


def top_command(
    folder: Path | None,
    *,
    connect: str,
    key: str,
    once: bool,
    as_plain: bool,
    every_s: float,
    out: TextIO | None = None,
) -> int:
    """Show the run until the user leaves; return the exit code."""
    target = out or sys.stdout
    source = open_source(folder, connect=connect, key=key)
    if once:
        seen = snapshot(source.look())
        if as_plain or not target.isatty():
            _say(seen, target)
        else:
            _draw_once(seen, target)
        return exit_code(seen)
    if as_plain or not target.isatty():
        return _lines(source, every_s, target)
    return _picture(source, every_s, target)


def exit_code(seen: Snapshot) -> int:
    """0 if the run answers or has ended, 69 if it is silent."""
    return 0 if seen.live or seen.ended else EXIT_SILENT


def _say(seen: Snapshot, out: TextIO) -> None:
    print("\n".join(plain(seen)), file=out, flush=True)


def _draw_once(seen: Snapshot, out: TextIO) -> None:
    from rich.console import Console

    from asyncrl.monitor.screen import screen

    Console(file=out).print(screen(seen))


def _lines(source: FileSource | ServiceSource, every_s: float, out: TextIO) -> int:
    """A block of lines per poll, until the run is over or a signal ends it."""
    while True:
        seen = snapshot(source.look())
        _say(seen, out)
        if seen.ended:
            return 0
        print(file=out, flush=True)
        time.sleep(every_s)


class Looks(threading.Thread):
    """Polls on a thread; `newest` is the last snapshot, `error` the exception that ended the thread."""

    def __init__(self, look: Callable[[], Snapshot], *, every_s: float) -> None:
        super().__init__(name="looks", daemon=True)
        self.newest: Snapshot | None = None
        self.error: AsyncRLError | None = None
        self.done = threading.Event()
        self._look = look
        self._every_s = every_s

    def run(self) -> None:
        """Poll until `done` is set, or until a permanent error."""
        while not self.done.is_set():
            try:
                self.newest = self._look()
            except AsyncRLError as error:
                self.error = error
                return
            self.done.wait(self._every_s)


def _picture(source: FileSource | ServiceSource, every_s: float, out: TextIO) -> int:
    """Redraw in place until a key is pressed."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from asyncrl.monitor.screen import screen

    looks = Looks(lambda: snapshot(source.look()), every_s=every_s)
    shown: Snapshot | None = None
    with (
        keys() as pressed,
        Live(Text("asking ..."), console=Console(file=out), screen=True, auto_refresh=False) as live,
    ):
        looks.start()
        while looks.error is None and looks.is_alive():
            if (newest := looks.newest) is not None and newest is not shown:
                shown = newest
                live.update(screen(shown), refresh=True)
            if pressed(KEY_POLL_S) in ("q", "Q", "\x03", "\x04"):
                break
    looks.done.set()
    if looks.error is not None:
        raise looks.error
    if shown is not None:  # the last picture stays on the screen
        _draw_once(shown, out)
    return 0 if shown is None else exit_code(shown)


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Keys one by one, without Enter: a function that waits up to the given seconds for the next one; empty without
    one.
    """
    if not sys.stdin.isatty():
        yield _no_keys
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield _next_key
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _no_keys(timeout_s: float) -> str:
    time.sleep(timeout_s)
    return ""


def _next_key(timeout_s: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return (sys.stdin.read(1) or "\x04") if ready else ""
