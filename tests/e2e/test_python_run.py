"""Runs from Python, each in a script of its own as a notebook's kernel: train, look, stop, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
import json, sys
import asyncrl

ROWS = [{{"prompt": f"{{n % 90 + 10}}+{{n % 7 + 10}}=", "answer": "1"}} for n in range(64)]
LONGEST = 20

def right(prompts, completions, answer, **_):
    assert set(answer) == {{"1"}}
    return [min(len(text), LONGEST) / LONGEST for text in completions]

GIVEN = dict(
    model={model!r}, data=ROWS, rewards=[right], lr=1e-4, group_size=4, max_staleness=2, max_prompt_tokens=32,
    max_new_tokens=24, dir={run!r}, progress=False,
    settings={{"buffer.batch_groups": 4, "buffer.store": "sqlite", "producers.count": 1, "learner.checkpoint_every": 2,
              "log.tensorboard": False}},
)
"""


def script(folder: Path, model: Path, code: str) -> subprocess.Popen[str]:
    path = folder / "notebook.py"
    path.write_text(HEAD.format(model=str(model), run=str(folder / "run")) + textwrap.dedent(code))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return warm.popen(
        [sys.executable, str(path)],
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def left(folder: Path) -> list[int]:
    """Processes that work in the folder, or whose command names it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if str(folder) in (entry / "cmdline").read_text() and "State:\tZ" not in (entry / "status").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until(condition: object, limit_s: float = 150.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.1)


def test_train_look_and_take_the_weights(tiny_model: Path, tmp_path: Path) -> None:
    child = script(
        tmp_path,
        tiny_model,
        """
        seen = []
        run = asyncrl.train(**GIVEN, steps=4, on_step=lambda s: seen.append((s.step, s.reward_mean)))
        assert [step for step, _ in seen] == [1, 2, 3, 4], seen
        table = run.metrics()
        assert table.index.name == "step" and list(table.index) == [1, 2, 3, 4]
        assert list(table.reward_mean) == [reward for _, reward in seen]
        assert not run.running and run.result["done"] and run.step == 4
        assert run.audit().ok and "OK" in repr(run.audit()), run.audit()
        assert {"response", "reward"} <= set(run.samples(step=4).columns), run.samples(step=4).columns
        assert run.report().exists() and (run.export("taken") / "config.json").exists()
        assert "group 3" in repr(run.trace(group=3)) and run.trace(group=3).group == 3
        figures = run.evaluate(ROWS[:6])
        assert figures["version"] == 4 and figures["evaluation_scored"] == 6, figures
        again = asyncrl.Run.open(run.folder)
        assert again.step == 4 and "done" in repr(again)
        print("all is there")
        """,
    )
    out, _ = child.communicate(timeout=280)
    assert child.returncode == 0 and "all is there" in out, out
    source = (tmp_path / "run" / "code" / "functions.py").read_text()
    assert "def right(" in source and "LONGEST = 20" in source
    assert left(tmp_path) == []


def test_tuned_stopped_and_resumed(tiny_model: Path, tmp_path: Path) -> None:
    child = script(
        tmp_path,
        tiny_model,
        """
        import time
        run = asyncrl.train(**GIVEN, steps=100000, background=True)
        while run.step < 3:
            assert run.running, run
            time.sleep(0.1)
        tuned = run.tune(max_staleness=1)
        assert "max_staleness: 2 -> 1" in repr(tuned), tuned
        try:
            run.wait(progress=False, timeout_s=0.0)
        except TimeoutError:
            assert run.running, "the run goes on"
        else:
            raise AssertionError("it waited for the end")
        run.stop()
        assert not run.running and run.step >= 3
        before = run.step
        run = asyncrl.train(**GIVEN, steps=before + 2)
        assert run.step == before + 2 and run.audit().ok, run.audit()
        print("resumed")
        """,
    )
    out, _ = child.communicate(timeout=280)
    assert child.returncode == 0 and "resumed" in out, out


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
def test_an_interrupt_and_a_killed_kernel_leave_nothing(how: int, tiny_model: Path, tmp_path: Path) -> None:
    child = script(tmp_path, tiny_model, "asyncrl.train(**GIVEN, steps=100000)\n")
    metrics = tmp_path / "run" / "metrics" / "learner.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
    child.send_signal(how)
    out, _ = child.communicate(timeout=200)
    wait_until(lambda: left(tmp_path) == [])
    if how == signal.SIGINT:
        assert "KeyboardInterrupt" in out, out
        assert json.loads((tmp_path / "run" / "result.json").read_text())["code"] == 0
        assert list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_a_failed_run_says_why(tiny_model: Path, tmp_path: Path) -> None:
    child = script(
        tmp_path,
        tiny_model,
        """
        def broken(completions, **_):
            raise ValueError("this reward always fails")

        try:
            asyncrl.train(**{**GIVEN, "rewards": [broken]}, steps=4)
        except asyncrl_errors().AsyncRLError as error:
            print(error.render())
        """.replace("asyncrl_errors()", "__import__('asyncrl.errors').errors"),
    )
    out, _ = child.communicate(timeout=280)
    assert "error[role.failed]" in out and "this reward always fails" in out, out
