"""Statistics of vLLM's scheduler, for `Engine.health`.

Guarantees:
1. numbers are of the last step; nothing waits and nothing is requested;
2. `busy_s` counts the time between two steps within `GAP_S` while samples were running.
"""

from __future__ import annotations

import time
from typing import Any

GAP_S = 2.0


class Stats:
    """The last values of the scheduler, and sums since the start."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.kv_used = 0.0
        self.preempted = 0
        self.busy_s = 0.0
        self._at = 0.0

    def take(self, scheduler: Any, iteration: Any) -> None:
        now = time.monotonic()
        if self.running and now - self._at < GAP_S:
            self.busy_s += now - self._at
        self._at = now
        if scheduler is not None:
            self.running = int(scheduler.num_running_reqs)
            self.waiting = int(scheduler.num_waiting_reqs)
            self.kv_used = float(scheduler.kv_cache_usage)
        if iteration is not None:
            self.preempted += int(getattr(iteration, "num_preempted_reqs", 0))

    def logger(self, _config: Any, _engine_index: int = 0) -> Any:
        """A stat logger of vLLM that feeds this (a factory, as vLLM requires)."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        stats = self

        class Logger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                stats.take(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                pass

        return Logger()
