"""The ground truth of a sample in the forms that scorers need."""

from __future__ import annotations

import json
from typing import Any

from asyncrl.errors import UNREADABLE
from producers.rewards.sample import RewardSample


def require_truth(sample: RewardSample) -> Any:
    """The ground truth. Raises ValueError if the row has none."""
    if sample.ground_truth is None:
        columns = ", ".join(sorted(sample.row)) or "none"
        raise ValueError(f"the row has no ground truth (reward_model.ground_truth, ground_truth or answer): {columns}")
    return sample.ground_truth


def require_truths(sample: RewardSample) -> list[str]:
    """The ground truths as texts: the items of a list, also of verl's {"target": [...]}."""
    truth = require_truth(sample)
    if isinstance(truth, dict) and "target" in truth:
        truth = truth["target"]
    items = list(truth) if isinstance(truth, list | tuple) else [truth]
    if not items or not all(isinstance(item, str | int | float) for item in items):
        raise ValueError(f"the ground truth is no text and no list of texts: {truth!r:.100}")
    return [str(item) for item in items]


def json_truth(sample: RewardSample) -> Any:
    """The ground truth, decoded if it is JSON text."""
    truth = require_truth(sample)
    if isinstance(truth, str):
        try:
            return json.loads(truth)
        except UNREADABLE:
            return truth
    return truth
