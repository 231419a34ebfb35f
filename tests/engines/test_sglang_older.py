"""The sglang engine on a server of before weight sessions: it answers 404 to their routes and counts no versions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import rig_sglang
from engine_lab import LIMIT, Bench, plain_logprobs, save_model

PROMPT = [3, 4, 5, 6, 7]


@pytest.fixture(scope="module", params=["keep", "recompute"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = save_model(tmp_path_factory.mktemp("older"))
    made = Bench(rig_sglang.make_stand_in(folder, request.param, "--older"))
    try:
        made.run(made.engine.start(), limit_s=60)
        yield made
    finally:
        made.close()


def test_every_version_comes_in_without_a_session(bench: Bench) -> None:
    for seed in (1, 2, 1):
        version = bench.push(seed)
        item = bench.ask(PROMPT)[0]
        assert item.runs == ((version, len(item.token_ids)),)
        assert np.abs(plain_logprobs(seed, PROMPT, item.token_ids) - item.logprobs).max() < LIMIT
    assert not bench.engine._server.sessions  # type: ignore[attr-defined]
