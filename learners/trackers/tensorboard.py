"""Metrics in TensorBoard: event files in the run folder.

Guarantees:
1. every tag belongs to one of four pages (`asyncrl.metrics.pages`), and the tab "Custom Scalars" has a chart for each
   group of related metrics;
2. a number that is not finite is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from asyncrl.metrics.pages import LAYOUT, metric_tag
from asyncrl.plugins import TrackerRun


class TensorBoardTracker:
    def __init__(self, run: TrackerRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder))
        self._writer.add_custom_scalars(layout())

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        for name, value in values.items():
            if name != "step" and math.isfinite(value):
                self._writer.add_scalar(metric_tag(name), value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def layout() -> dict[str, dict[str, list[object]]]:
    """Return the custom layout: page -> chart -> its tags."""
    return {
        page: {
            title: ["Multiline", [f"^{re.escape(metric_tag(name))}$" for name in names]]
            for title, names in charts.items()
        }
        for page, charts in LAYOUT.items()
    }
