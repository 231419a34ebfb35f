"""Reward functions of the user: found by their name, called in the form of their parameter names.

`asyncrl check` runs `python -m producers.rewards.functions --validate NAME`. Names: `asyncrl.config.sections.reward`;
forms, plain or `async`: `producers.rewards.forms`. Guarantees:
1. a function of another form is `config.reward` with the forms in its text, before anything is scored;
2. results are read by `producers.rewards.sample`; for a function over batches None means that it does not apply to that
   sample.
It uses no sandbox: the functions are the user's own code.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import EXIT_CONFIG, ConfigError
from producers.rewards.forms import recognise
from producers.rewards.loading import load_reward
from producers.rewards.sample import RewardSample, Value, read_value
from producers.sandbox import ready_sandbox


class RewardCall:
    """One function of the user, and its form (`producers.rewards.forms`)."""

    def __init__(
        self,
        dotted: str,
        *,
        prompt_key: str = "prompt",
        args: Mapping[str, Any] | None = None,
        make_sandbox: Callable[[], Any] | None = None,
    ) -> None:
        self.function = load_reward(dotted, args, make_sandbox=make_sandbox)
        self._form = recognise(self.function, name=dotted, prompt_key=prompt_key, args=bound_args(self.function))
        self.form = self._form.name
        self.is_batch = self._form.batch
        inner = inspect.unwrap(getattr(self.function, "func", self.function))
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(
            getattr(inner, "__call__", None)  # noqa: B004
        )

    def one(self, sample: RewardSample) -> Any:
        """The raw result for one sample (an awaitable where `is_async`); not for batch forms."""
        positional, keywords = self._form.arguments([sample])
        return self.function(*positional, **keywords)

    def batch(self, samples: Sequence[RewardSample]) -> Any:
        """The raw results for several samples, for batch forms."""
        positional, keywords = self._form.arguments(samples)
        return self.function(*positional, **keywords)

    def values(self, raw: Any, count: int) -> list[Value]:
        """The values of a batch result. Raises unless it is one number (or None) per sample."""
        return [Value(None, {}) if item is None else read_value(item) for item in self._form.items(raw, count)]

    def source(self) -> bytes:
        """The text of the function's file; empty without one."""
        inner = getattr(self.function, "func", self.function)
        for found in (inner, type(inner)):
            try:
                return Path(inspect.getfile(found)).read_bytes()
            except (OSError, TypeError):  # an instance, or built in
                continue
        return b""


def bound_args(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The arguments from the configuration."""
    return function.keywords if isinstance(function, functools.partial) else {}


def main(argv: Sequence[str] | None = None) -> int:
    """`--validate NAME [--args JSON]`: exit code 0, or 2 with the reason."""
    parser = argparse.ArgumentParser(prog="producers.rewards.functions", description="check a reward function")
    parser.add_argument("--validate", required=True, metavar="MODULE:NAME")
    parser.add_argument("--args", type=json.loads, default={}, metavar="JSON", help="args of the [[reward]]")
    parser.add_argument("--sandbox", default="bubblewrap", metavar="KIND", help="sandbox.kind")
    args = parser.parse_args(argv)
    try:
        form = RewardCall(args.validate, args=args.args, make_sandbox=lambda: ready_sandbox(args.sandbox)).form
    except ConfigError as error:
        if error.code != "config.reward":  # in one line, for the check
            print(f"[{error.code}] {error.message} -> {error.remedy}", file=sys.stderr)
        else:
            print(error.render(), file=sys.stderr)
        return EXIT_CONFIG
    print(f"{args.validate}: form {form}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
