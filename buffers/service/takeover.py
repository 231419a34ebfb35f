"""How a buffer becomes the one that serves a run with a stand-by (`network.standby`).

Guarantees:
1. of all buffers of a run only the holder of the lease serves (`buffers.stores.lease`);
2. a stand-by begins when the lease was given back or has lapsed, about `LEASE_S + FREE_S` after the last renewal;
3. it serves a run that another buffer has begun, never an empty one. It refuses a run folder that is not the one in
   which the other buffer writes: it could not read the payloads;
4. a buffer that is no stand-by replaces its own dead predecessor at once, and refuses to start next to a living one
   (`service.duplicate`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncrl.config import Config
from asyncrl.config.redis_url import restore_password
from asyncrl.errors import AsyncRLError, ConfigError, error_for
from asyncrl.net.probe import find_free
from asyncrl.runtime.liveness import Sign
from asyncrl.runtime.role import Stop
from asyncrl.runtime.run_dir import RunDir, endpoint, run_id
from buffers.payloads.record_format import same_folder
from buffers.stores.lease import LEASE_S, Holder, Lease
from buffers.stores.redis_client import RedisClient

LOOK_S = 0.5
FREE_S = 2.0  # the lease stays free for this long: after an outage of Redis its holder renews it first
STRANGE_S = 10.0  # a shared file system may show a new file late
CALL_S = 1.0  # of one call to Redis: RENEW_S and a lost call together are at most FREE_S


def own_address(config: Config, *, standby: bool) -> str:
    """Where this process will listen. A stand-by takes the address of the two that belongs to this host."""
    first = endpoint(config, "buffer")
    if not standby:
        return first
    free, reasons = find_free((config.network.standby, first))
    if not free:
        what = f"a stand-by can listen at neither address: {reasons}"
        raise ConfigError("config.network", what, where="network.standby")
    return free


def open_lease(config: Config, stop: Stop, *, standby: bool) -> Lease:
    """This process's side of the lease of the run."""
    url = restore_password(config.buffer.redis_url, RunDir(config.run_dir).store)
    client = RedisClient(url, max_outage_s=config.buffer.redis_max_outage_s, stop=stop.is_set, timeout_s=CALL_S)
    return Lease(client, run=run_id(config), address=own_address(config, standby=standby))


def take_lease(
    lease: Lease,
    stop: Stop,
    *,
    process_gone: Callable[[int, str], bool],
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Take the lease for a buffer that is no stand-by; False if it was stopped. Raises `service.duplicate`."""
    deadline, replaces = clock() + LEASE_S + 2 * LOOK_S, ""
    while not stop.is_set():
        holder = lease.take(replaces=replaces)
        if holder is None:
            return True
        replaces = holder.token if holder.ended or process_gone(holder.pid, holder.host) else ""
        if not replaces and clock() > deadline:
            remedy = "stop it first, or start this one as its stand-by: asyncrl launch buffer --standby"
            raise error_for("service.duplicate", f"the buffer of this run serves: {holder}", remedy=remedy)
        stop.wait(0.0 if replaces else LOOK_S)
    return False


class StandBy:
    """Waits until the lease of a serving buffer is over."""

    def __init__(self, config: Config, lease: Lease, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease = lease
        self._clock = clock
        self._run = run_id(config)
        self._folder = RunDir(config.run_dir).segments
        self._strange_since: float | None = None
        self._free_since: float | None = None
        self._reported = ""
        self._sign = Sign(RunDir(config.run_dir).alive, role="buffer", name=f"standby-{lease.me.host}")
        self._every_s = config.log.heartbeat_s

    def wait(self, stop: Stop) -> bool:
        """True once this process has the lease; False if it is stopped, or the run has ended."""
        try:
            while not stop.is_set():
                self._sign.beat("the lease of the serving buffer", every_s=self._every_s)
                if (answer := self.look()) is not None:
                    return answer
                stop.wait(LOOK_S)
            return False
        finally:
            self._sign.close()

    def look(self) -> bool | None:
        """Take the lease if it is free: True. False if the run has ended; None while another process serves."""
        holder = self._lease.holder()
        if holder is None:
            return self._take()
        self._free_since = None
        if holder.ended:
            print(f"buffer: no stand-by is needed: {holder.ended}", flush=True)
            return False
        self._check_folder(holder)
        self._report(f"stand-by for {holder}")
        return None

    def _take(self) -> bool | None:
        if not self._lease.run_exists():
            self._report(f"stand-by: no buffer has served {self._run} at this Redis yet")
            return None
        if self._strange_since is not None:
            raise self._other_folder()
        self._free_since = self._clock() if self._free_since is None else self._free_since
        if self._clock() - self._free_since < FREE_S or self._lease.take() is not None:
            return None
        print("buffer: the lease is free, this stand-by takes over", flush=True)
        return True

    def _check_folder(self, holder: Holder) -> None:
        if not holder.nonce or same_folder(str(self._folder), holder.nonce):
            self._strange_since = None
        elif self._strange_since is None:
            self._strange_since = self._clock()
        elif self._clock() - self._strange_since > STRANGE_S:
            raise self._other_folder()

    def _other_folder(self) -> AsyncRLError:
        return ConfigError(
            "config.conflict",
            f"{self._folder} is not the folder in which the serving buffer writes payloads",
            where="run.dir",
            remedy="put run.dir on a file system that both hosts mount",
        )

    def _report(self, line: str) -> None:
        if line != self._reported:
            print(f"buffer: {line}", flush=True)
        self._reported = line
