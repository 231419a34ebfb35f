"""Limits of time that grow with the weights: 30 s are plenty for a model of 1 GB, and too few for one of 141 GB."""

from __future__ import annotations

SLOW = 1 << 30  # bytes per second of a slow path: host memory under load, 10 Gbit/s


def limit_for(seconds: float, nbytes: int) -> float:
    """The limit of an operation on these bytes; `seconds` for none.

    >>> limit_for(30.0, 1 << 20), limit_for(30.0, 141 << 30)
    (30.0, 171.0)
    """
    return seconds + nbytes // SLOW
