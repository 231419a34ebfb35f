"""`asyncrl new`: a file with a part of your own that works, to change.

Each text below is a whole file for `NAME`; `tests/unit/test_new_part.py` writes every one, tests it with the command
that is printed, and names it in a configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from asyncrl.errors import ConfigError


class Part(NamedTuple):
    """A kind of part: its text, the command that tests it, the setting that names it (`{0}`: `file.py:name`)."""

    text: str
    test: str
    use: str


PARTS = {
    "reward": Part(
        '''"""A reward: a number per response."""


def NAME(prompts, completions, answer, **columns):
    """1 where the response is the column `answer` of its row, else 0."""
    return [float(text.strip() == str(wanted).strip()) for text, wanted in zip(completions, answer)]
''',
        "asyncrl test-reward {0} --data rows.jsonl",
        '[[reward]] function = "{0}"',
    ),
    "loss": Part(
        '''"""A policy loss: a value per token, with the gradient of the log-probs."""

from learners.algorithms.types import LossInputs, TokenLoss


def NAME(inputs: LossInputs, *, clip: float = 0.2) -> TokenLoss:
    """The clipped policy gradient of PPO (Schulman et al. 2017, eq. 7). All tensors are [N], one value per token."""
    ratio = (inputs.current - inputs.proximal).where(inputs.mask, 0.0).clamp(-20, 20).exp()
    advantages = inputs.advantages.where(inputs.mask, 0.0)
    bounded = ratio.clamp(1 - clip, 1 + clip)
    loss = -(ratio * advantages).minimum(bounded * advantages)
    if inputs.weights is not None:  # of the correction for the age of the sample
        loss = loss * inputs.weights.detach()
    return TokenLoss(loss.where(inputs.mask, 0.0), (ratio * advantages > bounded * advantages) & inputs.mask)
''',
        "asyncrl test-loss {0}",
        '[learner.algorithm] loss = "{0}"',
    ),
    "environment": Part(
        '''"""An environment: what the policy sees next, a reward for each turn, and when it is over."""


class NAME:
    """Guess the column `answer` of the row, in several turns. A new object for every sample."""

    def __init__(self, *, hint="Wrong. Try again."):
        """`environment.args` gives the arguments."""
        self.hint = hint
        self.answer = ""

    def reset(self, row):
        """What the policy sees first; None: the prompt of the row."""
        self.answer = str(row.get("answer", ""))

    def step(self, turn):
        """What the policy sees next, the reward of its turn, whether that was all, and parts of the reward."""
        right = turn.text.strip() == self.answer
        return self.hint, float(right), right, {}
''',
        'asyncrl test-env {0} --row \'{{"prompt": "2+2=", "answer": "4"}}\'',
        '[environment] name = "{0}"',
    ),
    "tool": Part(
        '''"""A tool: a function that the policy can call. Its signature and docstring become its schema."""


def NAME(text: str) -> str:
    """Count the letters of a text.

    Args:
        text: the text
    """
    return str(sum(letter.isalpha() for letter in text))
''',
        "asyncrl test-env tools --args '{{}}' --config my.toml --set 'environment.tools=[\"{0}\"]'",
        '[environment] name = "tools", tools = ["{0}"]',
    ),
}


def write_part(kind: str, name: str, folder: Path) -> tuple[Path, Part]:
    """Write `folder/NAME.py`; its path, and its kind.

    Raises:
        ConfigError: `usage`: the name is no Python name, or the file exists.
    """
    if not name.isidentifier():
        raise ConfigError(
            "usage", f"{name!r} is no name of a Python function", where="NAME", remedy="such as my_reward"
        )
    path = folder / f"{name}.py"
    if path.exists():
        raise ConfigError("usage", "the file exists", where=str(path), remedy="give another name")
    path.write_text(PARTS[kind].text.replace("NAME", name), encoding="utf-8")
    return path, PARTS[kind]


def new_command(kind: str, name: str) -> int:
    path, part = write_part(kind, name, Path())
    place = f"{path}:{name}"
    print(f"written: {path}\ntest it: {part.test.format(place)}\nuse it:  {part.use.format(place)}")
    return 0
