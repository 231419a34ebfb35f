"""asyncrl: asynchronous, disaggregated reinforcement learning for language models on message queues.

    run = asyncrl.train(model="path/or/folder", data=rows, rewards=[right], steps=100, lr=1e-4, dir="runs/mine")
    run.metrics(), run.samples(), run.audit(), run.report(), run.export("my-model")

What a user imports lives here. Importing this package imports no torch, no redis and no engine; the names below are
imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.python_api.run import Run, launch, train
    from asyncrl.python_api.settings import Config

__version__ = "0.1.0"
__all__ = ["Config", "Run", "__version__", "launch", "train"]


def __getattr__(name: str) -> Any:
    if name == "Config":
        from asyncrl.python_api.settings import Config

        return Config
    if name in __all__:
        from asyncrl.python_api import run

        return getattr(run, name)
    raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
