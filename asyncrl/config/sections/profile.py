"""`[learner.profile]`: traces and memory of single steps, and the peak that utilization is measured against.

Example: `steps = "5:8"`, `ranks = [0, 3]`, `memory = true`: traces and memory of ranks 0 and 3 for the steps 5 to 8.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from asyncrl.config.sections.base import Count, Section


class ProfileConfig(Section, frozen=True):
    """`[learner.profile]`: traces of single steps, and the peak for utilization."""

    steps: str = ""  # steps to trace, "5:8" for 5 to 8 (both included) or "5"; empty: none. Files: RUN/profile
    ranks: tuple[Count, ...] = (0,)  # ranks that write a trace
    memory: bool = False  # also record the device's memory over these steps
    peak_flops: Annotated[float, Meta(ge=0)] = 0.0  # of one device, for mfu; 0: by its name (on a CPU: no mfu)


def parse_steps(text: str) -> range:
    """The steps of a setting; empty for an empty text.

    >>> list(parse_steps("5:8")), list(parse_steps("5")), list(parse_steps(""))
    ([5, 6, 7, 8], [5], [])

    Raises:
        ValueError: it is not a range of steps.
    """
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"{text!r} is not a step such as 5, nor a range such as 5:8")
    return range(first, last + 1)
