"""Idle connections to every kind of listening socket: cut after seconds, and never more than the limit."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from bare_config import BARE

from asyncrl import wire
from asyncrl.config import dump, parse
from asyncrl.monitor.prometheus import Server as MetricsServer
from asyncrl.net import connections, descriptors, http_server
from asyncrl.net.async_requester import AsyncRequester
from asyncrl.net.responder import Call, Responder
from asyncrl.runtime.run_dir import RunDir
from producers.agents import endpoint as agents
from producers.sandbox.server import Server as SandboxServer

MOST = 20


def idle(port: int, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(count)]


def is_open(one: socket.socket) -> bool:
    """Whether the other end keeps the connection; what it sends is read and thrown away."""
    one.setblocking(False)
    try:
        while data := one.recv(4096):
            assert data
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def wait(what: Callable[[], Any], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def count_open(some: list[socket.socket]) -> int:
    return sum(map(is_open, some))


@contextmanager
def serving(server: Any) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


def get(port: int, path: str) -> int:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    client.request("GET", path)
    status = client.getresponse().status
    client.close()
    return status


@pytest.mark.parametrize("kind", ["metrics", "sandbox"])
def test_an_http_server_answers_beside_idle_connections(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", MOST)
    run = RunDir(tmp_path / "run").create()
    run.config.write_text(dump(parse(BARE)))
    server: Any = MetricsServer(run, 0) if kind == "metrics" else SandboxServer(None, 0)  # type: ignore[arg-type]
    path = "/metrics" if kind == "metrics" else "/v1/ping"
    with serving(server) as port:
        some = idle(port, MOST + 30)
        wait(lambda: count_open(some) <= MOST)
        assert not is_open(some[0]) and is_open(some[-1]), "the oldest ones make room"
        assert get(port, path) == 200
        wait(lambda: count_open(some) == 0)  # each after its few seconds
        assert get(port, path) == 200 and server._count <= 1


def test_a_message_that_is_faster_than_the_news_of_its_connection_counts() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    guard = connections.ConnectionGuard(router, limit=1)
    ends = [socket.socketpair() for _ in range(2)]
    (first, _), (second, _) = ends
    try:
        guard.note_message(first.fileno(), b"its key")
        guard._take(zmq.EVENT_ACCEPTED, first.fileno())
        guard._take(zmq.EVENT_ACCEPTED, second.fileno())  # one too many: the silent one has to go
        assert list(guard._connections) == [first.fileno()] and guard._connections[first.fileno()].key == b"its key"
        guard._take(zmq.EVENT_DISCONNECTED, first.fileno())
        guard._take(zmq.EVENT_ACCEPTED, first.fileno())
        assert not guard._connections[first.fileno()].spoke, "the next one on this descriptor"
    finally:
        guard.close()
        context.destroy(0)
        for pair in ends:
            for one in pair:
                one.close()


def test_a_socket_of_messages_keeps_those_that_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "connection_limit", lambda: MOST)
    monkeypatch.setattr(connections, "SILENT_S", 2.0)

    def answer(calls: list[Call]) -> None:
        for call in calls:
            call.reply(wire.Ok())

    async def play() -> None:
        responder = Responder("tcp://127.0.0.1:*", answer)
        asker = AsyncRequester(responder.address, resend_s=1.0)
        await asker.request(wire.Ok(), timeout_s=30)
        some = await asyncio.to_thread(idle, int(responder.address.rpartition(":")[2]), MOST + 60)
        await asyncio.to_thread(wait, lambda: count_open(some) < MOST)
        assert len(responder._guard) <= MOST
        await asyncio.to_thread(wait, lambda: count_open(some) == 0)
        assert len(responder._guard) == 1, "the one that spoke stays"
        await asker.request(wire.Ok(), timeout_s=30)
        assert asker._connected <= 1, "it was never cut"
        asker.close()
        responder.close()

    asyncio.run(play())


def test_of_speakers_the_key_with_the_most_loses_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = connections.ConnectionGuard.__new__(connections.ConnectionGuard)
    guard._connections = {}
    for number, key in enumerate([b"a", b"b", b"b", b"b", b"a"]):
        connection = connections._Connection(number)
        connection.spoke, connection.key = True, key
        guard._connections[number] = connection
    assert guard._choose() == 1
    guard._connections[9] = connections._Connection(9)
    assert guard._choose() == 9


def test_the_endpoint_of_agents_drops_who_has_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "MOST_CONNECTIONS", MOST)

    async def play() -> None:
        endpoint = agents.Endpoint(model="policy", tokenizer=None)  # type: ignore[arg-type]
        await endpoint.open()
        session = endpoint.begin(None)  # type: ignore[arg-type]
        import aiohttp

        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.key}"}) as client:
            assert (await client.get(f"{endpoint.url}/models")).status == 200
            some = await asyncio.to_thread(idle, endpoint.port, MOST + 60)
            await asyncio.to_thread(wait, lambda: count_open(some) <= MOST)
            assert (await client.get(f"{endpoint.url}/models")).status == 200
            await asyncio.to_thread(wait, lambda: count_open(some) == 0)
            assert len(endpoint._runner.server.connections) == 1
            assert (await client.get(f"{endpoint.url}/models")).status == 200
        await endpoint.close()

    asyncio.run(play())


def test_a_quarter_of_the_descriptors_is_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "raise_descriptor_limit", lambda: 400)
    assert descriptors.connection_limit() == 100
    monkeypatch.setattr(descriptors, "raise_descriptor_limit", lambda: 1 << 20)
    assert descriptors.connection_limit() == descriptors.MOST_CONNECTIONS
