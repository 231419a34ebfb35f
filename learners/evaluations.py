"""Follows held-out evaluations: sends their figures to the tracker and waits for the last one at the end of a run.

Guarantees:
1. between two steps it asks and never waits; an unanswered request is repeated after the next step;
2. the wait at the end is bounded by `2 * evaluation.timeout_s + GRACE_S`, and SIGTERM ends it earlier;
3. figures are reported at the step whose weights they measured: the version, not the step that they came due at;
4. a process reports each evaluation once. After a restart it reports earlier ones again, at the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, StateLost, Unavailable
from asyncrl.evaluation.ids import METRICS, measured_version, name_version

POLL_S = 0.5
GRACE_S = 30.0  # on top of two evaluations: the buffer may restart meanwhile


class LastEvaluations:
    """Asks with `ask(seen=...)` and reports figures with `track(values, step=...)`."""

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
        self.figures: dict[int, dict[str, float]] = {}  # of finished evaluations, by the version that they measured
        self._config = config
        self._ask = ask
        self._track = track
        self._clock = clock
        self._sleep = sleep
        self._seen = 0
        self._until: float | None = None

    def look(self) -> str:
        """Report evaluations that ended since the last call. Return a description of the one that runs or waits."""
        if not self.enabled:
            return ""
        ended, running = self._ask(seen=self._seen)
        for line in ended:
            self._seen = max(self._seen, int(line["round"]))
            self.last = line
            version = measured_version(line)
            self.figures[version] = numbers(line)
            print(f"learner: {describe(line)}", flush=True)
            if self._track is not None:
                self._track(numbers(line), step=version)
        return running

    def poll(self) -> None:
        """Like `look`, but never fail."""
        try:
            self.look()
        except (StateLost, Unavailable):
            return  # the next claim reports it
        except AsyncRLError as error:
            print(f"learner: warning: cannot ask for evaluations: {error.message}", flush=True)

    def describe_pending(self) -> str:
        """At the end of the run: wait half a second and describe what still runs; empty if nothing does."""
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
    return {
        name: float(value)
        for name, value in line.items()
        if name.startswith(METRICS) and isinstance(value, int | float)
    }


def describe(line: Mapping[str, Any]) -> str:
    """Example: `evaluation of step 20: gsm8k mean@1 0.532 (se 0.031); 64 of 64 prompts, version 20, 4.1 s`."""
    k = int(line["evaluation_samples"])
    means = []
    for name, value in line.items():
        if name.startswith("val-core/") and name.endswith(f"/reward/mean@{k}"):
            source = name.removeprefix("val-core/").removesuffix(f"/reward/mean@{k}")
            error = line.get(f"val-aux/{source}/reward/mean@{k}/se", 0.0)
            means.append(f"{source} mean@{k} {value:.3f} (se {error:.3f})")
    prompts, scored = int(line["evaluation_prompts"]), int(line["evaluation_scored"])
    text = f"evaluation of step {line['step']}: {', '.join(means) or 'no figures'}; {scored} of {prompts} prompts"
    text += f", {name_version(line)}"
    text += f", {line['evaluation_s']:.1f} s"
    for what in ("failed", "missing"):
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dict(line.get(what) or {}).items()))
        text += f"; {what}: {reasons}" if reasons else ""
    return text + (f" (ended early: {line['why']})" if line.get("why") else "")
