"""Rigs of the vllm_http engine on stand-in servers: weights from staged files (`keep`), and through a process group
(`recompute`), as where the server is on another host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from engine_lab import SLOTS, config_of
from served import Served

from asyncrl.engine import Engine
from asyncrl.plugins import BUILT_IN, find

HERE = Path(__file__).parent


def why_not() -> str:
    """Empty where there is such an engine."""
    return "" if "vllm_http" in BUILT_IN["asyncrl.engines"] else "there is no engine vllm_http"


def make(folder: Path, kv: str) -> Engine:
    """The engine on a stand-in, not started; closing it ends both."""
    command = [sys.executable, str(HERE / "standin_vllm.py"), "--model-path", str(folder), "--slots", str(SLOTS)]
    command += ["--no-files"] if kv == "recompute" else []
    served = Served(command, log=folder / "standin-vllm.log", environment={"OMP_NUM_THREADS": "1"})
    engine: Any = find("asyncrl.engines", "vllm_http")(
        config_of(folder, engine="vllm_http", kv=kv, more=f'url = ["{served.url}"]')
    )
    engine.served = served
    close = engine.close

    async def close_both(*, grace_s: float) -> None:
        try:
            await close(grace_s=grace_s)
        finally:
            served.end()

    engine.close = close_both
    return engine  # type: ignore[no-any-return]


def break_it(engine: Any) -> None:
    """The server dies."""
    engine.served.end()
