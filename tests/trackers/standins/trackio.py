"""Stands in for trackio: the part of its interface that is used, with its own argument names."""

from __future__ import annotations

import os
from typing import Any

from standin_store import Store

PLACE = os.environ.get("TRACKIO_DIR", "")  # read at the import, as the real one does


class _Run:
    def __init__(self, store: Store) -> None:
        self._store = store

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._store.put(step=step, values=metrics)

    def finish(self) -> None:
        self._store.put(end=True)


def init(
    *,
    project: str,
    name: str,
    config: dict[str, Any],
    embed: bool,
    auto_log_gpu: bool,
    auto_log_cpu: bool,
    resume: str,
    space_id: str | None = None,
    private: bool | None = None,
) -> _Run:
    store = Store(PLACE)
    store.put(
        begin=name,
        project=project,
        name=name,
        mode="online" if space_id else "offline",
        secret=os.environ.get("HF_TOKEN", ""),
    )
    return _Run(store)
