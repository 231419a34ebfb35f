"""Clients with two addresses of a service: the one that is served gets the requests, whatever happened to the other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from proxy import free_port

from asyncrl import wire
from asyncrl.errors import Unavailable
from asyncrl.net.async_requester import AsyncRequester
from asyncrl.net.keys import write_keys
from asyncrl.net.requester import Requester

SERVICE = """
import asyncio, sys
from pathlib import Path
from asyncrl import wire
from asyncrl.net.keys import read_keys
from asyncrl.net.responder import Responder

async def serve():
    Responder(
        sys.argv[1],
        lambda calls: [call.reply(wire.Ok(sys.argv[1])) for call in calls],
        keys=read_keys(Path(sys.argv[2])) if sys.argv[2] else None,
    )
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(serve())
"""


class Places:
    """Two addresses, and the service processes at them."""

    def __init__(self, key_file: Path | None) -> None:
        self.key_file = key_file
        self.keys = write_keys(key_file) if key_file else None
        self.first, self.second = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.both = f"{self.first},{self.second}"
        self.started: list[subprocess.Popen[str]] = []

    def serve(self, address: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        words = [sys.executable, "-c", SERVICE, address, str(self.key_file or "")]
        self.started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env))
        assert self.started[-1].stdout is not None and self.started[-1].stdout.readline() == "ready\n"
        return self.started[-1]

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait(60)
            process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture(params=["open", "keys"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    made = Places(tmp_path / "server.key" if request.param == "keys" else None)
    yield made
    made.close()


def test_a_stopped_service_and_its_return(places: Places) -> None:
    """Its connections stay open: nothing but the new one says that the other address is served. A request waits longer
    for its answer than the test lasts, so no resend by time can help it.
    """
    first = places.serve(places.first)

    async def ask_all() -> list[str]:
        asker = AsyncRequester(places.both, keys=places.keys, resend_s=300)
        blocking = Requester(places.both, keys=places.keys, resend_s=300)

        async def ask() -> list[str]:
            own = [asker.request(wire.Ok("x"), timeout_s=120) for _ in range(20)]
            answers = await asyncio.gather(*own, asyncio.to_thread(blocking.request, wire.Ok("y"), timeout_s=120))
            return [answer.message.detail for answer in answers]

        try:
            found = await ask()
            first.send_signal(signal.SIGSTOP)
            asked = asyncio.ensure_future(ask())
            await asyncio.to_thread(places.serve, places.second)
            found += await asked
            first.send_signal(signal.SIGCONT)
            first.kill()
            await asyncio.to_thread(first.wait, 60)
            return found + await ask()
        finally:
            asker.close()
            blocking.close()

    found = asyncio.run(ask_all())
    assert found == [places.first] * 21 + [places.second] * 42


def test_none_is_served(places: Places) -> None:
    asker = Requester(places.both, keys=places.keys)
    with pytest.raises(Unavailable, match="no answer"):
        asker.request(wire.Ok(), timeout_s=1.0)
    places.serve(places.second)
    assert asker.request(wire.Ok(), timeout_s=60).message.detail == places.second
    asker.close()
