"""Several judges in a run of real processes: workers that join and are killed, and one judge that is far too slow.

What the sum of a sample is made of stands in the history: one answer of every judge that its row is for, and the
learner's batches hold the sum.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from plant import Plant

REWARDS = """
import time
def score(sample):
    time.sleep(0.005)
    return (sum(sample.response_ids) % 7) / 8
def deep(sample):
    time.sleep({deep})
    return (len(sample.response_ids) % 2) / 16
"""
TWO = 'reward=[{function="toy_rewards:score"}, {function="toy_rewards:deep", judge="deep", data_sources=["hard"]}]'


def make_hard(plant: Plant, every: int) -> None:
    """Every so many rows are of the source that the second judge is for."""
    path = Path(plant.config.data.path)
    lines = path.read_text().splitlines()
    path.write_text(
        "".join(
            line.replace('"toy"', '"hard"' if number % every == 0 else '"toy"') + "\n"
            for number, line in enumerate(lines)
        )
    )


def assert_judged(plant: Plant) -> tuple[int, int]:
    """Every answer stands in the history once, and every reward is the sum of its answers; how many were of each."""
    answers: dict[tuple[int, int], dict[str, float]] = {}
    for line in plant.history("judged", "lost"):
        if line["e"] == "lost" and line["why"] in ("late", "payload_lost", "store_lost", "abandoned"):
            answers = {key: said for key, said in answers.items() if key[0] != line["g"]}  # made anew
        elif line["e"] == "judged":
            said = answers.setdefault((line["g"], line["i"]), {})
            assert line["judge"] not in said, f"judge {line['judge']!r} answered twice about {line}"
            said[line["judge"]] = line["reward"]
    for line in plant.history("score"):
        said = answers.get((line["g"], line["i"]))
        assert said is None or abs(sum(said.values()) - line["reward"]) < 1e-9
    counts = Counter(judge for said in answers.values() for judge in said)
    return counts[""], counts["deep"]


@pytest.mark.timeout(300)
def test_reward_workers_that_join_and_are_killed_are_not_noticed(tmp_path: Path, figure: Any) -> None:
    extra = (TWO, 'judge=[{name="deep", retries=0}]', "reward_workers.retries=0", "reward_workers.batch_samples=4")
    with Plant(
        tmp_path, steps=2000, rewards=2, judges={"deep": 2}, rewards_code=REWARDS.format(deep=0.01), extra=extra
    ) as plant:
        make_hard(plant, 2)
        late = ("reward-1", "reward-deep-1")
        plant.start(*(name for name in plant.roles if name not in late))
        plant.wait("a step", lambda: plant.committed() >= 1)
        for name in late:
            plant.begin(name)
        for name in late:
            plant.wait(
                f"an answer of {name}",
                lambda name=name: any(line["worker"] == name for line in plant.history("judged")),
            )
        for number in range(4):
            at = len(plant.history("judged"))
            plant.wait("some scores", lambda at=at: len(plant.history("judged")) > at + 6)
            name = ("reward-0", "reward-deep-0", "reward-1", "reward-deep-0")[number]
            plant.wait(f"a living {name}", lambda name=name: plant.roles[name].alive())
            plant.kill(name)
        plant.finish()
        found = plant.assert_accounted()
        assert not found.dead and not found.dropped, "a worker that dies costs no try"
        assert plant.restarts["reward-0"] == 1 and plant.restarts["reward-deep-0"] == 2
        by = Counter(line["worker"] for line in plant.history("judged"))
        assert set(by) == {"reward-0", "reward-1", "reward-deep-0", "reward-deep-1"}, "who joined had work"
        default, deep = assert_judged(plant)
        assert 0 < deep < default
        figure(f"4 kills, 2 joins: {found.trained} groups trained, 0 lost, 0 doubled; answers {dict(by)}")


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_judge_that_is_too_slow_holds_up_no_longer_than_the_policy_says(tmp_path: Path, figure: Any) -> None:
    """One of eight rows needs a judge of 2 s a sample (the other one: 5 ms): what is not scored when its turn comes is
    waited for `late_timeout_s` and dropped; the rest is trained meanwhile.
    """
    slow_s, steps = 2.0, 12
    extra = (
        TWO,
        'judge=[{name="deep", batch_samples=2, timeout_s=20}]',
        "buffer.late_timeout_s=0.5",
        "data.shuffle=false",
        "buffer.max_staleness=2",
    )
    with Plant(
        tmp_path, steps=steps, judges={"deep": 1}, rewards_code=REWARDS.format(deep=slow_s), extra=extra
    ) as plant:
        make_hard(plant, 8)
        plant.start()
        plant.wait("a step", lambda: plant.committed() >= 1)
        began = time.monotonic()
        plant.wait("its worker", lambda: {one["judge"]: one["workers"] for one in plant.status()["judges"]}["deep"])
        plant.wait_done(150)
        took = time.monotonic() - began
        found = plant.assert_accounted()
        hard = {line["g"] for line in plant.history("issue") if line["g"] % 8 == 0}
        one_by_one = len(hard) * 2 * slow_s
        assert found.over_bound == 0 and set(found.dropped) <= {"late"} and not found.dead
        assert len({line["g"] for line in plant.history("drop")} & hard) >= 2, "the policy had to act"
        assert took < one_by_one, f"the learner waited for the judge: {took:.0f} s, its work is {one_by_one:.0f} s"
        figure(
            f"{steps} steps in {took:.0f} s beside a judge that needs {one_by_one:.0f} s for its {len(hard)} "
            f"groups; dropped {found.dropped}"
        )
