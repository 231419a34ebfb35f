"""`cluster.devices = "turns"`: learner and engine use one device one after the other, on real processes on a CPU."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_run import Run, tiny_model  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
TURNS = ("cluster.devices=turns", "weightsync.in_place=true")
#: One group at a time: with several, their order in a batch is that of their arrival, and sums are rounded by it.
SAME = ("producers.count=1", "buffer.max_staleness=0", "buffer.batch_groups=1", "sampling.group_size=8")
#: Places where a process has the turn, or has just got or given it, and the pass at which it is killed there.
KILLED = {
    "learner.at_turn": 3,
    "learner.after_step": 2,
    "learner.after_turn": 3,
    "producer.at_wake": 2,
    "producer.awake": 3,
    "producer.at_sleep": 2,
    "producer.asleep": 2,
}


class KilledRun(Run):
    """Each place of `KILLED` kills one process of the run."""

    def environment(self) -> dict[str, str]:
        (self.folder / "killed").mkdir(exist_ok=True)
        failpoints = ",".join(f"{name}:kill:{count}" for name, count in KILLED.items())
        once = str(self.folder / "killed")
        return {**super().environment(), "ASYNCRL_FAILPOINT": failpoints, "ASYNCRL_FAILPOINT_ONCE": once}


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    run = getattr(request, "param", Run)(tmp_path, tiny_model)
    yield run
    run.close()


def digest_of_export(run: Run) -> str:
    parts = sorted((run.dir / "export").glob("*.safetensors"))
    assert parts
    return hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()


def complete(run: Run, *settings: str, trained: int = 20) -> None:
    done = run.launch(*settings)
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 0, trained), audit
    assert run.living() == []


def test_the_weights_are_those_of_separate_devices(tmp_path: Path, tiny_model: Path) -> None:
    digests = []
    for name, settings in (("turns", (*SAME, *TURNS)), ("apart", SAME)):
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, tiny_model)
        try:
            complete(run, *settings, trained=5)
            digests.append(digest_of_export(run))
            assert (run.dir / "device.turn").exists() == (name == "turns")
        finally:
            run.close()
    assert digests[0] == digests[1]


@pytest.mark.chaos
def test_several_ranks_take_turns(run: Run) -> None:
    complete(run, *TURNS, "learner.ranks=2")


@pytest.mark.parametrize("run", [KilledRun], indirect=True)
def test_killed_in_every_phase_of_a_turn(run: Run) -> None:
    restarts = ("learner.restarts=5", "learner.checkpoint_every=1", "learner.steps=8")
    complete(run, *TURNS, *restarts, "buffer.max_staleness=1", "producers.count=2", trained=32)
    killed = {path.name for path in (run.folder / "killed").iterdir()}
    assert killed == {f"{name}.kill.{count}" for name, count in KILLED.items()}
