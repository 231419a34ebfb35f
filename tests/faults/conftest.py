"""Faults of real runs: the run folder, the tiny model and the commands are those of the end to end tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from learner_lab import Children, Recorded, make_model

_PLACE = Path(__file__).parents[1] / "e2e" / "conftest.py"
_spec = importlib.util.spec_from_file_location("e2e_run", _PLACE)
assert _spec is not None and _spec.loader is not None
e2e_run = sys.modules.setdefault("e2e_run", importlib.util.module_from_spec(_spec))  # `from e2e_run import alive`
_spec.loader.exec_module(e2e_run)

tiny_model = e2e_run.tiny_model
run = e2e_run.run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """Learners that start in a moment, and a store with all arrivals of a run; for the tests of the learner."""
    children = Children()
    yield Recorded(tmp_path_factory.mktemp("recorded"), make_model(tmp_path_factory.mktemp("tiny")), children)
    children.close()
