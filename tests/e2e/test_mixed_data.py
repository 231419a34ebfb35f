"""Three data sets, and three environments, at 5:3:2 in a run that is stopped and goes on: the shares of what was
trained."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from e2e_run import Run

from asyncrl.runtime import batch_file
from asyncrl.runtime.run_dir import RunDir
from asyncrl.wire.batch_arrays import decode_batch

STEPS, GROUPS = 25, 200


def mixed(run: Run, parts: dict[str, int], **columns: Any) -> tuple[str, ...]:
    """Settings of a run over data sets of these sizes at 5:3:2; `columns`: more columns, by name of the data set."""
    paths = []
    for name, size in parts.items():
        path = run.folder / f"{name}.jsonl"
        more = columns.get(name, {})
        rows = [{"prompt": f"{number % 90 + 10}+1=", "data_source": name, **more} for number in range(size)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(str(path))
    return (
        f'data.path="{",".join(paths)}"',
        "data.ratios=[5, 3, 2]",
        f"learner.steps={STEPS}",
        f"buffer.batch_groups={GROUPS // STEPS}",
        "log.archive=true",
    )


def start(run: Run, settings: tuple[str, ...], *, until: int) -> Any:
    """A launch that has trained this many steps."""
    words = [word for setting in settings for word in ("--set", setting)]
    launched = run.start("launch", "all", str(run.config), *words)
    run.wait(f"step {until}", lambda: max(run.steps(), default=0) >= until)
    return launched


def trained(run: Run) -> Iterator[Any]:
    archive = RunDir(run.dir).archive
    for step in range(1, STEPS + 1):
        file = batch_file.read(batch_file.batch_path(archive, step))
        yield from decode_batch(file.batch, file.payloads).groups


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_three_data_sets_keep_their_ratios_through_a_resume(run: Run) -> None:
    settings = mixed(run, {"sums": 40, "words": 7, "codes": 300})
    first = start(run, settings, until=7)
    os.kill(first.pid, signal.SIGINT)
    out, _ = first.communicate(timeout=90)
    assert first.returncode == 130, out
    done = run.launch(*settings)
    assert done.returncode == 0, done.stdout + run.logs()
    counts = Counter(group.row["data_source"] for group in trained(run))
    assert sum(counts.values()) == GROUPS
    for name, share in (("sums", 0.5), ("words", 0.3), ("codes", 0.2)):
        assert abs(counts[name] / GROUPS - share) <= 0.02, counts


ENVIRONMENTS = """
[[row_environment]]
agent_name = "talk"
name = "chat"
[[row_environment]]
agent_name = "guess"
name = "guessing:Guess"
args = {value = 0.25}
"""
GUESSING = """
class Guess:
    def __init__(self, *, value):
        self.value = value
    def reset(self, row):
        return None
    def step(self, turn):
        return None, self.value, True, {}
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_three_environments_keep_their_ratios_when_every_process_is_killed(run: Run) -> None:
    (run.folder / "guessing.py").write_text(GUESSING)
    run.config.write_text(run.config.read_text() + ENVIRONMENTS)
    talk = {"agent_name": "talk", "followups": ["2+2=", "3+3="]}
    settings = mixed(run, {"plain": 40, "talk": 7, "guess": 300}, talk=talk, guess={"agent_name": "guess"})
    killed = start(run, settings, until=7)
    run.close()  # kill -9 of all
    killed.communicate(timeout=60)
    done = run.launch(*settings)
    assert done.returncode == 0, done.stdout + run.logs()
    found = {group.group: group for group in trained(run)}
    names = [found[number].row["data_source"] for number in sorted(found)]
    assert sorted(found) == list(range(GROUPS)), "nothing was dropped, so the first groups are all trained"
    for begin in range(0, GROUPS, 10):
        assert Counter(names[begin : begin + 10]) == {"plain": 5, "talk": 3, "guess": 2}
    shown = {
        group.row["data_source"]
        for group in found.values()
        if any(sample.mask is not None and not sample.mask.all() for sample in group.samples)
    }
    assert shown == {"talk"}, "its samples alone hold observations"
    own = {group.row["data_source"] for group in found.values() if all(one.reward == 0.25 for one in group.samples)}
    assert own == {"guess"}, "its samples alone have the reward of the environment"
    audit = run.audit()
    assert audit["exit"] == 0, audit
