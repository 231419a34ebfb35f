"""The engines that the contract suite runs on. A rig says why it cannot run here, makes an engine, and breaks it."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import rig_sglang
import rig_vllm_http
import rig_vllm_standin
from engine_lab import config_of

from asyncrl.engine import Engine
from asyncrl.plugins import find


class Rig(NamedTuple):
    """`make` gives an engine for a model folder and a K/V policy, not started. `break_it` makes its next step fail."""

    name: str
    make: Callable[[Path, str], Engine]
    break_it: Callable[[Any], None]
    why_not: Callable[[], str] = lambda: ""  # empty: it runs here
    start_s: float = 60.0
    kv: tuple[str, ...] = ("keep", "recompute")


def _hf(folder: Path, kv: str) -> Engine:
    engine: Engine = find("asyncrl.engines", "hf")(config_of(folder, engine="hf", kv=kv))
    return engine


def _hf_caches(folder: Path, kv: str) -> Engine:
    """The hf engine as it decodes models that do not fit its slots."""
    engine: Any = _hf(folder, kv)
    engine.tried = ("caches",)
    made: Engine = engine
    return made


def _spoil_forward(engine: Any) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("spoiled")

    engine._decoder.memory.model.forward = fail


def lacks(package: str, target: str) -> Callable[[], str]:
    """Why an engine of an environment of its own does not run in this one."""

    def why_not() -> str:
        found = importlib.util.find_spec(package) is not None
        return "" if found else f"{package} is not in this environment: make {target}"

    return why_not


def _vllm(folder: Path, kv: str) -> Engine:
    engine: Engine = find("asyncrl.engines", "vllm")(config_of(folder, engine="vllm", kv=kv))
    return engine


def _kill_children(engine: Any) -> None:
    for pid in engine._children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


RIGS = (
    Rig("hf", _hf, _spoil_forward),
    Rig("hf-caches", _hf_caches, _spoil_forward),
    Rig("vllm", _vllm, _kill_children, lacks("vllm", "vllm"), start_s=240),
    Rig("vllm_http_standin", rig_vllm_standin.make, rig_vllm_standin.break_it, rig_vllm_standin.why_not, 240),
    Rig("sglang_standin", rig_sglang.make_stand_in, rig_sglang.break_it),
    Rig("sglang", rig_sglang.make, rig_sglang.break_it, rig_sglang.why_not, rig_sglang.START_S),
    Rig("vllm_http", rig_vllm_http.make, rig_vllm_http.break_it, lacks("vllm", "vllm"), start_s=240),
)
