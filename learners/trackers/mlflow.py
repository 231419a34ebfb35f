"""Metrics at an MLflow server or in a local folder (extra `asyncrl[mlflow]`).

Options: `tracking_uri` (default MLFLOW_TRACKING_URI) and `tags` (a table). The secret is `trackers.key_file` or
MLFLOW_TRACKING_TOKEN. Guarantees:
1. the run is found by its tag `asyncrl.id`, so curves continue after a restart;
2. characters that MLflow does not allow become `_` (`mean@4` is `mean_4`);
3. `offline`: an SQLite file in the tracker's folder, for `mlflow ui --backend-store-uri`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from asyncrl.plugins import TrackerRun

ID_TAG = "asyncrl.id"
LONGEST = 500  # characters of a parameter's value
AT_ONCE = 100  # parameters in one call, MLflow's limit
METRICS_AT_ONCE = 1000


class MlflowTracker:
    def __init__(self, run: TrackerRun) -> None:
        from mlflow import MlflowClient

        if run.secret:
            os.environ["MLFLOW_TRACKING_TOKEN"] = run.secret
        place = f"sqlite:///{run.folder}/mlflow.db" if run.offline else run.options.get("tracking_uri")
        self._client = MlflowClient(tracking_uri=place)
        self._run = self._find_run(run) or self._create_run(run)

    def _find_run(self, run: TrackerRun) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            return ""
        found = self._client.search_runs([experiment.experiment_id], f"tags.`{ID_TAG}` = '{run.id}'", max_results=1)
        for one in found:
            self._client.update_run(one.info.run_id, status="RUNNING")
            return str(one.info.run_id)
        return ""

    def _create_run(self, run: TrackerRun) -> str:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(run.project)
        try:
            place = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        except MlflowException:  # another process has created it
            experiment = self._client.get_experiment_by_name(run.project)
            if experiment is None:
                raise
            place = experiment.experiment_id
        tags = {**dict(run.options.get("tags", {})), ID_TAG: run.id}
        made = str(self._client.create_run(place, run_name=run.name, tags=tags).info.run_id)
        settings = iter([Param(name, text[:LONGEST]) for name, text in flat(run.config)])
        while some := list(islice(settings, AT_ONCE)):
            self._client.log_batch(made, params=some)
        return made

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = iter([Metric(clean_name(name), value, now, step) for name, value in values.items()])
        while some := list(islice(metrics, METRICS_AT_ONCE)):
            self._client.log_batch(self._run, metrics=some)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def clean_name(name: str) -> str:
    """Replace characters that MLflow does not allow.

    >>> allowed("val-core/add/reward/mean@4")
    'val-core/add/reward/mean_4'
    """
    return re.sub(r"[^\w\-. /]", "_", name)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and their values as text."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield clean_name(f"{prefix}{key}"), str(value)
