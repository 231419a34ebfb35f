"""F7: reward functions that raise, end their process, never return (also in C code that holds the interpreter), take
all memory, fork without end or print without end, and workers that are killed.

The sample is tried on another worker; then its group is dead with the reason, and the run goes on. It never gets a
reward that was made up, and too many of them end the run with the function's name.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from plant import Plant

REWARDS = """
import ctypes, os, re, time
def score(sample):
    number = int(sample.row["prompt"])
    if number == 3:
        raise ValueError("on purpose")
    if number == 5:
        os._exit(9)
    if number == 7:
        while True:
            pass
    if number == 11:
        bytearray(10 << 30)
    if number == 13:
        while True:
            os.fork()
    if number == 17:
        while True:
            print("x" * 100000)
    if number == 19:
        re.match(r"(a+)+$", "a" * 60 + "b")
    if number == 23:
        ctypes.PyDLL(None).sleep(1000)
    return 0.25 + (sum(sample.response_ids) % 7) / 10
def broken(sample):
    raise ValueError("no good")
"""
#: group -> what its failure says. The endless print ends at the timeout or at its limit, whichever is first.
EVIL = {
    3: ("raised", "ValueError: on purpose"),
    5: ("died", "exit code 9"),
    7: ("timeout", "no result within"),
    11: ("memory", "MemoryError"),
    13: ("died", "more than 40 processes"),
    17: ("", ""),
    19: ("timeout", "no result within"),
    23: ("timeout", "no result within"),
}
LIMITS = (
    "reward_workers.timeout_s=1",
    "reward_workers.retries=1",
    "reward_workers.memory_bytes=1073741824",
    "reward_workers.max_processes=40",
    "data.shuffle=false",
    "reward_workers.batch_samples=8",
)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_f07_every_kind_of_bad_function(tmp_path: Path, figure: Any) -> None:
    with Plant(tmp_path, steps=4, rewards=2, rewards_code=REWARDS, extra=LIMITS) as plant:
        began = time.monotonic()
        plant.start()
        plant.wait("the last of them", lambda: len(plant.history("dead")) == len(EVIL), 100)
        plant.wait_done()
        took = time.monotonic() - began
        found = plant.assert_accounted()
        assert found.dead == {"reward_failed": len(EVIL)} and not found.dropped
        details = {line["g"]: line["detail"] for line in plant.history("dead")}
        assert set(details) == set(EVIL)
        for group, (reason, words) in EVIL.items():
            assert details[group].startswith(reason) and words in details[group] and "score" in details[group]
        # No reward was made up: there is none of a bad call, and every one that is there is the function's own.
        scores = plant.history("score")
        assert not {line["g"] for line in scores} & set(EVIL)
        assert all(line["reward"] >= 0.25 for line in scores)
        said = {name: plant.said(name) for name in ("reward-0", "reward-1")}
        assert any(all(f"group {group} " in text for text in said.values()) for group in EVIL)  # tried elsewhere
        assert not any(role.codes[:-1] for role in plant.roles.values() if role.kind == "reward")  # no worker died
        figure(f"{len(EVIL)} kinds of bad functions in {took:.0f} s: {found.trained} groups trained, {details}")


@pytest.mark.timeout(300)
def test_f07_workers_that_are_killed_cost_no_attempt(tmp_path: Path) -> None:
    slow = "import time\ndef score(sample):\n    time.sleep(0.02)\n    return 1.0\n"
    with Plant(tmp_path, steps=8, rewards=2, rewards_code=slow, extra=("reward_workers.retries=0",)) as plant:
        plant.start()
        for number in range(4):
            at = len(plant.history("score"))
            plant.wait("some scores", lambda at=at: len(plant.history("score")) > at + 4)
            name = f"reward-{number % 2}"
            plant.wait(f"a living {name}", lambda name=name: plant.roles[name].alive())
            plant.kill(name)
        plant.wait_done()
        found = plant.assert_accounted()
        assert not found.dead and plant.restarts["reward-0"] == plant.restarts["reward-1"] == 2


@pytest.mark.timeout(300)
def test_f07_too_many_of_them_end_the_run_with_the_name(tmp_path: Path) -> None:
    extra = ("reward_workers.retries=0", "reward_workers.max_failed_groups=3")
    code = REWARDS.replace("def score", "def good").replace("def broken", "def score")
    with Plant(tmp_path, steps=50, rewards_code=code, extra=extra) as plant:
        plant.start()
        plant.wait("the learner's end", lambda: plant.roles["learner"].codes)
        assert plant.roles["learner"].codes[0] not in (0, 69, 75)
        said = plant.said("learner")
        assert "reward.budget" in said and "score: ValueError: no good" in said
        assert plant.committed() == 0 and not plant.history("score")
