"""A progress bar, and in a notebook a picture of the reward where matplotlib is installed."""

from __future__ import annotations

import sys
import time
from typing import Any

from asyncrl.config import load
from asyncrl.runtime.run_dir import RunDir

DRAW_EVERY_S = 5.0


class Progress:
    """Shows the lines of the learner's metrics. A context manager; without `shown` it does nothing."""

    def __init__(self, files: RunDir, *, shown: bool) -> None:
        self._files = files
        self._shown = shown
        self._bar: Any = None
        self._task: Any = None
        self._curve: Curve | None = None

    def __enter__(self) -> Progress:
        if self._shown:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns)
            self._bar.start()
            self._task = self._bar.add_task("loading the model and its roles", total=None)
            self._curve = Curve() if is_notebook() else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._curve is not None:
            self._curve.draw()

    def show(self, line: dict[str, Any]) -> None:
        """A step has ended."""
        if self._bar is None:
            return
        total = load(self._files.config).learner.steps
        text = f"reward {line['reward_mean']:.3f}" if "reward_mean" in line else f"loss {line.get('loss', 0.0):.3f}"
        self._bar.update(self._task, total=total, completed=line["step"], description=text)
        if self._curve is not None:
            self._curve.add(line)


class Curve:
    """The reward by step, drawn again every few seconds in one place of the notebook."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._drawn = time.monotonic()
        self._handle: Any = None

    def add(self, line: dict[str, Any]) -> None:
        """A point; and the picture, if the last one is old."""
        if "reward_mean" in line:
            self._points.append((line["step"], line["reward_mean"]))
        if time.monotonic() > self._drawn + DRAW_EVERY_S:
            self.draw()

    def draw(self) -> None:
        """Draw what is there; nothing without matplotlib."""
        try:
            from IPython.display import display
            from matplotlib.figure import Figure
        except ImportError:
            return
        self._drawn = time.monotonic()
        figure = Figure(figsize=(6, 2.5), layout="constrained")
        axis = figure.subplots()
        axis.plot(*zip(*self._points, strict=True) if self._points else ((), ()))
        axis.set(xlabel="step", ylabel="mean reward")
        if self._handle is None:
            self._handle = display(figure, display_id=True)
        else:
            self._handle.update(figure)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"
