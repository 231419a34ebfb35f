"""Fixtures of the tests on several ranks; a test module says by `CASES` which case module it is about."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks

from learners.gang.gang import Gang


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a job of the long form are `chaos`."""
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if given.get("layout", given.get("job")) in ranks.LONG_JOBS:
            item.add_marker(pytest.mark.chaos)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Launches train the cases of the long form where a test asks for them."""
    here = Path(__file__).parent
    if any(item.path.parent == here and item.get_closest_marker("chaos") for item in session.items):
        os.environ[ranks.EVERY_CASE] = "1"


def _home(factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this test run have in common."""
    base = factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, one of experts below it; those of every worker have the same weights."""
    folder = ranks.make_model(tmp_path_factory.mktemp("model"))
    ranks.make_moe(folder / ranks.MOE)
    return folder


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    """Of a module, not of the session: other tests of this process join groups of their own."""
    with ranks.alone() as made:
        yield made


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of two ranks by case, and their folder: of one launch for all jobs."""
    return ranks.results_in(ranks.launched(_home(tmp_path_factory), model, 2), request.module.cases.__name__)


@pytest.fixture(scope="session")
def results_of(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of a job by case, and its folder, by the number of ranks and the job's name."""
    return lambda count, job: ranks.results_in(ranks.launched(_home(tmp_path_factory), model, count), job)


@pytest.fixture(scope="module")
def one(request: pytest.FixtureRequest, model: Path, gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same cases on one rank, and their folder."""
    out = tmp_path_factory.mktemp("one")
    return importlib.import_module(request.module.cases.__name__).run_all(model, gang, out), out
