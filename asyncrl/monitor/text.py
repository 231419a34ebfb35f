"""Text helpers of `asyncrl status`, `top` and the launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config import Config

#: By mode of the learner, or with teachers: names of the figures that show learning, and their metrics; the most
#: telling one first.
FIGURES = {
    "rl": (("reward", "reward_mean"),),
    "rl, taught": (("reward", "reward_mean"), ("teacher", "teacher_kl")),
    "taught": (("teacher", "teacher_kl"),),
    "sft": (("loss", "loss"),),
    "dpo": (("pairs", "pair_accuracy"), ("margin", "score_margin")),
    "kto": (("margin", "score_margin"), ("KL", "kto_kl")),
    "reward_model": (("pairs", "pair_accuracy"), ("margin", "score_margin")),
}


def shown_mode(config: Config | None) -> str:
    """The key of `FIGURES` for a run."""
    if config is None or config.learner.mode != "rl" or not config.teacher:
        return config.learner.mode if config is not None else "rl"
    return "rl, taught" if config.reward else "taught"


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
