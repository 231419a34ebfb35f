"""The lease of a run with a stand-by, at a real Redis: one holder, its clock, its successor, its end."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bare_config import BARE
from user_redis import UserRedis

from asyncrl.config import Config, parse
from asyncrl.errors import AsyncRLError, ConfigError, Fenced
from asyncrl.runtime.role import Stop
from asyncrl.runtime.run_dir import RunDir, run_id
from buffers.service import takeover
from buffers.service.takeover import StandBy, own_address, take_lease
from buffers.stores.keys import lease_key
from buffers.stores.lease import ENDED_S, LEASE_S, RENEW_S, Lease, Term
from buffers.stores.redis import RedisStore
from buffers.stores.redis_client import RedisClient

pytestmark = pytest.mark.redis


class Clock:
    """Seconds that pass when a process waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Waits(Stop):
    """A stop whose waits let the clock go on."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout_s: float) -> bool:
        self._clock.now += timeout_s
        return self.is_set()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[UserRedis]:
    made = UserRedis(tmp_path / "redis")
    yield made
    made.close()


@pytest.fixture
def config(tmp_path: Path, server: UserRedis) -> Config:
    settings = [
        "buffer.store=redis",
        f"buffer.redis_url={server.url}",
        "buffer.fsync=always",
        f"run.dir={tmp_path}/run",
    ]
    addresses = ["network.buffer=tcp://127.0.0.1:5555", "network.standby=tcp://127.0.0.1:5556"]
    found = parse(BARE, overrides=[*settings, *addresses])
    RunDir(found.run_dir).create()
    return found


class Sides:
    """Leases of several processes on the same run."""

    def __init__(self, config: Config, server: UserRedis) -> None:
        self.config, self.server, self.clock = config, server, Clock()
        self.key = lease_key(run_id(config))
        self._leases: list[Lease] = []

    def lease(self, address: str = "tcp://127.0.0.1:5555") -> Lease:
        client = RedisClient(self.server.url, max_outage_s=5.0)
        self._leases.append(Lease(client, run=run_id(self.config), address=address, clock=self.clock))
        return self._leases[-1]

    def serve(self) -> tuple[Lease, RedisStore]:
        """The lease of a buffer that serves."""
        lease, store = self.lease(), RedisStore(self.server.url, run=run_id(self.config))
        assert lease.take() is None
        lease.epoch = store.open(floor=1).epoch
        return lease, store

    def lapse(self) -> None:
        self.server.client.delete(self.key)
        self.clock.now += LEASE_S

    def stand_by(self) -> StandBy:
        return StandBy(self.config, self.lease("tcp://127.0.0.1:5556"), clock=self.clock)


@pytest.fixture
def sides(config: Config, server: UserRedis) -> Sides:
    return Sides(config, server)


def test_a_term_counts_from_the_request() -> None:
    clock = Clock()
    term = Term(clock)
    assert term.is_over()
    clock.now += 1.0
    term.renewed(asked_at=100.0)  # the answer took a second
    clock.now = 100.0 + LEASE_S - 0.01
    assert not term.is_over()
    term.renewed(asked_at=99.0)  # an older answer shortens nothing
    assert not term.is_over()
    clock.now = 100.0 + LEASE_S
    assert term.is_over()


def test_the_limits_add_up_to_less_than_ten_seconds() -> None:
    assert RENEW_S + takeover.CALL_S <= takeover.FREE_S < LEASE_S
    assert LEASE_S + takeover.FREE_S + 2 * takeover.LOOK_S <= 8.0


def test_one_holder_until_it_leaves(sides: Sides) -> None:
    first, second = sides.lease(), sides.lease()
    assert first.take() is None and first.take() is None  # asked again: the answer was lost
    assert second.take() == first.me and second.holder() == first.me
    assert 0 < sides.server.client.pttl(sides.key) <= LEASE_S * 1000
    first.leave()
    first.leave()
    assert second.holder() is None and second.take() is None


def test_a_holder_asks_redis_when_its_term_is_over(sides: Sides) -> None:
    first, _ = sides.serve()
    sides.server.client.delete(sides.key)
    first.confirm()
    assert not sides.server.client.exists(sides.key)  # not asked: its clock says that the lease holds
    sides.clock.now += LEASE_S
    first.confirm()
    assert first.holder() == first.me  # it lapsed, and no other process had taken it


def test_fenced_by_another_holder_and_by_a_newer_epoch(sides: Sides) -> None:
    first, store = sides.serve()
    sides.lapse()
    second = sides.lease()
    assert second.take() is None
    with pytest.raises(Fenced):
        first.confirm()
    with pytest.raises(Fenced):  # it stays so, without a question
        first.confirm()
    first.leave()
    assert second.holder() == second.me  # what is not its own it does not give back
    RedisStore(sides.server.url, run=run_id(sides.config)).open(floor=store.open(floor=1).epoch)
    second.epoch = 1
    sides.clock.now += LEASE_S
    with pytest.raises(Fenced):
        second.confirm()


def test_a_thread_renews(sides: Sides) -> None:
    first, _ = sides.serve()
    sides.server.client.pexpire(sides.key, 60_000)
    first.keep()
    deadline = time.monotonic() + 60
    while sides.server.client.pttl(sides.key) > LEASE_S * 1000:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.leave()
    assert not sides.server.client.exists(sides.key)


def test_a_stand_by_waits_for_a_lease_that_stays_free(sides: Sides) -> None:
    standby = sides.stand_by()
    assert standby.look() is None  # an empty Redis: no buffer has served yet
    first, _ = sides.serve()
    assert standby.look() is None
    sides.lapse()
    assert standby.look() is None
    sides.clock.now += takeover.FREE_S - 0.1
    first.confirm()  # Redis was away, not the buffer: it renews in time
    assert standby.look() is None
    sides.lapse()
    assert standby.look() is None
    sides.clock.now += takeover.FREE_S
    assert standby.look() is True
    with pytest.raises(Fenced):
        first.confirm()


def test_the_end_of_a_run_ends_its_stand_by(sides: Sides, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = sides.serve()
    first.leave(ended="the run is complete")
    assert LEASE_S * 1000 < sides.server.client.pttl(sides.key) <= ENDED_S * 1000
    assert sides.stand_by().look() is False and "the run is complete" in capsys.readouterr().out
    again = sides.lease()
    assert take_lease(again, Waits(sides.clock), process_gone=lambda *_: False, clock=sides.clock)


def test_a_buffer_replaces_its_dead_predecessor_alone(sides: Sides) -> None:
    first, _ = sides.serve()
    second, waits = sides.lease(), Waits(sides.clock)
    with pytest.raises(AsyncRLError, match="serves") as caught:
        take_lease(second, waits, process_gone=lambda *_: False, clock=sides.clock)
    assert (caught.value.code, caught.value.exit_code) == ("service.duplicate", 75)
    assert sides.clock.now > 100 + LEASE_S  # a lease that is not renewed would have lapsed
    asked: list[tuple[int, str]] = []

    def process_gone(pid: int, host: str) -> bool:
        asked.append((pid, host))
        return True

    assert take_lease(second, waits, process_gone=process_gone, clock=sides.clock)
    assert asked == [(first.me.pid, first.me.host)]
    waits.set("stop")
    assert not take_lease(sides.lease(), waits, process_gone=process_gone, clock=sides.clock)


def test_a_stand_by_refuses_another_run_folder(sides: Sides) -> None:
    """It could not read the payloads of the buffer that serves."""
    first, _ = sides.serve()
    segments = RunDir(sides.config.run_dir).segments
    (segments / "nonce").write_text("mine")
    first.me = msgspec.structs.replace(first.me, nonce="mine")
    sides.clock.now += LEASE_S
    first.confirm()
    standby = sides.stand_by()
    (segments / "nonce").write_text("other")
    assert standby.look() is None
    (segments / "nonce").write_text("mine")  # a network file system showed it late
    sides.clock.now += takeover.STRANGE_S + 1
    assert standby.look() is None
    (segments / "nonce").write_text("other")
    assert standby.look() is None
    sides.clock.now += takeover.STRANGE_S + 1
    with pytest.raises(ConfigError, match="is not the folder"):
        standby.look()
    sides.lapse()
    with pytest.raises(ConfigError, match="is not the folder"):
        standby.look()


def test_the_commands_of_a_user_of_a_run(sides: Sides) -> None:
    """Those of docs/security.md are enough."""
    text = " ".join((Path(__file__).parents[2] / "docs/security.md").read_text().split())
    rights = re.findall(r"(?<=[ `])[~+-][a-z|:@*]+", text[text.index("`~arl:*") :][:250])
    assert "~arl:*" in rights and "+pexpire" in rights and "+evalsha" in rights
    sides.server.client.execute_command("ACL", "SETUSER", "run", "on", ">word", *rights)
    sides.server.url = sides.server.url.replace("redis://", "redis://run:word@")
    first, store = sides.serve()
    store.apply([])
    assert sides.stand_by().look() is None and first.run_exists()
    first.leave()
    assert first.holder() is None


def test_a_stand_by_listens_at_the_address_of_its_host(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    here: set[str] = set()

    def bind_problem(address: str) -> Any:
        return None if address in here else ("config.network", "not here")

    monkeypatch.setattr("asyncrl.net.probe.bind_problem", bind_problem)
    assert own_address(config, standby=False) == config.network.buffer
    with pytest.raises(ConfigError, match="neither"):
        own_address(config, standby=True)
    here.add(config.network.buffer)  # the first host came back and stands by now
    assert own_address(config, standby=True) == config.network.buffer
    here.add(config.network.standby)
    assert own_address(config, standby=True) == config.network.standby
