"""TRL's form: `reward(prompts, completions, completion_ids, **columns) -> list`, a batch; None: does not apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from producers.rewards.forms.base import Form, Parameters, row_columns
from producers.rewards.sample import RewardSample


def nothing(*_: Any, **__: Any) -> None:
    """Ignored: parts of a dict result are logged instead."""


class TRL(Form):
    """A batch: texts, or lists of messages if the prompts are; every column of the rows as a list."""

    name = "trl"
    signature = "reward(prompts, completions, **columns)"
    batch = True

    @classmethod
    def claims(cls, parameters: Parameters) -> bool:
        return "completions" in parameters.names

    def keywords(self, samples: Sequence[RewardSample]) -> dict[str, Any]:
        """Prompts, completions, their tokens, and the columns."""
        chat = [isinstance(sample.row.get(self.prompt_key), list) for sample in samples]
        columns: dict[str, Any] = {
            "prompts": [sample.row[self.prompt_key] if is_chat else sample.prompt
                        for sample, is_chat in zip(samples, chat, strict=True)],
            "completions": [[{"role": "assistant", "content": sample.response}] if is_chat else sample.response
                            for sample, is_chat in zip(samples, chat, strict=True)],
            "prompt_ids": [sample.prompt_ids for sample in samples],
            "completion_ids": [sample.response_ids for sample in samples],
        }  # fmt: skip
        if not self.parameters.takes_all and "prompt_ids" not in self.parameters.names:
            del columns["prompt_ids"]
        columns = row_columns(samples, without=self.prompt_key) | columns
        own = columns.get("ground_truth", [None] * len(samples))  # rows of a job may have different columns
        columns["ground_truth"] = [
            sample.ground_truth if truth is None else truth for sample, truth in zip(samples, own, strict=True)
        ]
        for name, value in (("trainer_state", None), ("log_extra", nothing), ("log_metric", nothing)):
            if name in self.parameters.names:
                columns.setdefault(name, value)
        return columns
