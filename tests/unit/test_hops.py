"""Hops between staged versions: exact, bounded, dropped with a reason; a version as transports see it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.wire import Hop, Manifest
from weightsync.encoding.delta import decode
from weightsync.plan.buckets import Plan, TensorSpec, group_by_bucket, plan_buckets
from weightsync.plan.digest import version_digest
from weightsync.publisher import delta_chain as hops_module
from weightsync.publisher.delta_chain import DeltaChain, Staged
from weightsync.staging import Staging

PLAN = plan_buckets([TensorSpec(f"t{i}", "BF16", (3000 + i, 2)) for i in range(5)], bucket_bytes=30_000)


class Line:
    """A line of versions in real slots."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.staging = Staging(folder, folders=[folder])
        self.chain = DeltaChain(**{"limit": 4, "deadline_s": 30.0, "threads": 2, **settings})
        self.random = np.random.default_rng(3)
        self.data = self.random.integers(0, 256, sum(t.nbytes for t in PLAN.tensors), dtype=np.uint8)
        self.kept: dict[int, list[bytes]] = {}  # buckets by version

    def stage(self, version: int, *, change: float = 0.01, plan: Plan = PLAN, encoding: str = "full") -> Staged:
        many = int(self.data.size * change)
        self.data[self.random.choice(self.data.size, many, replace=False)] ^= 0x41
        chunks, start = [], 0
        for tensor in plan.tensors:
            chunks.append((tensor.name, self.data[start : start + tensor.nbytes]))
            start += tensor.nbytes
        slot, digests = self.staging.fill(plan, chunks)
        manifest = Manifest(version, plan.digest, plan.bucket_bytes, digests, version_digest(digests), encoding)
        self.kept[version] = [bytes(bucket) for bucket in slot.buckets(plan.bucket_bytes)]
        return Staged(manifest, plan, self.staging, slot, slot.order)

    def add(self, version: int, **settings: Any) -> Staged:
        staged = self.stage(version, **settings)
        self.chain.extend(staged)
        return staged

    def followed(self, staged: Staged, start: int) -> list[bytes]:
        """The buckets of version `start` after its hops."""
        buckets = [bytearray(bucket) for bucket in self.kept[start]]
        chain = staged.hops[[hop.base for hop in staged.hops].index(start) :]
        with staged.blobs(chain) as blobs:
            assert blobs is not None and [blob.nbytes for blob in blobs] == [n for hop in chain for n in hop.nbytes]
            for number, blob in enumerate(blobs):
                bucket = number % len(buckets)
                decode(blob, memoryview(buckets[bucket]), group_by_bucket(PLAN.tensors, len(buckets))[bucket])
        return [bytes(bucket) for bucket in buckets]


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path)
    yield line
    line.chain.close()
    assert not any(slot.readers for slot in line.staging._slots)
    line.staging.close()


def bases(staged: Staged) -> list[int]:
    return [hop.base for hop in staged.hops]


def test_every_older_version_of_the_chain_leads_to_the_newest(line: Line) -> None:
    versions = {version: line.add(version) for version in (5, 6, 7, 9)}
    assert {version: bases(staged) for version, staged in versions.items()} == {5: [], 6: [5], 7: [5, 6], 9: [5, 6, 7]}
    newest = versions[9]
    assert [hop.base_digest for hop in newest.hops] == [versions[v].manifest.digest for v in (5, 6, 7)]
    for start in (5, 6, 7):
        assert line.followed(newest, start) == line.kept[9]
    assert line.chain.why == "" and 0 < line.chain.hop_bytes < PLAN.nbytes / 10
    assert len(list(line.staging._folders[0].iterdir())) == 2, "two slots are enough while nobody is in a hurry"


def test_the_oldest_hops_go_by_number_and_by_bytes(tmp_path: Path) -> None:
    few = Line(tmp_path / "few", limit=2)
    assert [bases(few.add(version)) for version in range(5)] == [[], [0], [0, 1], [1, 2], [2, 3]]
    big = Line(tmp_path / "big", limit=9)
    for version in range(8):
        staged = big.add(version, change=0.2)
        assert sum(sum(hop.nbytes) for hop in staged.hops) < PLAN.nbytes
    assert 0 < len(staged.hops) < 7 and bases(staged)[-1] == 6
    assert big.followed(staged, bases(staged)[0]) == big.kept[7]
    none = Line(tmp_path / "none", limit=0)
    none.add(0)
    assert none.add(1).hops == ()


def test_a_hop_that_is_not_smaller_is_dropped_with_those_before(line: Line) -> None:
    line.add(0)
    assert bases(line.add(1)) == [0]
    line.data[:] = line.random.integers(0, 256, line.data.size, dtype=np.uint8)
    assert line.add(2).hops == () and line.chain.why == "not smaller than the weights" and line.chain.hop_bytes == 0
    assert bases(line.add(3)) == [2], "the next one starts anew"


def test_hops_that_nobody_wants_are_not_encoded_and_the_next_one_starts_there(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.add(0)
    assert bases(line.add(1)) == [0]
    with monkeypatch.context() as patched:
        patched.setattr("weightsync.publisher.delta_chain.encode", None)  # whoever encodes fails
        for version in (2, 3):
            staged = line.stage(version)
            line.chain.extend(staged, wanted=False)
            assert staged.hops == () and (line.chain.why, line.chain.hop_bytes) == ("no member takes hops", 0)
    newest = line.add(4)
    assert bases(newest) == [3] and line.chain.why == "" and line.followed(newest, 3) == line.kept[4]
    assert len(list(line.staging._folders[0].iterdir())) == 2


def test_another_layout_and_adapters_have_no_hops(line: Line) -> None:
    line.add(0)
    other = plan_buckets([TensorSpec("z", "U8", (1000,))], bucket_bytes=1 << 20)
    assert line.add(1, plan=other).hops == () and "layout" in line.chain.why
    line.add(2)
    assert line.add(3, encoding="adapter").hops == ()
    assert line.add(4).hops == () and "layout" in line.chain.why


def test_an_encoding_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(tmp_path, deadline_s=0.05)
    line.add(0)
    monkeypatch.setattr(hops_module, "encode", lambda *_: time.sleep(0.2) or b"")
    assert line.add(1).hops == () and line.chain.why == "not encoded within 0.05 s"


def test_while_a_hop_is_encoded_both_versions_stay_and_a_newer_one_skips(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of the module: 8 and 9 come while 6 -> 7 is encoded; the next hop is 7 -> 9."""
    line.add(6)
    began, go_on = threading.Event(), threading.Event()
    real = hops_module.encode

    def slow(*args: Any) -> bytes:
        began.set()
        assert go_on.wait(60)
        return real(*args)

    monkeypatch.setattr(hops_module, "encode", slow)
    seven = line.stage(7)
    encoding = threading.Thread(target=line.chain.extend, args=(seven,))
    encoding.start()
    assert began.wait(60)
    line.stage(8)
    nine = line.stage(9)
    go_on.set()
    encoding.join(60)
    assert line.followed(seven, 6) == line.kept[7]
    line.chain.extend(nine)
    assert bases(nine) == [6, 7] and line.followed(nine, 6) == line.kept[9] and line.followed(nine, 7) == line.kept[9]


def test_a_version_that_was_overwritten_is_left_out_and_an_overwritten_base_drops_the_hop(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = line.add(0)
    late = line.stage(1)
    for version in (2, 3, 4):
        line.stage(version)
    line.chain.extend(late)
    assert not late.hops and bases(line.add(5)) == [0], "as if version 1 had never been"
    five = line.chain._end
    assert five is not None
    real = hops_module.encode

    def torn(*args: Any) -> bytes:
        five.slot.order = 0  # as at the limit of the slots
        return real(*args)

    monkeypatch.setattr(hops_module, "encode", torn)
    assert line.add(6).hops == () and line.chain.why == "the version before was overwritten"
    assert zero.hops == ()


def test_a_version_gives_what_it_has_and_keeps_it(line: Line) -> None:
    line.add(0)
    staged = line.add(1)
    with staged.blobs(()) as blobs:
        assert blobs is not None and [bytes(blob) for blob in blobs] == line.kept[1]
        line.stage(2)
        line.stage(3)
        assert [bytes(blob) for blob in blobs] == line.kept[1]
    strange = Hop(0, "other", staged.hops[0].nbytes)
    for wrong in ((strange,), (*staged.hops, strange), (strange, *staged.hops)):
        with staged.blobs(wrong) as blobs:
            assert blobs is None
    line.chain.close()
    for version in (4, 5, 6):
        line.stage(version)
    with staged.blobs(()) as blobs:
        assert blobs is None, "overwritten"
    with staged.blobs(staged.hops) as blobs:
        assert blobs is not None, "hops are bytes of their own"
