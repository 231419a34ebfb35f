"""The demonstration task of images: small pictures of equal shapes, and questions about colour, number and place.

Cheap to import; Pillow and pyarrow are imported when pictures are drawn. Everything is a function of (split, seed,
index), but another version of Pillow may compress the same pixels to other bytes. A picture has 48 x 48 pixels: 1 to 5
circles, squares or triangles of one colour in cells of a 3 x 3 grid, each moved a little, on dark grey with noise. The
truths of a question are equally likely, so only the picture tells which one is right: the best answers without it are
right with `CHANCE` = (1/6 + 1/5 + 1/5) / 3 = 0.189.

Example: two red circles, "what colour?" -> "red" and "how many?" -> "2"; one square below, "where?" -> "bottom".
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.images.decoding import encode_png

if TYPE_CHECKING:
    from PIL.Image import Image

SPLITS = ("train", "heldout")
SIDE, CELL, RADIUS, JITTER = 48, 16, 5, 2  # pixels
COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (60, 90, 240),
    "yellow": (240, 220, 40),
    "purple": (190, 60, 220),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle")
PLACES = {"left": (0, 1), "right": (2, 1), "top": (1, 0), "bottom": (1, 2), "middle": (1, 1)}  # column, row of the cell
#: Answers of each question.
ANSWERS: Mapping[str, tuple[str, ...]] = {
    "what colour?": tuple(COLOURS),
    "how many?": ("1", "2", "3", "4", "5"),
    "where?": tuple(PLACES),
}
CHANCE = sum(1 / len(answers) for answers in ANSWERS.values()) / len(ANSWERS)
MAX_ANSWER_TOKENS = 8  # letters of the longest answer, the end of the sequence, and one more


def row_random(*, seed: int, index: int, split: str = "train") -> random.Random:
    """The private random stream of a row. Raises ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    return random.Random(f"asyncrl.demo.shapes/{split}/{seed}/{index}")


def draw_row(rng: random.Random) -> tuple[str, str, Image]:
    """A question, its right answer, and the picture (RGB)."""
    question = rng.choice(list(ANSWERS))
    truth = rng.choice(ANSWERS[question])
    colour = truth if truth in COLOURS else rng.choice(list(COLOURS))
    if truth in PLACES:
        cells = [PLACES[truth]]
    else:
        count = int(truth) if truth.isdigit() else rng.randint(1, 5)
        cells = rng.sample([(column, row) for column in range(3) for row in range(3)], count)
    return question, truth, _draw(rng, colour, cells)


def _draw(rng: random.Random, colour: str, cells: Sequence[tuple[int, int]]) -> Image:
    from PIL import Image, ImageDraw

    dark = rng.randint(20, 60)
    noise = rng.randbytes(SIDE * SIDE).translate(bytes(dark + byte % 4 * 6 for byte in range(256)))
    picture = Image.frombytes("L", (SIDE, SIDE), noise).convert("RGB")
    pen = ImageDraw.Draw(picture)
    shape = rng.choice(SHAPES)
    for column, row in cells:
        x, y = (CELL * place + CELL // 2 + rng.randint(-JITTER, JITTER) for place in (column, row))
        box = (x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS)
        if shape == "circle":
            pen.ellipse(box, fill=COLOURS[colour])
        elif shape == "square":
            pen.rectangle(box, fill=COLOURS[colour])
        else:
            pen.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=COLOURS[colour])
    return picture


def demonstration(question: str, truth: str, *, noise: float, rng: random.Random) -> str:
    """The answer of a teacher that, with this probability (0..1), draws any answer of the question uniformly."""
    return rng.choice(ANSWERS[question]) if noise and rng.random() < noise else truth


def prompt_rows(size: int, seed: int, *, split: str = "train", permuted: bool = False) -> list[dict[str, Any]]:
    """`size` rows with verl's column names; `<image>` marks the place of the picture.

    Args:
        size: number of rows.
        seed: of rows and permutation.
        split: `train` or `heldout`, from different streams.
        permuted: each row gets the picture of another row. A policy then reaches `best_blind_score` of its rows and
            not more: the negative control of a run.

    Raises:
        ValueError: an unknown split.
    """
    drawn = [draw_row(row_random(seed=seed, index=index, split=split)) for index in range(size)]
    pictures = [picture for _, _, picture in drawn]
    if permuted:
        order = list(range(size))
        random.Random(f"asyncrl.demo.shapes/permutation/{split}/{seed}").shuffle(order)
        moved = dict(zip(order, order[1:] + order[:1], strict=True))  # one cycle over all rows
        pictures = [pictures[moved[index]] for index in range(size)]
    return [
        {
            "data_source": "shapes",
            "prompt": [{"role": "user", "content": f"<image>{question}"}],
            "images": [{"bytes": encode_png(picture), "path": None}],
            "ability": "vision",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": index, "split": split, "question": question},
        }
        for index, ((question, truth, _), picture) in enumerate(zip(drawn, pictures, strict=True))
    ]


def best_blind_score(rows: Sequence[Mapping[str, Any]]) -> float:
    """The mean reward of the best answers that depend on the question alone; about `CHANCE`, above it in small sets."""
    truths: dict[str, Counter[str]] = {}
    for row in rows:
        truths.setdefault(row["extra_info"]["question"], Counter())[row["reward_model"]["ground_truth"]] += 1
    return sum(max(counts.values()) for counts in truths.values()) / len(rows)


def shapes_reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1.0 if the whole answer equals the truth, else 0.0. White space at the ends does not count."""
    return float(solution_str.strip() == str(ground_truth))


def write_parquet(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> int:
    """Write rows as a parquet file, replacing the file at once; the number of rows. Creates the folder."""
    import pyarrow
    import pyarrow.parquet

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist([dict(row) for row in rows])
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])  # as `datasets` writes them
    place = table.schema.get_field_index("images")
    table = table.set_column(place, "images", table["images"].cast(pyarrow.list_(image)))
    partial = target.with_name(target.name + ".partial")
    pyarrow.parquet.write_table(table, partial)
    partial.replace(target)
    return len(rows)
