"""The demonstration task of images: pictures, questions, rewards, rows, and its control without pictures."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from PIL import Image  # noqa: E402, RUF100

from asyncrl.demo import shapes


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [("red", "red", 1.0), (" 3\n", "3", 1.0), ("reds", "red", 0.0), ("blue", "red", 0.0), ("", "3", 0.0)],
)
def test_reward(answer: str, truth: str, reward: float) -> None:
    assert shapes.shapes_reward("shapes", answer, truth, extra_info={"index": 0}) == reward


def shape_parts(picture: Image.Image) -> list[tuple[tuple[float, float], tuple[int, int, int]]]:
    """Centre and colour of each connected area that is not background, found without the code of the task."""
    bright = {
        (x, y): picture.getpixel((x, y))
        for x in range(picture.width)
        for y in range(picture.height)
        if max(picture.getpixel((x, y))) > 150
    }
    parts = []
    while bright:
        first, colour = bright.popitem()
        area, edge = [first], [first]
        while edge:
            x, y = edge.pop()
            for near in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
                if bright.pop(near, None) is not None:
                    area.append(near)
                    edge.append(near)
        parts.append((tuple(sum(values) / len(area) for values in zip(*area, strict=True)), colour))
    return parts


def test_truths_are_what_the_pictures_show() -> None:
    for index in range(150):
        question, truth, picture = shapes.draw_row(shapes.row_random(seed=3, index=index))
        assert picture.size == (48, 48)
        parts = shape_parts(picture)
        assert len({colour for _, colour in parts}) == 1
        (x, y), colour = parts[0]
        if question == "what colour?":
            assert colour == shapes.COLOURS[truth]
        elif question == "how many?":
            assert len(parts) == int(truth)
        else:
            shown = "left" if x < 16 else "right" if x >= 32 else "top" if y < 16 else "bottom" if y >= 32 else "middle"
            assert (len(parts), shown) == (1, truth)


def test_rows_are_in_the_layout_of_verl_and_equal_in_every_process() -> None:
    rows = shapes.prompt_rows(5, 3)
    assert rows == shapes.prompt_rows(7, 3)[:5]
    assert rows != shapes.prompt_rows(5, 3, split="heldout")
    for row in rows:
        assert row["prompt"] == [{"role": "user", "content": f"<image>{row['extra_info']['question']}"}]
        assert Image.open(io.BytesIO(row["images"][0]["bytes"])).size == (48, 48)
        assert row["reward_model"]["ground_truth"] in shapes.ANSWERS[row["extra_info"]["question"]]
    code = "from asyncrl.demo import shapes; print(shapes.prompt_rows(5, 3))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(rows)
    with pytest.raises(ValueError, match="unknown split"):
        shapes.prompt_rows(1, 0, split="test")


def test_importing_the_task_loads_neither_torch_nor_pillow() -> None:
    code = (
        "import sys, asyncrl.demo.shapes; print([name for name in ('torch', 'PIL', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_permuted_rows_keep_questions_and_lose_the_relation_to_pictures() -> None:
    plain, mixed = (shapes.prompt_rows(300, 0, permuted=permuted) for permuted in (False, True))
    for one, other in zip(plain, mixed, strict=True):
        assert {**one, "images": 0} == {**other, "images": 0}
        assert one["images"] != other["images"]  # no row keeps its picture
    assert Counter(row["images"][0]["bytes"] for row in plain) == Counter(row["images"][0]["bytes"] for row in mixed)


def test_chance_is_what_the_best_answers_without_pictures_reach() -> None:
    assert pytest.approx(0.18889, abs=1e-5) == shapes.CHANCE
    assert shapes.CHANCE <= shapes.best_blind_score(shapes.prompt_rows(2000, 0)) < shapes.CHANCE + 0.04
    assert shapes.best_blind_score(shapes.prompt_rows(1, 0)) == 1.0


@pytest.mark.parametrize("noise", [0.0, 0.83, 1.0])
def test_a_teacher_is_right_as_often_as_its_noise_says(noise: float) -> None:
    rng = random.Random(0)
    said = [shapes.demonstration("where?", "left", noise=noise, rng=rng) for _ in range(3000)]
    assert set(said) <= set(shapes.PLACES)
    assert said.count("left") / 3000 == pytest.approx(1 - noise + noise / 5, abs=0.03)


def test_parquet_holds_the_rows_with_the_types_of_datasets(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = shapes.prompt_rows(4, 1)
    assert shapes.write_parquet(tmp_path / "new" / "rows.parquet", rows) == 4
    table = pyarrow.parquet.read_table(tmp_path / "new" / "rows.parquet")
    assert table.to_pylist() == rows
    image = table.schema.field("images").type.value_type
    assert (image.field("bytes").type, image.field("path").type) == (pyarrow.binary(), pyarrow.string())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rows.parquet"]
