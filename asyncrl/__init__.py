"""asyncrl: asynchronous, disaggregated reinforcement learning for language models on message queues.

    run = asyncrl.train(model="path/or/folder", data=rows, rewards=[right], steps=100, lr=1e-4, dir="runs/mine")
    run.metrics(), run.samples(), run.audit(), run.report(), run.export("my-model")

What a user imports lives here. Importing this package imports no torch, no redis and no engine; the names below are
imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
_PLACES = {"Config": "settings", "Run": "run", "launch": "run", "train": "run"}  # modules of asyncrl.python_api
__all__ = ["Config", "Run", "__version__", "launch", "train"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"asyncrl.python_api.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
