"""Writes checkpoints in children that kill themselves at a line of Python, drawn by a seed: of the writer, of the file
system's helpers, or in the middle of a shard.

Run as `python torn_writer.py FOLDER SEED KILLS`. Prints a JSON line for every child: its step, how it ended, and what a
learner that starts then finds. The next child writes the step after that.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save

from learners.backends.sharded_checkpoint import shard_path
from learners.checkpoints import checkpoint

PIECES = 256
#: The writer on one rank: `share` and `gather` as a gang of one has them.
GANG: Any = SimpleNamespace(lead=True, share=lambda data: data, gather=lambda data: [data])


class Shard:
    """A rank's part that is written in pieces, so that a kill can leave any of them."""

    def __init__(self, step: int) -> None:
        self._data = save({"model/weight": torch.full((4096,), float(step))})

    def save(self, folder: Path) -> Path:
        path = shard_path(folder, 0)
        size = -(-len(self._data) // PIECES)
        with path.open("wb", buffering=0) as file:
            for start in range(0, len(self._data), size):
                file.write(self._data[start : start + size])
        return path


def write(root: Path, step: int, last_line: int) -> int:
    """Write the checkpoint of a step, killed before that line runs; the lines that ran."""
    lines = 0

    def trace(_frame: FrameType, event: str, _given: object) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == last_line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    state = checkpoint.State(step=step, ledger=f"ledger {step}")
    sys.settrace(trace)
    try:
        checkpoint.save(root, state, step=step, backend=Shard(step), gang=GANG, keep=2)
    finally:
        sys.settrace(None)
    return lines


def found_in(root: Path) -> dict[str, Any]:
    """What a learner that starts finds: the step, its ledger, the numbers in its shard, and what was skipped."""
    skipped: list[str] = []
    found = checkpoint.newest(root, say=skipped.append)
    if found is None:
        return {"step": 0, "skipped": skipped}
    values = load_file(shard_path(found[1], 0))["model/weight"].unique().tolist()
    return {"step": found[0].step, "ledger": found[0].ledger, "values": values, "skipped": skipped}


def main() -> None:
    root, rng, kills = Path(sys.argv[1]), random.Random(sys.argv[2]), int(sys.argv[3])
    lines = [write(root, step, 0) for step in (1, 2, 3)][-1]  # the third one also removes the first
    newest = 3
    for _ in range(kills):
        line = rng.randint(1, lines)
        if (child := os.fork()) == 0:
            write(root, newest + 1, line)
            os._exit(0)
        _, status = os.waitpid(child, 0)  # bounded: it is killed at its line, or ends
        hidden = root / f".step_{newest + 1:06d}.tmp" / shard_path(root, 0).name
        torn = hidden.stat().st_size if hidden.exists() else 0
        told = {"wrote": newest + 1, "code": os.waitstatus_to_exitcode(status), "torn": torn, "newest": found_in(root)}
        print(json.dumps(told), flush=True)
        newest = told["newest"]["step"]


if __name__ == "__main__":
    main()
