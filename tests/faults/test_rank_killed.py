"""One of two ranks is killed in mid-step, five times in a run, or while both write a version: the gang starts anew and
ends with the same bits.

The launcher and torchrun start the gang, as in any run; the batches are those of `learner_lab`, so that a gang in which
nothing was killed says how it must end. Checkpoints are asynchronous: kills also meet the writer.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from e2e_run import alive
from learner_lab import ROOT, Lab, Recorded, seed_of
from proxy import free_port

from asyncrl.runtime.liveness import read_signs

Figure = Callable[[str], None]
KILLS = 5
STEPS = 18
#: Three restarts in ten minutes are the default: five kills need more.
SETTINGS = f"run.hang_timeout_s=300;learner.ranks=2;learner.checkpoint_async=true;learner.restarts={KILLS}"
SURVIVOR_S = 30.0  # torchrun kills what has not ended by itself after this long; a collective would wait for 180 s


def undisturbed(recorded: Recorded, folder: Path) -> dict[str, Any]:
    """How a gang of two ends that nobody kills, without launcher and torchrun."""
    with recorded.lab(folder, steps=STEPS, extra=SETTINGS).serve() as lab:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        argv = ["--config", str(lab.run.config), "--name", "learner"]
        for rank in ("0", "1"):
            env = place | {"RANK": rank, "LOCAL_RANK": rank}
            lab.learners.append(lab.children.start(argv, log=lab.log, env=env, limits={}))
        assert [lab.end_of(pid, 120) for pid in lab.learners] == [0, 0], lab.tail()
        lab.assert_accounted()
        return lab.result()


@contextmanager
def launched(lab: Lab) -> Iterator[subprocess.Popen[bytes]]:
    """`asyncrl launch learner` for the lab's run."""
    with (lab.run.logs / "launcher.log").open("ab") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", "launch", "learner", str(lab.run.config)],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(60)


def ranks(lab: Lab) -> dict[str, int]:
    """pid of every rank that runs, by `RANK`."""
    signs = [seen for seen in read_signs(lab.run.alive).values() if seen.role == "learner" and alive(seen.pid)]
    return {seen.name.partition("-rank")[2] or "0": seen.pid for seen in signs}


def in_step(lab: Lab, *, after: int) -> bool:
    """A batch after this step is claimed, and not committed."""
    lines = lab.history("register", "claim", "commit")
    return bool(lines) and lines[-1]["e"] == "claim" and lines[-1]["step"] > after


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_of_two_is_killed_five_times(recorded: Recorded, tmp_path: Path, figure: Figure) -> None:
    rng = seed_of("a rank of two")
    wanted = undisturbed(recorded, tmp_path / "whole")
    lab = recorded.lab(tmp_path / "killed", steps=STEPS, extra=SETTINGS)
    slowest, started = 0.0, time.monotonic()
    with lab.serve(), launched(lab) as launcher:
        for number in range(KILLS):
            goal = 3 * number + rng.randrange(1, 3)  # steps that were committed before
            lab.wait("a step", lambda after=goal: in_step(lab, after=after), 180)  # type: ignore[misc]
            time.sleep(rng.uniform(0, 0.03))
            here = ranks(lab)
            victim, survivor = (here[str((number + 1 + which) % 2)] for which in range(2))
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            lab.wait("the survivor's end", lambda pid=survivor: not alive(pid), SURVIVOR_S)  # type: ignore[misc]
            slowest = max(slowest, time.monotonic() - killed)
        assert launcher.wait(240) == 0, lab.tail()
        lab.assert_accounted()
        found = lab.result()
        took = time.monotonic() - started
    registered = [line["step"] for line in lab.history("register")]
    said = lab.said()
    named = sum(1 for line in said.splitlines() if re.match(r"learner: rank \d of 2 lost another rank", line))
    replayed = sum(1 for line in lab.lines() if line["replayed"])
    figure(
        f"{KILLS} kills of one rank of two in mid-step, started from steps {registered}, {replayed} steps replayed, "
        f"survivors gone after at most {slowest:.1f} s, {named} of {KILLS} named the loss, {took:.0f} s, same bits"
    )
    assert len(registered) == KILLS + 1 and registered == sorted(registered) and registered[-1] > 0
    assert replayed > 0 and named == KILLS
    assert found == wanted


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_killed_while_all_write_a_version(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is not offered: no generator hears of a version with a missing part, and the gang starts anew."""
    wanted = undisturbed(recorded, tmp_path / "whole")
    once = tmp_path / "once"
    once.mkdir()
    monkeypatch.setenv("ASYNCRL_FAILPOINT", "learner.writing_rows:kill:6")
    monkeypatch.setenv("ASYNCRL_FAILPOINT_ONCE", str(once))
    lab = recorded.lab(tmp_path / "killed", steps=STEPS, extra=SETTINGS)
    with lab.serve(), launched(lab) as launcher:
        assert launcher.wait(240) == 0, lab.tail()
        lab.assert_accounted()
        assert len(list(once.iterdir())) == 1 and len(lab.history("register")) == 2, lab.tail()
        assert lab.result() == wanted
