"""Routing replay in a whole run: a tiny mixture of experts, the engine hf, FSDP2, audit and replay."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import warm
from e2e_run import ROOT, Run

MAKE = """
import sys
from pathlib import Path
sys.path.insert(0, "tests/distributed")
from ranks import make_moe
make_moe(Path(sys.argv[1]))
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_run_replays_the_experts_of_its_engine(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "moe"
    warm.run([sys.executable, "-c", MAKE, str(folder)], cwd=ROOT, check=True, timeout=120)
    settings = [f"model.path={folder}", "log.archive=true", "learner.steps=8", "producers.checkpoint_tokens=4"]
    plain = run.folder / "plain"
    for replay in (True, False):
        where = [] if replay else [f"run.dir={plain}"]
        done = run.launch(*settings, *where, f"learner.router_replay={str(replay).lower()}")
        assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"]) == (0, 0, 0), audit
    lines = run.lines("metrics/learner.jsonl")
    shares = [line["router_replay_share"] for line in lines]
    assert shares[0] == 1.0 and all(0 <= share <= 1 for share in shares), "later samples over a swap have none"
    assert lines[0]["lag_max"] == 0 and lines[0]["logprob_gap_mean"] < 1e-6
    without = [json.loads(line) for line in (plain / "metrics" / "learner.jsonl").read_text().splitlines()]
    assert "router_replay_share" not in without[0]
    done = run.command("replay", str(run.dir), "--out", str(run.folder / "again"), "--json")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["equal"] == found["checked"] == 8, found
