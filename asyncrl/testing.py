"""Contract tests for plug-in authors: what `asyncrl test-reward` checks, for their own test suites.

    from asyncrl.testing import assert_reward

    def test_my_reward():
        assert_reward("my_rewards:exact", [{"prompt": "2+2=", "answer": "4"}])

Guarantees: nothing heavy is imported before a helper is called; a helper raises AssertionError with the whole report.
The functions run in the worker's child process, as in a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.plugins import load_object


def check_reward(
    function: str, rows: Sequence[Mapping[str, Any]], *, args: Mapping[str, Any] | None = None, response_key: str = "",
    prompt_key: str = "prompt", timeout_s: float = 10.0, memory_bytes: int = 2 << 30, sandbox: str = "bubblewrap",
) -> Any:  # fmt: skip
    """The report on a reward function: `ok`, `checks` (verdict, text, remedy), `outcomes`, `render()`.

    `function` and `args` are as in `[[reward]]`; the module must be importable (its folder on PYTHONPATH). Raises
    `config.reward` where it cannot be used.
    """
    check = load_object("producers.rewards.author:check_reward", code="config.extra")
    return check(
        function, rows, args=args, response_key=response_key, prompt_key=prompt_key, timeout_s=timeout_s,
        memory_bytes=memory_bytes, sandbox=sandbox,
    )  # fmt: skip


def assert_reward(function: str, rows: Sequence[Mapping[str, Any]], **options: Any) -> None:
    """Raise AssertionError with the report where the function does not keep the contract."""
    report = check_reward(function, rows, **options)
    assert report.ok, f"\n{report.render()}"
