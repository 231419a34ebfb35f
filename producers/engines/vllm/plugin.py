"""Runs in every process of vLLM: registers the weight transfer backend `asyncrl`, and ties the process to the producer.

Guarantees:
1. the backend is registered only by name: nothing of it is imported unless `WeightTransferConfig` uses it, so another
   vLLM in the same environment is not changed;
2. a child process of a producer (its pid in `PRODUCER`) gets SIGKILL when its parent dies (Linux), so that a killed
   producer leaves no engine behind; one with a dead parent ends at once.
"""

from __future__ import annotations

import multiprocessing
import os

from asyncrl.launcher.parent_guard import tie_to_parent

BACKEND = "asyncrl"
PRODUCER = "ASYNCRL_VLLM_PRODUCER"  # environment variable: pid of the producer that starts the engine


def register() -> None:
    """Register the backend and tie the process. Idempotent."""
    _tie()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "producers.engines.vllm.weight_transfer", "StagedWeightTransfer"
        )
    except ValueError:  # it is registered
        return


def _tie() -> None:
    producer = os.environ.get(PRODUCER, "")
    parent = multiprocessing.parent_process()
    if not producer or producer == str(os.getpid()) or parent is None or parent.pid is None:
        return
    if not tie_to_parent(parent.pid):
        os._exit(1)
