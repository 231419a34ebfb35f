"""Metrics in TensorBoard, beside the JSONL files.

Called by `learners.services` through `asyncrl.plugins` (group `asyncrl.trackers`). Guarantees:
1. every tag stands in one of three groups: `health/` (is the data path well), `learning/` (does it learn), `speed/`;
   figures of evaluations keep their names (`val-core/`, `val-aux/`, as verl has them), their accounts are `health/`;
2. a number that is not finite is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

HEALTH = frozenset({
    "lag_mean", "lag_max", "bound_max", "over_bound_groups", "ratio_max", "tis_capped_share", "ess", "kl_behaviour",
    "logprob_gap_mean", "truncated_share", "zero_advantage_share", "replayed", "groups", "version",
})  # fmt: skip
SPEED = frozenset({
    "wait_s", "fetch_s", "assemble_s", "proximal_s", "train_s", "publish_s", "commit_s", "checkpoint_s", "step_s",
    "tokens_per_s", "tokens", "micro_batches", "model_flops", "tflops_per_device", "mfu", "mfu_step", "memory_bytes",
    "memory_peak_bytes",
})  # fmt: skip


def tag_of(name: str) -> str:
    """The metric's tag: its group and its catalogue name."""
    if name.startswith(("val-core/", "val-aux/")):
        return name
    group = "health" if name in HEALTH or name.startswith("evaluation_") else "speed" if name in SPEED else "learning"
    return f"{group}/{name}"


class TensorBoardTracker:
    """Writes scalars to an event file in `folder`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Numbers of one step."""
        for name, value in values.items():
            if name != "step" and math.isfinite(value):
                self._writer.add_scalar(tag_of(name), value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
