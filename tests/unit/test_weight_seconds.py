"""Seconds of weights computed from bytes: counts of well-known models, the table of the docs, goals of the design."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.planner.weight_seconds import LINKS, MODELS, PORTS, sync_seconds, table, weight_bytes

PAGE = Path(__file__).parents[2] / "docs/weightsync.md"
#: Billions of parameters, as their model cards tell them.
PARAMETERS = {
    "Qwen2.5-7B": 7.61,
    "Qwen2.5-32B": 32.5,
    "Llama-3.3-70B": 70.6,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.0,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_parameters_of_their_cards(name: str) -> None:
    assert weight_bytes(MODELS[name][0], "bfloat16") / 2e9 == pytest.approx(PARAMETERS[name], rel=0.01)


def test_each_stage_has_the_speed_of_its_narrowest_link() -> None:
    one = sync_seconds(90_000_000_000, workers=1)
    assert one == (90 / 50, 90 / 50, 90 / 45)
    many = sync_seconds(90_000_000_000, workers=8, copying=8, senders=8)
    assert many == (90 / 200, 90 / 200, 90 / 300), "host memory, and the links between the devices, are the limit"
    slow = LINKS._replace(network=1e9)
    assert sync_seconds(90_000_000_000, workers=1, links=slow).direct == 90.0
    assert (
        weight_bytes({"model_type": "unheard of"}, "bfloat16") == weight_bytes({"model_type": "unheard of"}, "fp8") == 0
    )
    model = MODELS["Qwen2.5-7B"][0]
    assert weight_bytes(model, "int8") == weight_bytes(model, "float32") // 4, "sent in 8 bits"


@pytest.mark.parametrize(("name", "senders", "limit_s"), [("Qwen3-30B-A3B", 1, 4.0), ("Qwen3-235B-A22B", PORTS, 6.0)])
def test_the_design_reaches_its_goals_on_paper(name: str, senders: int, limit_s: float) -> None:
    model, workers = MODELS[name]
    assert sync_seconds(weight_bytes(model, "bfloat16"), workers=workers, senders=senders).direct <= limit_s


def test_the_page_has_the_table() -> None:
    assert "\n".join(table()) in PAGE.read_text()
