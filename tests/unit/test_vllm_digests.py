"""Workers of a tensor-parallel vLLM share the buckets to digest; the producer joins what they say."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import WorkError
from producers.engines.vllm.base import join_digests
from weightsync.plan.digest import version_digest

BUCKETS = [f"{number:032x}" for number in range(5)]
WHOLE = version_digest(BUCKETS)


def workers(count: int, *, shares: int) -> list[dict[str, Any]]:
    """What `count` workers say, of which `shares` share the buckets."""
    return [
        {"digests": {str(n): BUCKETS[n] for n in range(rank % shares, len(BUCKETS), shares)}, "shares": shares}
        for rank in range(count)
    ]


@pytest.mark.parametrize(("count", "shares"), [(1, 1), (2, 1), (2, 2), (4, 4), (8, 8), (4, 2)])
def test_the_joined_digest_is_that_of_the_version(count: int, shares: int) -> None:
    assert join_digests(workers(count, shares=shares), buckets=len(BUCKETS)) == WHOLE


@pytest.mark.parametrize("rank", range(3))
def test_a_wrong_byte_of_any_worker_and_bucket_is_another_digest(rank: int) -> None:
    found = workers(3, shares=3)
    for number in list(found[rank]["digests"]):
        good, found[rank]["digests"][number] = found[rank]["digests"][number], "f" * 32
        assert join_digests(found, buckets=len(BUCKETS)) != WHOLE
        found[rank]["digests"][number] = good


@pytest.mark.parametrize(("count", "shares"), [(2, 1), (4, 2)])
def test_workers_that_differ_are_refused(count: int, shares: int) -> None:
    for rank in range(count):
        found = workers(count, shares=shares)
        found[rank]["digests"][str(rank % shares)] = "f" * 32
        with pytest.raises(WorkError, match="different weights"):
            join_digests(found, buckets=len(BUCKETS))


@pytest.mark.parametrize(("count", "shares"), [(1, 1), (2, 2), (4, 2)])
def test_a_bucket_that_a_replica_did_not_digest_is_refused(count: int, shares: int) -> None:
    for rank in range(count):
        found = workers(count, shares=shares)
        del found[rank]["digests"][str(rank % shares)]
        with pytest.raises(WorkError, match="was digested by"):
            join_digests(found, buckets=len(BUCKETS))
    with pytest.raises(WorkError, match="was digested by 0"):
        join_digests(workers(count, shares=shares), buckets=len(BUCKETS) + 1)
    with pytest.raises(WorkError, match="was digested by 0"):
        join_digests([], buckets=1)
