"""The services of the simulator: the buffer's process around the real `BufferService`, and a weight service.

`Host` is one buffer process: its inbox, its drains and ticks, its death. `Weights` keeps what
matters here of the weight service: the target, and the fence of learner epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sim_disk import Killed
from sim_net import SimCall

import buffers.main as server_module
from asyncrl.errors import AsyncRLError, Fenced, Unavailable
from buffers.service.service import BufferService

if TYPE_CHECKING:
    from sim_learner import Learner
    from sim_world import World

TICK_S = 0.5


class Weights:
    """The weight service as far as it matters here: the target, and the fence of learner epochs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.target: tuple[int, int, str] | None = None  # epoch, version, digest
        self.digests: dict[int, str] = {}  # of every version, as it was published last
        self.last = (0, -1)
        self.committed = -1

    def publish(self, epoch: int, version: int, digest: str, learner: Learner) -> None:
        """Take a version; an older learner is refused, as the real service refuses it."""
        if epoch < self.last[0]:
            self._world.hits["publish_refused"] += 1
            raise Fenced("fenced", f"learner epoch {epoch} is over")
        if (epoch, version) == self.last and self.target is not None and self.target[2] == digest:
            return
        if epoch == self.last[0] or learner.process is not self._world.check.learner:
            self._world.check.published(epoch, version, self.last)
        self.last, self.target = (epoch, version), (epoch, version, digest)
        self.digests[version] = digest
        self.committed = version


class Host:
    """A buffer process: the real service, its inbox, its life."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive, self.paused, self.scheduled = True, False, False
        self.inbox: list[SimCall] = []
        self.ticks = 0
        if world.medium.tainted:
            world.check.forget()
            world.medium.tainted = False
        with world.wired():
            self.service: BufferService = server_module.open_service(world.config, world.store())
        groups = self.service.machine
        if world.check_opened:
            world.check.opened(world.medium.rows, groups.table.meta, groups.table.batches)
        world.clock.at(TICK_S, self._tick)

    def arrive(self, call: SimCall) -> None:
        """A request."""
        self.inbox.append(call)
        if not self.scheduled:
            self.scheduled = True
            self.world.clock.at(0.001, self._drain)

    def _drain(self) -> None:
        self.scheduled = False
        if not self.alive or self.paused or not self.inbox:
            return
        calls, self.inbox = self.inbox[:16], self.inbox[16:]
        self._guarded(self.service.handle, calls)
        if not self.alive:
            return
        for call in calls:
            self.world.check.handled(call._ask.process, call.message)
            self.world.after_call(call.message)
        if self.inbox:
            self.scheduled = True
            self.world.clock.at(0.001, self._drain)
        self.world.after_message(len(calls))

    def _tick(self) -> None:
        if not self.alive:
            return
        self.world.clock.at(TICK_S, self._tick)
        if self.paused:
            return
        self.ticks += 1
        self._guarded(self.service.tick)
        if self.ticks % 3 == 0 and self.alive:
            self.service.segments.sync()
            self.service.store.sync()

    def _guarded(self, what: Callable[..., None], *args: Any) -> None:
        try:
            what(*args)
        except Killed:
            self.die("killed")
        except (Fenced, Unavailable) as error:
            if error.code == "fenced":
                self.world.hits["service_fenced"] += 1
            self.die(error.code)
        except AsyncRLError as error:
            self.world.fail("internal", f"the service ended: {error.code}: {error.message}")

    def resume(self) -> None:
        """SIGCONT."""
        self.paused = False
        if self.inbox and self.alive:
            self.scheduled = True
            self._drain()

    def die(self, why: str) -> None:
        """The process ends."""
        if not self.alive:
            return
        self.alive = False
        self.world.note(f"buffer ends: {why}")
        if self.world.net.service is self:
            self.world.net.service = None
            self.world.clock.at(self.world.restart_after(), self.world.start_buffer)
