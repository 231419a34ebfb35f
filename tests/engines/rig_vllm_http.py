"""The rig of the engine vllm_http: a real server of vLLM for each engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_lab import MAX_NEW, MAX_PROMPT, SLOTS, config_of
from vllm_served import Server

from asyncrl.engine import Engine
from asyncrl.plugins import find


def make(folder: Path, kv: str) -> Engine:
    """An engine with its server; closing it ends both."""
    server = Server(folder, longest=MAX_PROMPT + MAX_NEW, slots=SLOTS, slow=True)
    server.wait()
    lines = f'url = ["{server.url}"]'
    engine: Any = find("asyncrl.engines", "vllm_http")(config_of(folder, engine="vllm_http", kv=kv, more=lines))
    engine.server = server
    close = engine.close

    async def close_both(*, grace_s: float) -> None:
        await close(grace_s=grace_s)
        server.kill()

    engine.close = close_both
    return engine  # type: ignore[no-any-return]


def break_it(engine: Any) -> None:
    """Kill the server."""
    engine.server.kill()
