"""Contract tests for what users write, for their own test suites: `check_environment`.

Called by authors of environments, and (`run_contract`) by the command `test-env`. Guarantee: it imports what it tests,
and what that needs, only when it is called.

Example, in a test of one's own:

    from asyncrl.testing import check_environment
    assert all(found.kept for found in check_environment("my_envs:Guess", row={"prompt": "guess"}))
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import EXIT_FAILED
from asyncrl.plugins import load_object


def check_environment(
    name: str, *, row: Mapping[str, Any], args: Mapping[str, Any] | None = None, model: str = "",
    says: Sequence[str] = (), config: Path | None = None,
) -> list[Any]:  # fmt: skip
    """The findings (`name`, `kept`, `detail`) about an environment, played with a row and given answers.

    `model`: a folder whose tokenizer and chat template show what is observed; `config`: a TOML whose settings count.
    """
    from asyncrl.config import load

    contract = load_object("producers.environments.contract:config_for", code="config.environment")
    check = load_object("producers.environments.contract:check_environment", code="config.environment")
    made = contract(name, args=args or {}, model=model, base=load(config) if config else None)
    found: list[Any] = check(made, row, says=says)
    return found


def run_contract(module: str, words: Sequence[str], *, limit_s: float) -> int:
    """Run a contract test as a process of its own, with the current folder on its path; its exit code."""
    path = os.pathsep.join(part for part in (os.getcwd(), os.environ.get("PYTHONPATH", "")) if part)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *words], env={**os.environ, "PYTHONPATH": path}, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"it still ran after {limit_s:g} s and was ended", file=sys.stderr)
        return EXIT_FAILED
    return done.returncode
