"""One contract for every store of the buffer's index: SQLite, and a real Redis on a private server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import redis

from asyncrl.config import BufferConfig
from asyncrl.config.redis_url import hide_password
from asyncrl.errors import AsyncRLError, ConfigError, Fenced, Unavailable
from buffers.groups.records import Change
from buffers.stores.base import Store, StoreLost
from buffers.stores.private_server import PrivateServer, find_server, major_version
from buffers.stores.redis import RedisStore, open_redis
from buffers.stores.sqlite import SqliteStore

Open = Callable[[], Store]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrivateServer]:
    program = find_server()
    if program is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no redis-server or valkey-server on the PATH")
    found = PrivateServer(program, tmp_path, fsync="everysec")
    found.start()
    yield found
    found.stop()


@pytest.fixture(params=["sqlite", "redis"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """A connection of another service to the same store, at each call."""
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "index.sqlite")
    url = request.getfixturevalue("server").url
    return lambda: RedisStore(url, run="r@/tmp/{x}", max_outage_s=2.0)


def write(store: Store, **rows: bytes | None) -> None:
    store.apply([Change(key, value) for key, value in rows.items()])


def test_rows_come_back(connect: Open) -> None:
    store = connect()
    assert store.open(floor=5).rows == []
    write(store, a=b"1", b=b"\x00\xff", c=b"")
    write(store, a=b"2", b=None, nothing=None)
    store.close()
    again = connect()
    opened = again.open(floor=5)
    assert sorted(opened.rows) == [("a", b"2"), ("c", b"")] and opened.epoch == 6
    again.close()


def test_epochs_grow_and_respect_the_floor(connect: Open) -> None:
    epochs = []
    for floor in (10, 3, 1 << 40, 0):
        store = connect()
        epochs.append(store.open(floor=floor).epoch)
        store.close()
    assert epochs == [10, 11, 1 << 40, (1 << 40) + 1]


def test_an_older_service_is_fenced_and_writes_nothing(connect: Open) -> None:
    first, second = connect(), connect()
    first.open(floor=1)
    write(first, a=b"1")
    second.open(floor=1)
    for attempt in (lambda: write(first, a=b"bad"), lambda: first.reseed([Change("a", b"bad")])):
        with pytest.raises(Fenced) as fenced:
            attempt()
        assert fenced.value.exit_code == 75
    write(second, b=b"2")
    assert sorted(connect().open(floor=1).rows) == [("a", b"1"), ("b", b"2")]


def test_reseed_replaces_everything(connect: Open) -> None:
    store = connect()
    store.open(floor=1)
    write(store, a=b"1", b=b"1")
    store.reseed([Change("b", b"2"), Change("c", b"3")])
    write(store, d=b"4")
    assert sorted(connect().open(floor=1).rows) == [("b", b"2"), ("c", b"3"), ("d", b"4")]


def test_many_rows_at_once(connect: Open) -> None:
    store = connect()
    store.open(floor=1)
    store.apply([Change(f"g{n}", b"x" * 100) for n in range(12_000)])
    store.apply([Change(f"g{n}", None) for n in range(0, 12_000, 2)])
    store.sync()
    assert len(connect().open(floor=1).rows) == 6000


# ---------------------------------------------------------------- sqlite


def test_sqlite_is_all_or_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "index.sqlite", fsync="always")
    store.open(floor=1)
    write(store, a=b"1")
    with pytest.raises(Unavailable):
        store.apply([Change("a", b"2"), Change("b", object())])  # type: ignore[arg-type]
    write(store, c=b"3")
    assert sorted(SqliteStore(tmp_path / "index.sqlite").open(floor=1).rows) == [("a", b"1"), ("c", b"3")]
    assert (tmp_path / "index.sqlite").stat().st_mode & 0o077 == 0


# ---------------------------------------------------------------- redis


def socket_of(server: PrivateServer) -> str:
    return urlsplit(server.url).path


def admin_of(server: PrivateServer, folder: Path) -> Any:
    password = (folder / "redis.admin").read_text()
    return redis.Redis(unix_socket_path=socket_of(server), username="admin", password=password)


@pytest.mark.long
def test_private_server_answers_its_store_alone(server: PrivateServer, tmp_path: Path) -> None:
    """And the store nothing but its scripts and its rows."""
    nobody = redis.Redis(unix_socket_path=socket_of(server))
    with pytest.raises(redis.exceptions.AuthenticationError):
        nobody.ping()
    store = RedisStore(server.url, run="r")
    store.open(floor=1)
    write(store, a=b"1", b=None)
    mine = store._client.redis
    assert mine.ping() and mine.hgetall(store._keys[1]) == {b"a": b"1"}
    for refused in (
        mine.flushall,
        mine.config_get,
        mine.save,
        mine.acl_list,
        lambda: mine.eval("return 1", 0),
        mine.monitor().__enter__,
        lambda: mine.hgetall("others"),
        lambda: mine.get("arl:x"),
        mine.shutdown,
        lambda: mine.publish("c", "x"),
        lambda: mine.execute_command("DEBUG", "JMAP"),
        lambda: mine.execute_command("MODULE", "LIST"),
        lambda: mine.execute_command("REPLICAOF", "h", "1"),
        lambda: mine.keys("*"),
    ):
        with pytest.raises(redis.exceptions.ResponseError):
            refused()
    admin = admin_of(server, tmp_path)
    assert admin.config_get("protected-mode") == {"protected-mode": "yes"}
    assert admin.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    if major_version(find_server() or "") >= 7:
        for name in ("enable-debug-command", "enable-module-command"):
            assert admin.config_get(name) == {name: "no"}


def test_passwords_of_the_private_server_stand_nowhere(server: PrivateServer, tmp_path: Path) -> None:
    password = parse_qs(urlsplit(server.url).query)["password"][0]
    admin = (tmp_path / "redis.admin").read_text()
    assert (tmp_path / "redis.admin").stat().st_mode & 0o177 == (tmp_path / "redis.acl").stat().st_mode & 0o177 == 0
    held = [Path(f"/proc/{server.pid}/cmdline").read_bytes(), Path(f"/proc/{server.pid}/environ").read_bytes()]
    held += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "redis.admin"]
    assert not [data for data in held if password.encode() in data or admin.encode() in data]
    assert password not in RedisStore(server.url, run="r").where


def test_private_server_is_private(server: PrivateServer, tmp_path: Path) -> None:
    path = socket_of(server)
    assert Path(path).stat().st_mode & 0o177 == 0
    inodes = set()
    for fd in os.listdir(f"/proc/{server.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            inodes.add(os.readlink(f"/proc/{server.pid}/fd/{fd}"))
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert not [line for line in listening if f"socket:[{line[9]}]" in inodes]


def test_a_killed_server_comes_back_with_everything(tmp_path: Path, server: PrivateServer) -> None:
    store = RedisStore(server.url, run="r", max_outage_s=10.0, server=server)
    store.open(floor=1)
    write(store, a=b"1")
    os.kill(server.pid, signal.SIGKILL)
    write(store, b=b"2")
    assert sorted(RedisStore(server.url, run="r").open(floor=1).rows) == [("a", b"1"), ("b", b"2")]


def test_a_repeated_write_is_harmless(server: PrivateServer) -> None:
    """The answer of a write was lost: the same write again is acknowledged."""
    store = RedisStore(server.url, run="r")
    store.open(floor=1)
    write(store, a=b"1")
    store._sequence -= 1
    write(store, a=b"1")
    write(store, a=b"2")
    assert RedisStore(server.url, run="r").open(floor=1).rows == [("a", b"2")]


def test_an_emptied_or_rolled_back_server_is_noticed(server: PrivateServer, tmp_path: Path) -> None:
    store = RedisStore(server.url, run="r")
    epoch = store.open(floor=100).epoch
    write(store, a=b"1")
    write(store, a=b"2")
    head = store._keys[0]
    for spoil in (
        admin_of(server, tmp_path).flushall,
        lambda: store._client.redis.hset(head, "seq", 1),
        lambda: store._client.redis.hset(head, "epoch", 7),
    ):
        spoil()
        with pytest.raises(StoreLost):
            write(store, b=b"3")
        store.reseed([Change("a", b"9")])
        write(store, c=b"4")
    opened = RedisStore(server.url, run="r").open(floor=1)
    assert sorted(opened.rows) == [("a", b"9"), ("c", b"4")] and opened.epoch == epoch + 1


def test_a_server_in_a_folder_with_a_long_path_starts(server: PrivateServer, tmp_path: Path) -> None:
    """The address of a socket has about a hundred bytes: it lies elsewhere then."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    program = find_server()
    assert program is not None
    other = PrivateServer(program, folder, fsync="everysec")
    other.start()
    assert RedisStore(other.url, run="r").open(floor=1).epoch == 1
    other.stop()


def test_a_server_that_is_gone_for_good(server: PrivateServer) -> None:
    store = RedisStore(server.url, run="r", max_outage_s=0.6)
    store.open(floor=1)
    server.stop()
    started = time.monotonic()
    with pytest.raises(Unavailable) as error:
        write(store, a=b"1")
    assert error.value.code == "store.unreachable" and error.value.exit_code == 69
    assert 0.5 < time.monotonic() - started < 60


def test_no_server_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError) as error:
        open_redis(BufferConfig(store="redis"), run_id="r", folder=tmp_path)
    assert error.value.code == "store.no_server"


def test_passwords_are_not_printed() -> None:
    for url in ("redis://u:topsecret@h:1/0", "rediss://:topsecret@h", "redis://h:1/0?password=topsecret"):
        assert "topsecret" not in hide_password(url) and "h" in hide_password(url)


def test_two_runs_on_one_server_do_not_meet(server: PrivateServer) -> None:
    one, two = RedisStore(server.url, run="one"), RedisStore(server.url, run="two")
    one.open(floor=1)
    two.open(floor=1)
    write(one, a=b"1")
    write(two, a=b"2")
    assert RedisStore(server.url, run="one").open(floor=1).rows == [("a", b"1")]


def test_a_refused_write_is_named(server: PrivateServer, tmp_path: Path) -> None:
    store = RedisStore(server.url, run="r")
    store.open(floor=1)
    admin_of(server, tmp_path).config_set("maxmemory", "1mb")
    with pytest.raises(AsyncRLError) as error:
        for number in range(50):
            write(store, **{f"k{number}": b"x" * 100_000})
    assert error.value.code == "store.refused"
