"""Your own code at every step, evaluation and checkpoint of a run, as a tracker: in a process of its own.

`[trackers] use = ["callbacks"]` and `options.callbacks.call = ["watch.py:Watch"]`. A class is made once, without
arguments, and may have any of

    def on_step(self, values, step): ...          # numbers of the step by name (docs/metrics.md)
    def on_evaluation(self, values, step): ...    # of the weights of that step: `val-core/...`
    def on_checkpoint(self, folder, step): ...    # a whole checkpoint; it is deleted when `checkpoint_keep` newer exist

A function stands for `on_step`. Guarantees:
1. what a callback raises is in the log of the process, with its traceback; the other callbacks and the run go on;
2. every step, evaluation and checkpoint that it sees is passed on at least once, over restarts of this process too.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.metrics.pages import PAGES
from asyncrl.plugins import TrackerRun, load_object
from asyncrl.runtime.run_dir import RunDir

EVALUATION = ("val-", "evaluation_")  # how names of evaluations begin; without any score only the latter are there
WHERE = "trackers.options.callbacks.call"


class Callbacks:
    def __init__(self, run: TrackerRun) -> None:
        names = run.options.get("call") or []
        if not names:
            raise ConfigError("config.missing", "it names no callback", where=WHERE, remedy='call = ["watch.py:Watch"]')
        self._callbacks = [make_callback(name) for name in names]
        self._checkpoints = RunDir(Path(run.config["run"]["dir"])).checkpoints
        self._done = run.folder / "checkpoints"
        self._done.mkdir(exist_ok=True)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Call `on_evaluation` for the numbers of an evaluation, else `on_step`; then look for new checkpoints."""
        named = {plain_name(tag): value for tag, value in values.items()}
        self._call("on_evaluation" if any(name.startswith(EVALUATION) for name in named) else "on_step", named, step)
        self._look_for_checkpoints()

    def close(self) -> None:
        self._look_for_checkpoints()

    def _look_for_checkpoints(self) -> None:
        for manifest in sorted(self._checkpoints.glob("step_*/manifest.json")):
            mark = self._done / manifest.parent.name
            if not mark.exists():
                self._call("on_checkpoint", manifest.parent, int(manifest.parent.name.rpartition("_")[2]))
                mark.touch()

    def _call(self, name: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            function = getattr(callback, name, None)
            if function is None:
                continue
            try:
                function(*arguments)
            except Exception:  # the author's code may raise anything
                print(
                    f"{type(callback).__name__}.{name}({arguments[-1]}) failed:\n{traceback.format_exc()}", flush=True
                )


class _Function:
    def __init__(self, function: Any) -> None:
        self.on_step = function


def make_callback(name: str) -> Any:
    """The object with the methods. Raises `config.extra` if it cannot be imported."""
    found = load_object(name, code="config.extra", where=WHERE)
    return found() if isinstance(found, type) else _Function(found)


def plain_name(tag: str) -> str:
    """The metric behind a tag: `learning/reward_mean` is `reward_mean`."""
    page, _, name = tag.partition("/")
    return name if page in PAGES else tag
