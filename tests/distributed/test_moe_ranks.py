"""Mixtures of experts with the backend megatron against fsdp2 on one rank, that is transformers itself."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("megatron.core")

import moe_cases as cases
from ranks import chosen

#: The first one waits for the launch of all jobs of its number of ranks.
pytestmark = pytest.mark.timeout(1200)
RUNS = [(1, "alone")] + [(count, name) for count, names in cases.LAYOUTS.items() for name in names]
PAIRS = [(count, *pair) for count, names in cases.LAYOUTS.items() for pair in itertools.pairwise(names)]
LONG = [f"{family}-{name}" for count, name in RUNS for family in cases.LONG[count]]
every_family = pytest.mark.parametrize("family", cases.FAMILIES)


def every_run(test: Any) -> Any:
    """Of every family; a case of the long form is `chaos`."""
    runs = pytest.mark.parametrize("run", RUNS, ids=[name for _, name in RUNS])
    return pytest.mark.chaos_cases(*LONG)(runs(every_family(test)))


@pytest.fixture(scope="module")
def alone(one: Any) -> Any:
    return {family: {name: cases.as_told(found) for name, found in each.items()} for family, each in one[0].items()}


@pytest.fixture(scope="module")
def found(results_of: Any, alone: Any) -> Any:
    return lambda family, run: (
        alone[family]["alone"] if run[0] == 1 else results_of(run[0], "moe_cases")[0][family][run[1]]
    )


@every_run
def test_layouts_train_as_transformers(found: Any, alone: Any, family: str, run: tuple[int, str]) -> None:
    got, wanted = found(family, run), alone[family]["fsdp2"]
    for left, right in zip(got["metrics"], wanted["metrics"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "kl_behaviour", "ratio_max"):
            assert left[name] == pytest.approx(right[name], rel=1e-5, abs=1e-5), name
    for sample, values in wanted["logprobs"].items():
        np.testing.assert_allclose(got["logprobs"][sample], values, atol=1e-5, rtol=0)
    assert got["names"] == wanted["names"] and got["specs"] == wanted["specs"]
    for name, values in wanted["weights"].items():
        np.testing.assert_allclose(got["weights"][name], values, atol=1e-5, rtol=0, err_msg=name)


@every_run
def test_gradients_agree_by_parameter(found: Any, alone: Any, family: str, run: tuple[int, str]) -> None:
    """Checkpoints hold them by the names of transformers, experts stacked, in every layout and backend."""
    wanted = alone[family]["fsdp2"]
    theirs = cases.gradients(wanted, Path(wanted["folder"]))
    for name, mine in cases.gradients(found(family, run), Path(wanted["folder"])).items():
        torch.testing.assert_close(mine, theirs[name], atol=1e-6, rtol=1e-5, msg=name)
        assert float(theirs[name].abs().max()) > 0, name


@every_run
def test_weights_come_in_and_go_out_bit_by_bit(found: Any, alone: Any, family: str, run: tuple[int, str]) -> None:
    result = found(family, run)
    files = load_file(Path(result["folder"]) / "model.safetensors")
    kept = {name for name in files if not name.endswith("e_score_correction_bias")}
    assert set(result["names"]) == kept, "versions have the names of the folder"
    for name in kept:
        assert torch.tensor(result["start"][name]).equal(files[name].flatten()), name


@every_run
def test_transformers_loads_an_export(found: Any, family: str, run: tuple[int, str]) -> None:
    from transformers import AutoModelForCausalLM

    result = found(family, run)
    files = load_file(Path(result["out"]) / "export" / "model.safetensors")
    assert set(files) == set(load_file(Path(result["folder"]) / "model.safetensors"))
    for name, values in result["weights"].items():
        assert torch.tensor(values).equal(files[name].flatten()), name
    _, said = AutoModelForCausalLM.from_pretrained(Path(result["out"]) / "export", output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]


@every_family
def test_checkpoints_load_in_other_layouts(found: Any, alone: Any, family: str) -> None:
    """Each layout of a launch loads what the one before it has written after a step; one rank what fsdp2 has."""
    for count, before, after in ((1, "fsdp2", "alone"), *PAIRS):
        if not chosen([family], cases.LONG[count]):
            continue
        writer = alone[family][before] if count == 1 else found(family, (count, before))
        loaded = found(family, (count, after))["loaded"]
        assert loaded and loaded == writer["first"] != writer["weights"], (before, after)


def test_dense_models_train_with_split_rows(results_of: Any, model: Path, gang: Any, tmp_path: Path) -> None:
    got = results_of(2, "moe_cases")[0]["dense"]
    wanted = cases.trained(model, gang, "", tmp_path / "plain")
    for left, right in zip(got["metrics"], wanted["metrics"], strict=True):
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-5)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)
    for name, values in wanted["weights"].items():
        np.testing.assert_allclose(got["weights"][name], values, atol=1e-5, rtol=0, err_msg=name)
