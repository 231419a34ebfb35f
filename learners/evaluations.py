"""Evaluations as the learner sees them: their figures go to the tracker, and the end of the run waits for the last one.

Guarantees:
1. between two steps it asks and never waits; an answer that does not come is asked for again after the next step;
2. the end waits until none runs or waits any more, at most `2 * evaluation.timeout_s` and a little: one that runs, and
   the one of the last step after it. The end of the process's time (SIGTERM) ends the wait;
3. each evaluation is told once per process; a learner that is started again tells the earlier ones again, at the same
   steps of the curves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, StateLost, Unavailable
from asyncrl.evaluation.ids import METRICS

POLL_S = 0.5
GRACE_S = 30.0  # above the time of two evaluations: for a buffer that was restarted meanwhile


class LastEvaluations:
    """Asks `ask(seen=...)`, tells `track(values, step=...)`."""

    def __init__(
        self,
        config: Config,
        *,
        ask: Callable[..., tuple[list[dict[str, Any]], str]],
        track: Callable[..., None] | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.enabled = config.evaluation.enabled
        self.last: dict[str, Any] = {}
        self.figures: dict[int, dict[str, float]] = {}  # by step, of those that have ended
        self._config = config
        self._ask = ask
        self._track = track
        self._clock = clock
        self._sleep = sleep
        self._seen = 0
        self._until: float | None = None

    def look(self) -> str:
        """Tell those that ended since the last look; which one runs or waits, in words. Raises what `ask` raises."""
        if not self.enabled:
            return ""
        ended, running = self._ask(seen=self._seen)
        for line in ended:
            self._seen = max(self._seen, int(line["round"]))
            self.last = line
            self.figures[int(line["step"])] = numbers(line)
            print(f"learner: {describe(line)}", flush=True)
            if self._track is not None:
                self._track(numbers(line), step=int(line["step"]))
        return running

    def poll(self) -> None:
        """`look`, where nothing may go wrong."""
        try:
            self.look()
        except (StateLost, Unavailable):
            return  # the next claim meets it and says it
        except AsyncRLError as error:
            print(f"learner: warning: evaluations cannot be looked at: {error.message}", flush=True)

    def pending(self) -> str:
        """At the end of the run: what is waited for, after half a second; empty where nothing is any more."""
        if not self.enabled:
            return ""
        now = self._clock()
        if self._until is None:
            self._until = now + 2 * self._config.evaluation.timeout_s + GRACE_S
        running = self.look()
        if running and now >= self._until:
            print(f"learner: warning: no longer waiting for the evaluation {running}", flush=True)
            return ""
        if running:
            self._sleep(POLL_S)
        return f"the evaluation {running}" if running else ""


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line, without its labels."""
    return {
        name: float(value)
        for name, value in line.items()
        if name.startswith(METRICS) and isinstance(value, int | float)
    }


def describe(line: Mapping[str, Any]) -> str:
    """`evaluation of step 20: gsm8k mean@1 0.532 (se 0.031); 64 of 64 prompts, versions 20 to 21, 4.1 s`."""
    k = int(line["evaluation_samples"])
    means = []
    for name, value in line.items():
        if name.startswith("val-core/") and name.endswith(f"/reward/mean@{k}"):
            source = name.removeprefix("val-core/").removesuffix(f"/reward/mean@{k}")
            error = line.get(f"val-aux/{source}/reward/mean@{k}/se", 0.0)
            means.append(f"{source} mean@{k} {value:.3f} (se {error:.3f})")
    prompts, scored = int(line["evaluation_prompts"]), int(line["evaluation_scored"])
    text = f"evaluation of step {line['step']}: {', '.join(means) or 'no figures'}; {scored} of {prompts} prompts"
    if "evaluation_version_min" in line:
        text += f", versions {line['evaluation_version_min']} to {line['evaluation_version_max']}"
    text += f", {line['evaluation_s']:.1f} s"
    for what in ("failed", "missing"):
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dict(line.get(what) or {}).items()))
        text += f"; {what}: {reasons}" if reasons else ""
    return text + (f" (ended early: {line['why']})" if line.get("why") else "")
