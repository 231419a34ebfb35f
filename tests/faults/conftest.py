"""Faults of real runs: the run folder, the tiny model and the commands are those of the end to end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_run import run, tiny_model
from learner_lab import Children, Recorded, make_model

__all__ = ["recorded", "run", "tiny_model"]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """Learners that start in a moment, and a store with all arrivals of a run; for the tests of the learner."""
    children = Children()
    yield Recorded(tmp_path_factory.mktemp("recorded"), make_model(tmp_path_factory.mktemp("tiny")), children)
    children.close()
