"""The learner's turns on devices that it shares with engines (`cluster.devices = "turns"`).

Guarantees:
1. all ranks are on their devices only between `begin` and `end`; outside, weights and optimizer states of every model
   rest in host memory (`learners.backends.resting_states`);
2. rank 0 holds the lock for all ranks: they begin after it has the lock, and it gives the lock after all have left;
3. engines take a published version before the next turn, or have had `weightsync.timeout_s` for it.
With any other setting nothing happens.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from asyncrl.config import Config
from asyncrl.device_turn import DeviceTurn
from asyncrl.errors import Unavailable
from asyncrl.runtime.failpoints import failpoint
from learners.backends.resting_states import RestingStates
from learners.gang.gang import Gang

if TYPE_CHECKING:
    from learners.rank_zero import Services

LOOK_S = 0.05


class DeviceTurns:
    def __init__(self, config: Config, gang: Gang) -> None:
        self._gang = gang
        self._states: RestingStates | None = None
        self._turn: DeviceTurn | None = None
        self._sync_s = config.weightsync.timeout_s
        if config.cluster.devices != "turns":
            return
        self._states = RestingStates(gang.device, config.run_dir)
        if gang.lead:
            limit_s = config.run.hang_timeout_s
            config.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._turn = DeviceTurn(config.run_dir, together=False, limit_s=limit_s)

    @property
    def waiting_for(self) -> str:
        return self._turn.waiting_for if self._turn is not None else ""

    def begin(self, services: Services | None = None) -> None:
        """Wait for the turn and move back to the device. Collective. With `services`, engines take the newest version
        before it.
        """
        if self._states is None:
            return
        if self._turn is not None:
            if services is not None:
                services.set_waiting("engines that take the newest version, and its turn on the device")
                until = time.monotonic() + self._sync_s
                while not _is_taken(services) and time.monotonic() < until:
                    time.sleep(LOOK_S)
            self._turn.take()
            if services is not None:
                services.set_waiting("")
            failpoint("learner.at_turn")
        self._gang.share(b"")
        self._states.move_back()

    def end(self, backend: Any) -> None:
        """Leave the device and give the turn. Collective."""
        if self._states is None:
            return
        self._states.move_out(backend.resident())
        if self._gang.size > 1:
            self._gang.barrier()  # bounded: the timeout of the group
        if self._turn is not None:
            self._turn.give()
            failpoint("learner.after_turn")


def _is_taken(services: Services) -> bool:
    """Whether an engine holds the newest published version, or nothing can be learned about it."""
    try:
        return services.publisher.committed_version() >= max(services.digests, default=-1)
    except Unavailable:
        return True
