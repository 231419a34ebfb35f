"""Operations of a process group on a device end within their limit, and no watchdog of torch ends the process."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.transports import process_groups
from weightsync.transports.process_groups import GROUPS, finish, leave


class Work:
    """An operation that ends after so many looks at it; `error`: what it then raises."""

    def __init__(self, looks: int, error: str = "") -> None:
        self.looks, self.error, self.waited = looks, error, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self, timeout: timedelta) -> None:
        assert timeout > timedelta(0)
        self.waited = True
        if self.error:
            raise RuntimeError(self.error)


class Group:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def abort(self) -> None:
        self.calls.append("abort")

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        raise RuntimeError("a peer is gone")


def test_an_operation_of_a_lost_peer_is_aborted_at_the_limit() -> None:
    group, started = Group(), time.monotonic()
    with pytest.raises(RuntimeError, match="no end of the operation within"):
        finish(Work(10**9), group, within_s=0.05, on_device=True)
    assert group.calls == ["abort"] and time.monotonic() - started >= 0.05


def test_an_operation_that_ends_says_how() -> None:
    group = Group()
    finish(done := Work(3), group, within_s=60, on_device=True)
    assert done.waited and done.looks < 0
    with pytest.raises(RuntimeError, match="connection closed"):
        finish(Work(0, "connection closed"), group, within_s=60, on_device=True)
    finish(host := Work(10**9), group, within_s=60, on_device=False)
    assert host.waited and host.looks == 10**9, "host memory: the backend's own wait has the limit"
    assert group.calls == []


def test_a_group_is_shut_down_before_it_is_let_go() -> None:
    group = Group()
    leave(group)
    leave(None)
    leave(SimpleNamespace())
    assert group.calls == ["shutdown"]


@pytest.mark.parametrize("before", [None, "0"])
def test_groups_of_nccl_have_no_watchdog(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """It would end the process a minute after a peer has died, and at its own limit: the learner, and every producer
    that lives. Torch starts none where this variable is set; other groups of the process keep theirs."""
    made: list[Any] = []

    class NCCL:
        Options = SimpleNamespace

        def __init__(self, *given: Any) -> None:
            assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
            made.append(given)
            if given[1] == 2:
                raise RuntimeError("no such device")

    monkeypatch.setattr(process_groups, "dist", SimpleNamespace(ProcessGroupNCCL=NCCL))
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if before is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
    GROUPS["nccl"]("store", 1, 3, timedelta(seconds=15))
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    with pytest.raises(RuntimeError):
        GROUPS["nccl"]("store", 2, 3, timedelta(seconds=15))
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    store, rank, size, options = made[0]
    assert (store, rank, size) == ("store", 1, 3) and options._timeout >= timedelta(hours=1)
