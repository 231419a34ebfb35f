"""docs/matrix.md says "run" for what a test runs, and for nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matrix
import pytest
import ranks

HERE = Path(__file__).parent


@pytest.mark.long
@pytest.mark.skipif(not ranks.HAS_MEGATRON, reason="half of the table is of the extra megatron")
def test_every_test_that_the_table_names_exists() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", "", str(HERE)]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    names = {line.rpartition("tests/distributed/")[2] for line in done.stdout.splitlines() if "::" in line}
    assert len(names) > 400
    assert matrix.named_tests() - names == set()


def test_the_jobs_of_the_table_have_its_layouts() -> None:
    """A cell names a job; what the job sets are the settings of the cell's layout."""
    for backend, jobs in matrix.JOBS.items():
        if backend == "megatron" and not ranks.HAS_MEGATRON:
            continue
        for layout, name in jobs.items():
            [(count, job)] = [(count, each[name]) for count, each in ranks.LAUNCHES.items() if name in each]
            wanted = split_of("\n".join(matrix.LAYOUTS[layout]), count)
            assert split_of(job.layout.replace(";", "\n"), count) == wanted, (backend, layout)
            assert ("megatron" in job.layout) is (backend == "megatron")


def split_of(lines: str, count: int) -> dict[str, int]:
    """Ranks and splits larger than one."""
    found = {"ranks": count}
    for line in lines.splitlines():
        key, _, value = line.partition("=")
        if key.startswith("learner.parallel.") and int(value) > 1:
            found[key] = int(value)
        elif key == "learner.ranks":
            found["ranks"] = int(value)
    return found
