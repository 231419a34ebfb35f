"""The demonstration task of tools: multiply with a calculator and give the product.

Pure Python and cheap to import. Everything is a function of (split, seed, index). A prompt is one user message; a good
policy calls the tool `calculator` once and repeats its answer; the noisy teacher may skip the call, or copy digits
wrongly.

Example: "23*47" -> `<tool_call>{"name": "calculator", "arguments": {"expression": "23*47"}}</tool_call>` -> (the tool:
"1081") -> "1081".
"""

from __future__ import annotations

import json
import random
from typing import Any

SPLITS = ("train", "heldout")
#: Tokens of the tokenizer: all of ASCII and some words, since a policy also sees errors as text.
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
WORDS = (
    "<tool_call>",
    "</tool_call>",
    '{"name": "',
    '", "arguments": {',
    '"}}',
    "assistant",
    "user",
    "tool",
    "system",
    "calculator",
    "expression",
)
TEMPLATE = (
    "{% for message in messages %}<bos>{{ message.role }}\n{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


def operands(*, seed: int, index: int, split: str = "train") -> tuple[int, int]:
    """Two numbers in 11..99. Raises ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    rng = random.Random(f"asyncrl.recipes.calculator/{split}/{seed}/{index}")
    return rng.randint(11, 99), rng.randint(11, 99)


def prompt_rows(size: int, seed: int, *, split: str = "train") -> list[dict[str, Any]]:
    """`size` rows with verl's column names; the prompt is a list of chat messages."""
    rows = []
    for index in range(size):
        one, other = operands(seed=seed, index=index, split=split)
        rows.append(
            {
                "data_source": "calculator",
                "prompt": [{"role": "user", "content": f"{one}*{other}"}],
                "reward_model": {"style": "rule", "ground_truth": str(one * other)},
                "extra_info": {"index": index, "split": split},
            }
        )
    return rows


def tool_call(expression: str) -> str:
    """The call of the tool, as a policy writes it."""
    tree = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(tree)}</tool_call>"


def demonstration(one: int, other: int, *, noise: float, rng: random.Random) -> tuple[str, str, str]:
    """The teacher's first turn, the tool's answer (empty without a call), and the teacher's last turn.

    `noise` is the chance of a guess without a call, and half of it that of a wrong digit.
    """
    if rng.random() < noise:
        return str(rng.randint(121, 9801)), "", ""
    left, right = (_miscopy(number, noise / 2, rng) for number in (one, other))
    found = str(int(left) * int(right))
    return tool_call(f"{left}*{right}"), found, _miscopy(int(found), noise / 2, rng)


def _miscopy(number: int, noise: float, rng: random.Random) -> str:
    """A number with wrong digits; the first one is never 0, so that it stays a Python number."""
    digits = [
        str(rng.randint(0 if place else 1, 9)) if noise and rng.random() < noise else digit
        for place, digit in enumerate(str(number))
    ]
    return "".join(digits)


def calculator_reward(sample: Any) -> float:
    """1.0 if the last turn is exactly the product, else 0.0."""
    said = sample.turns[-1] if sample.turns else sample.response
    return float(said.strip() == str(sample.ground_truth))
