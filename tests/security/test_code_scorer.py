"""`builtin:code`: programs of the model against their tests, in the sandbox."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sandbox_lab import needs_bubblewrap

from asyncrl.errors import Unavailable
from producers.rewards.functions import RewardCall
from producers.rewards.sample import RewardSample, read_value
from producers.sandbox import Sandbox, SandboxLimits, open_sandbox

PROGRAMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3", "7\n"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
ASSERTS = {"asserts": ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]}
READ = "a, b = map(int, input().split())\nprint({})"
DEFINE = "def add(a, b):\n    return {}"

CASES = [
    (READ.format("a + b"), PROGRAMS, 1.0),
    (READ.format("3"), PROGRAMS, 0.5),
    (READ.format("a - b"), PROGRAMS, 0.0),
    ("Sure:\n```python\n" + READ.format("a + b") + "\n```\nThat is it.", PROGRAMS, 1.0),
    # other blocks around it: what it needs, what it prints
    ("First:\n```bash\npip install x\n```\nthen\n```python\n" + READ.format("a + b") + "\n```", PROGRAMS, 1.0),
    ("```Python3\n" + READ.format("a + b") + "\n```\nIt prints:\n```\n3\n```", PROGRAMS, 1.0),
    ("```\n" + READ.format("a + b") + "\n```", PROGRAMS, 1.0),
    ("So:\n```python\n" + READ.format("a + b"), PROGRAMS, 1.0),
    ('By ```print``` then\n```python title="a.py"\n' + READ.format("a + b") + "\n```", PROGRAMS, 1.0),
    ("print(", PROGRAMS, 0.0),
    ("print('0.50', 2)", {"inputs": [""], "outputs": ["0.5 2.0"]}, 1.0),
    ("print(0.3000001)", {"inputs": [""], "outputs": ["0.3"]}, 0.0),
    ("print('  a')\nprint('nan sNaN')", {"inputs": [""], "outputs": ["a\nnan sNaN"]}, 1.0),
    ("print('sNaN')", {"inputs": [""], "outputs": ["1"]}, 0.0),
    ("import sys; sys.exit(1)", PROGRAMS, 0.0),
    ("while True: pass", {"inputs": ["1"], "outputs": ["1"]}, 0.0),
    (DEFINE.format("a + b"), CALLS, 1.0),
    (DEFINE.format("a * b // 1"), CALLS, 0.0),
    (DEFINE.format("3 if a == 1 else 1 / 0"), CALLS, 0.5),
    ("class Solution:\n    def add(self, a, b): return a + b", CALLS, 1.0),
    ("x = 1", CALLS, 0.0),
    (DEFINE.format("a + b"), ASSERTS, 1.0),
    (DEFINE.format("3"), ASSERTS, 0.5),
    (DEFINE.format("3"), ASSERTS["asserts"], 0.5),
    ("def add(a, b):\n    while a == 3: pass\n    return a + b", CALLS, 0.5),
    ("def pairs(n):\n    return [(i, i / 2) for i in range(n)]",
     {"inputs": ["[2]"], "outputs": ["[[0, 0.0], [1, 0.5]]"], "fn_name": "pairs"}, 1.0),
]  # fmt: skip
#: Programs that want the reward without the work: none may get it.
TRICKS = [
    ("raise SystemExit(0)", CALLS), ("import os; os._exit(0)", CALLS), ("import os; os._exit(0)", ASSERTS),
    ("import sys\nsys.modules['json'].dumps = lambda _: '{\"value\": 3}'\ndef add(a, b): return 0", ASSERTS),
    ("open('outputs.jsonl', 'w').write('{\"value\": true}\\n' * 9)\nimport os; os._exit(0)", ASSERTS),
    ("open('outputs.jsonl', 'w').write('{\"value\": true}\\n' * 9)\nimport os; os._exit(0)", CALLS),
    ("import os\nos.mkdir('outputs.jsonl')", CALLS), ("import os\nos.mkdir('outputs.jsonl')", ASSERTS),
    ("print('7')\nimport os\nos.kill(1, 9)", PROGRAMS | {"inputs": ["1 2"], "outputs": ["3"]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    needs_bubblewrap()
    with open_sandbox("bubblewrap", SandboxLimits(timeout_s=60.0)) as found:
        yield found


def passed(sandbox: Sandbox, response: str, truth: Any, **args: Any) -> float:
    row = {"prompt": "p", "reward_model": {"ground_truth": truth}}
    sample = RewardSample.from_row(row, prompt="p", response=response, prompt_ids=[1], response_ids=[1], finish="stop")
    found = read_value(RewardCall("builtin:code", args=args, make_sandbox=lambda: sandbox).one(sample))
    assert found.value == float(found.parts["passed"] == 1.0)
    return found.parts["passed"]


@pytest.mark.parametrize(("response", "truth", "share"), CASES)
def test_code(sandbox: Sandbox, response: str, truth: Any, share: float) -> None:
    more = {"timeout_s": 6.0} if "while" in response else {}  # these do not end
    assert passed(sandbox, response, truth, **more) == share


def test_the_truth_may_be_json_in_a_text(sandbox: Sandbox) -> None:
    assert passed(sandbox, DEFINE.format("a + b"), json.dumps(CALLS)) == 1.0


def test_endless_tests_cost_the_time_of_one(sandbox: Sandbox) -> None:
    truth = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "4"]}
    began = time.monotonic()
    response = "n = int(input())\nwhile n == 2: pass\nprint(n)"
    assert passed(sandbox, response, truth, timeout_s=5.0) == 0.25  # the first passed; what follows had no time left
    assert time.monotonic() - began < 3 * 5.0


def test_a_completion_stands_between_prefix_and_suffix(sandbox: Sandbox) -> None:
    truth = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "f"}
    assert passed(sandbox, "a+b", truth, prefix="f = lambda a, b: ", suffix="\n") == 1.0


@pytest.mark.parametrize(("response", "truth"), TRICKS)
def test_tricks_earn_nothing(sandbox: Sandbox, response: str, truth: Any) -> None:
    assert passed(sandbox, response, truth) == 0.0


@pytest.mark.parametrize(
    "truth",
    [
        "no tests",
        {"inputs": []},
        {"inputs": [1], "outputs": []},
        7,
        [],
        {"inputs": ["x"], "outputs": [1], "fn_name": "f"},
    ],
)
def test_a_truth_without_tests_is_an_error(sandbox: Sandbox, truth: Any) -> None:
    with pytest.raises(ValueError, match=r"ground truth|inputs for"):
        passed(sandbox, "x = 1", truth)


def test_what_does_not_fit_the_sandbox_is_no_fault_of_the_program() -> None:
    needs_bubblewrap()
    truth = {"inputs": [["x" * (3 << 20)]], "outputs": [3], "fn_name": "len"}
    limits = SandboxLimits(timeout_s=30.0, disk_bytes=1 << 20)
    with open_sandbox("bubblewrap", limits) as small, pytest.raises(Unavailable, match="could not be started"):
        passed(small, "x = 1", truth)
