"""Settings changed by `asyncrl tune`. The buffer records them with a batch, so a repeated or replayed step has the same
ones.

Guarantees:
1. only settings of `[learner.algorithm]` can change; others raise `tune.refused` with their name;
2. the same text gives the same settings; an empty text gives those of the configuration.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.config import LearnerConfig
from asyncrl.config.rules.algorithm import apply_overrides
from asyncrl.errors import UNREADABLE, AsyncRLError

PREFIX = "learner.algorithm."


def apply_tuning(learner: LearnerConfig, text: str) -> LearnerConfig:
    """Return the learner's configuration with the overrides of `text`, a JSON object of dotted keys.

    >>> tuned(LearnerConfig(), '{"learner.algorithm.clip_high": 0.5}').algorithm.clip_high
    0.5
    """
    if not text:
        return learner
    try:
        overrides = msgspec.json.decode(text, type=dict[str, Any])
    except UNREADABLE as error:
        raise AsyncRLError("tune.refused", f"{text!r}: {error}", where="learner") from None
    if unknown := ", ".join(sorted(key for key in overrides if not key.startswith(PREFIX))):
        raise AsyncRLError("tune.refused", f"{unknown}: no setting of the algorithm", where="learner")
    mine = {key.removeprefix(PREFIX): value for key, value in overrides.items()}
    try:
        return msgspec.structs.replace(learner, algorithm=apply_overrides(learner.algorithm, mine))
    except ValueError as error:
        raise AsyncRLError("tune.refused", f"{text}: {error}", where="learner") from None
