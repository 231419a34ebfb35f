"""Judges that are models: what they are asked, the number in the answer, the pace of requests, what is refused."""

from __future__ import annotations

import asyncio
import doctest
import math
import random
from typing import Any

import msgspec
import pytest

import asyncrl.config.sections.reward
import producers.rewards.judges.rate_limit as pacing
from asyncrl.config import dump, parse
from asyncrl.config.judges import list_judges
from asyncrl.config.sections.reward import JudgeConfig
from asyncrl.errors import ConfigErrors
from producers.rewards.judges import templates
from producers.rewards.judges.child import make_result
from producers.rewards.outcome import Problem
from producers.rewards.pipe import FunctionSpec
from producers.rewards.sample import RewardSample

BASE = """
model.path = "m"
data.path = "d.jsonl"
[[reward]]
judge = "grader"
[[judge]]
name = "grader"
"""
URL = BASE + 'kind = "url"\nurl = "http://h/v1"\nmodel = "big"\nprompt = "{response}"\n'
SAMPLE = RewardSample.from_row(
    {"answer": "4", "level": 3, "tags": ["a"]},
    prompt="2+2=",
    response="it is {prompt} 4",
    prompt_ids=[1],
    response_ids=[2],
    finish="stop",
)


def table(**changes: Any) -> JudgeConfig:
    return JudgeConfig("grader", kind="url", prompt="{response}", **changes)


@pytest.mark.parametrize(
    "module", [asyncrl.config.sections.reward, pacing, templates], ids=lambda module: module.__name__
)
def test_examples_in_the_docstrings(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


# ---------------------------------------------------------------- configuration


def refused(text: str) -> str:
    with pytest.raises(ConfigErrors) as caught:
        parse(text)
    return "\n".join(f"{error.code} {error.where} {error.message}" for error in caught.value.errors)


def test_a_reward_of_a_model_needs_no_function() -> None:
    config = parse(URL)
    (judge,) = list_judges(config)
    assert judge.table.is_model and judge.rewards[0].label == "grader"
    assert parse(dump(config)) == config


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (URL.replace('judge = "grader"\n', "", 1), "function is required"),
        (URL.replace('judge = "grader"', 'judge = "grader"\nfunction = "a:b"'), "leave reward.function out"),
        (URL.replace("http://h/v1", "h:80"), "not http:// or https://"),
        (URL.replace('model = "big"', ""), "the server's name of the model"),
        (URL.replace("{response}", "grade it"), "it needs {response}"),
        (URL + 'pattern = "["', "no regular expression"),
        (URL + 'pattern = "[0-9]+"', "it needs a group"),
        (URL + "range = [3.0, 1.0]", "[lowest, highest]"),
        (URL + 'yes = ["no"]', "none in common"),
        (URL + 'api_key_env = "A"\napi_key_file = "b"', "at most one"),
        (BASE + 'kind = "classifier"', "a folder is needed"),
        (BASE + 'kind = "classifier"\nmodel = "m"\nurl = "http://h"', "are for kind = 'url'"),
        (
            BASE + 'kind = "generative"\nmodel = "m"\nprompt = "{response}"\nanswer = "yes_no"\nengine = "vllm"',
            "reads probabilities",
        ),
        (URL.replace("//h", "//me:secret@h"), "a secret in the address would stand in logs"),
        (BASE + 'model = "m"', "are for classifier, generative or url"),
    ],
)
def test_contradictions_are_named(text: str, wanted: str) -> None:
    assert wanted in refused(text)


# ---------------------------------------------------------------- words


def test_a_template_takes_columns_and_leaves_other_braces() -> None:
    text = templates.render('{prompt}|{response}|{ground_truth}|{level}|{tags}|{"score": 1}', SAMPLE)
    assert text == '2+2=|it is {prompt} 4|4|3|["a"]|{"score": 1}', "what a response holds is not replaced again"
    assert templates.render("{columns}", SAMPLE) == '{"answer":"4","level":3,"tags":["a"]}'
    seen = msgspec.structs.replace(SAMPLE, row={"level": 3, "images": [b"PNG"]})
    assert templates.render("{columns}", seen) == '{"level":3}', "the model gets them as images"
    with pytest.raises(Problem, match=r"'depth'.*answer, level, tags"):
        templates.render("{depth}", SAMPLE)


def test_messages_have_the_system_text_first() -> None:
    found = templates.judge_messages(table(system="Be strict."), SAMPLE)
    assert [message["role"] for message in found] == ["system", "user"]
    assert found[1]["content"] == "it is {prompt} 4"


@pytest.mark.parametrize(
    ("settings", "text", "value"),
    [
        ({}, "Score: 3, no: 7.5", 7.5),
        ({}, "-2", -2.0),
        ({"pattern": r"Score: (\d+)"}, "Score: 8 of 10", 8.0),
        ({"range": (0.0, 10.0)}, "10", 10.0),
        ({}, "none", None),
        ({"pattern": r"Score: (\d+)"}, "8", None),
        ({"pattern": r"(\w+)"}, "good", None),
        ({"pattern": r"(\w+)"}, "nan", None),
        ({"pattern": r"x(\d)?"}, "x", None),
        ({"range": (0.0, 10.0)}, "11", None),
    ],
)
def test_the_number_in_an_answer(settings: dict[str, Any], text: str, value: float | None) -> None:
    if value is None:
        with pytest.raises(Problem) as caught:
            templates.number_in(table(**settings), text)
        assert caught.value.reason == "unparsed"
    else:
        assert templates.number_in(table(**settings), text).value == value


@pytest.mark.parametrize(
    ("pattern", "text", "value"),
    [
        (None, "7", 7.0),
        (None, " 7.5\n", 7.5),
        (None, "Score: 7", 7.0),
        (None, "1. It is short. 2. The second step", None),
        (None, "1. It is short", None),
        (None, "of 10 points it gets 1", None),
        (r"Score: (\d+)", "Score: 7. Then 3", 7.0),
    ],
)
def test_the_number_in_an_answer_that_was_cut(pattern: str | None, text: str, value: float | None) -> None:
    asked = table(**({"pattern": pattern} if pattern else {}))
    if value is not None:
        assert templates.number_in(asked, text, cut=True).value == value
        return
    with pytest.raises(Problem, match="was cut after max_new_tokens = 256") as caught:
        templates.number_in(asked, text, cut=True)
    assert caught.value.reason == "unparsed" and templates.number_in(asked, text, cut=False).value


def test_an_evaluation_does_not_vote_on_the_words_of_a_judge() -> None:
    """They differ for the same answer: maj@k counts the answers of the policy."""
    said = templates.number_in(table(), "It is right, so 7")
    result = make_result(0, SAMPLE, said, [FunctionSpec("", "grader", 0.5)])
    assert (result.reward, result.parts, result.answer) == (3.5, {"grader": 7.0}, "")


def test_yes_against_no() -> None:
    words = templates.sum_logprobs(
        [("yes", math.log(0.3)), (" Yes", math.log(0.3)), ("no", math.log(0.2)), ("or", -9.0)]
    )
    found = templates.yes_share(table(), words)
    assert found.value == pytest.approx(0.75) and found.parts == pytest.approx({"yes": 0.6, "no": 0.2})
    with pytest.raises(Problem, match="neither yes nor no"):
        templates.yes_share(table(), {"maybe": -0.1})


# ---------------------------------------------------------------- pace


class Clock:
    """A time that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_permits_come_at_the_rate_and_not_while_the_server_wants_peace() -> None:
    clock = Clock()
    pace = pacing.Pace(4.0, clock=clock, sleep=clock.sleep)

    async def times(count: int) -> list[float]:
        found = []
        for _ in range(count):
            await pace.permit()
            found.append(clock.now)
        return found

    assert asyncio.run(times(5)) == [100.0, 100.25, 100.5, 100.75, 101.0]
    pace.pause_for(3.0)
    assert asyncio.run(times(2)) == [104.0, 104.0], "turns that came meanwhile are due at once"
    free = pacing.Pace(0.0, clock=clock, sleep=clock.sleep)
    asyncio.run(free.permit())
    assert clock.now == 104.0


def test_backoff_doubles_up_to_its_limit_and_half_of_it_is_chance() -> None:
    rng = random.Random(1)
    for attempt, longest in ((1, 0.5), (2, 1.0), (5, 8.0), (60, 30.0)):
        found = [pacing.backoff(attempt, rng) for _ in range(200)]
        assert longest / 2 <= min(found) < max(found) <= longest


def test_slow_is_what_takes_longer_than_95_percent() -> None:
    slow = pacing.Slow()
    for number in range(pacing.ENOUGH - 1):
        slow.record(number)
    assert slow.threshold_s() is None
    for number in range(pacing.ENOUGH - 1, 100):
        slow.record(number)
    assert slow.threshold_s() == 95


def test_the_first_good_answer_wins_and_the_other_is_cancelled() -> None:
    ended: list[str] = []

    async def race(first: Any, second: Any, after_s: float | None = 0.01, may: bool = True) -> Any:
        calls = iter((first, second))

        async def call() -> Any:
            seconds, answer = next(calls)
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                ended.append(f"cancelled {answer}")
                raise
            if isinstance(answer, Exception):
                raise answer
            return answer

        return await pacing.hedge(call, after_s=after_s, may=lambda: may, counted=lambda: ended.append("second"))

    assert asyncio.run(race((30, "slow"), (0, "fast"))) == "fast" and ended == ["second", "cancelled slow"]
    ended.clear()
    assert asyncio.run(race((0.05, "first"), (30, "second"))) == "first"
    assert asyncio.run(race((0.05, "first"), (0, ValueError("broken")))) == "first"
    assert asyncio.run(race((0.05, ValueError("first")), (0.1, "second"))) == "second"
    with pytest.raises(ValueError, match="first"):
        asyncio.run(race((0.05, ValueError("first")), (0, ValueError("second"))))
    ended.clear()
    assert asyncio.run(race((0.05, "alone"), (0, "never"), may=False)) == "alone" and ended == []
    assert asyncio.run(race((0.05, "alone"), (0, "never"), after_s=None)) == "alone" and ended == []


def test_words_without_a_probability_are_summed_too() -> None:
    found = templates.sum_logprobs([(" yes", -9999.0), ("yes", -9999.0), ("no", -0.1), ("no ", -9999.0)])
    assert found["yes"] == pytest.approx(-9999.0 + math.log(2)) and found["no"] == pytest.approx(-0.1)
    assert templates.yes_share(table(), found).value == 0.0
