"""Metrics at Weights & Biases (extra `asyncrl[wandb]`).

The secret is `trackers.key_file` or WANDB_API_KEY; options are those of `wandb.init` (entity, tags, group, ...).
Guarantees:
1. the run keeps its id over restarts, so curves continue;
2. a step may be sent twice: the axis is the metric `step`, not the number of calls;
3. `offline`: files below the tracker's folder, for `wandb sync`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from asyncrl.plugins import TrackerRun


class WandbTracker:
    def __init__(self, run: TrackerRun) -> None:
        import wandb

        if run.secret:
            os.environ["WANDB_API_KEY"] = run.secret
        how = {"silent": True, "console": "off", "x_disable_stats": True, **run.options.get("settings", {})}
        more = {key: value for key, value in run.options.items() if key != "settings"}
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            dir=str(run.folder),
            config=run.config,
            mode="offline" if run.offline else "online",
            resume=None if run.offline else "allow",
            settings=wandb.Settings(**how),
            **more,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()
