"""A short run on an engine of another package: nothing lost, log-probs of the learner, every digest right."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

STEPS, GROUPS = 8, 4
GAP = 1e-4  # engine and learner in float32 under the same weights
#: Settings of such a run.
SETTINGS = ("producers.count=1", "producers.slots=16", f"learner.steps={STEPS}", "buffer.max_staleness=2")


class Exact(NamedTuple):
    """Versions that were committed; how far engine and learner are apart at lag 0."""

    versions: int
    mean: float
    largest: float


def assert_exact(run: Any, done: Any, *, gap: float = GAP) -> Exact:
    """The run ended well, and learned from in-flight updates. `gap`: of log-probs under the same weights."""
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert audit["exit"] == 0, audit
    assert (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, STEPS * GROUPS)
    lines = run.lines("metrics/learner.jsonl")
    assert max(line["lag_max"] for line in lines) in (1, 2)
    gaps = [line["lag/0/logprob_gap_max"] for line in lines if "lag/0/logprob_gap_max" in line]
    means = [line["lag/0/logprob_gap_mean"] for line in lines if "lag/0/logprob_gap_mean" in line]
    assert gaps and max(gaps) <= gap, gaps
    rounds = [line for line in run.lines("metrics/weightsync.jsonl") if line.get("members_committed")]
    assert len(rounds) >= 3
    for line in rounds:
        assert all(digest == line["digest"] for digest in line["members"].values()), json.dumps(line)
    assert run.living() == []
    return Exact(len(rounds), sum(means) / max(1, len(means)), max(gaps))
