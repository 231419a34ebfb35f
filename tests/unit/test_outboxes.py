"""Which transports a publisher opens, and when."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.wire import RoundReply
from weightsync.publisher.outboxes import Outboxes
from weightsync.transports.base import TransportError

VERSION: Any = SimpleNamespace(slot=SimpleNamespace(path=Path("/dev/shm/asyncrl-x")))


class Box:
    """Notes what is asked of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []

    def open(self) -> str:
        self.calls.append("open")
        return f"{self.name}:open"

    def offer(self, version: Any) -> str:
        self.calls.append("offer")
        return f"{self.name}:offered"

    def send(self, reply: RoundReply, blobs: Any, *, deadline_s: float) -> None:
        self.calls.append("send")

    def close(self) -> None:
        self.calls.append("close")


def made(transport: str) -> tuple[Outboxes, dict[str, Box]]:
    boxes: dict[str, Box] = {}

    def make(name: str) -> Any:
        assert name not in boxes, "opened once"
        boxes[name] = Box(name)
        return boxes[name]

    return Outboxes(transport, make), boxes


def test_auto_opens_nothing_until_a_member_needs_it() -> None:
    outboxes, boxes = made("auto")
    assert outboxes.addresses(VERSION) == {"local": "/dev/shm/asyncrl-x", "collective": "", "stream": ""} and not boxes
    outboxes.open_remote()
    outboxes.open_remote()
    assert set(boxes) == {"collective", "stream"}
    offered = {"local": "/dev/shm/asyncrl-x", "collective": "collective:offered", "stream": "stream:offered"}
    assert outboxes.addresses(VERSION) == offered
    outboxes.send(RoundReply(1, "transferring"), [], deadline_s=1.0)
    outboxes.close()
    assert boxes["collective"].calls[-2:] == ["send", "close"] and boxes["stream"].calls[-1] == "close"


@pytest.mark.parametrize("transport", ["stream", "disk"])
def test_the_only_transport_is_offered_at_once(transport: str) -> None:
    outboxes, boxes = made(transport)
    assert outboxes.addresses(VERSION) == {transport: f"{transport}:offered"}
    assert boxes[transport].calls == ["offer"]
    with pytest.raises(TransportError, match="not allowed"):
        outboxes.send(RoundReply(1, "transferring"), [], deadline_s=1.0)


def test_a_collective_waits_for_its_members_and_local_needs_nothing() -> None:
    outboxes, boxes = made("collective")
    assert outboxes.addresses(VERSION) == {"collective": ""} and not boxes
    outboxes.open_remote()
    assert outboxes.addresses(VERSION) == {"collective": "collective:offered"}
    outboxes, boxes = made("local")
    outboxes.open_remote()
    assert outboxes.addresses(VERSION) == {"local": "/dev/shm/asyncrl-x"} and not boxes
