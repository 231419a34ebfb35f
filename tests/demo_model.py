"""The demo's warm-started model: made once in the checkout's `runs/` (as by `make demo`), and copied by tests."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = Path("runs", "models", "running_sum")
LIMIT_S = 400


def place(folder: Path) -> Path:
    """Make the model if there is none of today's recipe, and copy it to the same place in `folder`."""
    (ROOT / MODEL.parent).mkdir(parents=True, exist_ok=True)
    with (ROOT / MODEL.parent / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test makes it, at most LIMIT_S
        subprocess.run(
            [sys.executable, "-m", "asyncrl", "demo", "--prepare-only"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            check=True,
            timeout=LIMIT_S,
        )
        shutil.copytree(ROOT / MODEL, folder / MODEL)
    return folder / MODEL
