"""The files of evaluations.

Guarantees:
1. `evaluations/step-<N>.jsonl` holds a line for every scored sample before its score is persisted. After a kill a line
   may stand there twice (readers take the last one of `round`, `row` and `index`), none is missing;
2. `metrics/evaluation.jsonl` holds a line for every evaluation that ended; after a kill the missing ones are written at
   the next start, and those that a full disk refused with the next evaluation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.evaluation.ids import METRICS
from asyncrl.metrics import MetricsLog, open_lines, read_lines, report_loss
from asyncrl.runtime.run_dir import RunDir
from buffers.service.event_log import write_all


class EvaluationFiles:
    """Opens the files when there is something to write."""

    def __init__(self, config: Config) -> None:
        self._run = RunDir(config.run_dir)
        self._durable = config.buffer.fsync == "always"
        self._log: MetricsLog | None = None
        self._ended: list[dict[str, Any]] = []  # evaluations whose lines are to be written
        self._written: set[int] | None = None  # rounds that are in the metrics

    def write_samples(self, samples: Sequence[dict[str, Any]]) -> None:
        by_step: dict[int, list[bytes]] = {}
        for sample in samples:
            by_step.setdefault(int(sample["step"]), []).append(msgspec.json.encode(sample))
        for step, lines in by_step.items():
            self._run.evaluations.mkdir(mode=0o700, exist_ok=True)
            with open_lines(self._run.evaluations / f"step-{step}.jsonl") as file:
                write_all(file.fileno(), b"\n".join([*lines, b""]))
                if self._durable:
                    os.fdatasync(file.fileno())

    def write_ended(self, ended: Sequence[dict[str, Any]]) -> None:
        """Append the lines of metrics that are not there yet. The evaluations themselves are in the store."""
        self._ended += ended
        try:
            self._write_ended()
        except OSError as error:
            report_loss("the line of an evaluation waits for the next one", error)

    def _write_ended(self) -> None:
        if not self._ended:
            return
        if self._log is None or self._written is None:
            path = self._run.metrics / "evaluation.jsonl"
            self._written = {line["round"] for line in read_lines(path) if "round" in line}
            self._log = MetricsLog(path)
        for line in self._ended:
            if line["round"] in self._written:
                continue
            values = {name: value for name, value in line.items() if name.startswith(METRICS)}
            self._log.write(values, **{name: value for name, value in line.items() if name not in values})
            self._written.add(line["round"])
        self._ended.clear()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
