"""The asking and the answering side over real ZeroMQ: resends, refusals, corrupt and oversized frames, keys, modes."""

import asyncio
import os
import platform
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from asyncrl import wire
from asyncrl.errors import AsyncRLError, ConfigError, Unavailable
from asyncrl.net import addresses, responder
from asyncrl.net.async_requester import AsyncRequester
from asyncrl.net.keys import read_keys, write_keys
from asyncrl.net.requester import Requester
from asyncrl.net.responder import Call, Responder


class Echo:
    """A service on a thread with a loop of its own; answers with the number of payload bytes."""

    def __init__(self, address: str, **options: object) -> None:
        self.ignore = 0
        self._options = options
        self._started = threading.Event()
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(address)), daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    async def _main(self, address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.responder = Responder(address, self._handle, **self._options)  # type: ignore[arg-type]
        self._started.set()
        await self._stop.wait()
        self.responder.close()

    def _handle(self, calls: list[Call]) -> None:
        for call in calls:
            if self.ignore:
                self.ignore -= 1
            elif isinstance(call.message, wire.Stop):
                call.refuse(AsyncRLError("fenced", "no", where="echo"))
            else:
                call.reply(wire.Ok(str(sum(len(payload) for payload in call.payloads))), call.payloads)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return addresses.ipc_address(tmp_path, "echo")


@pytest.fixture
def echo(address: str) -> Iterator[Echo]:
    service = Echo(address, max_bytes=1 << 20)
    yield service
    service.close()


def test_request_reply_and_payloads_without_loss(echo: Echo, address: str) -> None:
    asker = Requester(address)
    packet = asker.request(wire.Ok("x"), [b"12", b"345"], timeout_s=60)
    assert packet.message.detail == "5"
    assert [bytes(payload) for payload in packet.payloads] == [b"12", b"345"]
    asker.close()


def test_lost_answers_are_asked_for_again(echo: Echo, address: str) -> None:
    echo.ignore = 2
    asker = Requester(address, resend_s=0.1)
    assert asker.request(wire.Ok(), timeout_s=60).message.detail == "0"
    assert echo.responder.counters["received"] >= 3  # more where the machine is slow
    asker.close()


def test_refusals_become_the_error_of_their_code(echo: Echo, address: str) -> None:
    asker = Requester(address)
    with pytest.raises(AsyncRLError) as caught:
        asker.request(wire.Stop("x"), timeout_s=60)
    assert (caught.value.code, caught.value.exit_code, caught.value.where) == ("fenced", 75, "echo")
    asker.close()


def test_nobody_there_ends_at_the_deadline() -> None:
    asker = Requester("tcp://127.0.0.1:9", resend_s=0.1)
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"no answer to Ok within 0\.4 s"):
        asker.request(wire.Ok(), timeout_s=0.4)
    assert time.monotonic() - started < 30
    asker.close()


def test_many_requests_under_way_and_nobody_there_async(echo: Echo, address: str) -> None:
    async def main() -> list[str]:
        asker = AsyncRequester(address, max_under_way=32)
        packets = await asyncio.gather(*(asker.request(wire.Ok(), [bytes(size)], timeout_s=60) for size in range(300)))
        asker.close()
        nobody = AsyncRequester("tcp://127.0.0.1:9", resend_s=0.1)
        with pytest.raises(Unavailable):
            await nobody.request(wire.Ok(), timeout_s=0.3)
        nobody.close()
        return [packet.message.detail for packet in packets]

    assert asyncio.run(main()) == [str(size) for size in range(300)]


def raw(address: str) -> tuple[zmq.Context, zmq.Socket]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return context, socket


def test_corrupt_frames_are_answered_or_counted_and_harm_nobody(echo: Echo, address: str) -> None:
    context, socket = raw(address)
    frames = wire.encode(wire.Ok("abc"), request=7)
    socket.send_multipart([frames[0], b"\x00" + bytes(frames[1])[1:]])
    assert socket.poll(5000)
    refusal = wire.decode(socket.recv_multipart())
    assert (refusal.request, refusal.message.code) == (7, "wire.checksum")
    socket.send_multipart([b"GET / HTTP/1.1"])
    socket.send_multipart(wire.encode(wire.Ok(), request=8))  # read after the one before it, on the same connection
    assert socket.poll(5000)
    assert wire.decode(socket.recv_multipart()).request == 8
    asker = Requester(address)
    assert asker.request(wire.Ok(), timeout_s=60).message.detail == "0"
    assert echo.responder.counters["bad_frames"] == 2
    asker.close()
    socket.close(0)
    context.term()


def test_an_oversized_frame_is_dropped_and_the_service_lives(echo: Echo, address: str) -> None:
    asker = Requester(address, resend_s=0.2)
    with pytest.raises(Unavailable):
        asker.request(wire.Ok(), [bytes(2 << 20)], timeout_s=0.8)
    asker.close()
    other = Requester(address)
    assert other.request(wire.Ok(), [bytes(100_000)], timeout_s=60).message.detail == "100000"
    other.close()


def test_keys_admit_their_holder_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = write_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_keys(path) == keys
    service = Echo("tcp://127.0.0.1:0", keys=keys)
    stranger_keys = write_keys(tmp_path / "other.json")
    mixed = msgspec.structs.replace(stranger_keys, server_public=keys.server_public)
    for wrong in (None, mixed):
        stranger = Requester(service.responder.address, keys=wrong, resend_s=0.2)
        with pytest.raises(Unavailable):
            stranger.request(wire.Ok(), timeout_s=0.6)
        stranger.close()
    friend = Requester(service.responder.address, keys=keys)
    assert friend.request(wire.Ok(), timeout_s=60).message.detail == "0"
    friend.close()
    service.close()
    os.chmod(path, 0o644)
    with pytest.raises(ConfigError, match="readable by others"):
        read_keys(path)


def test_unsafe_and_impossible_addresses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no keys"):
        addresses.check_bind("tcp://0.0.0.0:5555", keys=None)
    with pytest.raises(ConfigError, match="is not ipc"):
        addresses.check_bind("http://x", keys=None)
    addresses.check_bind("tcp://127.0.0.1:1", keys=None)
    addresses.check_bind("tcp://0.0.0.0:1", keys=None, insecure=True)
    service = Echo("tcp://127.0.0.1:0")

    async def bind_again() -> None:
        Responder(service.responder.address, lambda calls: None)

    with pytest.raises(ConfigError) as caught:
        asyncio.run(bind_again())
    assert caught.value.code == "net.port_in_use"
    service.close()


def test_ipc_sockets_are_private_and_long_folders_work(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    address = addresses.ipc_address(deep, "buffer")
    assert len(address) < 108
    assert address == addresses.ipc_address(deep, "buffer")
    service = Echo(address)
    path = Path(address.removeprefix("ipc://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    service.close()
    assert not path.parent.exists()  # it lay in the folder for temporary files


def test_folders_of_killed_services_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.net.addresses.tempfile.gettempdir", lambda: str(tmp_path))
    dead, alive, strange = (tmp_path / f"asyncrl-{os.getuid()}-{name}" for name in ("dead", "alive", "strange"))
    ends = []
    for folder in (dead, alive):
        folder.mkdir()
        end = socket.socket(socket.AF_UNIX)
        end.bind(str(folder / "buffer.sock"))
        end.listen()
        ends.append(end)
    ends[0].close()  # what a kill leaves: the file, and nobody behind it
    strange.mkdir()
    (strange / "file").touch()
    for folder in (dead, alive, strange):
        os.utime(folder, (1.0, 1.0))
    service = Echo(addresses.ipc_address(tmp_path / ("x" * 120), "buffer"))
    assert not dead.exists() and alive.exists() and strange.exists()
    service.close()
    ends[1].close()


def test_keys_leave_nothing_in_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    service = Echo(addresses.ipc_address(tmp_path, "echo"), keys=write_keys(tmp_path / "run.key"))
    assert list((tmp_path / "tmp").iterdir()) == []
    service.close()


def test_what_a_dead_service_was_asked_is_asked_of_the_next_one(address: str) -> None:
    """At once when the connection is back, and not when the patience for an answer ends."""
    first = Echo(address)
    first.ignore = 100

    async def ask() -> tuple[wire.Packet, wire.Packet, float]:
        nonlocal first
        asker = AsyncRequester(address, resend_s=300)
        blocking = Requester(address, resend_s=300)
        both = asyncio.gather(
            asker.request(wire.Ok("x"), timeout_s=60),
            asyncio.to_thread(blocking.request, wire.Ok("y"), timeout_s=60),
        )
        while first.ignore > 98:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(first.close)
        first = await asyncio.to_thread(Echo, address)
        started = time.monotonic()
        answers = await both
        took = time.monotonic() - started
        asker.close()
        blocking.close()
        return *answers, took

    one, two, took = asyncio.run(ask())
    first.close()
    assert (one.message, two.message) == (wire.Ok("0"), wire.Ok("0"))
    assert took < 30


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_request_that_was_damaged_under_way_is_sent_again(address: str, times: int) -> None:
    """Once or twice is bad luck; what arrives damaged three times was made so, and is an error."""
    service = Echo(address)
    handle, left = service._handle, {"sync": times, "async": times}

    def refuse_first(calls: list[Call]) -> None:
        for call in calls:
            if left[call.message.detail]:
                left[call.message.detail] -= 1
                call.refuse(AsyncRLError("wire.checksum", "damaged"))
            else:
                handle([call])

    service.responder._handler = refuse_first

    async def ask() -> None:
        asker = AsyncRequester(address, resend_s=300)
        try:
            await asker.request(wire.Ok("async"), timeout_s=30)
        finally:
            asker.close()

    blocking = Requester(address, resend_s=300)
    if times < 3:
        asyncio.run(ask())
        blocking.request(wire.Ok("sync"), timeout_s=30)
    else:
        with pytest.raises(AsyncRLError, match="damaged"):
            asyncio.run(ask())
        with pytest.raises(AsyncRLError, match="damaged"):
            blocking.request(wire.Ok("sync"), timeout_s=30)
    blocking.close()
    service.close()


#: Closes, or disconnects, with requests that cannot leave while answers still come; then the service is killed.
ABANDONS = """
import subprocess, sys, time, zmq
from asyncrl.net import frames

server = '''
import sys, time, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.setsockopt(zmq.RCVHWM, 1)
socket.bind(sys.argv[1])
peer = socket.recv_multipart()[0]
while True:
    socket.send_multipart([peer, b"x" * 100])
    time.sleep(0.005)
'''
address, way = sys.argv[1:]
service = subprocess.Popen([sys.executable, "-c", server, address])
context = zmq.Context()
socket, connections = frames.connect(context, address, None, 1 << 30)
socket.send(b"hello")
socket.recv()
for _ in range(200):
    socket.send(bytes(1_000_000))
if way == "close":
    socket.disable_monitor()
    connections.close(0)
    socket.close(5000)
else:
    socket.disconnect(address)
time.sleep(0.3)
service.kill()
service.wait()
time.sleep(2.3)
print("alive", flush=True)
import os
os._exit(0)
"""


@pytest.mark.parametrize("way", ["close", "disconnect"])
def test_who_leaves_a_service_that_is_killed_is_not_aborted(address: str, way: str) -> None:
    """libzmq aborted the process, by the heartbeat of a connection that was closed and broken."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ABANDONS, address, way],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


class Line:
    """TCP to a service; `cut` lets the connections of now carry nothing any more, without closing them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._cut: set[int] = set()
        self._number = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self._port))
            self._number += 1
            for pair in ((here, there), (there, here)):
                threading.Thread(target=self._pump, args=(*pair, self._number), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, number: int) -> None:
        try:
            while data := source.recv(1 << 16):
                if number not in self._cut:
                    target.sendall(data)
        except OSError:
            return

    def cut(self) -> None:
        self._cut = set(range(1, self._number + 1))

    def close(self) -> None:
        self._listener.close()


def test_the_heartbeats_of_a_service_tell_its_client_that_the_line_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sends none itself, and makes a new connection all the same; what it asked is asked again there."""
    monkeypatch.setattr(responder, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(responder, "SILENT_MS", 400)
    service = Echo("tcp://127.0.0.1:*")
    line = Line(int(service.responder.address.rpartition(":")[2]))
    requester = Requester(line.address, resend_s=60.0)
    try:
        requester.request(wire.StatusRequest(), timeout_s=60)
        time.sleep(0.3)  # a heartbeat has come
        line.cut()
        started = time.monotonic()
        requester.request(wire.StatusRequest(), timeout_s=30)
        assert time.monotonic() - started < 25
    finally:
        requester.close()
        service.close()
        line.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the limit is Linux's")
def test_a_service_closes_connections_that_acknowledge_nothing() -> None:
    """The kernel does: every accepted connection has the limit."""
    service = Echo("tcp://127.0.0.1:*")
    requester = Requester(service.responder.address)
    try:
        requester.request(wire.StatusRequest(), timeout_s=60)
        assert responder.SILENT_MS in {limit for limit in map(_user_timeout, os.listdir("/proc/self/fd")) if limit}
    finally:
        requester.close()
        service.close()


def _user_timeout(descriptor: str) -> int:
    """In ms, of a TCP connection; 0 of anything else."""
    try:
        one = socket.socket(fileno=int(descriptor))
    except OSError:
        return 0
    try:
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    except OSError:
        return 0
    finally:
        one.detach()


HOLES = """
import sys
import numpy as np
from asyncrl.allocator import keep_memory

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4 // 1024

if len(sys.argv) > 1:
    keep_memory(mapped_bytes=1 << 20)
np.ones(24 << 20, np.uint8)  # glibc now takes smaller blocks from the heap
blocks, small = [], []
for _ in range(40):
    blocks.append(np.ones(4 << 20, np.uint8))
    small.append(np.ones(1000))
before = resident_mb()
blocks.clear()
print(before - resident_mb())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_large_blocks_go_back_to_the_system_from_between_small_ones() -> None:
    """160 MiB of 4 MiB blocks; the learner's tensors are such."""
    ways = [
        subprocess.run([sys.executable, "-c", HOLES, *more], capture_output=True, check=True) for more in ([], ["x"])
    ]
    assert int(ways[0].stdout) < 40 and int(ways[1].stdout) > 150
