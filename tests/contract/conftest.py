"""Buffer services of a test, stopped at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from buffer_lab import TOML, Make, Service, need_redis

from asyncrl.config import parse


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Service] = []

    def build(store: str = "sqlite", buffer: str = "", **changes: str) -> Service:
        if store == "redis":
            need_redis()
        overrides = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
        config = parse(TOML.format(dir=tmp_path / "run", store=store, buffer=buffer), overrides=overrides)
        made.append(Service(config))
        return made[-1]

    yield build
    for service in made:
        if service.process is not None and service.process.poll() is None:
            service.stop()
