"""One prompt, one answer: the environment of most verifiable tasks.

Called by `producers.rollout`. Guarantees: the engine's samples pass through unchanged and unscored (reward workers
score them). An environment with tools would call the engine again with a longer prompt and mask what it inserted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from asyncrl.engine import Engine, GenRequest
from producers.rollout import Finished


class SingleTurn:
    """Generate, and that is all."""

    async def play(self, engine: Engine, request: GenRequest, row: Mapping[str, Any]) -> AsyncIterator[Finished]:
        """The samples of the request, each as it finishes."""
        async for sample in engine.generate(request):
            yield Finished(sample)
