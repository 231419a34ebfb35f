"""One contract for every transport and encoding: bytes arrive, failures are bounded and named, the next round works."""

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transport_rigs import KIND_NAMES, KINDS, RIGS, digest_of, digests_from, run_round, wait_for

from weightsync.receiver.receiver import built_in_transports
from weightsync.transports.base import TransportError


@pytest.fixture
def foreign() -> set[int | None]:
    """Threads that were there before the rig: other tests of this process may have left some."""
    return {thread.ident for thread in threading.enumerate()}


@pytest.fixture(params=KINDS, ids=KIND_NAMES)
def rig(request: pytest.FixtureRequest, foreign: set[int | None], tmp_path: Path) -> Iterator[Any]:
    name, hops = request.param
    rig = RIGS[name](tmp_path, hops=hops)
    yield rig
    rig.close()


@pytest.mark.parametrize("members", [1, 2, 3])
def test_every_member_gets_the_bytes(rig: Any, members: int) -> None:
    assert run_round(rig, members, 1) == [rig.expected()] * members


def test_the_whole_is_what_the_manifest_says(rig: Any) -> None:
    """Guards the tests themselves: for whole buckets `expected` is the manifest."""
    if not rig.hops:
        assert tuple(rig.expected()) == rig.manifest.bucket_digests
    assert len(set(rig.expected())) >= len(rig.sizes) - 1 and min(filter(None, rig.sizes)) > 0


def test_rounds_follow_one_another(rig: Any) -> None:
    for generation in (1, 2, 3, 4):
        assert run_round(rig, 2, generation) == [rig.expected()] * 2
        rig.publish()


def test_fewer_hops_are_a_suffix(rig: Any) -> None:
    if not rig.hops:
        pytest.skip("for hops alone")
    rig.held.hops, rig.held.steps = rig.held.hops[1:], rig.held.steps[len(rig.plan.bucket_bytes) :]
    assert len(rig.hops) == 1
    assert run_round(rig, 2, 1) == [rig.expected()] * 2


def test_a_corrupt_blob_shows_and_no_other(rig: Any) -> None:
    expected = rig.expected()
    rig.break_blob(2)
    (found,) = run_round(rig, 1, 1)
    assert [number for number, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b] == [2]


def test_a_publisher_that_is_not_there_is_an_error_in_time(rig: Any) -> None:
    inbox = rig.inbox(1, 2, 1)
    rig.vanish()
    started = time.monotonic()
    with pytest.raises(TransportError):
        digests_from(rig, inbox)
    assert time.monotonic() - started < rig.deadline_s + 30
    inbox.close()


def test_what_was_read_stays_until_the_next_but_one(rig: Any) -> None:
    """The receiver works on blob k while k + 1 is read."""
    expected, seen = rig.expected(), []
    inbox = rig.inbox(1, 2, 1)
    sender = threading.Thread(target=rig.send, args=(1, 1))
    sender.start()
    inbox.open()
    before = inbox.read(0)
    for number in range(1, len(rig.sizes)):
        then = digest_of(rig, number - 1, before)
        view = inbox.read(number)
        assert digest_of(rig, number - 1, before) == then
        seen.append(then)
        before = view
    assert [*seen, digest_of(rig, len(rig.sizes) - 1, before)] == expected
    inbox.close()
    sender.join(rig.deadline_s)
    assert not sender.is_alive()


def test_versions_published_meanwhile_show(rig: Any) -> None:
    """Three newer ones are staged while a member is in the middle: what it gets is the old version, or an error, or
    has other digests; the newest is there for the next round."""
    if not rig.pulls:
        pytest.skip("the sender keeps its blobs for the time of the broadcast")
    expected = rig.expected()
    inbox = rig.inbox()

    def overwrite(number: int) -> None:
        if number == 1:
            for _ in range(3):
                rig.publish()

    try:
        found = digests_from(rig, inbox, overwrite)
    except TransportError:
        found = []
    if rig.name == "local":
        assert found[0] == expected[0] and found[2:] != expected[2:]
    elif rig.name == "disk":
        assert found in ([], expected)
    else:
        assert found == expected  # it is kept while somebody reads it
    assert run_round(rig, 2, 2) == [rig.expected()] * 2


def own_threads(foreign: set[int | None]) -> set[str]:
    found = [thread for thread in threading.enumerate() if thread.ident not in foreign]
    return {thread.name for thread in found if thread.name.startswith("weightsync")}


@pytest.mark.parametrize("reads", [0, 1, 3])
def test_closing_at_any_time_leaves_nothing(rig: Any, foreign: set[int | None], reads: int) -> None:
    """Also where a read fails, and where nothing was opened. No thread, no descriptor."""
    threads = partial(own_threads, foreign)
    run_round(rig, 1, 1)  # what is made once is there
    rig.deadline_s = 1.0
    wait_for("quiet", lambda: len(threads()) <= 1)
    time.sleep(0.1)
    before = threads()
    descriptors = len(os.listdir("/proc/self/fd"))
    rig.inbox(1, 2, 2).close()
    for generation in (2, 3):
        inbox = rig.inbox(1, 2, generation)
        sender = threading.Thread(target=quiet, args=(rig, generation))
        sender.start()
        inbox.open()
        for number in range(reads):
            inbox.read(number)
        inbox.close()
        inbox.close()
        sender.join(60)
        assert not sender.is_alive()
    wait_for("the threads to end", lambda: threads() <= before)
    # A pool or a cache may keep a few; nothing may grow with every round.
    wait_for("the descriptors", lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 2)


def quiet(rig: Any, generation: int) -> None:
    try:
        rig.send(1, generation)
    except TransportError:
        return


def test_a_read_after_the_end_is_an_error(rig: Any) -> None:
    inbox = rig.inbox(1, 2, 1)
    sender = threading.Thread(target=quiet, args=(rig, 1))
    sender.start()
    inbox.open()
    inbox.read(0)
    inbox.close()
    sender.join(rig.deadline_s + 1)
    if rig.name != "local":  # a mapping that is gone needs no words
        with pytest.raises(TransportError):
            for number in range(1, len(rig.sizes)):  # an empty blob needs nobody
                inbox.read(number)


def test_built_in_transports_are_the_rigs() -> None:
    assert set(built_in_transports()) <= set(RIGS)
