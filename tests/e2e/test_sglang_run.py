"""A short run on the sglang engine, its server given by URL: it learns from in-flight updates, the audit is clean.

On the stand-in everywhere; on the real SGLang where there is an environment for it (`make sglang`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import rig_sglang
from served import Served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, GROUPS = 8, 4
GAP = 1e-4  # engine and learner in float32 under the same weights


@pytest.fixture(params=["standin", "real"])
def server(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Served]:
    if request.param == "real" and (why := rig_sglang.why_not()):
        pytest.skip(why)
    served = rig_sglang.stand_in(tiny_model) if request.param == "standin" else rig_sglang.serve(tiny_model)
    yield served
    served.end()


def test_a_run_on_sglang_is_exact(run: Any, server: Served, figure: Callable[[str], None]) -> None:
    done = run.launch(
        "producers.engine=sglang", f'producers.url=["{server.url}"]', "producers.count=1", "producers.slots=16",
        f"learner.steps={STEPS}", "buffer.max_staleness=2", "weightsync.timeout_s=60", "run.hang_timeout_s=600",
        "producers.kv_at_swap=recompute",
        timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert audit["exit"] == 0, audit
    assert (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, STEPS * GROUPS)
    lines = run.lines("metrics/learner.jsonl")
    assert max(line["lag_max"] for line in lines) in (1, 2)
    gaps = [line["lag/0/logprob_gap_max"] for line in lines if "lag/0/logprob_gap_max" in line]
    means = [line["lag/0/logprob_gap_mean"] for line in lines if "lag/0/logprob_gap_mean" in line]
    assert gaps and max(gaps) <= GAP, gaps
    rounds = [line for line in run.lines("metrics/weightsync.jsonl") if line.get("members_committed")]
    assert len(rounds) >= 3
    for line in rounds:
        assert all(digest == line["digest"] for digest in line["members"].values()), json.dumps(line)
    assert run.living() == []
    mean = sum(means) / max(1, len(means))
    name = "stand-in" if server.log.name.startswith("standin") else "SGLang"
    figure(f"{name}: {len(rounds)} versions; engine and learner at lag 0 differ by {mean:.1g} (mean), {max(gaps):.1g}")
