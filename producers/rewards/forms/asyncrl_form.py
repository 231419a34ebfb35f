"""Our own form: `def reward(sample)`, plain or async; further parameters need defaults or `args`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from producers.rewards.forms.base import Form, Parameters
from producers.rewards.sample import RewardSample


class OwnSample(Form):
    """A function of one `RewardSample`."""

    name = "sample"
    signature = "reward(sample)"

    @classmethod
    def claims(cls, parameters: Parameters) -> bool:
        """One positional parameter with any name; with further ones it must be called `sample`."""
        first = parameters.positional[:1]
        if not first or not parameters.required <= set(first):
            return False
        return len(parameters.positional) == 1 or first == ("sample",)

    def keywords(self, samples: Sequence[RewardSample]) -> dict[str, Any]:
        """None: the sample is positional."""
        return {}

    def arguments(self, samples: Sequence[RewardSample]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (samples[0],), {}
