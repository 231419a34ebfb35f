"""The records of a learner step: metrics, groups, samples, TensorBoard, and one line on the terminal.

Guarantee: records that cannot be written (a full disk) are counted and reported, and do not end the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config import Config
from asyncrl.metrics import MetricsLog, open_lines
from asyncrl.runtime.run_dir import RunDir
from learners.batch import sample_log

if TYPE_CHECKING:
    from asyncrl.wire.batch_arrays import ClaimedBatch

#: Numbers of the newest step in heartbeats, for readers without the run folder.
HEARTBEAT_STATS = ("reward_mean", "lag_mean", "lag_max", "bound_max", "tokens_per_s", "step_s", "wait_s")


class StepRecords:
    """Writes the records. `decode` turns token ids into text."""

    def __init__(self, config: Config, run: RunDir, decode: Callable[[list[int]], str]) -> None:
        self._config = config
        self._decode = decode
        self._log = MetricsLog(run.metrics / "learner.jsonl")
        self._samples = run.samples
        self._groups = run.metrics / "groups.jsonl"
        self._lost_steps = 0  # steps whose records could not be written
        self.tracker = _open_tracker(config, run)

    def write(
        self,
        values: dict[str, float],
        batch: ClaimedBatch,
        groups: dict[str, Any] | None = None,
        logprobs: Mapping[int, list[float]] = MappingProxyType({}),
    ) -> dict[str, float]:
        """Write the records of a step and return the stats for heartbeats. `logprobs`: the learner's log-probs of the
        logged samples, by place in the batch.
        """
        try:
            self._write(values, batch, groups, logprobs)
        except OSError as error:
            self._lost_steps += 1
            print(
                f"learner: ERROR: the records of step {batch.step} are lost ({self._lost_steps} so far): {error}",
                flush=True,
            )
        waited = values["wait_s"] / max(values["step_s"], 1e-9)
        print(
            f"step {batch.step}/{self._config.learner.steps} reward {values['reward_mean']:.3f} "
            f"lag {values['lag_mean']:.1f}/{self._config.buffer.max_staleness} tok/s {values['tokens_per_s']:.0f} "
            f"wait {100 * waited:.0f}% loss {values.get('loss', 0.0):.4f} grad {values.get('grad_norm', 0.0):.3f} "
            f"entropy {values.get('entropy', 0.0):.3f} {values['step_s']:.2f} s"
            + (" (replayed)" if batch.replayed else ""),
            flush=True,
        )
        newest = {name: values[name] for name in HEARTBEAT_STATS if name in values}
        return {**newest, "step": float(batch.step), "version": float(batch.step), "busy_share": 1 - waited}

    def _write(
        self,
        values: dict[str, float],
        batch: ClaimedBatch,
        groups: dict[str, Any] | None,
        logprobs: Mapping[int, list[float]],
    ) -> None:
        if groups is not None:
            with open_lines(self._groups) as file:
                file.write(msgspec.json.encode({"t": time.time(), **groups}) + b"\n")
        self._log.write(values, groups_of_step=[group.group for group in batch.groups])
        if self.tracker is not None:
            self.tracker.log({**batch.ledger, **values}, step=batch.step)
        with open_lines(self._samples) as file:
            for line in sample_log.lines(batch, self._config.log.samples_per_step, self._decode, logprobs):
                file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        self._log.close()
        if self.tracker is not None:
            self.tracker.close()


def _open_tracker(config: Config, run: RunDir) -> Any:
    """Open TensorBoard in the run folder; online trackers have their own processes (`learners.trackers.main`)."""
    if not config.log.tensorboard:
        return None
    from asyncrl.plugins import TrackerRun, find

    given = TrackerRun(project=config.trackers.project, name=config.run.name, id="", folder=run.tensorboard)
    return find("asyncrl.trackers", "tensorboard")(given)
