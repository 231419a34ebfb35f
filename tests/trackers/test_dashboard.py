"""The Grafana dashboard against Grafana's own schema: what the schema does not know is lost on the way through it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana" / "asyncrl.json"

pytestmark = pytest.mark.skipif(not os.environ.get("REAL_TRACKERS"), reason="make test-trackers: with Grafana's schema")


def through_the_schema(board: dict[str, Any]) -> dict[str, Any]:
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    found: dict[str, Any] = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    return found


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """What is in one and not, or not the same, in the other; defaults that the other adds are none."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key, value in one.items():
            yield from differences(value, other.get(key), f"{path}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from differences(mine, theirs, f"{path}/{place}")
    elif one != other:
        yield path


def test_the_schema_knows_every_field() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert not list(differences(board, through_the_schema(json.loads(DASHBOARD.read_text()))))
    assert len(board["panels"]) > 20


def test_a_field_that_it_does_not_know_is_found() -> None:
    board = json.loads(DASHBOARD.read_text())
    board["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
    board["panels"][1]["targets"][0]["expression"] = "up"
    found = list(differences(board, through_the_schema(json.loads(json.dumps(board)))))
    assert found == ["/panels/1/fieldConfig/defaults/units", "/panels/1/targets/0/expression"]
