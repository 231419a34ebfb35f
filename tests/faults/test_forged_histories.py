"""A run of real processes that are killed: its history passes the audit as it is, and none of its forgeries does."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos import Chaos
from falsifier import Book, falsify, kinds_of, limit_of, table
from forgeries import KINDS
from plant import Plant

from asyncrl.audit.findings import Audit
from asyncrl.audit.prove import audit_file, audit_run
from asyncrl.audit.verdict import Expected
from asyncrl.audit.witnesses import Witnesses

Figure = Callable[[str], None]
EXTRA = ("log.archive=true", "buffer.batch_groups=4", "buffer.max_staleness=2", "buffer.place_bytes=256")
VICTIMS = ("buffer", "producer-0", "learner", "reward-0", "buffer", "learner", "producer-1")


def killed_run(folder: Path, *, steps: int, victims: tuple[str, ...], store: str = "sqlite") -> Plant:
    """A complete run; every victim was killed once after a step or two."""
    plant = Plant(folder, steps=steps, rewards=2, extra=(*EXTRA, f"buffer.store={store}"), env={"MINI_STEP_S": "0.03"})
    with plant:
        plant.start()
        for victim in victims:
            at = plant.committed()
            plant.wait("a step", lambda at=at: plant.committed() > at)  # type: ignore[misc]
            if plant.roles[victim].alive():
                plant.kill(victim)
        plant.wait_done()
        plant.assert_accounted()
    return plant


class Run:
    """The run, whose history may be replaced."""

    def __init__(self, plant: Plant) -> None:
        self.run = plant.run
        self.size = plant.config.sampling.group_samples
        self.kept = Witnesses(plant.run)
        data = plant.run.history.read_bytes()
        self.book = Book(data, limit=limit_of(plant.run.history, {anchor.head for anchor in self.kept.anchors}))

    def judge(self, data: bytes, anchored: bool) -> Audit:
        self.run.history.write_bytes(data)
        if anchored:
            return audit_run(self.run.root)
        return audit_file(self.run.history, expected=Expected(group_size=self.size))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield Run(killed_run(tmp_path_factory.mktemp("forged"), steps=24, victims=VICTIMS))


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_every_kind_of_forgery_is_found(run: Run, figure: Figure) -> None:
    """With the seals of the history, with a chain that is computed again, and by the meaning of the lines alone."""
    found = run.judge(run.book.encode(), True)
    assert found.ok and found.anchors >= 20 and found.drains > 100 and found.service_starts == 3
    results = {name: falsify(one, [(run, run.book)], places=3) for name, one in KINDS.items()}
    figure(f"{sum(result.places for result in results.values())} forgeries\n{table(results)}")
    missed = [f"{name}, {where}" for name, result in results.items() for where in result.missed]
    assert not missed, "\n".join(missed)
    assert sum(bool(result.places) for result in results.values()) >= 90


@pytest.mark.long
@pytest.mark.timeout(600)
def test_archive_names_what_was_forged(run: Run) -> None:
    """With a new chain and without heads, the archive alone still knows rewards, producers, tokens and spans."""
    run.kept.anchors.clear()
    for name in (
        "reward changed",
        "rewards of a group changed alike",
        "producer of a lease and its samples changed",
        "token of a lease and its samples changed",
        "sample longer, with its spans",
        "sample made older, with its digest",
        "two groups swapped in their steps",
    ):
        forged = run.book.fresh(1)
        assert KINDS[name].edit(forged)
        run.run.history.write_bytes(forged.encode(rechain=True))
        known = Expected(group_size=run.size)
        assert "archive" in kinds_of(audit_file(run.run.history, expected=known, witnesses=run.kept)), name


def clean_runs(folder: Path, figure: Figure, *, runs: int) -> None:
    seed = int(os.environ.get("FORGED_SEED") or random.SystemRandom().randrange(1 << 30))
    print(f"FORGED_SEED={seed}")
    rng, drains, anchors = random.Random(seed), 0, 0
    for number in range(runs):
        victims = tuple(rng.choice(sorted({*VICTIMS, "weightsync"})) for _ in range(rng.randint(1, 5)))
        plant = killed_run(folder / str(number), steps=rng.randint(8, 14), victims=victims)
        found = plant.audit()
        assert found.ok and not [note for note in found.notes if "seal" in note], (victims, found.notes)
        drains, anchors = drains + found.drains, anchors + found.anchors
    figure(f"{runs} runs with 1 to 5 kills each, {drains} drains, {anchors} heads kept: no alarm")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_histories_of_killed_runs_are_clean(tmp_path: Path, figure: Figure) -> None:
    clean_runs(tmp_path, figure, runs=8)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_histories_of_fifty_killed_runs_are_clean(tmp_path: Path, figure: Figure) -> None:
    clean_runs(tmp_path, figure, runs=50)


@pytest.mark.chaos
@pytest.mark.redis
@pytest.mark.timeout(1200)
def test_forged_history_of_a_chaos_run(tmp_path: Path, figure: Figure) -> None:
    """Faults of every kind, also losses of the store; afterwards somebody edits the log."""
    seed = int(os.environ.get("FORGED_SEED") or random.SystemRandom().randrange(1 << 30))
    print(f"FORGED_SEED={seed}")
    once = tmp_path / "once"
    once.mkdir()
    with Plant(tmp_path, rewards=2, extra=(*EXTRA, "buffer.store=redis", "learner.steps=1000000")) as plant:
        plant.start()
        plant.wait("the first steps", lambda: plant.committed() >= 2)
        chaos = Chaos(plant, seed, once=once)
        chaos.commits.look()
        chaos.run(seconds=60, at_least=20, of_each=0)
        plant.finish()
        plant.assert_accounted()
    made = Run(plant)
    names = random.Random(seed).sample(sorted(KINDS), 30)  # the log is long: each audit takes seconds
    results = {name: falsify(KINDS[name], [(made, made.book)], places=1) for name in names}
    figure(f"{chaos.report()}\n{sum(result.places for result in results.values())} forgeries\n{table(results)}")
    missed = [f"{name}, {where}" for name, result in results.items() for where in result.missed if "heads" not in where]
    assert not missed, "\n".join(missed)
