"""Built-in scorers: `function = "builtin:NAME"`, with options in `args`.

Each is a class whose instances are reward functions of our own form. Guarantee: a row that a scorer cannot use (no or
an unsuitable ground truth) is an error of that sample, never a 0. Of several turns they read the last one, which is
the answer; the lengths count all tokens.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from asyncrl.errors import ConfigError

#: name: (module:class, description)
SCORERS: dict[str, tuple[str, str]] = {
    "gsm8k": ("mathematics:GSM8K", "1 for the number after `####`, in a box, or last in the text; else 0"),
    "math": ("mathematics:Math", "1 for an expression that equals the ground truth (math-verify), boxed or last"),
    "aime": ("mathematics:AIME", "1 for the integer of the ground truth, 0 to 999; else 0"),
    "dapo": ("mathematics:DAPO", "1 for the right value after the last `Answer:`, else -1; part acc"),
    "exact": ("text:Exact", "1 for the ground truth itself, or one of a list"),
    "qa": ("text:QA", "F1 or EM of words by SQuAD's normalisation; parts f1, em"),
    "keyword": ("text:Keyword", "share of the words wanted; 0 with a forbidden one"),
    "json_schema": ("structure:JSONSchema", "1 for JSON that fits a schema; part parses"),
    "format": ("structure:Tags", "1 for `<think>..</think><answer>..</answer>` and nothing else, or a pattern"),
    "length": ("lengths:Length", "1 for so many tokens, falling to 0 beyond"),
    "overlong": ("lengths:Overlong", "0, falling to -factor over the last buffer_tokens before max_tokens"),
    "code": ("code:Code", "1 for a program that passes the tests in the sandbox; part passed"),
}


def find(dotted: str) -> Callable[..., Any]:
    """The class behind `builtin:name`. Raises `config.reward` listing the known names."""
    name = dotted.removeprefix("builtin:")
    if name not in SCORERS:
        near = difflib.get_close_matches(name, SCORERS, n=1)
        hint = f"; did you mean builtin:{near[0]}?" if near else ""
        raise ConfigError(
            "config.reward", f"{name!r} is not a built-in scorer: one of {', '.join(SCORERS)}{hint}", where=dotted
        )
    module, _, kind = SCORERS[name][0].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"producers.rewards.scorers.{module}"), kind)
    return found
