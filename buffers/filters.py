"""Filters: functions that look at a group with all of its rewards and may name a reason not to train on it.

Called by the server, which loads those of `buffer.filters`, and by the state machine, which asks them. A filter of the
user is called as `function(rewards=[...], lengths=[...], parts=[{...}], group=7)`, one entry per sample, and returns
the reason as a text, or "" to keep the group. It runs inside the buffer service: it must be quick and touch nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.plugins import load_object

ZERO_VARIANCE = "zero_variance"
Filter = Callable[..., Any]


def zero_variance(*, rewards: Sequence[float], **_: Any) -> str:
    """All rewards are the same: every advantage would be 0.

    >>> zero_variance(rewards=[1.0, 1.0]), zero_variance(rewards=[0.0, 1.0]), zero_variance(rewards=[1.0])
    ('every reward is 1', '', '')
    """
    same = len(rewards) > 1 and min(rewards) == max(rewards)
    return f"every reward is {rewards[0]:g}" if same else ""


def filters_of(names: Sequence[str]) -> list[tuple[str, Filter]]:
    """The filters of the configuration, by name. Raises `config.filter` where one cannot be loaded."""
    return [
        (name, zero_variance if name == ZERO_VARIANCE else load_object(name, code="config.filter")) for name in names
    ]
