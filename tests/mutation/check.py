"""Apply each mutant to a copy of the project and run the tests that must catch it: `make mutation`.

A mutant is caught when one of its tests fails; a mutant whose tests pass has survived, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900


def copy_project(target: Path) -> None:
    """Copy the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    for name in listed.decode().split("\0"):
        if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def run_tests(copy: Path, tests: Sequence[str], *, show: bool = False) -> int:
    """The exit code of pytest on these files of the copy. `show` prints the output of a failure."""
    paths = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    log = subprocess.run(  # noqa: PLW1510 - the exit code is the result
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
    )
    if log.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {log.returncode}:\n{log.stdout[-2000:]}")
    if log.returncode and show:
        print(log.stdout[-4000:])
    return log.returncode


def is_caught(copy: Path, mutant: Mutant) -> bool:
    """Whether a test fails on this mutant."""
    path = copy / mutant.file
    original = path.read_text()
    if original.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: its text stands {original.count(mutant.old)} times in {mutant.file}")
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        return run_tests(copy, mutant.tests) == 1
    finally:
        path.write_text(original)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to check (default: all)")
    parser.add_argument("--out", type=Path, help="write the results to this file too")
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not args.names or mutant.name in args.names]
    lines, survived = [], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_project(copy)
        clean = sorted({test for mutant in chosen for test in mutant.tests})
        if run_tests(copy, clean, show=True):
            raise SystemExit("the tests fail without any mutant")
        for mutant in chosen:
            started = time.monotonic()
            caught = is_caught(copy, mutant)
            survived += not caught
            lines.append(f"{mutant.name:40} {'caught' if caught else 'SURVIVED':8} {time.monotonic() - started:6.1f} s")
            print(lines[-1], flush=True)
    lines.append(f"{len(chosen) - survived} of {len(chosen)} mutants caught")
    print(lines[-1])
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
