"""Rigs of the sglang engine: on a stand-in server, everywhere; on the real one on a CPU, in an environment of its own
(`make sglang`).

`ASYNCRL_SGLANG_PYTHON` names another interpreter with SGLang.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from engine_lab import config_of
from served import Served

from asyncrl.engine import Engine
from producers.engines.sglang.engine import SGLangEngine

HERE = Path(__file__).parent
START_S = 600.0  # a busy machine with two cores needs five minutes
#: float32 on a CPU; overlap off, since versions are exact without alone.
ARGUMENTS = ("--host", "127.0.0.1", "--dtype", "float32", "--disable-overlap-schedule", "--max-total-tokens", "8192")


def python() -> Path:
    """The interpreter of the environment that has SGLang."""
    return Path(os.environ.get("ASYNCRL_SGLANG_PYTHON", HERE.parents[1] / ".venv-sglang/bin/python"))


def why_not() -> str:
    """Empty where SGLang can be started here."""
    return "" if python().exists() else f"{python()} is not there: make sglang"


def serve(folder: Path, *more: str) -> Served:
    """The real server with this model."""
    command = [str(python()), str(HERE / "sglang_cpu/serve.py"), "--model-path", str(folder), *ARGUMENTS, *more]
    return Served(command, log=folder / "sglang.log", environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": ""})


def stand_in(folder: Path, *more: str) -> Served:
    """The stand-in server with this model."""
    command = [sys.executable, str(HERE / "standin_sglang.py"), "--model-path", str(folder), *more]
    return Served(command, log=folder / "standin-sglang.log", environment={"OMP_NUM_THREADS": "1"})


class ServedBase(SGLangEngine):
    """The engine with a server of its own."""

    def __init__(self, served: Served, config: Any) -> None:
        super().__init__(config)
        self.served = served

    async def close(self, *, grace_s: float) -> None:
        """Also end the server."""
        try:
            await super().close(grace_s=grace_s)
        finally:
            self.served.end()


def make(folder: Path, kv: str) -> Engine:
    """The engine on a real server, not started."""
    served = serve(folder, "--enable-deterministic-inference")
    return ServedBase(served, config_of(folder, engine="sglang", kv=kv, more=f'url = ["{served.url}"]'))


def make_stand_in(folder: Path, kv: str, *more: str) -> Engine:
    """The engine on a stand-in, not started; `more`: words for the stand-in."""
    served = stand_in(folder, *more)
    return ServedBase(served, config_of(folder, engine="sglang", kv=kv, more=f'url = ["{served.url}"]'))


def break_it(engine: Any) -> None:
    """The server dies."""
    engine.served.end()
