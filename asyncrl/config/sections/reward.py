"""How `[[reward]] function` names a reward: four ways, told apart by their text alone.

It imports nothing.

    my_rewards:exact                a module on the Python path, and a name in it
    rewards/gsm8k.py:compute_score  a file, from the folder of the launch, and a name in it
    builtin:gsm8k                   a scorer that ships (docs/rewards.md)
    http://host:5000/get_reward     a server that answers POST {"query", "prompts", "labels"} with {"rewards"}
"""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

Kind = Literal["module", "file", "builtin", "url", ""]
FORMS = "'module:name', 'path/file.py:name', 'builtin:name' or an http address"


def kind_of(function: str) -> Kind:
    """Which way it is; empty: none of them."""
    if function.startswith(("http://", "https://")):
        return "url" if urlsplit(function).hostname else ""
    if re.fullmatch(r"builtin:\w+", function):
        return "builtin"
    if re.fullmatch(r"[^:]*\.py:[\w.]+", function):
        return "file"
    return "module" if re.fullmatch(r"[\w.]+:[\w.]+", function) else ""


def label_of(function: str) -> str:
    """A short name for metrics: what follows the colon; of an address its last part, or its host."""
    if kind_of(function) != "url":
        return function.rpartition(":")[2]
    address = urlsplit(function)
    return address.path.rstrip("/").rpartition("/")[2] or address.hostname or function
