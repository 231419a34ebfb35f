"""Every case of a file of worked numbers: ours give its outputs in float64 and float32, and again with NaN outside the
mask. `--cases FILE` names another file; the run exits 0 only if FILE has cases and every one of them passed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_inputs import Inputs
from reference_table import FUNCTIONS
from torch import Tensor

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
NAMES = {torch.float64: "float64", torch.float32: "float32"}
DEFAULT = Path(__file__).parent / "algorithm_cases.json"


def cases_of(config: pytest.Config) -> list[dict[str, Any]]:
    """The cases of the run's file."""
    path = Path(config.getoption("--cases") or DEFAULT)
    found: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = cases_of(metafunc.config)
        metafunc.parametrize("case", cases, ids=[case["name"] for case in cases])


def plain(value: Any) -> Any:
    """Tensors, and lists of them, as nested lists of numbers."""
    if isinstance(value, Tensor):
        return value.detach().double().tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def compare(got: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> None:
    """Every expected output is there and equal."""
    missing = sorted(set(expected) - set(got))
    assert not missing, f"the row gives no {', '.join(missing)}"
    for name, wanted in expected.items():
        want = np.asarray(wanted, dtype=np.float64)
        have = np.asarray(plain(got[name]), dtype=np.float64)
        assert have.size == want.size, f"{name}: {have.size} numbers instead of {want.size}"
        np.testing.assert_allclose(have.reshape(want.shape), want, rtol=tolerance, atol=tolerance, err_msg=name)


def tolerance_of(case: Mapping[str, Any], dtype: torch.dtype) -> float:
    """That of the type, or the case's own: a number for all, or one by type."""
    own = case.get("tolerance")
    if isinstance(own, Mapping):
        own = own.get(NAMES[dtype])
    elif own is not None and dtype == torch.float32:
        own = max(own, TOLERANCES[dtype])
    return TOLERANCES[dtype] if own is None else float(own)


@pytest.mark.parametrize("poison", [False, True], ids=["plain", "poisoned"])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=NAMES.get)
def test_case(case: dict[str, Any], dtype: torch.dtype, poison: bool) -> None:
    if case["function"] not in FUNCTIONS:
        pytest.fail(f"no row for {case['function']!r} in reference_table.py", pytrace=False)
    inputs = Inputs(case["inputs"], dtype=dtype, poison=poison)
    got = FUNCTIONS[case["function"]](case["params"], inputs)
    compare(got, case["expected"], tolerance_of(case, dtype))


def test_the_file_holds_cases_that_expect_something(pytestconfig: pytest.Config) -> None:
    cases = cases_of(pytestconfig)
    assert cases
    assert all(case["expected"] for case in cases)


def test_a_wrong_or_missing_output_is_seen() -> None:
    compare({"out": torch.tensor([1.0, 2.0]), "more": 3}, {"out": [1.0, 2.0]}, 1e-6)
    for got in ({}, {"out": [1.0]}, {"out": [1.0, 2.1]}, {"out": [1.0, float("nan")]}):
        with pytest.raises(AssertionError):
            compare(got, {"out": [1.0, 2.0]}, 1e-6)


def test_poison_reaches_masked_places_alone() -> None:
    inputs = Inputs({"x": [[1.0, 2.0]], "rows": [3.0], "mask": [[1, 0]]}, poison=True)
    assert inputs.real("x").isnan().tolist() == [[False, True]]
    assert inputs.real("rows").tolist() == [3.0]
