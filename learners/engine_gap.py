"""Compares the engine's log-probs with the learner's for tokens that both computed with the same weights (lag 0).

Guarantee: a run whose engine is far off in the first step, as with weights that it ignored or another distribution,
stops before that step is committed (`learner.engine_gap = "warn"` lets it train); smaller differences are said once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl.config import Config
from asyncrl.config.mode import streams
from asyncrl.engine import GAP_LIMIT
from asyncrl.errors import ConfigError

FAR_OFF = 10.0  # times the differences that rounding explains


class EngineGap:
    """`say` prints a warning; None on ranks that do not."""

    def __init__(self, config: Config, *, say: Callable[[str], None] | None) -> None:
        self._stops = config.learner.engine_gap == "stop"
        self._dtypes = sorted({config.model.dtype, config.producers.dtype, config.weightsync.quantised} - {"auto", ""})
        self._limit = max(GAP_LIMIT[name] for name in self._dtypes)
        self._say = say
        self._looks = not streams(config)

    def look(self, metrics: Mapping[str, float], step: int) -> None:
        """Look at the metrics of a step, which are the same on all ranks.

        Raises:
            ConfigError: `config.conflict`: the gap of the first step is `FAR_OFF` times too large.
        """
        gap = metrics.get("lag/0/logprob_gap_mean", 0.0)
        if not self._looks or gap <= self._limit:
            return
        what = f"engine and learner differ by {gap:.2g} nats per token under the same weights"
        if self._stops and step == 1 and gap > FAR_OFF * self._limit:
            remedy = 'see docs/engines.md, When engine and learner differ; or set learner.engine_gap = "warn"'
            raise ConfigError("config.conflict", what, where="producers.engine", remedy=remedy)
        if self._say is not None:
            names = " and ".join(self._dtypes)
            self._say(f"WARNING: {what} (at most {self._limit:g} is expected of {names}): see docs/engines.md")
            self._say = None
