"""Listeners of torch: closed to everybody once the ranks have met, while the ranks go on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from bare_config import BARE
from ports import listeners

from asyncrl.net import closed_listeners
from asyncrl.net.closed_listeners import closed_afterwards
from asyncrl.runtime.device import Device
from learners.gang import gang

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the packet filter is Linux's")

RANK = """
import json, os, sys
import torch.distributed as dist
from asyncrl.config import parse
from learners.gang.gang import Gang

gang = Gang.join(parse(os.environ["CONFIG"]))
other = gang.clone(timeout_s=60)
gang.mesh(shard=2)
print(json.dumps("met"), flush=True)
sys.stdin.readline()
assert other.gather(bytes([gang.rank])) == [b"\\0", b"\\1"] and gang.total({"one": 1.0}) == {"one": 2.0}
print(json.dumps("done"), flush=True)
gang.leave()
"""


def answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=1.5).close()
    except TimeoutError:
        return False
    return True


@pytest.fixture
def older() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_only_listeners_of_the_block_are_closed_and_only_to_latecomers(older: socket.socket) -> None:
    with closed_afterwards(pytest.fail):
        listener = socket.create_server(("127.0.0.1", 0))
        early = socket.create_connection(listener.getsockname(), timeout=60)
        served, _ = listener.accept()
    assert answers(older.getsockname()) and not answers(listener.getsockname())
    early.sendall(b"still here")
    assert served.recv(100) == b"still here"
    for one in (early, served, listener):
        one.close()


def test_after_an_error_listeners_stay_open() -> None:
    listener = None
    with pytest.raises(ZeroDivisionError), closed_afterwards(pytest.fail):
        listener = socket.create_server(("127.0.0.1", 0))
        raise ZeroDivisionError
    assert listener is not None and answers(listener.getsockname())
    listener.close()


def test_a_system_that_forbids_the_filter_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(closed_listeners, "SO_ATTACH_FILTER", 9999)
    gang._warn_of_listeners.cache_clear()
    ranks = gang.Gang(0, 2, Device("cpu"))
    for _ in range(2):
        with ranks.meeting():
            listener = socket.create_server(("127.0.0.1", 0))
        assert answers(listener.getsockname())
        listener.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert "forbids packet filters" in line and "docs/security.md" in line


def test_nobody_else_reaches_what_torch_listens_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "CONFIG": BARE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None and json.loads(rank.stdout.readline()) == "met"
        places = {(one.address, one.port) for one in listeners({rank.pid for rank in ranks}) if one.kind == "tcp"}
        assert ("127.0.0.1", port) in places and len(places) >= 4, places  # the store, and Gloo on each rank
        assert [place for place in places if answers(place)] == []
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go on\n")
            rank.stdin.flush()
        for rank in ranks:
            said, _ = rank.communicate(timeout=120)
            assert json.loads(said) == "done"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
