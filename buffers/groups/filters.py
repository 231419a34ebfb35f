"""Filters: functions that look at a group with all of its rewards and may name a reason not to train on it.

A filter of the
user is called as `function(rewards=[...], lengths=[...], parts=[{...}], group=7)`, one entry per sample, and returns
the reason as a text, or "" to keep the group. It runs inside the buffer service: it must be quick and touch nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.plugins import load_object

ZERO_VARIANCE = "zero_variance"
LOW, HIGH = 0.2, 0.8  # of accuracy_band
Filter = Callable[..., Any]


def zero_variance(*, rewards: Sequence[float], **_: Any) -> str:
    """All rewards are the same: every advantage would be 0.

    >>> zero_variance(rewards=[1.0, 1.0]), zero_variance(rewards=[0.0, 1.0]), zero_variance(rewards=[1.0])
    ('every reward is 1', '', '')
    """
    same = len(rewards) > 1 and min(rewards) == max(rewards)
    return f"every reward is {rewards[0]:g}" if same else ""


def accuracy_band(*, rewards: Sequence[float], **_: Any) -> str:
    """The mean reward is below 0.2 or above 0.8: too hard or too easy (PRIME, arXiv 2502.01456).

    >>> accuracy_band(rewards=[1.0, 0.0]), accuracy_band(rewards=[0.0, 0.1])
    ('', 'the mean reward of 0.05 is outside 0.2 to 0.8')
    """
    mean = sum(rewards) / max(len(rewards), 1)
    return "" if LOW <= mean <= HIGH else f"the mean reward of {mean:g} is outside {LOW:g} to {HIGH:g}"


BUILT_IN: dict[str, Filter] = {ZERO_VARIANCE: zero_variance, "accuracy_band": accuracy_band}


def filters_of(names: Sequence[str]) -> list[tuple[str, Filter]]:
    """The filters of the configuration, by name. Raises `config.filter` where one cannot be loaded."""
    return [(name, BUILT_IN.get(name) or load_object(name, code="config.filter")) for name in names]
