"""Tiny vision-language models: complete folders, whose models see pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("PIL")

from PIL import Image  # noqa: E402, RUF100
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer  # noqa: E402, RUF100
from vision_models import SIDE, VISION_FAMILIES, write_vision_folder  # noqa: E402, RUF100

from learners.warm_start.tiny_model import count_parameters
from learners.warm_start.tiny_vision import FAMILIES, VISION_TOKENS, make_tiny_vision, make_vision_tokenizer

MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]


def read_question(folder: Path, pictures: list[Image.Image]) -> dict[str, Any]:
    """Inputs of a row per picture, with as many placeholders as the model makes features."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    config = json.loads((folder / "config.json").read_text())
    image = config.get("image_token_id", config.get("image_token_index"))
    arrays = AutoImageProcessor.from_pretrained(folder, backend="pil")(pictures, return_tensors="pt")
    count = config.get("image_seq_length") or config.get("mm_tokens_per_image") or (SIDE // 16) ** 2
    ids = tokenizer.encode(tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True))
    assert ids.count(image) == 1
    whole = torch.tensor([[token for one in ids for token in [one] * (count if one == image else 1)]] * len(pictures))
    kept = {key: arrays[key] for key in ("pixel_values", "image_grid_thw") if key in arrays}
    marks = {"mm_token_type_ids": (whole == image).int()} if "image_grid_thw" in arrays else {}
    return {"input_ids": whole, "attention_mask": torch.ones_like(whole), **kept, **marks}


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_folder_is_complete_and_its_model_sees(family: str, tmp_path: Path) -> None:
    folder = write_vision_folder(tmp_path, family)
    model = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True).eval()
    inputs = read_question(folder, [Image.new("RGB", (SIDE, SIDE), colour) for colour in ("red", "blue")])
    with torch.no_grad():
        red, blue = model(**inputs).logits
    assert torch.isfinite(red).all() and torch.isfinite(blue).all()
    assert (red[-1] - blue[-1]).abs().max() > 1e-4  # rows differ in the picture alone
    assert torch.equal(red[0], blue[0])  # what stands before it does not see it
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["pad_token_id"], generation["eos_token_id"]) == (0, 2)


def test_tokens_of_images_are_one_token_each(tmp_path: Path) -> None:
    made = make_vision_tokenizer(tmp_path)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    for token in VISION_TOKENS:
        assert made.encode(token) == loaded.encode(token) == [loaded.convert_tokens_to_ids(token)]
    assert loaded.decode(loaded.encode("a<|image_pad|>b"), skip_special_tokens=True) == "ab"
    chat = [{"role": "user", "content": "plain"}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
    assert loaded.apply_chat_template(chat, tokenize=False) == "<bos>user\nplain<eos>\n<bos>assistant\nyes<eos>\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_the_demo_are_small_and_deterministic(family: Any, tmp_path: Path) -> None:
    tokenizer = make_vision_tokenizer(tmp_path)
    before = torch.random.get_rng_state()
    one, two, other = (make_tiny_vision(family, tokenizer, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert 450_000 < count_parameters(one) < 700_000
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="unknown family"):
        make_tiny_vision("gpt", tokenizer)  # type: ignore[arg-type]
