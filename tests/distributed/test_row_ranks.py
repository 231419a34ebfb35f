"""Versions that every rank writes a part of have the bytes and digests of gathered ones."""

from __future__ import annotations

from typing import Any

import pytest
import row_cases as cases

pytestmark = pytest.mark.timeout(1200)  # the first one waits for the launch of all jobs


@pytest.mark.parametrize(("count", "name"), [(count, name) for count, found in cases.CASES.items() for name in found])
def test_rows_make_the_version_of_a_gathering(results_of: Any, count: int, name: str) -> None:
    got, written = results_of(count, "row_cases")[0][name], cases.CASES[count][name][2]
    assert got["published"] == [repr([written, written])] * count
    assert not written or got["same"] is got["digests"] is True
    assert all(got["sums"]) and bool(got["sums"]) is written


#: Ranks that send by transport `direct`; of stacked experts, and with tensor or expert places, rank 0 alone.
SENDERS = {(2, "float32"): 2, (2, "bfloat16"): 2, (2, "narrow"): 2, (2, "odd"): 2, (4, "odd"): 4, (4, "hsdp"): 2}


@pytest.mark.parametrize(("count", "name"), [(count, name) for count, found in cases.CASES.items() for name in found])
def test_buckets_are_gathered_by_turns_on_the_ranks_that_send_them(results_of: Any, count: int, name: str) -> None:
    got = results_of(count, "row_cases")[0][name]
    senders = SENDERS.get((count, name), 1)
    assert got["senders"] == senders
    assert list(got["one"][0]) == list(got["buckets"]) and not any(got["one"][1:])
    for rank, mine in enumerate(got["several"]):
        bucket_of = got["buckets"]
        assert list(mine) == [one for one in bucket_of if rank < senders and bucket_of[one] % senders == rank]
        assert all(digest == got["one"][0][one] for one, digest in mine.items())
    assert senders == 1 or all(got["several"][:senders]), "each has one"


def test_two_ranks_send_the_codes_of_the_whole_weights(results_of: Any) -> None:
    """Of a mixture of experts, whose stacked parameters are sent expert by expert."""
    got = results_of(2, "row_cases")[0]["quantised"]
    assert got["got"] == got["wanted"] and len(set(got["got"])) > 100


def test_a_version_is_whole_or_is_not_offered(results_of: Any) -> None:
    """Without room rank 0 raises, and the others do not wait; if one rank does not see the slot, all gather."""
    assert results_of(2, "row_cases")[0]["failures"]["said"] == ["disk.full False False None", "True False False"]
