"""An environment that draws pictures: the policy moves a disc to a red square, and sees the board after each move.

`[environment] name = "asyncrl.demo.squares:FindSquare"`, with the rows of `prompt_rows`: the first picture is in the
prompt, the next one in the answer to every move. A picture has 48 x 48 pixels, a board of 3 x 3 cells. The reward of a
move is the share of the way that it saved, so that a sample which arrives has a reward of 1 in total.

Example: disc at the top left, square at the middle left. "down" -> reward 1, and the end; "right" -> reward -1.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.environment import Step, Turn
from asyncrl.images.decoding import encode_png

if TYPE_CHECKING:
    from PIL.Image import Image

CELLS, CELL = 3, 16  # per side of the board; pixels per side of a cell
MOVES: Mapping[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
QUESTION = "left, right, up or down?"
Cell = tuple[int, int]  # column, row


def start_cells(seed: int) -> tuple[Cell, Cell]:
    """Where disc and square are at first: two cells."""
    board = [(column, row) for column in range(CELLS) for row in range(CELLS)]
    disc, square = random.Random(f"asyncrl.demo.squares/{seed}").sample(board, 2)
    return disc, square


def draw(disc: Cell, square: Cell) -> Image:
    """The board in RGB."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (CELLS * CELL, CELLS * CELL), (40, 40, 40))
    pen = ImageDraw.Draw(picture)
    for (column, row), shape, colour in ((square, pen.rectangle, (230, 40, 40)), (disc, pen.ellipse, (240, 240, 240))):
        left, top = column * CELL + 3, row * CELL + 3
        shape((left, top, left + CELL - 7, top + CELL - 7), fill=colour)
    return picture


def prompt_rows(size: int, seed: int) -> list[dict[str, Any]]:
    """`size` rows with the first picture of each."""
    return [
        {
            "prompt": [{"role": "user", "content": f"<image>{QUESTION}"}],
            "images": [{"bytes": encode_png(draw(*start_cells(number))), "path": None}],
            "seed": number,
        }
        for number in range(seed * size, (seed + 1) * size)
    ]


class FindSquare:
    """One episode, of at most `moves` turns. The row's column `seed` places disc and square."""

    def __init__(self, moves: int = 6) -> None:
        self._left = moves

    async def reset(self, row: Mapping[str, Any]) -> None:
        """The prompt shows the first picture."""
        self._disc, self._square = start_cells(row["seed"])
        self._way = self._distance()

    async def step(self, action: Turn) -> Step:
        before = self._distance()
        steps = MOVES.get(action.text.strip(), (0, 0))
        column, row = (
            min(CELLS - 1, max(0, place + step)) for place, step in zip(self._disc, steps, strict=True)
        )  # a wall stops it
        self._disc = (column, row)
        self._left -= 1
        reward = (before - self._distance()) / self._way
        return Step(self._look(), reward, self._disc == self._square or self._left < 1)

    def _look(self) -> Sequence[Mapping[str, Any]]:
        picture = {"type": "image", "image": draw(self._disc, self._square)}
        return [{"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}]

    def _distance(self) -> int:
        return sum(abs(one - other) for one, other in zip(self._disc, self._square, strict=True))
