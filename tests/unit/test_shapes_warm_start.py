"""The warm start of the task of images: which tokens are trained, that it learns, and that its folder is complete."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("PIL")

from PIL import Image  # noqa: E402, RUF100
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer  # noqa: E402, RUF100

from learners.warm_start import shapes
from learners.warm_start.arithmetic import Stage
from learners.warm_start.sft import IGNORE, sft
from learners.warm_start.tiny_vision import FAMILIES, Family, image_processor, make_tiny_vision, make_vision_tokenizer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_rows_have_a_token_per_part_of_the_picture_and_train_the_answer_alone(tmp_path: Path) -> None:
    tokenizer = make_vision_tokenizer(tmp_path)
    pictures = [Image.new("RGB", (48, 48)), Image.new("RGB", (64, 32))]
    texts = [("what colour?", "red"), ("how many?", "2")]
    batch = shapes.encode_rows(texts, pictures, tokenizer, image_processor())
    assert batch["image_grid_thw"].tolist() == [[1, 6, 6], [1, 4, 8]]
    assert batch["pixel_values"].shape == (36 + 32, 3 * 2 * 8 * 8)
    assert batch["mm_token_type_ids"].sum(1).tolist() == [9, 8]
    for ids, labels, (question, answer) in zip(batch["input_ids"], batch["labels"], texts, strict=True):
        assert labels[labels != IGNORE].tolist() == [*tokenizer.encode(answer), 2]
        said = tokenizer.decode(ids[ids != 0], skip_special_tokens=True)
        assert said == f"user\n{question}\nassistant\n{answer}"


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[pytest.mark.chaos] if one == "qwen3_vl" else []) for one in FAMILIES]
)
def test_a_model_learns_answers_that_only_the_pictures_tell(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "ROWS", 12)
    tokenizer, stage = make_vision_tokenizer(tmp_path), Stage(steps=80, lr=3e-3, noise=0.0)
    batch = next(shapes.batches(stage, tokenizer=tokenizer, processor=image_processor(), rng=random.Random(0)))
    answers = {tuple(labels[labels != IGNORE].tolist()) for labels in batch["labels"]}
    assert len(answers) > 6  # of three questions
    losses = sft(make_tiny_vision(family, tokenizer), [batch] * 80, lr=stage.lr, steps=80, optimizer="muon")
    assert losses[0] > 4
    assert losses[-1] < 0.05


def test_the_folder_is_complete_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = (Stage(steps=2, lr=1e-3, noise=0.0), Stage(steps=1, lr=1e-4, noise=0.7, optimizer="adamw"))
    folder = shapes.make_shapes_model(tmp_path / "model", family="qwen3_vl", stages=stages)
    assert "stage 2/2" in capsys.readouterr().out
    assert type(AutoModelForImageTextToText.from_pretrained(folder)).__name__ == "Qwen3VLForConditionalGeneration"
    assert AutoTokenizer.from_pretrained(str(folder)).chat_template
    assert AutoImageProcessor.from_pretrained(folder, backend="pil").patch_size == 8
    assert len(json.loads((folder / "warm_start.json").read_text())["losses"]) == 3
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    shapes.make_shapes_model(folder, family="qwen3_vl", stages=stages)
    assert weights.stat().st_mtime_ns == before
    shapes.make_shapes_model(folder, family="qwen2_5_vl", stages=stages)  # another recipe
    assert weights.stat().st_mtime_ns != before
