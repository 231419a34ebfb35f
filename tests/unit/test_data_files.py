"""`data.path`: files, patterns, folders that `datasets` saves; other folders get an error with a way out."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from asyncrl.config import DataConfig
from asyncrl.errors import ConfigError
from asyncrl.preflight.files import count_rows, data_paths, first_row
from asyncrl.runtime.data_files import data_files
from producers.data.prompts import Prompts


def write_stream(path: Path, prompts: list[str]) -> None:
    """An Arrow file as `Dataset.save_to_disk` writes it: the stream format."""
    table = pyarrow.table({"prompt": pyarrow.array(prompts, pyarrow.string()), "answer": list(range(len(prompts)))})
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def save(folder: Path, shards: list[list[str]]) -> Path:
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, prompts in zip(names, shards, strict=True):
        write_stream(folder / name, prompts)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def prompts_of(path: str | Path) -> list[str]:
    prompts = Prompts(DataConfig(path=str(path), shuffle=False), seed=0)
    return [prompts.row_for(number)["prompt"] for number in range(prompts.count(100))]


def test_a_saved_dataset_is_read_in_the_order_of_its_state(tmp_path: Path) -> None:
    folder = save(tmp_path / "ds", [["a", "b"], [], ["c"]])
    assert prompts_of(folder) == ["a", "b", "c"]
    files = data_paths(str(folder))
    assert [count_rows(path) for path in files] == [2, 0, 1]
    assert first_row(files[0]) == {"prompt": "", "answer": None} and first_row(files[1]) is None


def test_a_folder_of_splits_names_them(tmp_path: Path) -> None:
    save(tmp_path / "ds" / "train", [["a"]])
    (tmp_path / "ds" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(ConfigError, match="folder of splits: train, test") as caught:
        data_files(str(tmp_path / "ds"))
    assert repr(str(tmp_path / "ds" / "train")) in caught.value.remedy
    assert prompts_of(tmp_path / "ds" / "train") == ["a"]


def test_a_folder_of_shards_asks_for_a_pattern_and_the_pattern_reads_them(tmp_path: Path) -> None:
    for split, prompts in (("train", "ab"), ("test", "z")):
        for number, prompt in enumerate(prompts):
            name = tmp_path / f"{split}-{number:05d}-of-{len(prompts):05d}.parquet"
            pyarrow.parquet.write_table(pyarrow.table({"prompt": [prompt]}), name)
    with pytest.raises(ConfigError, match="it is a folder, of test-00000-of-00001") as caught:
        data_files(str(tmp_path))
    assert repr(str(tmp_path / "test-*.parquet")) in caught.value.remedy
    assert prompts_of(f"{tmp_path}/train-*.parquet") == ["a", "b"]
    with pytest.raises(ConfigError, match="no file fits this pattern"):
        data_files(f"{tmp_path}/dev-*.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"the folder has no \.parquet"):
        data_files(str(tmp_path / "empty"))


def test_a_damaged_arrow_file_is_a_mistake_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    path.write_bytes(b"no arrow at all, but long enough to be looked at")
    with pytest.raises(ConfigError) as caught:
        Prompts(DataConfig(path=str(path)), seed=0)
    assert caught.value.code == "config.data"
    with pytest.raises(ValueError):
        first_row(path)


def test_the_file_format_of_arrow_is_read_as_well(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["a", "b"]})
    path = tmp_path / "x.arrow"
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert prompts_of(path) == ["a", "b"] and count_rows(path) == 2
