"""Real processes with other algorithms than the default: a greedy baseline from the producers, a KL penalty."""

from __future__ import annotations

import json
from typing import Any

from e2e_run import Run


def test_remax_gets_its_greedy_samples_and_replays_to_the_same_bits(run: Run) -> None:
    settings = (
        "learner.steps=4",
        "log.archive=true",
        "learner.algorithm.kl.where=reward",
        "learner.algorithm.kl.controller=adaptive",
        "learner.algorithm.kl.horizon=50",
    )
    words = [word for setting in settings for word in ("--set", setting)]
    done = run.command("launch", "all", str(run.config), "--preset", "remax", *words)
    assert done.returncode == 0, done.stdout + run.logs()
    assert "remax()" in run.command("check", str(run.dir / "config.toml"), timeout=100).stdout
    lines: list[dict[str, Any]] = run.lines("metrics/learner.jsonl")
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3, 4]
    assert len({line["kl_coeff"] for line in lines if "kl_coeff" in line}) > 1, "the controller moved"
    groups = [group for line in run.lines("metrics/groups.jsonl") for group in line["groups"]]
    assert all(sorted(group["indexes"]) == [0, 1, 2, 3] for group in groups), "the greedy sample (4) is not trained"
    assert any(value for group in groups for value in group["advantages"])
    audit = run.audit()
    assert audit["exit"] == 0, audit
    out = run.folder / "replay"
    told = run.command("replay", str(run.dir), "--out", str(out))
    assert told.returncode == 0, told.stdout
    found = json.loads((out / "replay.json").read_text())
    assert found["equal"] == found["checked"] == 4
