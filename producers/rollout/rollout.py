"""A rollout: an engine, an environment and one leased group; finished samples leave at once.

Guarantees:
1. samples that finish in the same decode step are delivered in one call; a slow delivery gathers later ones;
2. when `deliver` or `keep` reports a lost lease, the rest of the group is aborted at the engine;
3. cancelling the rollout aborts the group as well; an error of the engine or environment is raised;
4. finished samples go before checkpoints of others.
It does not know the buffer: `deliver` and `keep` do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from asyncrl.config import SamplingConfig
from asyncrl.engine import Engine, GenDelta, GenRequest
from asyncrl.images.digests import image_digest
from asyncrl.versions import Runs
from asyncrl.wire.support import MOST_IDS
from producers.support.retry import Bell

#: The engine always ends its iterator, which wakes the wait: this is only a safety net.
LOOK_S = 5.0


class Finished(NamedTuple):
    """A finished sample, with its reward if the environment scores. With several turns: `mask` u1 `[T]` (None: every
    token was sampled), `rows` and `turns` as in `wire.SampleHead`, `parts` of the reward by name. `images`:
    encoded, each with its place in the response, without those of the prompt. `others` as in `wire.SampleHead`."""

    sample: GenDelta
    reward: float | None = None
    mask: Any = None
    rows: tuple[tuple[int, int], ...] = ()
    turns: tuple[tuple[int, float], ...] = ()
    parts: Mapping[str, float] = {}
    images: tuple[tuple[int, bytes], ...] = ()
    others: tuple[tuple[int, str, Runs], ...] = ()


def fits_message(samples: Sequence[GenDelta]) -> bool:
    """Whether the supports of these samples may go in one message (`MOST_IDS`)."""
    return sum(sample.support.ids.size for sample in samples if sample.support is not None) <= MOST_IDS


def submit_fields(finished: Sequence[Finished]) -> dict[str, Any]:
    """Arguments of `ProducerClient.submit` besides the tokens, by sample index."""
    named: dict[str, dict[int, Any]] = {
        "rewards": {}, "masks": {}, "rows": {}, "turns": {}, "parts": {}, "images": {}, "others": {}
    }  # fmt: skip
    for item in finished:
        for name, value in (
            ("rewards", item.reward),
            ("masks", item.mask),
            ("rows", item.rows or None),
            ("turns", item.turns or None),
            ("parts", item.parts or None),
            ("images", tuple((place, image_digest(image)) for place, image in item.images) or None),
            ("others", item.others or None),
        ):
            if value is not None:
                named[name][item.sample.index] = value
    return named


class Environment(Protocol):
    """Makes samples from prompts. `tools`: schemas for the prompt; `counts`: numbers for the heartbeat, None without
    any."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def counts(self) -> Any:
        """Of all samples so far."""

    async def open(self) -> None:
        """Once, before the first prompt is encoded."""

    async def close(self) -> None:
        """At the end of the process."""

    def play(self, engine: Engine, request: GenRequest, row: Mapping[str, Any]) -> AsyncIterator[Finished | GenDelta]:
        """The samples of the request, each as it finishes. With `delta_tokens`, also new tokens of samples under way if
        a sample is one answer of the engine: another producer can continue from there."""


def split_request(request: GenRequest, sampling: SamplingConfig) -> list[GenRequest]:
    """The request; with `greedy_baseline` the sample beyond `group_size` is a separate greedy request.

    Its log-probs are recorded like those of all others; it is a baseline and never trained.
    """
    if not sampling.greedy_baseline:
        return [request]
    sampled = tuple(index for index in request.indices if index < sampling.group_size)
    greedy = tuple(index for index in request.indices if index >= sampling.group_size)
    parts = [replace(request, indices=sampled)] if sampled else []
    return [*parts, replace(request, indices=greedy, top_k=1)] if greedy else parts


async def roll_out(
    engine: Engine,
    environment: Environment,
    request: GenRequest,
    *,
    row: Mapping[str, Any],
    deliver: Callable[[list[Finished]], Awaitable[bool]],
    keep: Callable[[list[GenDelta]], Awaitable[bool]],
) -> bool:
    """Play one request and deliver its samples. `deliver`, and `keep` with tokens of samples under way, return False
    once the lease is lost. Returns whether the lease was still held at the end.
    """
    ready: list[Finished | GenDelta] = []
    bell = Bell()

    async def pump() -> None:
        async for item in environment.play(engine, request, row):
            ready.append(item)
            bell.ring()

    pumping = asyncio.create_task(pump())
    pumping.add_done_callback(lambda _: bell.ring())
    try:
        while ready or not pumping.done():
            await bell.wait(timeout_s=LOOK_S)
            batch, ready[:] = list(ready), []
            finished = [item for item in batch if isinstance(item, Finished)]
            done = {item.sample.index for item in finished}
            deltas = [item for item in batch if isinstance(item, GenDelta) and item.index not in done]
            held = (not finished or await deliver(finished)) and (not deltas or await keep(deltas))
            if not held:
                await engine.abort([request.id])
                return False
        pumping.result()
        return True
    finally:
        pumping.cancel()
        # Its error was raised above. bounded: it was cancelled
        await asyncio.gather(pumping, return_exceptions=True)


async def run_together(works: Sequence[Coroutine[Any, Any, bool]]) -> None:
    """Run the parts of one group in parallel; the first that fails, or returns False, ends them all."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            held = [task.result() for task in done]
            if not all(held):
                return
    finally:
        for task in tasks:
            task.cancel()
        # Errors were raised above. bounded: they were cancelled
        await asyncio.gather(*tasks, return_exceptions=True)
