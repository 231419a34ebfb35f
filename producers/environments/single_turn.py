"""One prompt, one answer: the environment of most verifiable tasks.

Guarantees: the engine's samples pass through unchanged and unscored (reward workers score them).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from asyncrl.engine import Engine, GenDelta, GenRequest, join_deltas
from producers.rollout.rollout import Finished


class SingleTurn:
    tools: Sequence[Mapping[str, Any]] = ()
    counts = None

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def play(
        self, engine: Engine, request: GenRequest, row: Mapping[str, Any]
    ) -> AsyncIterator[Finished | GenDelta]:
        """The samples of the request, each as it finishes, and the deltas before."""
        parts: dict[int, list[GenDelta]] = {}
        async for delta in engine.generate(request):
            parts.setdefault(delta.index, []).append(delta)
            yield Finished(join_deltas(parts.pop(delta.index))) if delta.finish else delta
