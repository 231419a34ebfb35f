"""Layouts of large learners on paper: parameters of stages against the model classes, ranks, the tables of the docs."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import main
from asyncrl.planner.layouts import DEEPSEEK_V3, DEVICE_GB, GB, LARGE, USABLE, engine_table, fitting, table
from asyncrl.preflight.layouts import Layout, find_fullest, list_stages
from asyncrl.preflight.model_shape import model_shape

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/large-models.md"


def counted(model: dict[str, Any]) -> tuple[Counter[int], Counter[int], int]:
    """By layer: parameters without and of routed experts; then those of the embeddings and the head."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in model.items() if key != "model_type"}
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model["model_type"], **fields))
    dense: Counter[int] = Counter()
    experts: Counter[int] = Counter()
    rest = 0
    for name, parameter in made.named_parameters():
        found = re.search(r"layers\.(\d+)\.", name)
        if found is None:
            rest += parameter.numel()
        else:
            (experts if ".mlp.experts." in name else dense)[int(found[1])] += parameter.numel()
    return dense, experts, rest


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("pipeline", [1, 4, 8])
def test_stages_have_the_parameters_of_the_model_class(name: str, pipeline: int) -> None:
    model = LARGE[name][0]
    dense, experts, rest = counted(model)
    shape = model_shape(model)
    assert shape is not None
    stages = list_stages(shape, pipeline)
    assert sum(stage.layers for stage in stages) == len(dense) == shape.layers
    start = 0
    for number, stage in enumerate(stages):
        layers = range(start, start + stage.layers)
        start += stage.layers
        ends = rest * ((number == 0) + (number == pipeline - 1)) / 2
        assert stage.experts == sum(experts[layer] for layer in layers)
        assert stage.dense == pytest.approx(sum(dense[layer] for layer in layers) + ends, rel=1e-3)


def test_a_rank_holds_its_part_once() -> None:
    """Over all ranks: weights as often as there are copies, optimizer states just once."""
    shape = model_shape(DEEPSEEK_V3)
    assert shape is not None
    for layout in (Layout(256, 1, 16, 16), Layout(512, 8, 8, 8), Layout(64, 2, 1, 32), Layout(64, 8, 2, 1)):
        stages = list_stages(shape, layout.pipeline)
        ranks = layout.devices // layout.pipeline
        dense = sum(stage.dense for stage in stages) / layout.tensor * ranks / layout.copies
        experts = sum(stage.experts for stage in stages) / layout.expert_split * ranks / layout.expert_copies
        assert dense + experts == pytest.approx(shape.parameters, rel=1e-3)


def test_more_splitting_takes_less_memory_of_each_rank() -> None:
    shape = model_shape(LARGE["Qwen3-235B-A22B"][0])
    assert shape is not None
    totals = [find_fullest(shape, Layout(256, 1, 1, expert))[1].total for expert in (1, 4, 16, 64)]
    assert totals == sorted(totals, reverse=True)
    whole, split, expert = (find_fullest(shape, Layout(256, *by))[1] for by in ((1, 1, 1), (8, 1, 1), (8, 1, 8)))
    assert split.weights == pytest.approx(whole.weights / 8), "without expert places, tensor ranks split experts too"
    assert (split.weights, split.optimizer) == (expert.weights, expert.optimizer)


def test_layouts_that_are_listed_fit_and_divide() -> None:
    for model, _ in LARGE.values():
        shape = model_shape(model)
        assert shape is not None
        for devices in (64, 256):
            for layout, _, rank in fitting(shape, devices, device_bytes=DEVICE_GB * GB):
                assert rank.total <= USABLE * DEVICE_GB * GB
                assert devices % (layout.tensor * layout.pipeline) == devices % (layout.expert * layout.pipeline) == 0


def test_the_page_has_the_tables() -> None:
    text = PAGE.read_text()
    assert "\n".join(table()) in text and "\n".join(engine_table()) in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    toml = tmp_path / "large.toml"
    toml.write_text(
        f'model.path = "{tmp_path}"\ndata.path = "x.jsonl"\nreward = [{{function = "a:b"}}]\n'
        "learner.micro_batch_tokens = 8192\nproducers.engine = 'vllm'\n"
        "producers.engine_args = {tensor_parallel_size = 32}\n"
    )
    assert main(["plan", str(toml), "--layouts", "64,256"]) == 0
    out = capsys.readouterr().out
    assert "64 devices: none fits" in out and "256 devices: tensor 1, pipeline 16, expert 16: 66.9 GB" in out
    assert "an engine of 32 devices: 13,688,915 tokens of KV cache" in out
