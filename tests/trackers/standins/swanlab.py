"""Stands in for swanlab: the part of its interface that is used, with its own argument names."""

from __future__ import annotations

import os
from typing import Any

from standin_store import Store


class _Run:
    def __init__(self, store: Store) -> None:
        self._store = store

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self._store.put(step=step, values=data)

    def finish(self) -> None:
        self._store.put(end=True)


def init(
    *,
    project: str,
    name: str,
    log_dir: str,
    config: dict[str, Any],
    mode: str,
    id: str | None = None,
    resume: str | None = None,
    workspace: str | None = None,
    tags: list[str] | None = None,
) -> _Run:
    store = Store(log_dir)
    store.put(begin=id or name, project=project, name=name, mode=mode, secret=os.environ.get("SWANLAB_API_KEY", ""))
    return _Run(store)
