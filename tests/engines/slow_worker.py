"""A worker of vLLM whose steps take a while, as those of a model of some size do: on a busy machine the tiny model of
the tests would have decoded everything before its first token was seen here."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from producers.engines.vllm.weight_transfer import HeldWeights

STEP_S = 0.01
_execute = Worker.execute_model


def _slowly(self: Any, *args: Any, **kwargs: Any) -> Any:
    time.sleep(STEP_S)
    return _execute(self, *args, **kwargs)


Worker.execute_model = _slowly


class SlowHeldWeights(HeldWeights):
    """`HeldWeights` under a name whose import slows the worker down."""
