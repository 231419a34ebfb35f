"""Metrics in trackio: a local database, or a Space at Hugging Face (extra `asyncrl[trackio]`).

Options are those of `trackio.init`; with `space_id` the metrics go to a Space, and the secret is `trackers.key_file` or
HF_TOKEN. Guarantees:
1. the run keeps its name over restarts and continues;
2. `offline`: the database lies in the tracker's folder, and no Space is used; `TRACKIO_DIR=RUN/trackers/trackio trackio
   show` displays it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from asyncrl.plugins import TrackerRun


class TrackioTracker:
    def __init__(self, run: TrackerRun) -> None:
        if run.secret:
            os.environ["HF_TOKEN"] = run.secret
        if run.offline:
            os.environ["TRACKIO_DIR"] = str(run.folder)
        import trackio

        more = {key: value for key, value in run.options.items() if not (run.offline and key == "space_id")}
        how = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False, "resume": "allow", **more}
        self._run = trackio.init(project=run.project, name=f"{run.name}-{run.id}", config=run.config, **how)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
