"""Environments with the interface of gymnasium: the environment `gymnasium`.

`[environment] name = "gymnasium"`, `args = {id = "FrozenLake-v1"}`. The row's columns `seed` and `options` go to
`reset`. `args.observe` and `args.act` ('module:function') turn an observation into text (default: `str`) and the text
of a turn into an action (default: the last whole number in it); `act` raises ValueError for a text that is not an
action. Guarantees: every sample has its own environment; its methods run in a thread; `terminated` and `truncated` end
the sample; a text that is not an action gets an error message and reward 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from asyncrl.environment import Row, Step, Turn
from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.plugins import load_object
from producers.support.blocking_calls import run_blocking


def last_number(text: str) -> int:
    """The last whole number in a text.

    >>> last_number("I go to 2.")
    2
    """
    found = re.findall(r"-?\d+", text)
    if not found:
        raise ValueError("no number in it")
    return int(found[-1])


class GymEnvironment:
    """One episode. Other arguments than `id`, `observe`, `act` and `intro` go to `gymnasium.make`."""

    def __init__(self, id: str, *, observe: str = "", act: str = "", intro: str = "", **options: Any) -> None:
        try:
            import gymnasium
        except ImportError as error:
            message = f"{error}: pip install 'asyncrl[gymnasium]'"
            raise ConfigError("config.extra", message, where="environment.name") from None
        self._intro = intro
        self._observe = converter(observe, "observe") if observe else str
        self._act = converter(act, "act") if act else last_number
        try:
            self._environment: Any = gymnasium.make(id, **options)
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError("config.environment", str(error), where=f"environment.args.id = {id!r}") from None

    async def reset(self, row: Row) -> str:
        seed, options = row.get("seed"), row.get("options")
        seen, _ = await run_blocking(self._environment.reset, seed=seed, options=options)
        return self._intro + str(self._observe(seen))

    async def step(self, action: Turn) -> Step:
        try:
            chosen = self._act(action.text)
            if not self._environment.action_space.contains(chosen):
                raise ValueError(f"{chosen!r} is not in {self._environment.action_space}")
        except UNREADABLE as error:
            return Step(f"not an action: {error}", 0.0)
        seen, reward, ended, cut, _ = await run_blocking(self._environment.step, chosen)
        return Step(str(self._observe(seen)), float(reward), bool(ended or cut))

    async def close(self) -> None:
        await run_blocking(self._environment.close)


def converter(dotted: str, name: str) -> Callable[[Any], Any]:
    """The user's function of this argument: an observation to text, or a text to an action."""
    found: Callable[[Any], Any] = load_object(dotted, code="config.environment", where=f"environment.args.{name}")
    return found
