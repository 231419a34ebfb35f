"""The end of a run with other policies (`[policies]`): its last weights stay published until the others are done.

A producer of another policy that restarts needs them, and the weight sync has them from the learner alone. The wait
ends without them if nothing has happened in their runs for `run.hang_timeout_s` or `run.start_timeout_s`, the longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.config import Config, load
from asyncrl.errors import AsyncRLError
from asyncrl.runtime.run_dir import RunDir


class OthersWait:
    """The wait of a learner that has done its last step."""

    def __init__(self, config: Config, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._seen: list[int] | None = None  # sizes of the others' histories
        self._since = 0.0

    def describe(self) -> str:
        """What it waits for; empty if nothing, or no longer."""
        unfinished, run = describe_unfinished(self._config), self._config.run
        histories = [RunDir(Path(folder)).history for folder in run.other_policies.values()]
        seen = [path.stat().st_size if path.exists() else 0 for path in histories]
        if seen != self._seen:
            self._seen, self._since = seen, self._clock()
        limit_s = max(run.hang_timeout_s, run.start_timeout_s)
        if unfinished and self._clock() - self._since > limit_s:
            print(f"nothing has happened for {limit_s:g} s in the runs of other policies: {unfinished}", flush=True)
            return ""
        return unfinished


def describe_unfinished(config: Config) -> str:
    """The other policies that have no checkpoint of their last step yet; empty if there are none."""
    found = []
    for name, folder in config.run.other_policies.items():
        run = RunDir(Path(folder))
        try:
            steps = load(run.config).learner.steps
        except AsyncRLError:
            found.append(f"policy {name}, which has not started")
            continue
        done = max(
            (int(path.name[5:]) for path in run.checkpoints.glob("step_*") if path.name[5:].isdigit()), default=0
        )
        if done < steps:
            found.append(f"policy {name}: its newest checkpoint is of step {done} of {steps}")
    return ", ".join(found)
