"""A short run on the real vLLM engine: it learns from in-flight updates, every promise of the audit kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.config import parse
from asyncrl.engine_env import python_of
from asyncrl.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS, GROUPS = 8, 4
OWN = [f"producers.python={os.environ['VLLM_PYTHON']}"] if os.environ.get("VLLM_PYTHON") else []
GAP = 1e-4  # engine and learner in float32 under the same weights


def why_not() -> str:
    """Why vLLM cannot be used here."""
    if OWN:
        return ""
    text = '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[producers]\nengine = "vllm"\n[[reward]]\nfunction = "a:b"\n'
    try:
        python_of(parse(text))
    except ConfigError as error:
        return error.message
    return ""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_run_on_vllm_is_exact(run: Any, figure: Callable[[str], None]) -> None:
    done = run.launch(
        "producers.engine=vllm", "producers.count=1", "producers.slots=16", f"learner.steps={STEPS}",
        "buffer.max_staleness=2", "weightsync.timeout_s=120", *OWN, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert audit["exit"] == 0, audit
    assert (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, STEPS * GROUPS)
    lines = run.lines("metrics/learner.jsonl")
    assert max(line["lag_max"] for line in lines) in (1, 2)
    gaps = [line["lag/0/logprob_gap_max"] for line in lines if "lag/0/logprob_gap_max" in line]
    assert gaps and max(gaps) <= GAP, gaps
    rounds = [line for line in run.lines("metrics/weightsync.jsonl") if line.get("members_committed")]
    assert len(rounds) >= 3
    for line in rounds:
        assert all(digest == line["digest"] for digest in line["members"].values()), json.dumps(line)
    assert run.living() == []
    figure(f"vllm: {len(rounds)} versions, engine and learner at lag 0 differ by at most {max(gaps):.1g} nats")
