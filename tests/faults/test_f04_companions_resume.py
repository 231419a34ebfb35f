"""F4 with models beside the policy: kill -9 at random points; the run ends with the bits of an undisturbed one.

As `test_f04_bit_equal_resume`, and beside the policy's export that of the critic or of the process reward model.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from learner_lab import Lab, Recorded, seed_of

Figure = Callable[[str], None]
STEPS, KILLS = 10, 3
RUNS = {
    "critic": "learner.algorithm.advantage=gae;learner.critic.lr=1e-3;learner.critic.critic_warmup=6;"
              "learner.critic.critic_warmup_until=0.01",
    "process_reward": "learner.algorithm.advantage=prime;learner.process_reward.lr=1e-3;"
                      "learner.process_reward.update=before",
}  # fmt: skip


def ended(lab: Lab, name: str) -> dict[str, object]:
    found = hashlib.blake2b((lab.run.export / name / "model.safetensors").read_bytes()).hexdigest()
    return lab.result() | {name: found}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RUNS))
def test_f04_models_beside_the_policy_end_with_the_same_bits(
    recorded: Recorded, tmp_path: Path, figure: Figure, name: str
) -> None:
    rng = seed_of(f"bit-equal resume with {name}")
    whole = recorded.lab(tmp_path / "whole", steps=STEPS, extra=RUNS[name]).serve()
    try:
        whole.finish()
        wanted = ended(whole, name)
        alone = [line.get("critic_alone") for line in whole.lines()]
    finally:
        whole.close()
    lab = recorded.lab(tmp_path / "killed", steps=STEPS, extra=RUNS[name]).serve()
    try:
        for number in range(KILLS):
            pid, goal = lab.learner(), min(2 * number + rng.randrange(1, 3), STEPS - 2)
            lab.wait("steps", lambda goal=goal: lab.committed() >= goal)  # type: ignore[misc]
            time.sleep(rng.uniform(0.0, 0.05))
            assert lab.children.running(pid), "it ended before it was killed"
            os.kill(pid, signal.SIGKILL)
            assert lab.end_of(pid, 30) == -signal.SIGKILL
        lab.finish()
        lab.assert_accounted()
        found, lines = ended(lab, name), {line["step"]: line for line in lab.lines()}
    finally:
        lab.close()
    assert found == wanted
    assert [lines[step].get("critic_alone") for step in sorted(lines)] == alone
    replayed = sum(1 for line in lab.lines() if line["replayed"])
    figure(f"{name}: {KILLS} kills, steps replayed {replayed}, digest {str(found[name])[:12]}, undisturbed the same")
