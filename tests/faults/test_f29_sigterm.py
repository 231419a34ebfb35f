"""F29: SIGTERM (a preemption) at random times: a checkpoint and exit code 0; the next learner replays nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from learner_lab import Recorded, seed_of
from test_f04_bit_equal_resume import metrics_size

from learners.checkpoints import checkpoint

TIMES = 50
GRACE_S = 20.0  # of Kubernetes: 30 s


@pytest.mark.chaos
@pytest.mark.slow
def test_f29_fifty_preemptions_lose_no_step(recorded: Recorded, tmp_path: Path) -> None:
    rng = seed_of("SIGTERM")
    steps = 3 * TIMES + 10
    lab = recorded.lab(tmp_path, steps=steps, extra="learner.checkpoint_every=1000").serve()
    trained = 0
    slowest = 0.0
    try:
        for _ in range(TIMES):
            before = metrics_size(lab)
            registered = len(lab.history("register"))
            pid = lab.learner()
            near = lab.committed() > steps - 30  # the run must not end before the last one
            wanted = 0 if near else rng.randrange(0, 3)  # 0: while it starts
            if wanted:
                lab.wait("steps", lambda at=before + wanted: metrics_size(lab) >= at)
            else:
                lab.wait("its handlers", lambda at=pid: str(at) in lab.run.processes.read_text())
            time.sleep(rng.uniform(0.0, 0.05))
            asked = time.monotonic()
            os.kill(pid, signal.SIGTERM)
            assert lab.end_of(pid, GRACE_S) == 0, lab.tail()
            slowest = max(slowest, time.monotonic() - asked)
            committed = lab.committed()
            found = checkpoint.newest(lab.run.checkpoints)
            if committed:
                assert found is not None and found[0].step == committed  # not every 1000 steps: at the end
            trained += committed > trained
            assert not any(line["replayed"] for line in lab.history("claim"))
            assert len(lab.history("register")) <= registered + 1
        lab.finish()
        lab.assert_accounted(replayed_steps=0)
        print(f"{TIMES} times SIGTERM, 0 steps replayed, slowest end {slowest:.2f} s")
        assert trained > 0
    finally:
        lab.close()
