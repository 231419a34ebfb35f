"""The life of vLLM's processes under a producer: their environment and their end.

Guarantees:
1. `prepare` sets variables before vLLM is imported and overrides none that the user set; with several producers on a
   host no two engines are bound to the same core;
2. `end` asks vLLM to shut down and kills the remaining processes after the grace.
A killed producer takes them along by `plugin`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from asyncrl.config import Config
from asyncrl.runtime.host_facts import descendants, is_alive
from producers.engines.vllm.plugin import PRODUCER

LOOK_S = 0.05
OWN_S = 1.0  # vLLM's processes seldom end by themselves


def prepare(config: Config) -> None:
    """Set the environment of this process and of vLLM's."""
    threads = str(config.producers.torch_threads)
    mine = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would bind every engine of a host to the same cores
        "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    for name, value in mine.items():
        os.environ.setdefault(name, value)
    os.environ[PRODUCER] = str(os.getpid())


def engine_processes() -> list[int]:
    """The engine processes that this one started, and their descendants."""
    started = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    return [pid for first in started for pid in (first, *descendants(first))]


def end(llm: Any, children: Sequence[int], *, grace_s: float) -> None:
    """Shut down; on a thread, blocks at most a little longer than the grace."""
    deadline = time.monotonic() + grace_s
    with suppress(Exception):  # it may be dead; its processes are killed below
        llm.shutdown(timeout=min(grace_s, OWN_S))
    while time.monotonic() < deadline and any(is_alive(pid) for pid in children):
        time.sleep(LOOK_S)
    for pid in children:
        with suppress(ProcessLookupError):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
