"""Receivers with the real service and publisher: deltas, engines in place, relays, and looks after the commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from receiver_lab import GROUPS, Engine, Lends, Member, buckets_of
from test_weightsync_service import PLAN, World, until, weights

from asyncrl.wire import Instruction, Manifest
from weightsync.plan.digest import bucket_digest, version_digest
from weightsync.receiver.hold import Hold
from weightsync.receiver.receiver import built_in_transports
from weightsync.transports.base import TransportError


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def build(**settings: Any) -> World:
        made.append(World(tmp_path, **settings))
        return made[-1]

    yield build
    for world in made:
        world.close()


def close_to(version: int) -> Iterator[tuple[str, np.ndarray]]:
    """Version 100 with one byte per tensor changed for each version after it: small deltas."""
    for name, data in weights(100):
        changed = data.copy()
        changed[: version - 100] += np.uint8(1)
        yield name, changed


def test_deltas_are_taken_and_a_spoilt_base_is_healed(make_world: Callable[..., World]) -> None:
    world = make_world(transport="stream", encoding="delta", timeout_s=10.0)
    publisher, member = world.publisher(), Member(world, "a", Engine())
    for version in (100, 101):
        publisher.publish(version, PLAN, close_to(version))
        publisher.wait_committed(version, members=1, timeout_s=90)
    first, second = (line for line in world.lines() if line["state"] == "committed")
    assert (first["encoding"], second["encoding"]) == ("full", "delta")
    member.engine.held[1][30] ^= 1
    publisher.publish(102, PLAN, close_to(102))
    publisher.wait_committed(102, members=1, timeout_s=90)
    held = b"".join(bytes(member.engine.held[n]) for n in range(len(GROUPS)))
    assert (
        version_digest([bucket_digest(g, member.engine.held[n]) for n, g in enumerate(GROUPS)])
        == (publisher.digests[102])
    )
    assert held and "delta" in member.receiver.encodings
    failed = [line for line in world.lines() if line["version"] == 102 and line["state"] == "failed"]
    assert "bucket 1 of version 102 has another digest" in failed[0]["members"]["a"]


def test_an_engine_in_place_says_so_before_the_first_byte(make_world: Callable[..., World]) -> None:
    world = make_world(transport="local", in_place=True)
    publisher = world.publisher()
    engine = Engine(bucket_s=0.05, in_place=True)
    seen: list[tuple[int, str]] = []
    right = engine.begin_update

    async def begin(manifest: Manifest, tensors: Any) -> None:
        status = (await asyncio.to_thread(world.status))["members"]["a"]
        seen.append((status["version"], status["digest"]))
        await right(manifest, tensors)

    engine.begin_update = begin
    member = Member(world, "a", engine)
    for version in (0, 1):
        publisher.publish(version, PLAN, weights(version))
        publisher.wait_committed(version, members=1, timeout_s=90)
        assert member.holds(version) and not member.receiver.dirty
    assert seen == [(-1, ""), (-1, "")], "the service knew before the engine was touched"
    assert member.receiver.encodings == ("full",)


def test_an_engine_in_place_that_was_left_in_the_middle_is_filled_again(make_world: Callable[..., World]) -> None:
    world = make_world(transport="local", in_place=True)
    publisher, engine = world.publisher(), Engine(in_place=True)
    makers = built_in_transports()
    cut = [False]

    def maker(instruction: Instruction) -> Any:
        inbox = makers["local"](instruction)
        read = inbox.read

        def broken(number: int, into: memoryview | None = None) -> memoryview:
            if cut[0] and number == 2:
                raise TransportError("cut")
            return read(number)

        inbox.read = broken  # type: ignore[method-assign]
        return inbox

    member = Member(world, "a", engine, transports={"local": maker})
    publisher.publish(0, PLAN, weights(0))
    publisher.wait_committed(0, members=1, timeout_s=90)
    cut[0] = True
    publisher.publish(1, PLAN, weights(1))
    until(lambda: "abort" in engine.done, "the transfer fails")
    until(lambda: world.status()["members"]["a"]["version"] == -1, "it holds nothing")
    assert member.receiver.dirty and engine.health().version == -1
    cut[0] = False
    publisher.wait_committed(1, members=1, timeout_s=90)
    assert member.holds(1) and engine.health().version == 1


def test_a_member_passes_on_what_it_holds(make_world: Callable[..., World]) -> None:
    world = make_world(transport="stream", relay_fanout=1)
    publisher = world.publisher()
    first = Member(world, "first", Engine())
    for version in (0, 1):
        publisher.publish(version, PLAN, weights(version))
        publisher.wait_committed(version, members=1, timeout_s=90)
    assert first.holds(1)
    until(lambda: world.status()["members"]["first"]["relay"], "the service knows the relay")
    second = Member(world, "second", Engine())
    publisher.wait_committed(1, members=2, timeout_s=90)
    assert second.holds(1)
    sources = {line["round"]: line for line in world.lines()}
    assert "first" in str(list(sources.values())[-1]), "the second took it from the first"


def test_bits_that_flip_later_end_the_receiver(make_world: Callable[..., World]) -> None:
    world = make_world(transport="local")
    publisher = world.publisher()
    member = Member(world, "a", Engine(), attest_every_s=0.05)
    publisher.publish(0, PLAN, weights(0))
    publisher.wait_committed(0, members=1, timeout_s=90)
    time.sleep(0.8)
    assert member.error is None, "right weights are found right"
    member.engine.held[3][99] ^= 128
    until(lambda: member.error is not None, "the change is seen")
    assert member.error is not None and member.error.code == "engine.broken" and member.error.where == "a"
    assert "have changed since the commit" in member.error.message
    assert member.receiver.digests[0] != publisher.digests[0], "what is still sent carries what is held"
    shown = world.status()["members"]["a"]
    assert shown["state"] != "serving" and "have changed since the commit" in shown["said"]
    until(lambda: any(line["state"] == "said" for line in world.lines()), "it is in the log")
    line = next(line for line in world.lines() if line["state"] == "said")
    assert (line["member"], line["version"]) == ("a", 0) and line["said"] == shown["said"]


def test_versions_are_passed_on_from_where_the_engine_holds_them(make_world: Callable[..., World]) -> None:
    """No copy for others; the version before goes as soon as its room is needed, and late ones get whole weights."""
    world = make_world(transport="stream", relay_fanout=1)
    publisher, first = world.publisher(), Member(world, "first", Lends())
    ended = []
    for version in range(4):
        publisher.publish(version, PLAN, weights(version))
        publisher.wait_committed(version, members=1, timeout_s=90)
        until(lambda: first.receiver._relay.address, "it is offered")
        held = first.receiver._relay.copies
        assert [item.manifest.version for item in held] == list(range(max(0, version - 1), version + 1))
        with held[-1].blobs(()) as blobs:
            assert blobs is not None and [bytes(blob) for blob in blobs] == buckets_of(version)
            assert all(blob.obj is first.engine.held[number] for number, blob in enumerate(blobs))
        assert [item.is_gone() for item in ended] == [True] * max(0, version - 1)
        ended.append(held[0]) if version else None
    until(lambda: world.status()["members"]["first"]["relay"], "the service knows the relay")
    publisher.close()
    late = Member(world, "late", Lends())
    until(lambda: late.receiver.version == 3, "it has the version from the relay")
    assert [bytes(late.engine.held[number]) for number in range(len(GROUPS))] == buckets_of(3)
    assert world.status()["members"]["late"]["source"] == "first"


@pytest.mark.parametrize("in_place", [False, True])
def test_a_version_is_kept_for_an_evaluation_and_the_others_go_on(
    make_world: Callable[..., World], in_place: bool
) -> None:
    world = make_world(transport="local", timeout_s=10.0, in_place=in_place)
    publisher = world.publisher()
    keeps, other = (Member(world, name, Engine(in_place=in_place)) for name in "ab")
    publisher.publish(1, PLAN, weights(1))
    publisher.wait_committed(1, members=2, timeout_s=90)
    assert keeps.receiver.hold.keep(1, 60.0) and not other.receiver.hold.active
    for version in (2, 3):
        publisher.publish(version, PLAN, weights(version))
        until(lambda version=version: other.holds(version), f"b holds {version}")
    time.sleep(0.3)
    assert keeps.holds(1), "neither received in place nor committed"
    assert not any(reason for line in world.lines() for reason in line["members"].values() if "no answer" in reason)
    keeps.receiver.hold.release()
    until(lambda: keeps.holds(3), "a holds 3")


def test_weights_under_way_are_given_up_for_an_evaluation(make_world: Callable[..., World]) -> None:
    world = make_world(transport="local", timeout_s=10.0)
    publisher, engine = world.publisher(), Engine()
    member = Member(world, "a", engine)
    publisher.publish(1, PLAN, weights(1))
    publisher.wait_committed(1, members=1, timeout_s=90)
    engine.bucket_s = 0.2
    publisher.publish(2, PLAN, weights(2))
    until(lambda: engine.done[-1].startswith("bucket"), "a bucket of 2")
    assert member.receiver.hold.keep(1, 60.0)
    until(lambda: engine.done[-1] == "abort", "it is given up")
    time.sleep(0.3)
    assert member.holds(1) and engine.done.count("commit") == 1
    member.receiver.hold.release()
    until(lambda: member.holds(2), "a holds 2")


def test_a_hold_ends_by_itself_and_not_before_the_version_is_left() -> None:
    now, served = [0.0], [4]
    hold = Hold(lambda: served[0], clock=lambda: now[0])
    assert not hold.active and not hold.keep(3, 10.0), "another version is served"
    assert hold.keep(4, 10.0)
    now[0] = 9.0
    assert hold.keep(4, 10.0), "not from anew"
    now[0] = 10.0
    assert not hold.active and not hold.keep(4, 10.0)
    served[0] = -1  # it commits, or loads in place
    assert not hold.keep(5, 10.0)
    served[0] = 5
    assert hold.active
    hold.release()
    assert not hold.active
