"""`builtin:code`: does the program in the response pass its tests? It runs in the sandbox of `[sandbox]`.

The ground truth (an object, or JSON in a text) is one of

    {"inputs": ["1 2"], "outputs": ["3"]}                           programs: standard input and output
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}          functions: arguments and result
    {"asserts": ["assert add(1, 2) == 3"]}, or a list of them       run after the program

Guarantees:
1. expected outputs never enter the sandbox: they are compared here. Asserts do enter it, and a program can find them:
   prefer inputs and outputs;
2. a program that fails, hangs or exceeds a limit has not passed; a failure of the sandbox is a failure of the sample,
   and so is a sandbox that lets the tests of a program wait for more than `WAIT_S`, and a second each;
3. malformed tests are an error.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from asyncrl.errors import UNREADABLE, Unavailable
from producers.rewards.sample import RewardSample
from producers.rewards.scorers.extract import find_fenced
from producers.rewards.scorers.ground_truth import json_truth

if TYPE_CHECKING:
    from producers.sandbox import Sandbox, SandboxResult

LANGUAGES = ("python", "python3", "py")
INPUTS, OUTPUTS, PROGRAM = "inputs.json", "outputs.jsonl", "program.py"
WAIT_S = 15.0  # beyond the time limit of all tests of a program together: waiting for the sandbox, and the network

#: Calls a function of the program with each input; one result per line, so that an endless call costs only later ones.
CALLS = """
import json, runpy, sys
jobs = json.load(open("inputs.json"))
space = runpy.run_path("program.py", run_name="program")
call = space.get(jobs["name"]) or getattr(space["Solution"](), jobs["name"])
with open("outputs.jsonl", "w") as results:
    for arguments in jobs["inputs"]:
        try:
            line = json.dumps({"value": call(*arguments)})
        except Exception as error:
            line = json.dumps({"error": repr(error)[:200]})
        results.write(line + "\\n")
        results.flush()
"""
ASSERTS = """
import json, runpy, sys
jobs = json.load(open("inputs.json"))
space = runpy.run_path("program.py", run_name="program")
with open("outputs.jsonl", "w") as results:
    for text in jobs["asserts"]:
        try:
            exec(compile(text, "test", "exec"), space)
            line = json.dumps({"value": jobs["mark"]})
        except Exception as error:
            line = json.dumps({"error": repr(error)[:200]})
        results.write(line + "\\n")
        results.flush()
"""


class Code:
    """The share of passed tests, or (with `all_tests`) 1 if all passed and else 0.

    `timeout_s` is for all tests of a program together: tests that did not pass by then have failed. None:
    `sandbox.timeout_s`. `prefix` and `suffix` surround a response that is a completion; with `fenced` the program is
    the last fenced block marked as Python, else the last one with no mark, else the whole response."""

    def __init__(
        self,
        *,
        sandbox: Sandbox,
        timeout_s: float | None = None,
        memory_bytes: int | None = None,
        all_tests: bool = True,
        prefix: str = "",
        suffix: str = "",
        fenced: bool = True,
    ) -> None:
        self._sandbox = sandbox
        self._timeout_s = timeout_s
        self._memory = memory_bytes
        self._all = all_tests
        self._around = (prefix, suffix)
        self._fenced = fenced

    def __call__(self, sample: RewardSample) -> dict[str, Any]:
        """The score, and the share of the tests that passed."""
        passed = self.run_tests(self.program(sample.last_turn), json_truth(sample))
        share = sum(passed) / len(passed)
        return {"score": float(share == 1.0) if self._all else share, "passed": share}

    def program(self, response: str) -> str:
        block = find_fenced(response, LANGUAGES) if self._fenced else None
        return (response if block is None else block).join(self._around)

    def run_tests(self, program: str, truth: Any) -> list[bool]:
        """One verdict per test. Raises ValueError if the ground truth has no tests, or malformed ones."""
        tests = {"asserts": truth} if isinstance(truth, list) else truth
        if not isinstance(tests, dict) or not (tests.get("asserts") or tests.get("inputs")):
            raise ValueError(f"the ground truth has no inputs and outputs, and no asserts: {truth!r:.100}")
        if tests.get("asserts"):
            return self._asserts(program, require_list(tests, "asserts", str))
        name = tests.get("fn_name")
        kind = object if name else str | int | float
        inputs, outputs = (require_list(tests, key, kind) for key in ("inputs", "outputs"))
        if len(inputs) != len(outputs):
            raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
        if name:
            return self._calls(program, str(name), inputs, outputs)
        return self._reads(program, list(map(str, inputs)), list(map(str, outputs)))

    def _reads(self, program: str, inputs: list[str], outputs: list[str]) -> list[bool]:
        limit_s = left = self._sandbox.limits.timeout_s if self._timeout_s is None else self._timeout_s
        passed, began = [False] * len(inputs), time.monotonic()
        for place, (given, wanted) in enumerate(zip(inputs, outputs, strict=True)):
            if (took_s := time.monotonic() - began) > limit_s + max(
                WAIT_S, place
            ):  # `left` counts the program's own time alone
                where = getattr(self._sandbox, "url", "the sandbox")
                what = f"{place} of {len(inputs)} tests took {took_s:.0f} s, {limit_s - left:.1f} s of them the program"
                raise Unavailable("sandbox.failed", f"{where} is too slow: {what}")
            result = require_started(self._sandbox.run(program, given, timeout_s=left, memory_bytes=self._memory))
            passed[place] = result.ok and same_text(result.stdout, wanted)
            left -= result.wall_s
            if left <= 0.0:
                break
        return passed

    def _calls(self, program: str, name: str, inputs: list[Any], outputs: list[Any]) -> list[bool]:
        arguments = [decode_json(item) for item in inputs]
        if not all(isinstance(item, list) for item in arguments):
            raise ValueError(f"inputs for {name} are lists of its arguments, not {inputs!r:.80}")
        found = self._harness(CALLS, program, {"name": name, "inputs": arguments})
        return [
            place < len(found) and "value" in found[place] and same(found[place]["value"], wanted)
            for place, wanted in enumerate(outputs)
        ]

    def _asserts(self, program: str, asserts: list[str]) -> list[bool]:
        mark = secrets.token_hex(8)
        found = self._harness(ASSERTS, program, {"asserts": asserts, "mark": mark})
        return [place < len(found) and found[place].get("value") == mark for place in range(len(asserts))]

    def _harness(self, code: str, program: str, given: dict[str, Any]) -> list[dict[str, Any]]:
        files = {PROGRAM: program.encode(errors="replace"), INPUTS: json.dumps(given).encode()}
        result = require_started(
            self._sandbox.run(code, "", files, fetch=[OUTPUTS], timeout_s=self._timeout_s, memory_bytes=self._memory)
        )
        lines = result.files.get(OUTPUTS, b"").decode(errors="replace").splitlines()
        return [item for line in lines if isinstance(item := decode_json(line), dict)]


def require_list(tests: dict[str, Any], key: str, kind: Any) -> list[Any]:
    """The tests under a key. Raises ValueError if they are no list, or one of them is of another kind."""
    found = tests.get(key)
    if not isinstance(found, list | tuple):  # the letters of a text are no tests
        raise ValueError(f"{key} of the ground truth: a {type(found).__name__} is no list: {found!r:.100}")
    for item in found:
        if not isinstance(item, kind):
            raise ValueError(f"{key} of the ground truth: a {type(item).__name__} is no test: {item!r:.100}")
    return list(found)


def require_started(result: SandboxResult) -> SandboxResult:
    """The result, if the program ran. Raises `sandbox.failed` if it did not start, which is not its fault."""
    if result.status == "error":
        raise Unavailable("sandbox.failed", f"the program could not be started: {result.stderr[:200]}")
    return result


def decode_json(item: Any) -> Any:
    """The value of JSON text; anything else unchanged."""
    if not isinstance(item, str):
        return item
    try:
        return json.loads(item)
    except UNREADABLE:
        return item


def same_text(said: str, wanted: str) -> bool:
    """Equal except white space at the ends of lines and of the text; numbers in a line may be written differently (0.50
    for 0.5), as in LiveCodeBench."""
    left, right = ([line.strip() for line in text.strip().splitlines()] for text in (said, wanted))
    return len(left) == len(right) and all(map(same_line, left, right))


def same_line(said: str, wanted: str) -> bool:
    """Equal, as texts or as numbers."""
    if said == wanted:
        return True
    try:
        left, right = ([Decimal(word) for word in line.split()] for line in (said, wanted))
        return left == right
    except InvalidOperation:  # a word that is not a number
        return False


def same(value: Any, wanted: Any) -> bool:
    """Equal, with tuples as lists and a tolerance for floats."""
    wanted = list(wanted) if isinstance(wanted, tuple) else wanted
    if value == wanted:
        return True
    if isinstance(wanted, str) and not isinstance(value, str):
        return same(value, decode_json(wanted)) if decode_json(wanted) != wanted else False
    if isinstance(value, float) and isinstance(wanted, int | float):
        return math.isclose(value, wanted, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(value, list) and isinstance(wanted, list) and len(value) == len(wanted):
        return all(map(same, value, wanted))
    return False
