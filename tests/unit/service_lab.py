"""A buffer service in this process: the real service, store and segments, a clock of its own, no sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bare_config import BARE

from asyncrl import wire
from asyncrl.config import parse
from asyncrl.net.responder import Call
from asyncrl.runtime.run_dir import RunDir
from buffers import main as server
from buffers.service.service import BufferService

TOML = BARE + 'max_staleness = 1\nlease_timeout_s = 30.0\nstore = "sqlite"\n[run]\nname = "t"\ndir = "{dir}"\n'


class Asked:
    """What one request got so far."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def reply(self, _peer: bytes, _request: int, message: Any, *_: Any, **__: Any) -> None:
        self.answers.append(message)

    @property
    def answer(self) -> Any:
        assert len(self.answers) == 1, self.answers
        return self.answers[0]


class ServiceLab:
    """The service and its clock. `ask` is a request of a peer, handled alone."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.config = config = parse(TOML.format(dir=folder / "run"))
        self.run = RunDir(config.run_dir).create()
        clocked = lambda config, **parts: BufferService(config, clock=lambda: self.now, **parts)  # noqa: E731
        monkeypatch.setattr(server, "BufferService", clocked)
        self.service = server.open_service(config, server.open_store(config, lambda: False))
        self.ask(wire.Register("learner", 1, "h", 0, "", False, "", {0: "d0"}), request=1)

    @property
    def groups(self) -> Any:
        return self.service.machine

    def restart(self) -> None:
        """Another service over the same store. What the first one did not answer stays without an answer."""
        self.service.close(hands_over=True)
        self.service = server.open_service(self.config, server.open_store(self.config, lambda: False))

    def ask(self, message: Any, payload: bytes = b"", *, request: int) -> Asked:
        return self.ask_together((request, message), payload=payload)[0]

    def ask_together(self, *requests: tuple[int, Any], payload: bytes = b"") -> list[Asked]:
        """Requests (number, message) of one drain."""
        asked = [Asked() for _ in requests]
        payloads = (payload,) if payload else ()
        packets = [wire.decode(wire.encode(message, payloads, request=number)) for number, message in requests]
        calls = [Call(one, b"peer", packet) for one, packet in zip(asked, packets, strict=True)]  # type: ignore[arg-type]
        self.service.handle(calls)
        return asked

    def hello(self, role: str, name: str, pid: int = 7) -> Any:
        return self.ask(wire.Hello(role, name, pid, "h"), request=0).answer

    def beat(self, role: str, name: str, pid: int = 7, **changes: Any) -> Any:
        return self.ask(wire.Heartbeat(role, name, pid, "h", "", **changes), request=0).answer

    def lease(self, name: str, request: int, *, groups: int = 1, wait_s: float = 0.0) -> Asked:
        return self.ask(wire.LeaseRequest(name, 0, groups, wait_s), request=request)

    def tick(self, seconds: float = 0.2) -> None:
        self.now += seconds
        self.service.tick()

    def close(self) -> None:
        self.service.close()
