"""`asyncrl demo --prepare-only` that is stopped: the exit code says so, and neither a process nor a model is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.runtime.host_facts import descendants


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "asyncrl", "demo", "--prepare-only"]
    demo = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, restore_signals=True, start_new_session=True
    )
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "stage 1/" in line:  # the process that makes the model says so
                break
        children = descendants(demo.pid)
        assert len(children) == 1
        demo.send_signal(number)
        assert demo.wait(60) == code
        deadline = time.monotonic() + 60
        while any(is_running(pid) for pid in children):
            assert time.monotonic() < deadline, "the process that makes the model goes on"
            time.sleep(0.05)
        assert not (tmp_path / "runs" / "models" / "running_sum").exists()
        assert (tmp_path / "runs" / "data" / "running_sum.jsonl").exists()
    finally:
        demo.kill()
        demo.wait()
