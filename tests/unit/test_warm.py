"""Processes of `warm` behave as those of `subprocess`: words, files, signals, exit codes, children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm

SAY = "import os, sys; print(sys.argv[1:], __name__, os.getcwd(), os.environ.get('COLOUR'), sys.path[0])"
WARM = "import sys; print('torch' in sys.modules, flush=True)"
CASES: dict[str, tuple[list[str], str]] = {
    "words": (["-c", SAY, "a", "-b"], ""),
    "unbuffered": (["-u", "-c", SAY, "a"], ""),
    "stdin": (["-c", "import sys; print(sys.stdin.read().upper()); sys.exit(3)"], "text\n"),
    "a word at the end": (["-c", "import sys; sys.exit('gone wrong')"], ""),
    "a late word": (["-c", "import atexit; atexit.register(print, 'late'); print('early')"], ""),
    "a thread": (["-c", "import threading, time; threading.Timer(0.2, lambda: print('done')).start()"], ""),
    "it raises": (["-c", "raise ValueError('on purpose')"], ""),
    "a module": (["-m", "json.tool"], '{"a":1}'),
    "a role": (["-m", "buffers.main", "--config", "/nonexistent"], ""),
    "no such module": (["-m", "no_such_module"], ""),
    "killed": (["-c", "import os; os.kill(os.getpid(), 9)"], ""),
    "interrupted": (["-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)"], ""),
}


@pytest.mark.parametrize("case", CASES)
def test_as_a_process_that_is_executed(case: str, tmp_path: Path) -> None:
    words, given = CASES[case]
    how: dict[str, Any] = {
        "input": given,
        "capture_output": True,
        "text": True,
        "timeout": 60,
        "cwd": tmp_path,
        "env": {**os.environ, "COLOUR": "red", "PYTHONPATH": str(warm.ROOT)},
    }
    wanted = subprocess.run([sys.executable, *words], check=False, **how)
    got = warm.run([sys.executable, *words], **how)
    assert (got.returncode, got.stdout) == (wanted.returncode, wanted.stdout), got.stderr
    ends = [text.rstrip().rpartition("\n")[2].rpartition(": ")[2] for text in (got.stderr, wanted.stderr)]
    assert ends[0] == ends[1]


def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("HERE = 5")
    (tmp_path / "script.py").write_text("import sys, beside\nprint(beside.HERE, sys.argv[1], __name__)")
    done = warm.run([sys.executable, str(tmp_path / "script.py"), "x"], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "5 x __main__\n"), done.stderr


def test_it_is_forked_and_so_are_its_children() -> None:
    inner = f"import os; print(os.getppid(), flush=True); {WARM}"
    outer = f"{WARM}; import os, subprocess; print(subprocess.Popen([sys.executable, '-c', {inner!r}]).wait(60))"
    child = warm.popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    out, _ = child.communicate(timeout=60)
    assert out.split() == ["True", str(child.pid), "True", "0"]


def test_signals_and_codes() -> None:
    child = warm.popen(
        [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"1\n"
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == child.poll() == -signal.SIGTERM
    child.stdout.close()
    assert not Path(f"/proc/{child.pid}").exists()


def test_what_customizes_its_start_is_executed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('customized')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = warm.run([sys.executable, "-c", WARM], timeout=60, capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["customized", "False"]
