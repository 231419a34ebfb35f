"""Problems with a known answer and a difficulty from 1 to 6: `story`, `countdown`, `reach`, `sort`, `code`.

Pure Python. A problem is a function of (kind, split, seed, index), so two processes draw the same ones.

    story      Ann has 7 pens.Ann buys 5 pens.Ann loses 3 pens. How many?   7+5=12;12-3=9#9
    countdown  make 15 of 1 3 8 3:                                          1+3=4;4+3=7;7+8=15#((1+3)+3)+8
    reach      ab bd ce:a to d?                                             a:b;b:d#yes
    sort       sort 7 3 9 1:                                                7;37;379;1379#1379
    code       twice first3:                                                (x*2)[:3]

Only what follows `#` is judged, except that `yes` to `reach` needs a way along the edges before it; a `countdown` may
use each number once. A `code` answer completes `PREFIX`, and the sandbox runs it.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

KINDS = ("story", "countdown", "reach", "sort", "code")
LEVELS = range(1, 7)
NAMES = ("Ann", "Bob", "Eve", "Tom")
THINGS = ("pens", "cups", "figs", "keys")
GAINS, LOSSES = (" buys ", " finds ", " gets "), (" loses ", " sells ", " gives ")
#: Words that are one token each.
WORDS = (*NAMES, *(f" {thing}" for thing in THINGS), *GAINS, *LOSSES, " has ", " How many?", "make ", " of ", "sort ",
         " to ", "yes", "no", "reverse", "twice", "first", "last", "upper", "[::-1]", "*2", ".upper()")  # fmt: skip
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*=()#;:.?, []"
#: The prefix of the program that a `code` answer completes.
PREFIX = "f = lambda x: "
INPUTS = ("abcd", "xyz", "hello")


class Problem(NamedTuple):
    """A prompt, the steps of a solution, its final answer, and what the reward compares with."""

    kind: str
    level: int
    prompt: str
    steps: tuple[str, ...]
    answer: str
    truth: Any

    @property
    def solution(self) -> str:
        """The text of a teacher that makes no mistake."""
        return ";".join(self.steps) + (f"#{self.answer}" if self.kind != "code" else self.answer)


def problem(kind: str, *, seed: int, index: int, split: str = "train", level: int = 0) -> Problem:
    """The problem of this place; `level` 0: drawn. Raises ValueError for an unknown kind or level."""
    if kind not in KINDS or level not in (0, *LEVELS):
        raise ValueError(f"kind {kind!r} must be one of {', '.join(KINDS)}, and level {level} in 0 to {LEVELS[-1]}")
    rng = random.Random(f"reasoning/{kind}/{split}/{seed}/{index}")
    return _MAKERS[kind](rng, level or rng.choice(LEVELS))


# ---------------------------------------------------------------- the kinds


def _story(rng: random.Random, level: int) -> Problem:
    name, thing, total = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 20)
    told, steps = [f"{name} has {total} {thing}."], []
    for _ in range(level):
        gain = total < 3 or rng.random() < 0.5
        change = rng.randint(2, 20) if gain else rng.randint(1, total)
        told.append(f"{name}{rng.choice(GAINS if gain else LOSSES)}{change} {thing}.")
        after = total + change if gain else total - change
        steps.append(f"{total}{'+' if gain else '-'}{change}={after}")
        total = after
    return Problem("story", level, "".join(told) + " How many?", tuple(steps), str(total), str(total))


def _countdown(rng: random.Random, level: int) -> Problem:
    numbers = [rng.randint(1, 9) for _ in range(2 + level // 2)]
    order = rng.sample(numbers, len(numbers))
    total, text, steps = order[0], str(order[0]), []
    for number in order[1:]:
        sign = rng.choice("+-*" if total < 30 else "+-")
        after = total + number if sign == "+" else total - number if sign == "-" else total * number
        steps.append(f"{total}{sign}{number}={after}")
        text, total = f"({text}){sign}{number}" if len(text) > 1 else f"{text}{sign}{number}", after
    given = " ".join(map(str, numbers))
    truth = {"target": total, "numbers": numbers}
    return Problem("countdown", level, f"make {total} of {given}:", tuple(steps), text, truth)


def _reach(rng: random.Random, level: int) -> Problem:
    nodes = rng.sample("abcdefghijklmnop", 3 + level)
    edges = {(rng.choice(nodes), rng.choice(nodes)) for _ in range(2 * len(nodes) - 2)}
    edges = {(a, b) for a, b in edges if a != b} or {(nodes[0], nodes[1])}
    start, goal = rng.sample(nodes, 2)
    path = shortest_path(edges, start, goal)
    listed = rng.sample(sorted(edges), len(edges))
    steps = tuple(f"{a}:{b}" for a, b in itertools.pairwise(path))
    text = " ".join(f"{a}{b}" for a, b in listed) + f":{start} to {goal}?"
    truth = {"edges": ["".join(edge) for edge in sorted(edges)], "start": start, "goal": goal, "reachable": bool(path)}
    return Problem("reach", level, text, steps, "yes" if path else "no", truth)


def _sort(rng: random.Random, level: int) -> Problem:
    digits = [rng.randint(0, 9) for _ in range(2 + level)]
    steps = ["".join(map(str, sorted(digits[: count + 1]))) for count in range(len(digits))]
    return Problem("sort", level, "sort " + " ".join(map(str, digits)) + ":", tuple(steps), steps[-1], steps[-1])


_OPERATIONS: dict[str, tuple[str, Callable[[str, int], str]]] = {
    "reverse": ("[::-1]", lambda x, _: x[::-1]),
    "twice": ("*2", lambda x, _: x * 2),
    "first": ("[:{}]", lambda x, n: x[:n]),
    "last": ("[-{}:]", lambda x, n: x[-n:]),
    "upper": (".upper()", lambda x, _: x.upper()),
}


def _code(rng: random.Random, level: int) -> Problem:
    chosen = [(rng.choice(sorted(_OPERATIONS)), rng.randint(1, 3)) for _ in range(1 + level // 2)]
    words = [f"{name}{number}" if name in ("first", "last") else name for name, number in chosen]
    text, outputs = "x", list(INPUTS)
    for name, number in chosen:
        form, apply = _OPERATIONS[name]
        text = (f"({text})" if "*" in text else text) + form.format(number)
        outputs = [apply(value, number) for value in outputs]
    truth = {"fn_name": "f", "inputs": [[value] for value in INPUTS], "outputs": outputs}
    return Problem("code", level, " ".join(words) + ":", (), text, truth)


_MAKERS: Mapping[str, Callable[[random.Random, int], Problem]] = {
    "story": _story, "countdown": _countdown, "reach": _reach, "sort": _sort, "code": _code,
}  # fmt: skip


def shortest_path(edges: set[tuple[str, str]], start: str, goal: str) -> list[str]:
    """Nodes from `start` to `goal`; empty if there is no way.

    >>> shortest_path({("a", "b"), ("b", "d"), ("c", "e")}, "a", "d")
    ['a', 'b', 'd']
    """
    paths, seen = [[start]], {start}
    for path in paths:
        if path[-1] == goal:
            return path
        for following in sorted(b for a, b in edges if a == path[-1] and b not in seen):
            seen.add(following)
            paths.append([*path, following])
    return []


# ---------------------------------------------------------------- a teacher with mistakes


def demonstration(found: Problem, *, noise: float, rng: random.Random) -> str:
    """The solution with each digit or letter after a `=`, `:` or `;`, or of the answer, replaced by a random one of the
    problem's own with probability `noise`. Raises ValueError for a `noise` outside 0 to 1.
    """
    if not 0.0 <= noise <= 1.0:
        raise ValueError(f"noise must lie in 0..1, got {noise}")
    text = found.solution
    if found.answer in ("yes", "no") and rng.random() < noise:
        text = text.replace(f"#{found.answer}", "#no" if found.answer == "yes" else "#yes")
    head, mark, tail = text.rpartition("#")
    free = head if found.answer in ("yes", "no") else text
    pool = [c for c in found.prompt if c.isdigit()] or ["1", "2", "3"]
    nodes = [c for c in found.prompt if c.islower()]

    def changed(place: int, character: str) -> str:
        if rng.random() >= noise:
            return character
        if character.isdigit():
            return rng.choice(pool)
        return rng.choice(nodes) if found.kind == "reach" and character.islower() else character

    noisy = "".join(changed(place, character) for place, character in enumerate(free))
    return noisy + mark + tail if free is head else noisy


# ---------------------------------------------------------------- rewards


def reward(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1.0 for a right answer, else 0.0; for every kind but `code`, whose programs `builtin:code` runs."""
    steps, mark, answer = solution_str.rpartition("#")
    if not mark:
        return 0.0
    if data_source == "countdown":
        return float(_reaches_target(answer, ground_truth))
    if data_source == "reach":
        wanted = "yes" if ground_truth["reachable"] else "no"
        return float(answer == wanted and (wanted == "no" or _walks(steps, ground_truth)))
    return float(answer.strip() == str(ground_truth))


def _walks(steps: str, truth: Mapping[str, Any]) -> bool:
    """Whether `a:b;b:d` leads along edges from the start to the goal."""
    hops = [step.split(":") for step in steps.split(";")]
    if any(len(hop) != 2 or "".join(hop) not in truth["edges"] for hop in hops):
        return False
    joined = all(before[1] == after[0] for before, after in itertools.pairwise(hops))
    return joined and hops[0][0] == truth["start"] and hops[-1][1] == truth["goal"]


def _reaches_target(text: str, truth: Mapping[str, Any]) -> bool:
    """Whether an expression of +, -, * has the target as its value and uses each given number at most once."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body if len(text) <= 64 else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    used: Counter[int] = Counter()
    value = _value(tree, used)
    return value == truth["target"] and not used - Counter(truth["numbers"])


def _value(tree: ast.AST | None, used: Counter[int]) -> int | None:
    """The value of an expression, None if it is another one than of integers with +, -, *; counts its numbers."""
    if isinstance(tree, ast.Constant) and type(tree.value) is int:
        used[tree.value] += 1
        return tree.value
    if not isinstance(tree, ast.BinOp):
        return None
    left, right = _value(tree.left, used), _value(tree.right, used)
    if left is None or right is None:
        return None
    if isinstance(tree.op, ast.Add):
        return left + right
    if isinstance(tree.op, ast.Sub):
        return left - right
    return left * right if isinstance(tree.op, ast.Mult) else None


# ---------------------------------------------------------------- rows


def rows(size: int, seed: int, *, split: str = "train", kinds: Sequence[str] = KINDS) -> list[dict[str, Any]]:
    """`size` rows with verl's column names, the kinds in turn."""
    made = [problem(kinds[n % len(kinds)], seed=seed, index=n, split=split) for n in range(size)]
    return [
        {
            "data_source": found.kind,
            "prompt": found.prompt,
            "reward_model": {"style": "rule", "ground_truth": found.truth},
            "extra_info": {"index": n, "level": found.level, "split": split},
        }
        for n, found in enumerate(made)
    ]


def demonstration_rows(size: int, seed: int, *, noise: float) -> list[dict[str, Any]]:
    """`size` rows with the answer of a teacher that makes mistakes in column `response`."""
    found = []
    for n in range(size):
        made = problem(KINDS[n % len(KINDS)], seed=seed, index=n, split="demonstrations")
        rng = random.Random(f"reasoning/teacher/{seed}/{n}")
        found.append(
            {"data_source": made.kind, "prompt": made.prompt, "response": demonstration(made, noise=noise, rng=rng)}
        )
    return found
