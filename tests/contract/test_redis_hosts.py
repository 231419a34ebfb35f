"""The Redis store at several servers, Sentinels or a cluster: the master dies, and writes go to the new one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from user_redis import Cluster, UserRedis, Watched

from asyncrl.config.redis_url import hide_password, restore_password
from asyncrl.errors import ConfigError
from asyncrl.net.probe import redis_problem
from asyncrl.net.redis_hosts import parse_hosts
from buffers.groups.records import Change
from buffers.stores.base import StoreLost
from buffers.stores.keys import head_key
from buffers.stores.lease import Lease
from buffers.stores.redis import RedisStore
from buffers.stores.redis_client import RedisClient

pytestmark = pytest.mark.redis
RUN = "run@/shared/{x}"


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path / "watched")
    yield made
    made.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "cluster")
    yield made
    made.close()


def write_past_a_death(url: str, kill: Callable[[], None]) -> None:
    """Every row is there at the end, and the lease has its holder."""
    store = RedisStore(url, run=RUN, max_outage_s=120)
    lease = Lease(RedisClient(url, max_outage_s=120), run=RUN, address="")
    assert lease.take() is None
    epoch = lease.epoch = store.open(floor=7).epoch
    rows: dict[str, bytes | None] = {}
    for number in range(40):
        if number == 20:
            kill()
        change = Change(f"row{number}", b"%d" % number)
        rows[change.key] = change.value
        try:
            store.apply([change])
        except StoreLost:  # the last writes had not reached the replica: the buffer writes its state again
            store.reseed([Change(key, value) for key, value in rows.items()])
    store.close()
    lease.confirm()
    other = Lease(RedisClient(url, max_outage_s=120), run=RUN, address="")
    assert other.run_exists() and other.take() in (None, lease.me)  # None: it lapsed during a long failover
    lease.leave()
    again = RedisStore(url, run=RUN)
    opened = again.open(floor=1)
    again.close()
    assert (opened.epoch, dict(opened.rows)) == (epoch + 1, rows)


def end(server: UserRedis) -> None:
    server.process.kill()
    server.process.wait(60)


def test_sentinels_name_the_new_master(watched: Watched) -> None:
    assert redis_problem(watched.url) == ""
    assert "knows no master 'other'" in redis_problem(watched.url.replace("/main", "/other"))
    write_past_a_death(watched.url, lambda: end(watched.master))
    assert watched.replica.client.role()[0] == b"master"


@pytest.mark.long
def test_a_cluster_elects_a_new_master(cluster: Cluster) -> None:
    """All keys of a run have one hash tag, so the scripts find them on one node."""
    assert redis_problem(cluster.url) == ""
    owner = cluster.master_with(head_key(RUN))
    write_past_a_death(cluster.url, lambda: end(owner))
    replica = cluster.nodes[cluster.nodes.index(owner) + 3]
    assert replica.client.role()[0] == b"master"


def test_urls() -> None:
    url = "redis+sentinel://user:secret@a:1,b:2/main/3"
    found = parse_hosts(url)
    assert found is not None and (found.hosts, found.name, found.db) == ((("a", 1), ("b", 2)), "main", 3)
    assert hide_password(url) == "redis+sentinel://user:***@a:1,b:2/main/3"
    assert restore_password(hide_password(url), Path("/none"), {"ASYNCRL_REDIS_PASSWORD": "secret"}) == url
    assert parse_hosts("redis://a:1/0") is None
    nodes = parse_hosts("rediss+cluster://a:1")
    assert nodes is not None and (nodes.kind, nodes.hosts, nodes.tls) == ("cluster", (("a", 1),), True)
    wrong = ("redis+sentinel://a:1", "redis+cluster://a:1/main", "http+sentinel://a:1/main", "redis+sentinel://a/main")
    for bad in wrong:
        with pytest.raises(ValueError):
            parse_hosts(bad)
        with pytest.raises(ConfigError, match=r"buffer\.redis_url"):
            RedisStore(bad, run="r")
        assert redis_problem(bad)
    assert "no Sentinel at 127.0.0.1:1" in redis_problem("redis+sentinel://127.0.0.1:1/main")
    assert "no Redis at 127.0.0.1:1" in redis_problem("redis+cluster://u:p@127.0.0.1:1,127.0.0.1:2")
