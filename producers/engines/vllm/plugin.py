"""What asyncrl adds to every process of vLLM: the weight transfer backend `asyncrl`, and an end with the producer.

Guarantees:
1. the backend is registered by name alone: nothing of it is imported unless `WeightTransferConfig` asks for it, so a
   vLLM that is not ours is left as it was;
2. a child process of a producer (its pid in `PRODUCER`) gets SIGKILL when its parent dies (Linux), so that a producer
   that was killed leaves no engine behind; one whose parent is dead already ends here.
"""

from __future__ import annotations

import multiprocessing
import os

from asyncrl.launcher.parent_guard import tie_to_parent

BACKEND = "asyncrl"
PRODUCER = "ASYNCRL_VLLM_PRODUCER"  # environment variable: pid of the producer that starts the engine


def register() -> None:
    """See the module; may be called again."""
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
