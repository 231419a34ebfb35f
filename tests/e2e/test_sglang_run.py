"""A short run on the sglang engine, its server given by URL: it learns from in-flight updates, the audit is clean.

On the stand-in everywhere; on the real SGLang where there is an environment for it (`make sglang`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from exact_run import SETTINGS, assert_exact

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import rig_sglang
from served import Served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(params=["standin", "real"])
def server(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Served]:
    if request.param == "real" and (why := rig_sglang.why_not()):
        pytest.skip(why)
    served = rig_sglang.stand_in(tiny_model) if request.param == "standin" else rig_sglang.serve(tiny_model)
    yield served
    served.end()


def test_a_run_on_sglang_is_exact(run: Any, server: Served, figure: Callable[[str], None]) -> None:
    done = run.launch(
        "producers.engine=sglang",
        f'producers.url=["{server.url}"]',
        "weightsync.timeout_s=60",
        "run.hang_timeout_s=600",
        "producers.kv_at_swap=recompute",
        *SETTINGS,
        timeout=800,
    )
    found = assert_exact(run, done)
    name = "stand-in" if server.log.name.startswith("standin") else "SGLang"
    apart = f"{found.mean:.1g} (mean), {found.largest:.1g}"
    figure(f"{name}: {found.versions} versions; engine and learner at lag 0 differ by {apart}")
