"""The backend megatron on two ranks, split by matrices and by layers, against fsdp2 on two ranks and against files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import backend_contract as contract
import msgspec
import numpy as np
import pytest
import ranks
import torch
import warm

from weightsync.encoding.quantised import SUFFIX, is_matrix, quantise

pytest.importorskip("megatron.core")

#: The first one waits for the launch of all jobs on two ranks.
pytestmark = pytest.mark.timeout(1200)
every_layout = pytest.mark.parametrize("layout", ["tensor", "pipeline"])
every_family = pytest.mark.parametrize("family", ["qwen2", "llama", "gemma"])


cases = contract  # what the fixture `one` runs


@pytest.fixture(scope="module")
def found(results_of: Any) -> Any:
    return results_of(2, "megatron_cases")[0]


def compare(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for left, right in zip(got["metrics"], wanted["metrics"], strict=True):
        assert left.keys() == right.keys()
        for name in ("loss", "grad_norm", "entropy", "kl_behaviour", "ess", "ratio_max"):
            assert left[name] == pytest.approx(right[name], rel=1e-5, abs=1e-5), name
    assert set(got["names"]) == set(wanted["names"])
    for name, values in wanted["weights"].items():
        np.testing.assert_allclose(got["weights"][name], values, atol=1e-5, rtol=0, err_msg=name)


@every_layout
@pytest.mark.parametrize("name", ["padded", "checkpointing", "warm"])
def test_settings_give_what_they_give_with_fsdp2(found: Any, layout: str, name: str) -> None:
    compare(found["cases"][name][layout], found["cases"][name]["fsdp2"])


def test_settings_that_should_change_the_result_do(found: Any) -> None:
    cases = found["cases"]
    assert cases["warm"]["tensor"]["digest"] != cases["padded"]["tensor"]["digest"]


@every_layout
@every_family
def test_other_families_train_as_with_fsdp2(found: Any, layout: str, family: str) -> None:
    compare(found["families"][family][layout], found["families"][family]["fsdp2"])


@every_layout
@every_family
def test_weights_come_in_and_go_out_bit_by_bit(found: Any, layout: str, family: str) -> None:
    from safetensors.torch import load_file

    result = found["families"][family]
    files = load_file(Path(result["folder"]) / "model.safetensors")
    assert set(result[layout]["names"]) == set(files)
    assert ("lm_head.weight" in files) is (family == "qwen2")
    assert any(name.endswith("q_proj.bias") for name in files) is (family == "qwen2")
    for name, tensor in files.items():
        assert torch.tensor(result[layout]["start"][name]).equal(tensor.flatten()), name
        narrow = torch.frombuffer(bytearray.fromhex(result[layout]["narrow"][name]), dtype=torch.bfloat16)
        assert narrow.equal(tensor.flatten().bfloat16()), name


@every_layout
@every_family
def test_matrices_leave_as_codes_of_the_whole_rows(found: Any, layout: str, family: str) -> None:
    from safetensors.torch import load_file

    result = found["families"][family]
    files = load_file(Path(result["folder"]) / "model.safetensors")
    sent = {name: bytes.fromhex(data) for name, data in result[layout]["codes"].items()}
    matrices = [name for name, tensor in files.items() if is_matrix(name, tuple(tensor.shape))]
    assert len(matrices) % 7 == 0 < len(matrices) and set(sent) == {*files, *(name + SUFFIX for name in matrices)}
    for name in matrices:
        codes, scale = quantise(files[name].bfloat16(), "fp8")
        assert sent[name] == codes.view(torch.uint8).numpy().tobytes(), name
        assert sent[name + SUFFIX] == scale.numpy().tobytes(), name


def test_weights_leave_in_the_order_of_fsdp2(found: Any) -> None:
    for family in found["families"].values():
        assert family["tensor"]["names"] == family["pipeline"]["names"] == family["fsdp2"]["names"]


def test_nothing_that_stands_in_for_cuda_is_left_behind(found: Any) -> None:
    assert found["names"] == []


def test_wrong_packing_is_refused_at_the_start(found: Any) -> None:
    assert found["packing"] == "learner.packing"


def test_a_checkpoint_of_two_ranks_continues_on_one(results_of: Any, one: Any, model: Path, tmp_path: Path) -> None:
    """In a process of its own: this one trains with fsdp2."""
    script, checkpoint = Path(contract.__file__).with_name("megatron_cases.py"), results_of(2, "megatron_tensor")[1]
    done = warm.run(
        [sys.executable, str(script), str(model), str(checkpoint / "checkpoint"), str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        timeout=240,
        env=ranks.environment(),
    )
    assert (tmp_path / "found.json").exists(), done.stderr[-4000:]
    got = msgspec.json.decode((tmp_path / "found.json").read_bytes())
    plain = one[0]["plain"]  # the same three steps without a pause
    compare(got, {"metrics": plain["metrics"][2:], "weights": plain["weights"], "names": plain["names"]})


def test_a_missing_folder_is_refused(found: Any) -> None:
    assert found["refused"].startswith("config.model: ")
