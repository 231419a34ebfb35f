"""The engine `hf` takes versions by transport `direct`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from direct_lab import Learner, makes_nothing_of_a_part, takes_versions
from engine_lab import Bench, config_of, save_model

from asyncrl.plugins import find


@pytest.fixture(scope="module")
def learner() -> Iterator[Learner]:
    made = Learner()
    yield made
    made.outbox.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = save_model(tmp_path_factory.mktemp("direct-model"))
    more = "[weightsync]\ntransport = 'direct'\nin_place = true"
    made = Bench(find("asyncrl.engines", "hf")(config_of(folder, engine="hf", kv="keep", more=more)))
    try:
        made.run(made.engine.start())
        yield made
    finally:
        made.close()


def test_versions_come_from_device_to_device(bench: Bench, learner: Learner) -> None:
    takes_versions(bench, learner)
    assert learner.outbox.formed == 1


@pytest.mark.parametrize("how", ["wrong", "until"])
def test_no_token_is_made_of_a_version_that_did_not_come_whole(bench: Bench, learner: Learner, how: str) -> None:
    makes_nothing_of_a_part(bench, learner, how)
