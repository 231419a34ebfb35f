"""Reward functions of the user: found by 'module:name', called in the form that their parameter names ask for.

Called in the reward worker's child process, and as `python -m producers.rewards.functions --validate module:name` by
`asyncrl check`. Three forms are known, plain or `async`:

    def reward(sample) -> float                                              # `RewardSample`
    def reward(data_source, solution_str, ground_truth, extra_info=None)     # verl, any subset with solution_str
    def reward(prompts, completions, **columns) -> list[float]               # TRL, a batch

Guarantees:
1. a function of another form is `config.reward` with the three forms in its text, before anything is scored;
2. a result is a number, or a dict with `score` or `reward` whose other numbers become parts, and whose `pred`, `answer`
   or `extracted_answer` is what an evaluation counts majorities by; anything else is an error; NaN and infinities are
   `not_finite`. Nothing becomes 0 by itself;
3. for a TRL function None means that it does not apply to that sample.
It runs in no sandbox: the functions are the user's own code.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from asyncrl.errors import EXIT_CONFIG, AsyncRLError, ConfigError
from asyncrl.plugins import load_object

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
ANSWERS = ("pred", "answer", "extracted_answer")  # keys of a dict result: what the response answers
FORMS = (
    "reward(sample), reward(data_source, solution_str, ground_truth, extra_info=None) "
    "or reward(prompts, completions, **columns)"
)


class RewardSample(msgspec.Struct, frozen=True):
    """What a reward function may look at. `prompt` and `response` are text without special tokens; `row` holds all
    columns of the prompt's row; `finish` is stop | length. With several turns `response` is all that followed the
    prompt, observations among it, and `turns` what the policy said, turn by turn."""

    prompt: str
    response: str
    prompt_ids: list[int]
    response_ids: list[int]
    row: dict[str, Any]
    ground_truth: Any = None
    data_source: str = ""
    extra_info: dict[str, Any] = {}
    finish: str = "stop"
    turns: list[str] = []

    @staticmethod
    def of(row: dict[str, Any], *, prompt: str, response: str, prompt_ids: Sequence[int], response_ids: Sequence[int],
           finish: str, turns: Sequence[str] = ()) -> RewardSample:  # fmt: skip
        """With the columns of verl taken from the row; `ground_truth` or `answer` may also stand in the row itself."""
        model = row.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, dict) else None
        for name in ("ground_truth", "answer"):
            truth = row.get(name) if truth is None else truth
        return RewardSample(
            prompt, response, list(prompt_ids), list(response_ids), row, truth, str(row.get("data_source") or ""),
            row.get("extra_info") or {}, finish, list(turns),
        )  # fmt: skip


class Value(NamedTuple):
    """A reward, None where the function does not apply, its further parts, and the answer that it found."""

    value: float | None
    parts: dict[str, float]
    answer: str = ""


class NotFinite(ValueError):
    """The function gave NaN or an infinity."""


class RewardCall:
    """One function of the user in one of the three forms: `form` is sample | verl | batch."""

    def __init__(self, dotted: str, *, prompt_key: str = "prompt") -> None:
        self.function = load_function(dotted)
        self.form, self._names = validate_reward(self.function, name=dotted)
        self.is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004
        )
        self._prompt_key = prompt_key

    def one(self, sample: RewardSample) -> Any:
        """The raw result for one sample (an awaitable where `is_async`); not for `batch`."""
        if self.form == "sample":
            return self.function(sample)
        given = {
            "data_source": sample.data_source, "solution_str": sample.response, "ground_truth": sample.ground_truth,
            "extra_info": sample.extra_info,
        }  # fmt: skip
        return self.function(**{name: given[name] for name in VERL if name in self._names})

    def batch(self, samples: Sequence[RewardSample]) -> Any:
        """The raw results for several samples, for `batch`."""
        chat = [isinstance(sample.row.get(self._prompt_key), list) for sample in samples]
        columns: dict[str, list[Any]] = {
            "prompts": [sample.row[self._prompt_key] if is_chat else sample.prompt
                        for sample, is_chat in zip(samples, chat, strict=True)],
            "completions": [[{"role": "assistant", "content": sample.response}] if is_chat else sample.response
                            for sample, is_chat in zip(samples, chat, strict=True)],
            "completion_ids": [sample.response_ids for sample in samples],
        }  # fmt: skip
        names = {name for sample in samples for name in sample.row} - {self._prompt_key}
        for name in names:
            columns.setdefault(name, [sample.row.get(name) for sample in samples])
        columns.setdefault("ground_truth", [sample.ground_truth for sample in samples])
        wanted = self._names or columns.keys()
        return self.function(**{name: value for name, value in columns.items() if name in wanted})

    def values(self, raw: Any, count: int) -> list[Value]:
        """The values of a batch result. Raises where it is not one number (or None) per sample."""
        items = raw.tolist() if hasattr(raw, "tolist") else raw
        if not isinstance(items, list | tuple) or len(items) != count:
            raise TypeError(f"a batch function must give a list of {count} numbers, it gave {_short(raw)}")
        return [Value(None, {}) if item is None else value_of(item) for item in items]


def load_function(dotted: str) -> Callable[..., Any]:
    """The function behind 'module:name'. Raises `config.reward`, also where importing the module fails."""
    try:
        function = load_object(dotted, code="config.reward", where=dotted)
    except AsyncRLError:
        raise
    except Exception as error:  # importing runs the user's code, which may raise anything
        message = f"importing it raised {type(error).__name__}: {error}"
        raise ConfigError("config.reward", message, where=dotted) from error
    if not callable(function):
        raise ConfigError("config.reward", f"it is a {type(function).__name__}, not a function", where=dotted)
    found: Callable[..., Any] = function
    return found


def validate_reward(function: Callable[..., Any], *, name: str = "") -> tuple[str, frozenset[str]]:
    """The form of a function (sample | verl | batch) and the names it takes; no names where it takes all.

    Raises:
        ConfigError: `config.reward`, where its parameters fit none of the three forms.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError("config.reward", f"its parameters cannot be read: {error}", where=name) from None
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = frozenset(p.name for p in named)
    required = {p.name for p in named if p.default is p.empty}
    if "completions" in names:
        return "batch", frozenset() if takes_all else names
    if "solution_str" in names:
        if not required - set(VERL):
            return "verl", frozenset(VERL) if takes_all else names & frozenset(VERL)
        unknown = ", ".join(sorted(required - set(VERL)))
        raise ConfigError("config.reward", f"nothing to give for its parameters {unknown}", where=name)
    positional = [p for p in named if p.kind is not p.KEYWORD_ONLY]
    if positional and required <= {positional[0].name} and (len(positional) == 1 or positional[0].name == "sample"):
        return "sample", frozenset()
    shown = ", ".join(p.name for p in named) or "none"
    raise ConfigError("config.reward", f"its parameters ({shown}) fit none of the forms {FORMS}", where=name)


def value_of(raw: Any) -> Value:
    """The value of one result. Raises TypeError for what is no number, NotFinite for NaN and infinities."""
    parts: dict[str, float] = {}
    answer = ""
    if isinstance(raw, dict):
        answer = next((str(raw[name]) for name in ANSWERS if raw.get(name) is not None), "")
        key = next((name for name in ("score", "reward") if name in raw), None)
        if key is None:
            raise TypeError(f"a dict result needs 'score' or 'reward', it has {', '.join(map(str, raw)) or 'nothing'}")
        for name, item in raw.items():
            number = _number(item)
            if name != key and number is not None and math.isfinite(number):
                parts[str(name)] = number
        raw = raw[key]
    value = _number(raw)
    if value is None:
        raise TypeError(f"the result is not a number: {_short(raw)}")
    if not math.isfinite(value):
        raise NotFinite(f"the result is {value}")
    return Value(value, parts, answer)


def _number(raw: Any) -> float | None:
    if isinstance(raw, bool | int | float):
        return float(raw)
    if hasattr(raw, "__float__"):
        try:
            return float(raw)  # numpy, torch, Decimal, Fraction
        except (TypeError, ValueError, RuntimeError):
            return None
    return None


def _short(raw: Any) -> str:
    text = repr(raw)
    return f"{type(raw).__name__} {text[:80]}"


def main(argv: Sequence[str] | None = None) -> int:
    """`--validate module:name`: exit code 0, or 2 with the reason."""
    parser = argparse.ArgumentParser(prog="producers.rewards.functions", description="check a reward function")
    parser.add_argument("--validate", required=True, metavar="MODULE:NAME")
    dotted = parser.parse_args(argv).validate
    try:
        form, _ = validate_reward(load_function(dotted), name=dotted)
    except ConfigError as error:
        print(error.render(), file=sys.stderr)
        return EXIT_CONFIG
    print(f"{dotted}: form {form}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
