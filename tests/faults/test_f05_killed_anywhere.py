"""F5: kill -9 at random lines of the writing. The newest complete checkpoint loads; a torn one is never taken."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from learner_lab import ROOT

KILLS = 80
SHARD_BYTES = 4 * 4096


def test_f05_killed_at_random_lines_of_the_writing(tmp_path: Path, figure: Callable[[str], None]) -> None:
    script = str(Path(__file__).with_name("torn_writer.py"))
    command = [sys.executable, script, str(tmp_path / "checkpoints"), "f05", str(KILLS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == KILLS
    before = 3
    for one in told:
        found, wrote = one["newest"], one["wrote"]
        assert one["code"] in (0, -9) and found["step"] in (before, wrote) and wrote == before + 1, one
        assert (found["ledger"], found["values"]) == (f"ledger {found['step']}", [found["step"]]), one
        assert found["skipped"] == [], "what can be seen is whole"
        assert one["code"] == -9 or found["step"] == wrote, one
        before = found["step"]
    torn = sum(0 < one["torn"] < SHARD_BYTES for one in told)
    late = sum(one["code"] == -9 and one["newest"]["step"] == one["wrote"] for one in told)
    early = sum(one["code"] == -9 and one["newest"]["step"] < one["wrote"] for one in told)
    figure(f"{KILLS} seeded lines: {early} kills before a checkpoint was whole ({torn} in a shard), {late} after")
    assert torn > 5 and late > 5 and early > 20
