"""`builtin:code` over a sandbox that answers at once: malformed tests, and a server that lets programs wait.

Programs that run are in tests/security/test_code_scorer.py."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import Unavailable
from producers.rewards.sample import RewardSample
from producers.rewards.scorers import code
from producers.sandbox import Sandbox, SandboxJob, SandboxLimits, SandboxResult


class Clock:
    """A server whose answers take `wait_s` beyond the program's own time."""

    def __init__(self, *, run_s: float, wait_s: float) -> None:
        self.now, self.run_s, self.wait_s = 0.0, run_s, wait_s

    def monotonic(self) -> float:
        return self.now


class Slow(Sandbox):
    url = "http://busy:8080/run_code"

    def __init__(self, clock: Clock) -> None:
        super().__init__(SandboxLimits(timeout_s=10.0))
        self.clock, self.jobs = clock, list[SandboxJob]()

    def run_job(self, job: SandboxJob) -> SandboxResult:
        self.jobs.append(job)
        self.clock.now += self.clock.run_s + self.clock.wait_s
        return SandboxResult(status="finished", stdout="1", wall_s=self.clock.run_s)


def passed(sandbox: Sandbox, truth: Any, *, response: str = "print(1)", turns: tuple[str, ...] = ()) -> float:
    row = {"prompt": "p", "reward_model": {"ground_truth": truth}}
    sample = RewardSample.from_row(
        row, prompt="p", response=response, prompt_ids=[1], response_ids=[1], finish="stop", turns=turns
    )
    share: float = code.Code(sandbox=sandbox)(sample)["passed"]
    return share


def many(count: int) -> dict[str, Any]:
    return {"inputs": [""] * count, "outputs": ["1"] * count}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(run_s=0.0, wait_s=0.0)
    monkeypatch.setattr(code, "time", found)
    return found


def test_the_program_of_the_last_turn_is_run(clock: Clock) -> None:
    sandbox = Slow(clock)
    assert passed(sandbox, many(1), response="print(2) 2 print(1)", turns=("print(2)", "print(1)")) == 1.0
    assert [job.code for job in sandbox.jobs] == ["print(1)"]


def test_a_server_that_lets_programs_wait_fails_the_sample(clock: Clock) -> None:
    """10 s for all tests, and 15 s for the waiting: without this the call would be killed as one of a slow function."""
    clock.run_s, clock.wait_s = 0.25, 2.0
    sandbox = Slow(clock)
    assert passed(sandbox, many(11)) == 1.0
    with pytest.raises(
        Unavailable, match=r"http://busy:8080/run_code is too slow: 12 of 99 tests took 27 s, 3\.0 s of"
    ):
        passed(sandbox, many(99))


def test_time_of_the_program_is_its_own_fault(clock: Clock) -> None:
    clock.run_s, clock.wait_s = 2.5, 2.0
    assert passed(Slow(clock), many(8)) == 0.5  # the first four; what follows had no time left


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        ({"asserts": "assert f() == 1"}, "asserts .*: a str is no list"),
        ({"asserts": [{"f()": 1}]}, "asserts .*: a dict is no test"),
        ([1], "asserts .*: a int is no test"),
        ({"inputs": "12", "outputs": "11"}, "inputs .*: a str is no list"),
        ({"inputs": {"a": 1}, "outputs": ["1"]}, "inputs .*: a dict is no list"),
        ({"inputs": ["1"], "outputs": "1"}, "outputs .*: a str is no list"),
        ({"inputs": ["1"]}, "outputs .*: a NoneType is no list"),
        ({"inputs": [["1", "2"]], "outputs": ["1"]}, "inputs .*: a list is no test"),
        ({"inputs": ["1"], "outputs": [None]}, "outputs .*: a NoneType is no test"),
        ({"inputs": [[1]], "outputs": "1", "fn_name": "f"}, "outputs .*: a str is no list"),
    ],
)
def test_malformed_tests_are_an_error(clock: Clock, truth: Any, words: str) -> None:
    sandbox = Slow(clock)
    with pytest.raises(ValueError, match=words):
        passed(sandbox, truth)
    assert not sandbox.jobs


def test_numbers_are_texts_to_read(clock: Clock) -> None:
    sandbox = Slow(clock)
    assert passed(sandbox, {"inputs": [1, 2.5], "outputs": [1, 1.0]}) == 1.0
    assert [job.stdin for job in sandbox.jobs] == ["1", "2.5"]
