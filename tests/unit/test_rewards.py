"""Reward functions: which forms are recognised, what they are given, what their results mean."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from producers.rewards.forms import recognise
from producers.rewards.functions import RewardCall, bound_args, main
from producers.rewards.loading import load_function
from producers.rewards.sample import NotFinite, RewardSample, read_value

ROW = {
    "prompt": "2+2=",
    "data_source": "add",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7},
    "difficulty": 3,
}


def sample(row: dict[str, Any] | None = None, response: str = "4") -> RewardSample:
    return RewardSample.from_row(
        row or ROW, prompt="2+2=", response=response, prompt_ids=[1, 2], response_ids=[3], finish="stop"
    )


def verl_full(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    assert (data_source, extra_info) == ("add", {"index": 7})
    return float(solution_str == ground_truth)


def verl_short(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


def ours(sample: RewardSample) -> float:
    return float(sample.response == sample.ground_truth and sample.row["difficulty"] == 3)


def ours_by_another_name(s: Any, scale: float = 1.0) -> float:
    return scale


def ours_alone(item: Any) -> float:
    return 1.0


async def ours_async(sample: RewardSample) -> float:
    return 1.0


def trl(prompts: list[str], completions: list[str], difficulty: list[int], **_: Any) -> list[float]:
    assert len(prompts) == len(completions) == len(difficulty)
    return [float(text == "4") * level for text, level in zip(completions, difficulty, strict=True)]


def trl_named(completions: list[str], ground_truth: list[str]) -> list[float]:
    return [float(text == truth) for text, truth in zip(completions, ground_truth, strict=True)]


class Callable_:
    def __call__(self, sample: RewardSample) -> float:
        return 0.5


instance = Callable_()


def wrong_nothing() -> float:
    return 0.0


def wrong_two(question: str, answer: str) -> float:
    return 0.0


def wrong_verl(solution_str: str, ground_truth: str, judge: Any) -> float:
    return 0.0


HERE = "test_rewards"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (verl_full, "verl"),
        (verl_short, "verl"),
        (ours, "sample"),
        (ours_alone, "sample"),
        (ours_async, "sample"),
        (trl, "trl"),
        (trl_named, "trl"),
        (instance, "sample"),
        (lambda sample, scale=2: scale, "sample"),
    ],
)
def test_forms_are_recognised_by_parameter_names(function: Callable[..., Any], form: str) -> None:
    assert recognise(function, args=bound_args(function)).name == form


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (wrong_nothing, "none"),
        (wrong_two, "question, answer"),
        (wrong_verl, "judge"),
        (ours_by_another_name, "s, scale"),
    ],
)
def test_other_forms_are_refused_with_their_parameters(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recognise(function, name="m:f", args=bound_args(function))
    assert caught.value.code == "config.reward" and words in caught.value.message and caught.value.where == "m:f"


@pytest.mark.parametrize("name", ["verl_full", "verl_short", "ours"])
def test_one_sample_is_given_as_the_form_says(name: str) -> None:
    call = RewardCall(f"{HERE}:{name}")
    assert read_value(call.one(sample())).value == 1.0
    assert read_value(call.one(sample({**ROW}, response="5"))).value == 0.0 or name == "ours_alone"


def test_a_batch_gets_columns_as_lists() -> None:
    call = RewardCall(f"{HERE}:trl")
    assert [item.value for item in call.values(call.batch([sample(), sample(response="x")]), 2)] == [3.0, 0.0]
    named = RewardCall(f"{HERE}:trl_named")
    assert [item.value for item in named.values(named.batch([sample(), sample(response="x")]), 2)] == [1.0, 0.0]


def test_a_batch_of_chat_rows_gets_messages() -> None:
    seen: dict[str, Any] = {}

    def function(prompts: Any, completions: Any, **_: Any) -> list[None]:
        seen.update(prompts=prompts, completions=completions)
        return [None]

    call = RewardCall(f"{HERE}:trl")
    call.function, call._form = function, recognise(function)
    messages = [{"role": "user", "content": "2+2="}]
    values = call.values(call.batch([sample({**ROW, "prompt": messages})]), 1)
    assert seen == {"prompts": [messages], "completions": [[{"role": "assistant", "content": "4"}]]}
    assert values[0].value is None  # None: does not apply


@pytest.mark.parametrize("raw", [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0), Decimal(1)])
def test_numbers_of_every_kind(raw: Any) -> None:
    assert read_value(raw) == (1.0, {}, "")


def test_dict_results_have_parts() -> None:
    assert read_value({"score": 0.5, "format": True, "note": "text", "bad": float("nan")}) == (0.5, {"format": 1.0}, "")
    assert read_value({"reward": 2}) == (2.0, {}, "")


@pytest.mark.parametrize("raw", [None, "1", [1.0], {}, {"points": 1}, {"score": None}, np.array([1.0, 2.0])])
def test_what_is_no_number_raises(raw: Any) -> None:
    with pytest.raises(TypeError):
        read_value(raw)


@pytest.mark.parametrize("raw", [float("nan"), float("inf"), {"score": float("-inf")}, np.float32("nan")])
def test_what_is_not_finite_raises(raw: Any) -> None:
    with pytest.raises(NotFinite):
        read_value(raw)


def test_a_batch_of_another_length_raises() -> None:
    call = RewardCall(f"{HERE}:trl")
    for raw in ([1.0], 1.0, "ab", None):
        with pytest.raises(TypeError, match="list of 2"):
            call.values(raw, 2)


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        (ROW, "4"),
        ({"prompt": "x", "ground_truth": 5}, 5),
        ({"prompt": "x", "answer": "6"}, "6"),
        ({"prompt": "x"}, None),
    ],
)
def test_ground_truth_is_found_where_people_keep_it(row: dict[str, Any], truth: Any) -> None:
    assert sample(row).ground_truth == truth


def test_loading_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "explodes.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for dotted, words in (
        ("no_such_module_here:f", "no_such_module_here"),
        (f"{HERE}:absent", "absent"),
        (f"{HERE}:ROW", "dict"),
        ("explodes:f", "ZeroDivisionError"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            load_function(dotted)
        assert caught.value.code == "config.reward"


def test_the_command_line_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--validate", f"{HERE}:ours"]) == 0
    assert main(["--validate", f"{HERE}:wrong_two"]) == 2
    assert "question, answer" in capsys.readouterr().err


def test_validation_imports_nothing_heavy() -> None:
    code = textwrap.dedent("""
        import sys, producers.rewards.functions, producers.rewards.main, producers.data.prompts, producers.main
        print([name for name in ("torch", "transformers", "redis", "zmq.asyncio") if name in sys.modules])
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        ({"score": 1.0, "pred": "42"}, "42"),
        ({"score": 1.0, "pred": None, "answer": 7}, "7"),
        ({"reward": 0.0, "extracted_answer": "x"}, "x"),
        ({"score": 1.0}, ""),
        (1.0, ""),
    ],
)
def test_the_answer_that_a_function_found(raw: Any, answer: str) -> None:
    assert read_value(raw).answer == answer
