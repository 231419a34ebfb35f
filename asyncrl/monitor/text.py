"""Text helpers of `asyncrl status`, `top` and the launcher."""

from __future__ import annotations

from typing import Any

#: By mode of the learner: names of the figures that show learning, and their metrics; the most telling one first.
FIGURES = {
    "rl": (("reward", "reward_mean"),),
    "sft": (("loss", "loss"),),
    "dpo": (("pairs", "pair_accuracy"), ("margin", "score_margin")),
    "kto": (("margin", "score_margin"), ("KL", "kto_kl")),
    "reward_model": (("pairs", "pair_accuracy"), ("margin", "score_margin")),
}
QUEUE_STATES = ("leased", "unscored", "ready", "claimed", "trained", "retired", "dropped", "dead")


def number(line: dict[str, Any], key: str, form: str = ".3f") -> str:
    """A value of a metrics line as text; `-` if it is missing."""
    value = line.get(key)
    return format(value, form) if isinstance(value, int | float) else "-"


def clean(text: str) -> str:
    """Without control characters.

    >>> clean("a\\x1b[2Jb")
    'a?[2Jb'
    """
    return "".join(one if one.isprintable() else "?" for one in text)
