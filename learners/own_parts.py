"""Loads the functions that `[learner]` names by place or by entry point, and tries what they can be tried on.

`asyncrl check` runs it as `python -m learners.own_parts`, with the resolved configuration on standard input, where a
configuration names such a part. Each mistake is a JSON line: code, message, setting.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from asyncrl.config import Config, parse
from asyncrl.errors import ConfigError
from asyncrl.plugins import is_place
from learners.algorithms.aggregation import Denominators
from learners.algorithms.registry import Kind, choose, divergence_for, reduction_for
from learners.step.lr_schedule import learning_rate


def load_parts(config: Config) -> Iterator[tuple[str, Callable[[], object]]]:
    """Setting -> what a learner does with it at its start; of schedules, the rate of each step."""
    learner = config.learner
    if learner.mode == "rl":
        kinds: tuple[Kind, ...] = ("advantage", "loss", "correction")
        for kind in kinds:
            yield f"learner.algorithm.{kind}", partial(choose, learner.algorithm, kind)
        yield "learner.algorithm.aggregation", partial(reduction_for, learner.algorithm, Denominators(1, 1))
        if is_place(learner.algorithm.kl.kind):
            yield "learner.algorithm.kl.kind", partial(divergence_for, learner.algorithm.kl.kind)
    for name in ("optim", "critic", "process_reward"):
        optim = getattr(learner, name)
        if is_place(optim.schedule):
            steps = range(1, learner.steps + 1)
            rate = partial(learning_rate, optim, steps=learner.steps)
            yield f"learner.{name}.schedule", lambda rate=rate, steps=steps: [rate(step=step) for step in steps]  # type: ignore[misc]


def main() -> int:
    for where, use in load_parts(parse(sys.stdin.read())):
        try:
            use()
        except ConfigError as error:
            code, message = error.code, error.message
        except Exception as error:  # the user's function may raise anything
            code, message = "config.extra", f"{type(error).__name__}: {error}"
        else:
            continue
        print(msgspec.json.encode([code, message, where]).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
