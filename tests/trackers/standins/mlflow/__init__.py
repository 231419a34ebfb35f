"""Stands in for mlflow: the part of its client that is used, with its own argument names and its limits."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from standin_store import Store

from mlflow.entities import Metric, Param

_NAME = re.compile(r"^[/\w.\- :]*$")


class MlflowClient:
    """The experiments are lines of the store."""

    def __init__(self, tracking_uri: str | None = None) -> None:
        assert tracking_uri and tracking_uri.startswith("sqlite:////"), tracking_uri
        self._store = Store(Path(tracking_uri.removeprefix("sqlite:///")).parent)

    def get_experiment_by_name(self, name: str) -> Any:
        made = [line for line in self._store.lines() if line.get("experiment") == name]
        return SimpleNamespace(experiment_id=name) if made else None

    def create_experiment(self, name: str) -> str:
        self._store.put(experiment=name)
        return name

    def create_run(self, experiment_id: str, run_name: str, tags: dict[str, str]) -> Any:
        self._store.put(
            begin=tags["asyncrl.id"],
            project=experiment_id,
            name=run_name,
            mode="offline",
            secret=os.environ.get("MLFLOW_TRACKING_TOKEN", ""),
        )
        return SimpleNamespace(info=SimpleNamespace(run_id=tags["asyncrl.id"]))

    def search_runs(self, experiment_ids: list[str], filter_string: str, max_results: int) -> list[Any]:
        wanted = filter_string.split("'")[1]
        made = {line["begin"] for line in self._store.lines() if "begin" in line}
        return [SimpleNamespace(info=SimpleNamespace(run_id=wanted))] if wanted in made else []

    def update_run(self, run_id: str, status: str) -> None:
        assert status == "RUNNING"
        self._store.put(begin=run_id, mode="offline")

    def log_batch(self, run_id: str, metrics: list[Metric] = [], params: list[Param] = []) -> None:  # noqa: B006
        assert len(metrics) <= 1000 and len(params) <= 100
        assert all(_NAME.match(item.key) for item in [*metrics, *params]), "a name that mlflow refuses"
        for metric in metrics:
            self._store.put(step=metric.step, values={metric.key: metric.value})

    def set_terminated(self, run_id: str) -> None:
        self._store.put(end=True)
