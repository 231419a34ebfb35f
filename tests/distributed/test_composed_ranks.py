"""Layouts of fsdp2 that split in several ways on two and four ranks: steps, versions and checkpoints of one process."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import composed_cases as cases
import long_row
import msgspec
import numpy as np
import pytest
import ranks

from learners.gang.gang import Gang

#: The first one waits for the launch of all jobs of its number of ranks.
pytestmark = pytest.mark.timeout(1200)
TOLD = ("loss", "grad_norm", "entropy", "kl_behaviour", "kl_reference", "ratio_max", "value_loss", "critic_grad_norm")
RUNS = [(count, name) for count, each in cases.CASES.items() for name in each]


def every_case(test: Any) -> Any:
    """Those of the long form are `chaos`."""
    parts = pytest.mark.parametrize(("count", "name"), RUNS, ids=[f"{count}-{name}" for count, name in RUNS])
    return pytest.mark.chaos_cases(*(name.replace(" ", "-") for name in cases.LONG))(parts(test))


@pytest.fixture
def pair(results_of: Any, count: int, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A case, and one process."""
    got = results_of(count, "composed_cases")[0][name]
    return got, results_of(1, "composed_cases")[0][cases.CASES[count][name].model]


def near(got: dict[str, Any], wanted: dict[str, Any], limit: float = 1e-5) -> None:
    assert got.keys() == wanted.keys()
    for kind, tensors in wanted.items():
        assert got[kind].keys() == tensors.keys()
        for name, values in tensors.items():
            np.testing.assert_allclose(got[kind][name], values, atol=limit, rtol=0, err_msg=f"{kind} {name}")


def near_metrics(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in TOLD:
        assert got[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), name


@every_case
def test_steps_equal_one_process(pair: Any) -> None:
    got, wanted = pair
    for what, numbers in wanted["forward"].items():
        assert numbers.keys() == got["forward"][what].keys()
        for sample, values in numbers.items():
            np.testing.assert_allclose(got["forward"][what][sample], values, atol=2e-6, rtol=0, err_msg=what)
    for left, right in zip(got["metrics"], wanted["metrics"], strict=True):
        near_metrics(left, right)
    near(got["saved"], wanted["saved"])
    near(got["weights"], wanted["weights"])
    assert got["saved"] != got["weights"]


@every_case
def test_a_checkpoint_of_one_process_continues(pair: Any) -> None:
    got, wanted = pair
    assert got["back"]["loaded"] == wanted["saved"]
    near_metrics(got["back"]["metrics"], wanted["metrics"][cases.SAVED])
    near(got["back"]["weights"], wanted["weights"])


@every_case
def test_its_checkpoint_continues_in_one_process(pair: Any, model: Path, gang: Gang, count: int, name: str) -> None:
    got, wanted = pair
    backend, trial = cases.open_run(model / cases.CASES[count][name].model, gang, "")
    found = cases.continued(backend, trial, gang, Path(got["folder"]))
    assert found["loaded"] == got["saved"]
    near_metrics(found["metrics"], wanted["metrics"][cases.SAVED])
    near(found["weights"], wanted["weights"])


@pytest.mark.chaos
@pytest.mark.timeout(5400)
def test_memory_of_a_long_row_falls_with_the_ranks(model: Path, tmp_path: Path, figure: Any) -> None:
    """64k tokens in one sample, one head of K/V: resident memory of a step, log-probs and the gradient."""
    found = {}
    for count in (1, 2, 4):
        command = ranks.torchrun(count, long_row.__file__, str(model), str(tmp_path), "65536")
        # Freed memory leaves the process, so that what is resident is in use.
        environment = ranks.environment() | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(command, env=environment, timeout=1800, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found[count] = msgspec.json.decode((tmp_path / f"ranks_{count}.json").read_bytes())
        figure(f"{count} ranks: {[size >> 20 for size in found[count]['rose']]} MiB")
    wanted = found[1]
    for count in (2, 4):
        assert max(found[count]["rose"]) < 1.25 * wanted["rose"][0] / count
        np.testing.assert_allclose(found[count]["logprobs"], wanted["logprobs"], atol=1e-5, rtol=0)
        assert found[count]["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
