"""Hops are encoded while somebody could take them: a real service, publisher and receivers, `auto`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from receiver_lab import Engine, Member
from test_weightsync_service import PLAN, World, until

from weightsync.publisher.offers import Offers
from weightsync.publisher.publisher import Publisher
from weightsync.receiver.receiver import built_in_transports


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, transport="auto", encoding="delta")
    yield world
    world.close()


def changed(data: np.ndarray[Any, Any], version: int) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """The tensors after a change of 50 bytes."""
    data[np.random.default_rng(version).choice(data.size, 50, replace=False)] ^= 0x11
    chunks, start = [], 0
    for tensor in PLAN.tensors:
        chunks.append((tensor.name, data[start : start + tensor.nbytes].copy()))
        start += tensor.nbytes
    return chunks


class Marked:
    """A version of the offers: what they look at."""

    def __init__(self, order: int, *, ready: bool) -> None:
        self.order, self.ready, self.slot = order, ready, object()


def test_an_older_version_is_never_announced_again() -> None:
    """The announced one lost its slot to a newer version, whose hops are not ready, and an older one is still there."""
    offers: Any = Offers(staging=None)  # type: ignore[arg-type]
    old, announced, newest = Marked(1, ready=True), Marked(2, ready=True), Marked(5, ready=False)
    for version in (old, announced):
        offers.add(version)
    offers.announced = announced
    offers.versions = [old, newest]
    assert offers._newest_ready() is announced
    newest.ready = True
    assert offers.next_ready() is newest
    offers.announced = None  # the service has forgotten it
    offers.versions = [old]
    assert offers.next_ready() is old


def test_versions_sent_direct_follow_one_that_was_staged() -> None:
    """An engine missed the first, which is then in a slot; the next ones have none, and no order."""
    offers: Any = Offers(staging=None)  # type: ignore[arg-type]
    first, second = Marked(0, ready=True), Marked(0, ready=True)
    first.slot = second.slot = None  # type: ignore[assignment]
    offers.add(first)
    offers.announced = offers.next_ready()
    offers.fill(first, object(), 1)
    offers.announced = offers.next_ready()
    assert offers.announced is first
    offers.add(second)
    assert offers.next_ready() is second


def test_no_hop_is_encoded_while_all_are_local_and_the_first_remote_one_gets_them(world: World) -> None:
    publisher = world.publisher()
    data = np.random.default_rng(1).integers(0, 256, PLAN.nbytes, dtype=np.uint8)

    def publish(version: int, members: int) -> float:
        publisher.publish(version, PLAN, changed(data, version))
        publisher.wait_committed(version, members=members, timeout_s=90)
        return publisher.stats["delta_bytes"]

    near = Member(world, "near", Engine())
    assert [publish(version, 1) for version in (0, 1, 2, 3)][1:] == [0, 0, 0], "nobody takes hops"
    assert staged_slots(publisher) == 2, "and they cost no memory"
    far = Member(world, "far", Engine(), transports={"stream": built_in_transports()["stream"]})
    until(lambda: far.receiver.version == 3, "the remote one has the whole weights")
    until(lambda: publisher._offers.reply.hops_wanted, "the publisher was told")
    assert 0 < publish(4, 2) < PLAN.nbytes / 20
    ways = next(line["ways"] for line in world.lines() if line["version"] == 4)
    assert ways["far"]["encoding"] == "delta" and ways["near"]["encoding"] == "full"
    far.close()
    until(lambda: not publisher._offers.reply.hops_wanted, "it is missed")
    assert publish(5, 1) == 0 and near.receiver.version == 5


def staged_slots(publisher: Publisher) -> int:
    return len(publisher._staging._slots)
