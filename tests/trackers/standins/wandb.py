"""Stands in for wandb: the part of its interface that is used, with its own argument names."""

from __future__ import annotations

import os
from typing import Any

from standin_store import Store


class Settings:
    """Refuses what the real one does not have."""

    def __init__(self, *, silent: bool, console: str, x_disable_stats: bool) -> None:
        assert isinstance(silent, bool) and console in ("off", "auto") and isinstance(x_disable_stats, bool)


class _Run:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._axis = ""

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self._axis = step_metric or self._axis

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert step is None and self._axis == "step", "a step may come again only on an axis of its own"
        self._store.put(step=data["step"], values={k: v for k, v in data.items() if k != "step"})

    def finish(self) -> None:
        self._store.put(end=True)


def init(
    *,
    project: str,
    name: str,
    id: str,
    dir: str,
    config: dict[str, Any],
    mode: str,
    resume: str | None,
    settings: Settings,
    entity: str | None = None,
    tags: list[str] | None = None,
    group: str | None = None,
) -> _Run:
    store = Store(dir)
    store.put(begin=id, project=project, name=name, mode=mode, secret=os.environ.get("WANDB_API_KEY", ""), tags=tags)
    return _Run(store)
