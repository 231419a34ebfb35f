"""Intervals of means over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: 97.5 % quantiles of Student's t by degrees of freedom.
T_QUANTILES = (0.0, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)


def interval(values: Sequence[float]) -> str:
    """Mean and half of the 95 % interval of the mean, by Student's t.

    >>> interval([0.1, 0.2, 0.3])
    '+0.200 ± 0.248'
    """
    if not values:
        return "-"
    mean, degrees = statistics.fmean(values), len(values) - 1
    if not degrees:
        return f"{mean:+.3f}"
    half = T_QUANTILES[min(degrees, len(T_QUANTILES) - 1)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.3f} ± {half:.3f}"
