"""The scorers that ship: tables of responses and what they are worth."""

from __future__ import annotations

import doctest
import json
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from producers.rewards.functions import RewardCall
from producers.rewards.sample import NotFinite, RewardSample, Value, read_value
from producers.rewards.scorers import SCORERS
from producers.rewards.scorers import extract as finding


def scored(
    name: str, response: str, truth: Any = None, tokens: int = 3, turns: Sequence[str] = (), **args: Any
) -> Value:
    row = {"prompt": "p", "reward_model": {"style": "rule", "ground_truth": truth}}
    ids = [7] * tokens
    sample = RewardSample.from_row(
        row, prompt="p", response=response, prompt_ids=[1], response_ids=ids, finish="stop", turns=turns
    )
    return read_value(RewardCall(f"builtin:{name}", args=args).one(sample))


def mathematics() -> None:
    pytest.importorskip("math_verify", reason="the scorers of mathematics need math-verify")


GSM8K = [
    ("She has 5*4=20.\n#### 20", "20", 1.0), ("#### 20", "a long solution\n#### 20", 1.0), ("#### 1,200", "1200", 1.0),
    ("#### $1200 dollars", "1,200", 1.0), ("The answer is 20", "20", 1.0), ("first 20, then 21", "20", 0.0),
    (r"so \boxed{20} in 3 days", "20", 1.0), ("#### twenty", "20", 0.0), ("", "20", 0.0), ("#### -3", "-3", 1.0),
    ("it is 2.50", "2.5", 1.0), ("#### 20 #### 21", "21", 1.0),
    # verl's and lm-eval's readings: a full stop, a dollar behind the sign, no digit before the point, other minus signs
    ("#### 20.", "20", 1.0), ("#### -$5", "-5", 1.0), ("#### -$5", "5", 0.0), ("#### $.50", "0.5", 1.0),
    ("it costs .5", "5", 0.0), ("#### \u22123", "-3", 1.0), ("####20", "20", 1.0), ("#### 007", "7", 1.0),
    ("#### 1,000,000", "1000000", 1.0), ("it is 20 \u0664", "20", 1.0), ("so 12, 15 and 20 of them.", "20", 1.0),
    ("#### 20%", "20", 1.0), ("#### 20 apples and 3 pears", "20", 1.0), ("#### ", "20", 0.0),
    # a box of more than one number is read as by `math`
    (r"\boxed{24\text{ cm}^2}", "24", 1.0), (r"\boxed{24\text{ cm}^2}", "2", 0.0), (r"\boxed{\frac{1}{2}}", "2", 0.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0), (r"\boxed{18 + 2 = 20}", "20", 1.0), (r"\boxed{2{,}000}", "2000", 1.0),
    (r"\boxed{20\%}", "20", 1.0), (r"\boxed{x = 20}", "20", 1.0), (r"\boxed{\$20}", "20", 1.0),
    (r"\boxed{20 miles per hour}", "20", 1.0), (r"\boxed{20 (twenty)}", "20", 1.0), (r"\boxed{-$5}", "-5", 1.0),
    (r"\boxed{\text{20 days}}", "20", 1.0), (r"\boxed{1,200.50 dollars}", "1200.5", 1.0),
    ("\\boxed{\u20ac20}", "20", 1.0), (r"\boxed{}", "20", 0.0), (r"\boxed{20%}", "20", 1.0),
    (r"\boxed{\text{Total: }18}", "18", 1.0), (r"\boxed{\text{John has }18\text{ apples}}", "18", 1.0),
    (r"\boxed{\text{\$}18}", "18", 1.0), (r"\boxed{\sqrt{4}}", "4", 0.0), (r"\boxed{\sqrt{4}}", "2", 1.0),
    (r"\boxed{$20$}", "20", 1.0), (r"\boxed{5 \text{ or } 6}", "6", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "value"), GSM8K)
def test_gsm8k(response: str, truth: str, value: float) -> None:
    mathematics()
    assert scored("gsm8k", response, truth).value == value


def test_gsm8k_strict_wants_the_mark() -> None:
    mathematics()
    assert scored("gsm8k", "it is 20", "20", strict=True).value == 0.0
    assert scored("gsm8k", "#### 20", "20", strict=True).value == 1.0


MATH = [
    (r"Thus \boxed{\frac{1}{2}}.", r"\frac{1}{2}", 1.0), (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
    (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1.0), (r"\boxed{1/3}", r"\frac{1}{2}", 0.0),
    (r"first \boxed{3}, no: \boxed{4}", "4", 1.0), (r"first \boxed{4}, no: \boxed{3}", "4", 0.0),
    (r"The answer is $x^2+2x+1$.", "(x+1)^2", 1.0), (r"\boxed{(1,2)}", "(1,2)", 1.0), (r"\boxed{(2,1)}", "(1,2)", 0.0),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0), (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1.0), ("I do not know", "4", 0.0),
    ("", "4", 0.0), ("x" * 100_000 + r"\boxed{4}", "4", 1.0), (r"\boxed{4", "4", 0.0),
    # what Hendrycks' normalisation (verl, lm-eval) counts as the same
    (r"\boxed{\tfrac12}", r"\frac{1}{2}", 1.0), (r"\boxed{.5}", "0.5", 1.0), (r"\boxed{10,000}", "10000", 1.0),
    (r"\boxed{\$5}", "5", 1.0), (r"\boxed{50\%}", "50", 1.0), (r"\boxed{90^\circ}", "90", 1.0),
    (r"\boxed{x=5}", "5", 1.0), (r"\boxed{5\text{ cm}}", "5", 1.0), (r"\boxed{\text{(A)}}", r"\text{(A)}", 1.0),
    (r"\boxed{\sqrt2}", r"\sqrt{2}", 1.0), (r"\boxed{\left(1,2\right)}", "(1,2)", 1.0), (r"$\boxed 5$", "5", 1.0),
    (r"\fbox{5}", "5", 1.0), (r"so \boxed 5.", "5", 1.0), (r"the \boxed answer is $5$", "5", 1.0),
    (r"\boxed{3\frac{1}{2}}", r"\frac{7}{2}", 1.0), (r"\boxed{[0,1)}", "[0,1)", 1.0), (r"\boxed{[0,1)}", "(0,1)", 0.0),
    # several answers where one is asked for
    (r"\boxed{5 \text{ or } 6}", "5", 0.0), (r"\boxed{5, 6}", "5", 0.0), (r"\boxed{6 = 5}", "6", 0.0),
    (r"\boxed{}", "5", 0.0), (r"\boxed{5}\boxed{6}", "5", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "value"), MATH)
def test_math(response: str, truth: str, value: float) -> None:
    mathematics()
    assert scored("math", response, truth).value == value


@pytest.mark.parametrize(
    ("truth", "response"),
    [(r"\$36", r"\boxed{36}"), (r"\$18.90", r"\boxed{\$18.90}"), (r"\$32,\!348", "32348"), (r"$\$36$", "36")],
)
def test_money_in_a_truth_is_no_mark_of_latex(truth: str, response: str) -> None:
    mathematics()
    assert scored("math", response, truth).value == 1.0
    assert scored("math", r"\boxed{7}", truth).value == 0.0
    assert scored("dapo", f"Answer: {response}", truth).value == 1.0


def test_math_gives_the_answer_that_it_found_and_takes_options() -> None:
    mathematics()
    assert scored("math", r"\boxed{7}", "7").answer == "7"
    assert scored("math", "it is 7", "7", boxed=True).value == 0.0
    assert scored("math", r"\boxed{8}", "7", correct=2, wrong=-0.5).value == -0.5


AIME = [
    (r"\boxed{33}", "033", 1.0), (r"\boxed{033}", "33", 1.0), ("the answer is 204.", "204", 1.0),
    (r"\boxed{34}", "33", 0.0), (r"\boxed{\frac{66}{2}}", "33", 1.0), (r"\boxed{33.5}", "33", 0.0), ("none", "33", 0.0),
    (r"\boxed{0}", "000", 1.0), (r"3 \boxed{999}", "999", 1.0), ("\\boxed{\u00b2}", "33", 0.0),
    (r"\boxed{1033}", "33", 0.0),
    (r"\boxed{-33}", "33", 0.0), (r"\boxed{33}^\circ", "33", 1.0), (r"\boxed{" + "1" * 2900 + "}", "33", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "value"), AIME)
def test_aime(response: str, truth: str, value: float) -> None:
    mathematics()
    assert scored("aime", response, truth).value == value


DAPO = [
    ("steps\nAnswer: 34", "34", 1.0), ("Answer: $34$", "34", 1.0), ("Answer: 35", "34", -1.0), ("it is 34", "34", -1.0),
    ("Answer: 33\nAnswer: 34", "34", 1.0), ("Answer: 34\n" + "x" * 400, "34", -1.0), (r"answer: \boxed{34}", "34", 1.0),
    (r"Answer: \frac{1}{2}", "0.5", 1.0), ("", "34", -1.0), ("Answer: 34.", "34", 1.0),
    ("**Answer:** 34", "34", 1.0), ("Answer: x = 34", "34", 1.0), ("Answer: 34 square units", "34", 1.0),
    ("Answer: 1,234", "1234", 1.0), ("Answer: $\\boxed{34}$", "34", 1.0), ("ANSWER : 34", "34", 1.0),
    ("Answer: 34 or 35", "34", -1.0), ("Answer:", "34", -1.0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "value"), DAPO)
def test_dapo(response: str, truth: str, value: float) -> None:
    mathematics()
    found = scored("dapo", response, truth)
    assert found.value == value and found.parts["acc"] == (value + 1) / 2


@pytest.mark.parametrize(("name", "truth"), [("gsm8k", "many"), ("math", ""), ("dapo", " "), ("aime", "1000")])
def test_a_truth_that_cannot_be_parsed_is_an_error(name: str, truth: str) -> None:
    mathematics()
    with pytest.raises(ValueError, match="the ground truth is no"):
        scored(name, r"\boxed{3}", truth)


EXACT = [
    ("yes", "yes", {}, 1.0),
    (" yes\n", "yes", {}, 1.0),
    ("Yes", "yes", {}, 0.0),
    ("Yes", "yes", {"case": False}, 1.0),
    ("so:\nyes", "yes", {}, 0.0),
    ("so:\nyes", "yes", {"last_line": True}, 1.0),
    ("b", ["a", "b"], {}, 1.0),
    ("c", ["a", "b"], {}, 0.0),
    ("7", 7, {}, 1.0),
    ("", "a", {}, 0.0),
    ("a", {"target": ["a"]}, {}, 1.0),
]


@pytest.mark.parametrize(("response", "truth", "args", "value"), EXACT)
def test_exact(response: str, truth: Any, args: dict[str, Any], value: float) -> None:
    assert scored("exact", response, truth, **args).value == value


QA = [
    ("The Eiffel Tower!", "eiffel tower", {}, 1.0), ("in Paris", "Paris", {}, 2 / 3), ("Rome", "Paris", {}, 0.0),
    ("in Paris", "Paris", {"metric": "em"}, 0.0), ("the Paris.", "Paris", {"metric": "em"}, 1.0),
    ("Lutetia", ["Paris", "Lutetia"], {"metric": "em"}, 1.0), ("Paris Paris", "Paris", {}, 2 / 3),
    ("<answer>Paris</answer>", "Paris", {"tag": "answer"}, 1.0),
    ("Paris", "Paris", {"tag": "answer"}, 0.0), ("", "Paris", {}, 0.0), ("the", "a", {}, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "args", "value"), QA)
def test_qa(response: str, truth: Any, args: dict[str, Any], value: float) -> None:
    assert scored("qa", response, truth, **args).value == pytest.approx(value)


KEYWORD = [
    ("red and blue", None, {"words": ["red", "blue"]}, 1.0), ("red", None, {"words": ["red", "blue"]}, 0.5),
    ("Red", None, {"words": ["red"]}, 1.0), ("Red", None, {"words": ["red"], "case": True}, 0.0),
    ("reddish", None, {"words": ["red"]}, 0.0), ("reddish", None, {"words": ["red"], "whole": False}, 1.0),
    ("red, sorry", None, {"words": ["red"], "forbidden": ["sorry"]}, 0.0),
    ("fine", None, {"forbidden": ["sorry"]}, 1.0),
    ("sorry", None, {"forbidden": ["sorry"]}, 0.0), ("sun", ["sun", "moon"], {}, 0.5), ("c++ too", None,
     {"words": ["c++"]}, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "args", "value"), KEYWORD)
def test_keyword(response: str, truth: Any, args: dict[str, Any], value: float) -> None:
    assert scored("keyword", response, truth, **args).value == value


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}
JSON = [
    ('{"age": 3}', 1.0),
    ('{"age": -1}', 0.25),
    ('{"age": "3"}', 0.25),
    ("{}", 0.25),
    ("[1]", 0.25),
    ("age: 3", 0.0),
    ("", 0.0),
    ('so:\n```json\n{"age": 4}\n```\ndone', 1.0),
    ('{"age": 3} and more', 0.0),
    ('{"age": NaN}', 0.0),
    ("[" * 100_000, 0.0),
]


@pytest.mark.parametrize(("response", "value"), JSON)
def test_json_schema(response: str, value: float) -> None:
    pytest.importorskip("jsonschema")
    assert scored("json_schema", response, schema=SCHEMA, parses=0.25).value == value
    assert scored("json_schema", response, json.dumps(SCHEMA), parses=0.25).value == value  # of the row
    assert scored("json_schema", response, SCHEMA, parses=0.25).value == value


def test_a_schema_that_is_none() -> None:
    pytest.importorskip("jsonschema")
    with pytest.raises(ConfigError, match="not a JSON schema"):
        scored("json_schema", "{}", schema={"type": "objekt"})
    with pytest.raises(ValueError, match="not an object"):
        scored("json_schema", "{}", "not a schema")


FORMAT = [
    ("<think>a</think><answer>b</answer>", {}, 1.0), ("<think>a\nb</think>\n<answer>c</answer>\n", {}, 1.0),
    ("<answer>b</answer>", {}, 0.0), ("x<think>a</think><answer>b</answer>", {}, 0.0), ("", {}, 0.0),
    ("<think>a</think><answer>b</answer> more", {}, 0.0), ("<think></think><answer>b</answer>", {}, 0.0),
    ("<think>a<think>a</think></think><answer>b</answer>", {}, 0.0), ("<answer>b</answer><think>a</think>", {}, 0.0),
    ("<a>1</a>", {"tags": ["a"]}, 1.0), ("Answer: 7", {"pattern": r"Answer: (?P<answer>\d+)"}, 1.0),
    ("Answer: x", {"pattern": r"Answer: (?P<answer>\d+)"}, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "args", "value"), FORMAT)
def test_format(response: str, args: dict[str, Any], value: float) -> None:
    assert scored("format", response, **args).value == value


def test_format_gives_the_answer() -> None:
    assert scored("format", "<think>a</think><answer> 42 </answer>").answer == "42"
    assert scored("format", "Answer: 7", pattern=r"Answer: (?P<answer>\d+)").answer == "7"
    with pytest.raises(ConfigError, match="pattern"):
        scored("format", "x", pattern="(")


LENGTHS = [(0, 0.0), (5, 0.0), (8, 0.6), (10, 1.0), (15, 1.0), (20, 1.0), (22, 0.6), (25, 0.0), (99, 0.0)]


@pytest.mark.parametrize(("tokens", "value"), LENGTHS)
def test_length(tokens: int, value: float) -> None:
    args = {"min_tokens": 10, "max_tokens": 20, "slope_tokens": 5}
    assert scored("length", "", tokens=tokens, **args).value == pytest.approx(value)
    assert scored("length", "", tokens=tokens, min_tokens=10, max_tokens=20).value == float(10 <= tokens <= 20)


OVERLONG = [(0, 0.0), (5, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (140, -1.0)]


@pytest.mark.parametrize(("tokens", "value"), OVERLONG)
def test_overlong(tokens: int, value: float) -> None:
    args = {"max_tokens": 100, "buffer_tokens": 20}
    assert scored("overlong", "", tokens=tokens, **args).value == pytest.approx(value)
    assert scored("overlong", "", tokens=tokens, factor=0.5, **args).value == pytest.approx(value / 2)


SESSIONS: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("exact", "4", "4", {}),
    ("qa", "It is <a>4</a>", "4", {"tag": "a"}),
    ("keyword", "four", None, {"words": ["four"], "forbidden": ["search"]}),
    ("json_schema", '{"age": 3}', None, {"schema": {"type": "object"}}),
    ("format", "<think>a</think><answer>4</answer>", None, {}),
    ("gsm8k", "4", "4", {}),
    ("math", "4", "4", {}),
]


@pytest.mark.parametrize(("name", "last", "truth", "args"), SESSIONS)
def test_of_several_turns_the_last_one_is_the_answer(name: str, last: str, truth: Any, args: dict[str, Any]) -> None:
    """Neither earlier turns nor observations: they hold other answers, and what tools gave."""
    if name in ("gsm8k", "math"):
        mathematics()
    if name == "json_schema":
        pytest.importorskip("jsonschema")
    call, shown = "search <think>b</think> #### 5", "found: \\boxed{6} ```json\n[]\n```"
    assert scored(name, call + shown + last, truth, turns=[call, last], **args).value == 1.0
    assert scored(name, last + shown + call, truth, turns=[last, call], **args).value == 0.0


@pytest.mark.parametrize("name", ["exact", "qa", "gsm8k", "math", "keyword"])
def test_a_row_without_a_truth_is_an_error(name: str) -> None:
    if name in ("gsm8k", "math"):
        mathematics()
    with pytest.raises(ValueError, match="no ground truth"):
        scored(name, "x", None)


def test_every_scorer_is_found_and_told_about() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    for name, (_, what) in SCORERS.items():
        assert what and f"`{name}`" in page, name


def test_scores_are_finite() -> None:
    with pytest.raises(NotFinite):
        scored("overlong", "", tokens=100, max_tokens=100, buffer_tokens=20, factor=float("inf"))


def test_repeated_marks_cost_no_more_than_their_length() -> None:
    """What a model that repeats itself writes: the time-out of these would be a failure and not a 0."""
    assert scored("format", "<think>x</think><answer>" * 20_000, tags=["think", "answer", "end"]).value == 0.0
    assert finding.find_fenced("```" + "a" * 100_000, ("a",)) is None
    assert finding.find_fenced("```a\n" + "```a " * 20_000, ("a",)) == ""
    assert scored("qa", "<answer>" * 50_000, "Paris", tag="answer").value == 0.0
    assert scored("qa", "<answer>x</answer>" * 20_000 + "<answer>Paris</answer>", "Paris", tag="answer").value == 1.0


def test_examples_of_finding() -> None:
    assert doctest.testmod(finding).failed == 0


FENCES = [
    ('```yaml\nage: 1\n```\nor\n```json\n{"age": 3}\n```', 1.0),
    ('```json\n{"age": 3}\n```\nas in\n```\nage\n```', 1.0),
    ('```\n{"age": 3}\n```', 1.0),
    ('```python\nx\n```\n{"age": 3}\n', 0.0),
]


@pytest.mark.parametrize(("response", "value"), FENCES)
def test_the_block_that_is_meant(response: str, value: float) -> None:
    pytest.importorskip("jsonschema")
    assert scored("json_schema", response, schema=SCHEMA).value == value
