"""Mathematics by math-verify (extra `math`): does the response end with the ground truth?

`builtin:gsm8k`, `builtin:math`, `builtin:aime`, `builtin:dapo`. Guarantees: a ground truth that cannot be parsed is an
error of the sample; a response without an answer is wrong; only the last `last_chars` of a response are read, so that a
long one costs no more. Call it in the main thread (math-verify's time limits are signals), as the worker's child does.
"""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

from asyncrl.errors import ConfigError
from producers.rewards.sample import RewardSample
from producers.rewards.scorers.ground_truth import require_truth

BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+(?P<bare>[-.0-9\\][^\s${}]*?)(?=[.,;]?(?:[\s$]|$)))")
NUMBER = re.compile(r"-?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
FORMULA = re.compile(r"\\(?:[dt]?frac|sqrt|pi|log|ln)")  # a single number in it is not its value
DOLLAR = re.compile(r"(?<!\\)\$")  # the mark of LaTeX; `\$` is money
INTEGER = re.compile(r"0*[0-9]{1,3}")  # the range of AIME
ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


def math_verify() -> ModuleType:
    """The package. Raises `config.extra` where it is missing."""
    try:
        return importlib.import_module("math_verify")
    except ImportError as error:
        message = f"the scorers of mathematics need math-verify: {error}"
        raise ConfigError("config.extra", message, remedy="pip install 'asyncrl[math]'") from None


class Math:
    """`correct` for an answer that equals the ground truth, else `wrong`. The last box counts, else the last
    expression; with `boxed` only a box."""

    def __init__(
        self, *, correct: float = 1.0, wrong: float = 0.0, boxed: bool = False, last_chars: int = 3000
    ) -> None:
        self._verify = math_verify()
        self._values = (wrong, correct)
        self._boxed = boxed
        self._last = last_chars
        latex = self._verify.LatexExtractionConfig(boxed_match_priority=0)
        self._wanted: tuple[Any, ...] = (latex, self._verify.ExprExtractionConfig())

    def __call__(self, sample: RewardSample) -> dict[str, Any]:
        """The score, and the answer that was found."""
        gold = self.gold(str(require_truth(sample)))
        found = self.answer(sample.last_turn[-self._last :])
        return self.make_score(self.equal(gold, found), found)

    def make_score(self, right: bool, found: list[Any]) -> dict[str, Any]:
        return {"score": self._values[right], "acc": float(right), "pred": str(found[-1]) if found else None}

    def gold(self, text: str) -> list[Any]:
        """The parsed ground truth. Raises ValueError if it is not mathematics."""
        is_marked = DOLLAR.search(text) or "\\boxed" in text
        parsed = self._verify.parse(text if is_marked else f"${text}$", self._wanted)
        parsed = parsed or self._verify.parse(text, self._wanted)
        if not parsed:
            raise ValueError(f"the ground truth is not an expression: {text!r:.100}")
        return list(parsed)

    def answer(self, text: str) -> list[Any]:
        """The parsed answer of a response; empty without one."""
        boxes = find_boxes(text)
        if boxes:
            return self.parse(f"${boxes[-1]}$")
        return [] if self._boxed else self.parse(text)

    def parse(self, text: str) -> list[Any]:
        """The parsed text; empty without mathematics."""
        return list(self._verify.parse(text, self._wanted))

    def equal(self, gold: list[Any], found: list[Any]) -> bool:
        return bool(found) and bool(self._verify.verify(gold, found))


def find_boxes(text: str) -> list[str]:
    r"""The contents of all \boxed{...} and \fbox{...}, with inner braces; for \boxed 5 the text after it."""
    boxes = []
    for start in BOX.finditer(text):
        if start["bare"]:
            boxes.append(start["bare"])
            continue
        depth, at = 1, start.end()
        while at < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        if not depth:
            boxes.append(text[start.end() : at - 1])
    return boxes


class GSM8K(Math):
    """What follows the last `####`, else a box, else the last number; with `strict` only `####`."""

    def __init__(
        self, *, strict: bool = False, correct: float = 1.0, wrong: float = 0.0, last_chars: int = 3000
    ) -> None:
        super().__init__(correct=correct, wrong=wrong, last_chars=last_chars)
        self._strict = strict

    def gold(self, text: str) -> list[Any]:
        """The number of a solution as the data set writes it, or a number alone."""
        numbers = self.numbers(text.rpartition("####")[2])
        if not numbers:
            raise ValueError(f"the ground truth is not a number: {text!r:.100}")
        return self.parse(numbers[0])

    def answer(self, text: str) -> list[Any]:
        _, mark, stated = text.rpartition("####")
        if mark:
            return self.numbers(stated)[:1] and self.parse(self.numbers(stated)[0])
        if self._strict:
            return []
        boxes = find_boxes(text)
        numbers = self.numbers(boxes[-1] if boxes else text)
        if boxes and (len(numbers) > 1 or FORMULA.search(boxes[-1])):  # of `24\text{ cm}^2` the last is not the answer
            return super().answer(text)
        return self.parse(numbers[-1]) if numbers else []

    @staticmethod
    def numbers(text: str) -> list[str]:
        """Every number of a text, without thousands separators and the dollar between sign and number."""
        plain = text.replace("\u2212", "-")  # the typographic minus sign
        return [found.replace(",", "").replace("$", "") for found in NUMBER.findall(plain)]


class AIME(Math):
    """An integer from 0 to 999: a box, else the last expression. Anything else is wrong."""

    def gold(self, text: str) -> list[Any]:
        """Leading zeros are ignored."""
        if not INTEGER.fullmatch(text.strip()):
            raise ValueError(f"the ground truth is not an integer from 0 to 999: {text!r:.100}")
        return super().gold(str(int(text)))

    def answer(self, text: str) -> list[Any]:
        """Leading zeros of a box are ignored."""
        boxes = find_boxes(text)
        if boxes and INTEGER.fullmatch(boxes[-1].strip()):
            return self.parse(str(int(boxes[-1])))
        return super().answer(text)


class DAPO(Math):
    """1 or -1 for the value after the last `Answer:` of the last 300 characters, the format of DAPO's prompts."""

    def __init__(self, *, correct: float = 1.0, wrong: float = -1.0, last_chars: int = 300) -> None:
        super().__init__(correct=correct, wrong=wrong, last_chars=last_chars)

    def answer(self, text: str) -> list[Any]:
        """The text after the last `Answer:`; no such line means no answer."""
        lines = ANSWER_LINE.findall(text)
        if not lines:
            return []
        stated = lines[-1].strip()
        boxes = find_boxes(stated)
        stated = boxes[-1] if boxes else stated.strip("$ .")
        return self.parse(f"${stated}$") or self.parse(stated)
