"""Contract tests for what users write, for their own test suites: `assert_reward`, `check_loss`, `check_environment`.

    from asyncrl.testing import assert_reward, check_environment

    def test_my_reward():
        assert_reward("my_rewards:exact", [{"prompt": "2+2=", "answer": "4"}])

    def test_my_environment():
        assert all(found.kept for found in check_environment("my_envs:Guess", row={"prompt": "guess"}))

Guarantees: nothing heavy is imported before a helper
is called; `assert_reward` raises AssertionError with the whole report; functions run in the worker's child process.
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


def check_reward(
    function: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    args: Mapping[str, Any] | None = None,
    response_key: str = "",
    prompt_key: str = "prompt",
    timeout_s: float = 10.0,
    memory_bytes: int = 2 << 30,
    sandbox: str = "bubblewrap",
) -> Any:
    """The report on a reward function: `ok`, `checks` (verdict, text, remedy), `outcomes`, `render()`.

    `function` and `args` are as in `[[reward]]`; the module must be importable (its folder on PYTHONPATH). Raises
    `config.reward` where it cannot be used.
    """
    check = load_object("producers.rewards.contract_test:check_reward", code="config.extra")
    return check(
        function,
        rows,
        args=args,
        response_key=response_key,
        prompt_key=prompt_key,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
        sandbox=sandbox,
    )


def check_loss(name: str, *, kind: str = "loss", options: Mapping[str, Any] | None = None) -> list[Any]:
    """The checks (`verdict`, `text`, `remedy`) of a loss, advantage, correction, aggregation or kl. Raises if it cannot
    be loaded.
    """
    check = load_object("learners.contract_test:check_part", code="config.extra")
    found: list[Any] = check(name, kind, options)
    return found


def assert_reward(function: str, rows: Sequence[Mapping[str, Any]], **options: Any) -> None:
    """Raise AssertionError with the report where the function does not keep the contract."""
    report = check_reward(function, rows, **options)
    assert report.ok, f"\n{report.render()}"


def check_environment(
    name: str,
    *,
    row: Mapping[str, Any],
    args: Mapping[str, Any] | None = None,
    model: str = "",
    says: Sequence[str] = (),
    config: Path | None = None,
) -> list[Any]:
    """The findings (`name`, `kept`, `detail`) about an environment, played with a row and given answers.

    `model`: a folder with a tokenizer and chat template that render the observations; `config`: a TOML with the
    settings.
    """
    from asyncrl.config import load

    contract = load_object("producers.environments.contract_test:config_for", code="config.environment")
    check = load_object("producers.environments.contract_test:check_environment", code="config.environment")
    made = contract(name, args=args or {}, model=model, base=load(config) if config else None)
    found: list[Any] = check(made, row, says=says)
    return found


def run_contract(module: str, words: Sequence[str], *, limit_s: float) -> int:
    """Run a contract test in a separate process, with the current folder on its path; return its exit code."""
    path = os.pathsep.join(part for part in (os.getcwd(), os.environ.get("PYTHONPATH", "")) if part)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *words], env={**os.environ, "PYTHONPATH": path}, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"it still ran after {limit_s:g} s and was ended", file=sys.stderr)
        return EXIT_FAILED
    return done.returncode
