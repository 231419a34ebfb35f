"""Preference losses and their gradients are those of TRL's own code: stored numbers, and new ones where TRL is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config import PreferenceConfig
from learners.algorithms.preference import kto, sppo, sppo_targets
from learners.step.supervised import pair_loss

HERE = Path(__file__).parent
STORED = json.loads((HERE / "trl_cases.json").read_text())["cases"]
OWN = HERE.parents[1] / ".venv-trl" / "bin" / "python"
PYTHON = str(OWN) if OWN.exists() else sys.executable if importlib.util.find_spec("trl") else ""
LIMIT = 1e-6


def pairs(case: dict[str, Any], policy: torch.Tensor) -> torch.Tensor:
    """Our loss, the mean over the pairs; chosen answers stand in the first half."""
    reference, lengths = (torch.tensor(case["inputs"][name]) for name in ("reference", "lengths"))
    if case["settings"].get("loss") == "sppo_hard":  # the winner wins with certainty, a pair has the sum of two rows
        rows = len(policy)
        targets = sppo_targets((torch.arange(rows) < rows // 2).double())
        mask, places = torch.ones(rows, dtype=torch.bool), torch.arange(rows)
        return sppo(policy, reference, mask, places, targets, eta=1 / 0.1).sum() / (rows // 2)
    return pair_loss(
        PreferenceConfig(**case["settings"]), policy.chunk(2), reference.chunk(2), lengths.chunk(2)
    ).loss.mean()


def rows(case: dict[str, Any], policy: torch.Tensor) -> torch.Tensor:
    given = {name: torch.tensor(value) for name, value in case["inputs"].items()}
    kl = (given["kl_policy"] - given["kl_reference"]).mean()
    assert float(kl.clamp(min=0)) == pytest.approx(case["expected"]["kl"], abs=LIMIT)
    assert (float(kl) < 0) == case["name"].startswith("kto_clamped")
    return kto(policy, given["reference"], given["labels"], kl, **case["settings"]).loss.mean()


def compare(case: dict[str, Any]) -> None:
    policy = torch.tensor(case["inputs"]["policy"], requires_grad=True)
    loss = rows(case, policy) if case["name"].startswith("kto") else pairs(case, policy)
    (gradient,) = torch.autograd.grad(loss, policy)
    wanted = case["expected"]
    torch.testing.assert_close(float(loss.detach()), wanted["loss"], rtol=LIMIT, atol=LIMIT)
    torch.testing.assert_close(gradient, torch.tensor(wanted["gradient"]), rtol=LIMIT, atol=LIMIT)


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("case", STORED, ids=[case["name"] for case in STORED])
def test_stored_numbers_of_trl(case: dict[str, Any]) -> None:
    compare(case)


@pytest.mark.skipif(not PYTHON, reason="no TRL here: make trl")
def test_new_batches_by_trl_itself() -> None:
    done = subprocess.run(
        [PYTHON, str(HERE / "trl_cases.py"), "1", "2", "3"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["cases"]
    assert {case["name"].split("-")[0] for case in found} == {case["name"].split("-")[0] for case in STORED}
    for case in found:
        compare(case)
