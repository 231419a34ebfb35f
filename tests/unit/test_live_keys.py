"""`asyncrl top` on a real terminal: drawn in place, left by a key, and the terminal is as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from synthetic_run import write_run

ROOT = Path(__file__).parents[2]


def read_until(master: int, words: bytes, *, timeout_s: float = 60.0) -> bytes:
    """What the terminal shows, up to these words."""
    text, deadline = b"", time.monotonic() + timeout_s
    while words not in text and time.monotonic() < deadline:
        ready, _, _ = select.select([master], [], [], 0.2)
        if ready:
            try:
                text += os.read(master, 65536)
            except OSError:  # the other end is closed
                break
    assert words in text, text[-2000:]
    return text


@pytest.mark.parametrize(("leave", "code"), [("q", 0), ("signal", 130)])
def test_a_key_or_an_interrupt_leaves_and_restores_the_terminal(tmp_path: Path, leave: str, code: int) -> None:
    run = write_run(tmp_path / "run", steps=20)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    before = termios.tcgetattr(slave)
    child = subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "top", str(run.root), "--every", "0.2"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
        start_new_session=True,
    )
    try:
        shown = read_until(master, b"advice")
        assert b"\x1b[?1049h" in shown and b"step 20 of 20" in shown  # a screen of its own
        if leave == "q":
            os.write(master, b"q")
        else:
            child.send_signal(signal.SIGINT)
        rest = read_until(master, b"\x1b[?1049l")
        assert child.wait(timeout=60) == code, rest[-2000:]
        assert termios.tcgetattr(slave) == before
    finally:
        child.kill()
        child.wait(timeout=60)
        os.close(master)
        os.close(slave)
