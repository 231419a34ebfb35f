"""Which files of a model's folder count, and which of its tensors a version needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.errors import AsyncRLError
from asyncrl.wire import Tensor
from producers.engines.model_files import check_tensors, read_facts, weight_files

NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")


def write(folder: Path, file: str, names: tuple[str, ...]) -> None:
    save_file({name: torch.zeros(2, 3) for name in names}, folder / file)


def sent(*names: str) -> list[Tensor]:
    return [Tensor(name, "F32", (2, 3), 0, 0, 24) for name in names]


def test_files_beside_those_of_the_index_do_not_count(tmp_path: Path) -> None:
    """Folders of some models have the same weights again, by other names."""
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1}')
    write(tmp_path, "consolidated.safetensors", ("norm.weight",))
    assert [path.name for path in weight_files(tmp_path)] == ["consolidated.safetensors"]
    write(tmp_path, "model.safetensors", NAMES)
    assert {*read_facts(tmp_path).shapes} == {*NAMES}
    (tmp_path / "model.safetensors").unlink()
    for number, name in enumerate(NAMES):
        write(tmp_path, f"model-{number}.safetensors", (name,))
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(NAMES)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    facts = read_facts(tmp_path)
    assert {*facts.shapes} == {*NAMES}
    check_tensors(facts, sent(*NAMES))
    with pytest.raises(AsyncRLError, match="lacks 1 parameters"):
        check_tensors(facts, sent(*NAMES[1:]))
    write(tmp_path, "model.safetensors", NAMES[:1])  # the index is of an earlier state of the folder
    assert {*read_facts(tmp_path).shapes} == {*NAMES[:1]}


@pytest.mark.parametrize("name", ["model.layers.1.eh_proj.weight", "mtp.fc.weight", "model.rotary_emb.inv_freq"])
def test_tensors_that_no_learner_has_are_not_asked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1}')
    write(tmp_path, "model.safetensors", (*NAMES, name))
    check_tensors(read_facts(tmp_path), sent(*NAMES))
