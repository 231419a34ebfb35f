"""Plain functions run_blocking the event loop: results, errors, and calls that never return."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

from producers.support.blocking_calls import run_blocking


def give(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


def test_results_and_errors_come_out() -> None:
    assert asyncio.run(run_blocking(give, 3)) == 3
    for error, kind in (
        (ValueError("x"), ValueError),
        (SystemExit(3), RuntimeError),
        (StopIteration(), RuntimeError),
        (asyncio.CancelledError(), RuntimeError),
    ):
        with pytest.raises(kind):
            asyncio.run(run_blocking(give, error))


@pytest.mark.timeout(300)
def test_calls_that_hang_hold_nobody() -> None:
    gone = threading.Event()

    async def run() -> int:
        hanging = [
            asyncio.create_task(run_blocking(gone.wait, 600)) for _ in range(100)
        ]  # more than any pool has places
        try:
            return await asyncio.wait_for(run_blocking(give, 7), 60)
        finally:
            for task in hanging:
                task.cancel()

    assert asyncio.run(run()) == 7
    gone.set()


@pytest.mark.timeout(300)
def test_the_process_ends_without_them() -> None:
    code = """
import asyncio, time
from producers.tools.base import FunctionTool, Toolbox
from asyncrl.environment import ToolCall
def stuck() -> str:
    "Never returns."
    time.sleep(600)
box = Toolbox([FunctionTool(stuck)])
print(asyncio.run(box.call(ToolCall("stuck", {}), timeout_s=0.2)), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=80)
    assert done.stdout == "error: stuck took longer than 0.2 s\n" and done.returncode == 0, done.stderr
