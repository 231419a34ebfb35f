"""Engines whose log-probs are wrong end the run before anything is trained: by the probe, or by the learner."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

ENGINES = """
from msgspec.structs import replace
from producers.engines.hf.engine import HFEngine

class BeforeTemperature(HFEngine):
    "Records log-probs as if the temperature were 1."
    async def generate(self, request):
        async for delta in super().generate(request):
            yield replace(delta, logprobs=delta.logprobs * request.temperature)

class AnotherModel(HFEngine):
    "Another distribution than the learner's, and log-probs that fit it."
    async def generate(self, request):
        async for delta in super().generate(replace(request, temperature=1.3 * request.temperature)):
            yield delta
"""


@pytest.mark.parametrize(
    ("engine", "role", "said"),
    [
        ("BeforeTemperature", "producer", "they do not follow sampling.temperature = 0.5"),
        ("AnotherModel", "learner", "nats per token under the same weights"),
    ],
)
def test_a_run_whose_log_probs_are_wrong_ends(run, engine: str, role: str, said: str) -> None:  # type: ignore[no-untyped-def]
    (run.folder / "wrong_engines.py").write_text(ENGINES)
    done = run.launch(f"producers.engine=wrong_engines.py:{engine}", "producers.count=1", "sampling.temperature=0.5")
    assert done.returncode == 2, done.stdout + run.logs()
    assert "error[config.conflict] producers.engine" in run.logs() and said in run.logs()
    assert run.lines("metrics/learner.jsonl") == []
    starts = [line["role"] for line in run.lines("processes.jsonl")]
    assert starts.count(role) == 1, "a restart could not help"
    assert run.living() == []
