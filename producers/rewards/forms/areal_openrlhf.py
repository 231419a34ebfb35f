"""AReaL's form (one sample: text, tokens and the columns of its row) and OpenRLHF's (a batch: texts and labels)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from producers.rewards.forms.base import Form, Parameters, make_list
from producers.rewards.sample import RewardSample, describe


class AReaL(Form):
    """One sample: `prompt` and `completions` are texts, the columns of the row are keywords."""

    name = "areal"
    signature = "reward(prompt, completions, prompt_ids, completion_ids, **columns)"

    @classmethod
    def claims(cls, parameters: Parameters) -> bool:
        """Recognised by `completions` next to `prompt` or, without `prompts`, by `prompt_ids`."""
        names = parameters.names
        return "completions" in names and "prompts" not in names and bool({"prompt", "prompt_ids"} & names)

    def keywords(self, samples: Sequence[RewardSample]) -> dict[str, Any]:
        """The sample and its row; `answer` falls back to the ground truth."""
        sample = samples[0]
        return {
            "answer": sample.ground_truth,
            "ground_truth": sample.ground_truth,
            **{name: value for name, value in sample.row.items() if name != self.prompt_key},
            "prompt": sample.prompt,
            "completions": sample.response,
            "prompt_ids": sample.prompt_ids,
            "completion_ids": sample.response_ids,
        }


class OpenRLHF(Form):
    """A batch: `queries` are prompt and response in one text. A tensor or list, or a dict with `rewards`."""

    name = "openrlhf"
    signature = "reward_func(queries, prompts, labels)"
    batch = True
    given = frozenset({"queries", "prompts", "labels", "images"})

    @classmethod
    def claims(cls, parameters: Parameters) -> bool:
        return "queries" in parameters.names

    def keywords(self, samples: Sequence[RewardSample]) -> dict[str, Any]:
        """Texts and ground truths, and the images if there are any."""
        images = [sample.row.get("images") or [] for sample in samples]
        return {
            **({"images": images} if any(images) else {}),
            "queries": [sample.prompt + sample.response for sample in samples],
            "prompts": [sample.prompt for sample in samples],
            "labels": [sample.ground_truth for sample in samples],
        }

    def items(self, raw: Any, count: int) -> list[Any]:
        """`rewards` is the reward; `scores` and the entries of `extra_logs` become parts, one value or one per
        sample."""
        if not isinstance(raw, dict):
            return super().items(raw, count)
        if "rewards" not in raw:
            raise TypeError(f"the dict needs 'rewards', it has {', '.join(map(str, raw)) or 'nothing'}")
        rewards = super().items(raw["rewards"], count)
        found: list[dict[str, Any]] = [{"score": reward} for reward in rewards]
        logs = raw.get("extra_logs") or {}
        if not isinstance(logs, dict):
            raise TypeError(f"extra_logs is no dict: {describe(logs)}")
        extra = {**({"scores": raw["scores"]} if raw.get("scores") is not None else {}), **logs}
        for name, value in extra.items():
            values = make_list(value)
            spread = values if values is not None and len(values) == count else [value] * count
            for place, item in enumerate(spread):
                found[place][str(name)] = item
        return found
