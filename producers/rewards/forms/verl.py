"""verl's forms: `compute_score(data_source, solution_str, ground_truth, extra_info)` and that of its batch manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from producers.rewards.forms.base import Form, Parameters
from producers.rewards.sample import RewardSample


class Verl(Form):
    """One sample: any subset of the four that has `solution_str`."""

    name = "verl"
    signature = "reward(data_source, solution_str, ground_truth, extra_info=None)"
    given = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})

    @classmethod
    def claims(cls, parameters: Parameters) -> bool:
        return "solution_str" in parameters.names

    def keywords(self, samples: Sequence[RewardSample]) -> dict[str, Any]:
        sample = samples[0]
        return {
            "data_source": sample.data_source,
            "solution_str": sample.response,
            "ground_truth": sample.ground_truth,
            "extra_info": sample.extra_info,
        }


class VerlBatch(Form):
    """A batch: the same four in the plural."""

    name = "verl_batch"
    signature = "reward(data_sources, solution_strs, ground_truths, extra_infos)"
    batch = True
    given = frozenset({"data_sources", "solution_strs", "ground_truths", "extra_infos"})

    @classmethod
    def claims(cls, parameters: Parameters) -> bool:
        return "solution_strs" in parameters.names

    def keywords(self, samples: Sequence[RewardSample]) -> dict[str, Any]:
        """Lists over the samples."""
        return {
            "data_sources": [sample.data_source for sample in samples],
            "solution_strs": [sample.response for sample in samples],
            "ground_truths": [sample.ground_truth for sample in samples],
            "extra_infos": [sample.extra_info for sample in samples],
        }
