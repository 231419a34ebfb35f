"""What the service writes and answers about evaluations: their files, and messages that name groups of both kinds.

Guarantees:
1. `evaluations/step-<N>.jsonl` holds a line for every scored sample before its score is persisted: after a kill a line
   may stand there twice (readers take the last one of `round`, `row` and `index`), none is missing;
2. `metrics/evaluation.jsonl` holds a line for every evaluation that ended: after a kill the missing ones are written at
   the next start;
3. scores of training and of evaluations may come in one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.evaluation.ids import METRICS, is_evaluation
from asyncrl.metrics import MetricsLog, read_lines
from asyncrl.runtime.run_dir import RunDir
from asyncrl.wire import RewardRequest, Scores, ScoresReply
from buffers.evaluation.evaluations import Evaluations
from buffers.groups.machine import Groups
from buffers.groups.scoring import ToScore
from buffers.service.event_log import write_all


class EvaluationFiles:
    """The files; made when there is something to write."""

    def __init__(self, config: Config) -> None:
        self._run = RunDir(config.run_dir)
        self._log: MetricsLog | None = None
        self._told: set[int] | None = None  # numbers of evaluations in the metrics

    def write_samples(self, samples: Sequence[dict[str, Any]]) -> None:
        by_step: dict[int, list[bytes]] = {}
        for sample in samples:
            by_step.setdefault(int(sample["step"]), []).append(msgspec.json.encode(sample))
        for step, lines in by_step.items():
            self._run.evaluations.mkdir(mode=0o700, exist_ok=True)
            with (self._run.evaluations / f"step-{step}.jsonl").open("ab", buffering=0) as file:
                write_all(file.fileno(), b"\n".join([*lines, b""]))

    def write_ended(self, ended: Sequence[dict[str, Any]]) -> None:
        """Lines of metrics of those that do not stand there yet."""
        if not ended:
            return
        if self._log is None or self._told is None:
            path = self._run.metrics / "evaluation.jsonl"
            self._told = {line["round"] for line in read_lines(path) if "round" in line}
            self._log = MetricsLog(path)
        for line in ended:
            if line["round"] in self._told:
                continue
            values = {name: value for name, value in line.items() if name.startswith(METRICS)}
            self._told.add(line["round"])
            self._log.write(values, **{name: value for name, value in line.items() if name not in values})

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def take_scores(groups: Groups, evaluations: Evaluations, message: Scores, *, now: float) -> ScoresReply:
    """Scores of both kinds of groups."""
    of_evaluations = msgspec.structs.replace(
        message,
        scores=tuple(one for one in message.scores if is_evaluation(one.group)),
        failures=tuple(one for one in message.failures if is_evaluation(one.group)),
    )
    if not (of_evaluations.scores or of_evaluations.failures):
        return groups.scores(message, now=now)
    rest = msgspec.structs.replace(
        message,
        scores=tuple(one for one in message.scores if not is_evaluation(one.group)),
        failures=tuple(one for one in message.failures if not is_evaluation(one.group)),
    )
    reply = groups.scores(rest, now=now)
    accepted, refused = evaluations.scores(of_evaluations, now=now)
    return ScoresReply(reply.accepted + accepted, {**reply.refused, **refused})


def reward_items(
    groups: Groups, evaluations: Evaluations, *, ask: RewardRequest, request: int, now: float
) -> list[ToScore]:
    """Samples to score: those of training first, then those of an evaluation, at least its share of `max_samples`."""
    room, judge = ask.max_samples, ask.judge
    items = groups.reward_lease(ask.worker, max_samples=room, request=request, now=now, judge=judge)
    share = max(1, int(evaluations.config.share * room), room - len(items))
    return items + evaluations.reward_lease(ask.worker, max_samples=share, request=request, now=now, judge=judge)
