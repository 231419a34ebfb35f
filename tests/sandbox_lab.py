"""Sandboxes for tests: skipped with the reason where bubblewrap cannot run, and a server on loopback."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from asyncrl.errors import AsyncRLError
from producers.sandbox import SandboxLimits, open_sandbox
from producers.sandbox.chromium import find_chromium


@functools.cache
def why_not() -> str:
    """Why bubblewrap isolates nothing here; empty where it does."""
    try:
        with open_sandbox("bubblewrap") as sandbox:
            result = sandbox.run("print('in')", timeout_s=120.0)
            return "" if result.stdout == "in\n" else f"{result.status}: {result.stderr}"
    except AsyncRLError as error:
        return error.message


def needs_bubblewrap() -> None:
    """Skip the test with the reason; in CI that is a failure."""
    if why_not():
        assert not os.environ.get("CI"), f"no sandbox in CI: {why_not()}"
        pytest.skip(f"no sandbox here: {why_not()}")


@contextlib.contextmanager
def served(limits: SandboxLimits) -> Iterator[str]:
    """The address of a sandbox server of ours that isolates where it can."""
    command = [
        sys.executable,
        "-m",
        "asyncrl",
        "sandbox-server",
        "--port",
        "0",
        "--kind",
        "none" if why_not() else "bubblewrap",
        "--output-bytes",
        str(limits.output_bytes),
        "--workers",
        "2",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdout.close()


def needs_browser() -> None:
    """Skip the test with the reason where no browser is installed."""
    try:
        find_chromium()
    except AsyncRLError as error:
        pytest.skip(error.message)
