"""Writes a trace of some steps of a rank, and the history of its device's memory, to RUN/profile.

Guarantees:
1. steps outside the range cost nothing; training gives the same results inside, but slower;
2. a trace has Chrome's format, gzipped (chrome://tracing, ui.perfetto.dev), with the host and, on CUDA, the device;
   passes are named "asyncrl: ...";
3. the allocator's history (`memory`) exists only on CUDA; other devices print a note. It is written as JSON, and as a
   page for a browser (which loads the viewer's script);
4. a write error is reported and ends nothing; a run that ends inside the range writes its trace.

Example: `steps = "5:8"`, `ranks = [0, 1]`: trace_step_000005-000008_rank0.json.gz and the same of rank 1.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.config.sections.profile import ProfileConfig, parse_steps
from asyncrl.runtime.device import Device

FOLDER = "profile"


class Profiler:
    """The profiler of one rank. `say` prints; `root` is the run folder."""

    def __init__(
        self, config: ProfileConfig, *, rank: int, device: Device, root: Path, say: Callable[[str], None]
    ) -> None:
        self._steps = parse_steps(config.steps) if rank in config.ranks else range(0)
        self._memory = config.memory
        self._rank, self._device, self._say = rank, device, say
        self._folder = root / FOLDER
        self._running: Any = None
        self._first = 0

    def start_step(self, step: int) -> None:
        if self._running is not None or step not in self._steps:
            return
        from torch.profiler import ProfilerActivity, profile

        if self._memory and not self._device.record_memory(True):
            self._say(
                f"learner.profile.memory: a {self._device.type} keeps no history of its memory; memory_bytes of "
                "the metrics is what this process holds by step"
            )
        activities = [ProfilerActivity.CPU]
        if self._device.supports("trace"):
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(activities=activities)
        self._running.start()
        self._first = step

    def end_step(self, step: int) -> None:
        if self._running is not None and step + 1 not in self._steps:
            self._write(step)

    def close(self, step: int) -> None:
        """Write the trace if the run ends inside the range."""
        if self._running is not None:
            self._write(step)

    def _write(self, last: int) -> None:
        running, self._running = self._running, None
        running.stop()
        name = f"step_{self._first:06d}-{last:06d}_rank{self._rank}"
        snapshot = self._device.memory_snapshot() if self._memory else {}
        if self._memory:
            self._device.record_memory(False)
        try:
            self._folder.mkdir(exist_ok=True)
            trace = self._folder / f"trace_{name}.json.gz"
            running.export_chrome_trace(str(trace))
            written = [trace, *(_write_memory(self._folder / f"memory_{name}", snapshot) if snapshot else ())]
        except (OSError, RuntimeError) as error:  # for example a full disk
            self._say(f"ERROR: the profile of steps {self._first} to {last} is lost: {error}")
            return
        self._say(f"profile of steps {self._first} to {last}: {', '.join(map(str, written))}")


def _write_memory(stem: Path, snapshot: dict[str, Any]) -> list[Path]:
    """Write the snapshot as JSON and as a page, not as PyTorch's pickle."""
    from torch.cuda import _memory_viz

    plain, page = stem.with_suffix(".json.gz"), stem.with_suffix(".html")
    with gzip.open(plain, "wt") as file:
        json.dump(snapshot, file, default=str)
    draw: Any = _memory_viz
    page.write_text(draw.trace_plot(snapshot))
    return [plain, page]
