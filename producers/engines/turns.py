"""An engine that is on its device only while it generates (`cluster.devices = "turns"`).

It wraps an engine that has the optional part `asyncrl.engine.Sleeping`. Guarantees:
1. the engine is awake only during this process's turn (`asyncrl.device_turn`), from its start on;
2. a turn begins with the first request and ends `LINGER_S` after the last one, when no sample is in progress;
3. an engine whose weights can change while it sleeps takes versions without a turn, and moves only between two updates;
   any other gets its turn for the commit.
The learner has the next turn once no request is left. That happens because the buffer leases a bounded number of groups
ahead of the learner.

Example: bound 0, 16 groups a step: the first lease wakes the engine, the end of the sixteenth group lets it sleep. The
learner trains and publishes, the sleeping engine takes the version, and its next lease wakes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from asyncrl.device_turn import DeviceTurn
from asyncrl.engine import EngineHealth, GenDelta, GenRequest
from asyncrl.errors import AsyncRLError
from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import Manifest, Tensor

LINGER_S = 0.05  # the worker asks for the next lease meanwhile


class TurnTaking:
    """Everything that is not here passes through to the engine."""

    def __init__(self, engine: Any, turn: DeviceTurn) -> None:
        self._engine = engine
        self._turn = turn
        self._awake = False
        self._requests = 0
        self._entering = asyncio.Lock()  # held while the turn is taken or given
        self._weights = asyncio.Lock()  # held by an update from its beginning to its end, and by a move
        self._updating = False
        self._sleeper: asyncio.Task[None] | None = None
        self._failure: AsyncRLError | None = None  # of the sleeper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def waiting_for(self) -> str:
        """What a request waits for; empty if none does."""
        return self._turn.waiting_for

    @property
    def commit_turn_s(self) -> float:
        """The longest wait of a commit for its turn."""
        return 0.0 if self._engine.sleeping.loads_asleep else self._turn.limit_s

    def health(self) -> EngineHealth:
        """As the engine's. Raises the error of an engine that could not leave its device: the worker ends with it, and
        the turn with the process.
        """
        if self._failure is not None:
            raise self._failure
        health: EngineHealth = self._engine.health()
        return health

    async def start(self) -> None:
        """Load the model in a turn; it sleeps afterwards."""
        await self._turn.take_async()
        await self._engine.start()
        await self._engine.sleeping.sleep()
        self._turn.give()

    async def close(self, *, grace_s: float) -> None:
        if self._sleeper is not None:
            self._sleeper.cancel()
        await self._engine.close(grace_s=grace_s)
        self._turn.give()

    async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        self._requests += 1
        try:
            await self._wake()
            async for delta in self._engine.generate(request):
                yield delta
        finally:
            self._end_request()

    async def begin_update(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        if self._engine.sleeping.loads_asleep and not self._updating:
            await self._weights.acquire()  # bounded: a move takes as long as a copy of the weights
            self._updating = True
        await self._engine.begin_update(manifest, tensors)

    async def commit_update(self) -> str:
        if self._engine.sleeping.loads_asleep:
            try:
                return str(await self._engine.commit_update())
            finally:
                self._end_update()
        self._requests += 1
        try:
            await self._wake()
            return str(await self._engine.commit_update())
        finally:
            self._end_request()

    async def abort_update(self) -> None:
        try:
            await self._engine.abort_update()
        finally:
            self._end_update()

    async def attest(self) -> str:
        """The digest of the weights; empty while they cannot be read. Like a request, it keeps the engine awake."""
        if self._engine.sleeping.loads_asleep:
            return str(await self._engine.attest())
        if self._entering.locked() or not self._awake:
            return ""
        self._requests += 1
        try:
            return str(await self._engine.attest())
        finally:
            self._end_request()

    def _end_update(self) -> None:
        if self._updating:
            self._updating = False
            self._weights.release()

    # ------------------------------------------------------------ turns

    async def _wake(self) -> None:
        async with self._entering:
            if self._awake:
                return
            await self._turn.take_async()
            failpoint("producer.at_wake")
            async with self._weights:
                await self._engine.sleeping.wake()
            self._awake = True
            failpoint("producer.awake")

    def _end_request(self) -> None:
        self._requests -= 1
        if not self._requests and (self._sleeper is None or self._sleeper.done()):
            self._sleeper = asyncio.create_task(self._sleep())

    async def _sleep(self) -> None:
        """Sleep if no request comes."""
        await asyncio.sleep(LINGER_S)
        async with self._entering:
            if self._requests or not self._turn.held:  # held without being awake: the only request ended meanwhile
                return
            failpoint("producer.at_sleep")
            try:
                async with self._weights:
                    await self._engine.sleeping.sleep()
            except AsyncRLError as error:
                self._failure = error
                return
            self._awake = False
            self._turn.give()
            failpoint("producer.asleep")
