"""Rows with images, videos or audio: refused by the check and by every reader, never read as if they had none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from quick_checks import no_parts_are_tried  # noqa: F401
from small_folder import CHAT, write_folder
from test_learner_loop import model_dir

from asyncrl import config as configuration
from asyncrl.config import DataConfig
from asyncrl.config.media import MEDIA_COLUMNS, find_media
from asyncrl.environment import EnvironmentFailure
from asyncrl.errors import ConfigError
from asyncrl.preflight import code as check_code
from asyncrl.preflight.check import check_files
from producers.data.evaluation_prompts import HeldOutPrompts
from producers.data.prompts import BadPrompt, Prompts, encode_prompt
from producers.data.tokenizer import Tokenizer
from producers.engines.dataset import encode_row
from producers.environments.rendering import make_messages

assert model_dir  # a fixture


def chat(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, *parts]}]


#: Rows that a model of text would see a part of.
MEDIA: dict[str, dict[str, Any]] = {
    **{column: {"prompt": "what?", column: ["a/file"]} for column in MEDIA_COLUMNS},
    "bytes": {"prompt": "what?", "images": [{"bytes": "iVBOR", "path": None}]},
    "image part": {"prompt": chat({"type": "image"})},
    "image_url part": {"prompt": chat({"type": "image_url", "image_url": {"url": "http://h/x.png"}})},
    "part without a type": {"prompt": chat({"image": "x.png"})},
    "video part": {"prompt": chat({"type": "video", "video": "x.mp4"})},
    "audio part": {"prompt": chat({"type": "input_audio", "input_audio": {"data": ""}})},
    "another column": {"prompt": "what?", "messages": chat({"type": "image"})},
    "an answer": {"prompt": "what?", "chosen": {"role": "assistant", "content": [{"type": "audio"}]}},
}
#: Rows of text that only look alike.
TEXT: dict[str, dict[str, Any]] = {
    "words": {"prompt": "describe the image", "note": "images, video and audio"},
    "empty columns": {"prompt": "what?", "images": [], "videos": None, "audios": {}},
    "text parts": {"prompt": chat({"type": "text", "text": "an image", "image_url": None})},
    "an image of a container": {"prompt": "what?", "docker_image": "python:3.11"},
}


@pytest.mark.parametrize("case", MEDIA)
def test_media_are_found(case: str) -> None:
    assert find_media(MEDIA[case])


@pytest.mark.parametrize("case", TEXT)
def test_text_is_no_medium(case: str) -> None:
    assert find_media(TEXT[case]) == ""


# ---------------------------------------------------------------- the readers


def write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    """The rows as a file of this kind, or as a source."""
    if kind == "source":
        module = ModuleType("media_rows_source")
        module.rows = lambda: iter(rows)  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        return "media_rows_source:rows"
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def data_of(place: str) -> DataConfig:
    return DataConfig(source=place) if ":" in place else DataConfig(path=place)


@pytest.mark.parametrize("case", MEDIA)
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "source"])
def test_a_first_row_with_media_is_an_error_of_the_data(kind: str, case: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"row 0 has .*prompts are text alone") as refused:
        Prompts(data_of(write(tmp_path, kind, [MEDIA[case]])), seed=0)
    assert refused.value.code == "config.data" and refused.value.remedy and refused.value.where


def test_bytes_are_no_way_round(tmp_path: Path) -> None:
    """Other columns of bytes are dropped when a row is read."""
    with pytest.raises(ConfigError, match="column 'images'"):
        Prompts(data_of(write(tmp_path, "parquet", [{"prompt": "what?", "images": b"\x89PNG"}])), seed=0)
    fine = Prompts(data_of(write(tmp_path, "parquet", [{"prompt": "what?", "blob": b"\x89PNG"}])), seed=0)
    assert fine.row_for(0) == {"prompt": "what?"}


Door = Callable[[configuration.Config, Tokenizer], Any]
DOORS: dict[str, tuple[str, Door]] = {
    "training": ("", lambda c, t: encode_prompt(Prompts(c.data, seed=0).row_for(1), c.data, t)),
    "evaluation": ("evaluation.path", lambda c, t: encode_prompt(HeldOutPrompts(c).row_for(1), c.data, t)),
    "sft": ("sft", lambda c, t: encode_row(Prompts(c.data, seed=0).row_for(1), c, t)),
    "preferences": ("dpo", lambda c, t: encode_row(Prompts(c.data, seed=0).row_for(1), c, t)),
}


@pytest.mark.parametrize("case", MEDIA)
@pytest.mark.parametrize("door", DOORS)
def test_no_door_drops_media(door: str, case: str, tmp_path: Path, model_dir: Path) -> None:
    """A later row is refused by itself, with its reason."""
    mode, enter = DOORS[door]
    answers = {"response": "4", "chosen": "4", "rejected": "5"}
    path = write(tmp_path, "jsonl", [{"prompt": "2+2=", **answers}, answers | MEDIA[case]])
    config = make_config(tmp_path, model_dir, path, mode)
    with pytest.raises(BadPrompt) as refused:
        enter(config, Tokenizer(model_dir, trust_remote_code=False))
    assert refused.value.reason.startswith(("media: it has", "answer:")), refused.value.reason


def make_config(place: Path, model: Path, path: str, mode: str) -> configuration.Config:
    text = f'model.path = "{model}"\ndata.path = "{path}"\ndata.shuffle = false\ndata.max_prompt_tokens = 64\n'
    text += "data.chat_template = false\n"
    if mode in ("sft", "dpo"):
        text += f'learner.mode = "{mode}"\nproducers.engine = "dataset"\nsampling.group_size = {1 + (mode == "dpo")}\n'
    if mode == "evaluation.path":
        text += f'evaluation.path = "{path}"\nevaluation.at_end = true\n'
    return configuration.parse(text + '[[reward]]\nfunction = "a:b"\n')


def test_an_observation_with_media_is_refused() -> None:
    with pytest.raises(EnvironmentFailure, match=r"a part 'image' .* text alone"):
        make_messages(chat({"type": "image"}))
    assert make_messages(chat()) == chat()


# ---------------------------------------------------------------- the check


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("key", ["data.path", "evaluation.path"])
def test_the_check_finds_a_later_row(key: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = write_folder(tmp_path / "model", template=CHAT)
    monkeypatch.setattr(check_code, "_problem", lambda command, **_: "")
    text = {"prompt": "2+2=", "images": None}
    media = write(tmp_path, kind, [text, text, {"prompt": "what?", "images": ["x.png"]}])
    (tmp_path / "text.jsonl").write_text(json.dumps({"prompt": "2+2="}) + "\n")
    paths = {"data.path": str(tmp_path / "text.jsonl"), "evaluation.path": str(tmp_path / "text.jsonl")} | {key: media}
    file = tmp_path / "run.toml"
    file.write_text(
        f'[model]\npath = "{model_dir}"\n[data]\npath = "{paths["data.path"]}"\n'
        f'[evaluation]\npath = "{paths["evaluation.path"]}"\nevery = 1\n[[reward]]\nfunction = "a:b"\n'
    )
    [found] = check_files(file)[1].errors
    line = {"data.path": 4, "evaluation.path": 6}[key]
    assert (found.code, found.where) == ("config.data", f"{file}:{line}")
    assert "row 2 has column 'images'" in found.message and "text alone" in found.remedy


@pytest.mark.parametrize("case", TEXT)
def test_the_check_lets_text_pass(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = write_folder(tmp_path / "model", template=CHAT)
    monkeypatch.setattr(check_code, "_problem", lambda command, **_: "")
    file = tmp_path / "run.toml"
    path = write(tmp_path, "jsonl", [TEXT[case]])
    file.write_text(f'model.path = "{model_dir}"\ndata.path = "{path}"\n[[reward]]\nfunction = "a:b"\n')
    assert check_files(file)[1].errors == []
