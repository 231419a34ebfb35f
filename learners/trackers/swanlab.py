"""Metrics at SwanLab (extra `asyncrl[swanlab]`).

The secret is `trackers.key_file` or SWANLAB_API_KEY; options are those of `swanlab.init` (workspace, tags, ...).
Guarantees:
1. online the run keeps its id over restarts, so curves continue;
2. `offline`: files below the tracker's folder, for `swanlab sync`; every start creates a new run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from asyncrl.plugins import TrackerRun


class SwanLabTracker:
    def __init__(self, run: TrackerRun) -> None:
        import swanlab

        if run.secret:
            os.environ["SWANLAB_API_KEY"] = run.secret
        resumed = {} if run.offline else {"id": run.id, "resume": "allow"}
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            log_dir=str(run.folder),
            config=run.config,
            mode="offline" if run.offline else "online",
            **resumed,
            **run.options,
        )

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
