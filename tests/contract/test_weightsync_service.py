"""Weight sync whole: service, publisher and receivers, with processes that are killed, stopped and late."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import warm

from asyncrl.config import Config, DataConfig, ModelConfig, RewardFunctionConfig, RunConfig, WeightSyncConfig, dump
from asyncrl.engine import EngineCapabilities
from asyncrl.errors import AsyncRLError, Fenced, HandshakeError, Unavailable, WorkError
from asyncrl.metrics import read_lines
from asyncrl.monitor.control import ServiceClient
from asyncrl.net.keys import Keys, write_keys
from asyncrl.net.requester import Requester
from asyncrl.runtime import role
from asyncrl.runtime.run_dir import RunDir, endpoint
from asyncrl.wire import Instruction, LeaseRequest, Manifest, Tensor
from weightsync.main import serve
from weightsync.plan.buckets import Plan, TensorSpec, plan_buckets
from weightsync.plan.digest import digest_tensors
from weightsync.publisher.publisher import Publisher
from weightsync.receiver.receiver import Receiver, built_in_transports

ROOT = Path(__file__).parents[2]
SPECS = [TensorSpec(f"layer.{i}", "F32", (250 + i, 4)) for i in range(12)]
PLAN = plan_buckets(SPECS, bucket_bytes=9000)


def weights(version: int, plan: Plan = PLAN) -> Iterator[tuple[str, np.ndarray]]:
    random = np.random.default_rng(version + 1000)
    for tensor in plan.tensors:
        yield tensor.name, random.integers(0, 256, tensor.nbytes, dtype=np.uint8)


class ArrayEngine:
    """An engine of arrays: staged buckets become its model at the commit, and the digest is taken of the model."""

    def __init__(self, *, bucket_s: float = 0.0, fingerprint: str = "model-a", marks: Path | None = None) -> None:
        self.bucket_s = bucket_s
        self.marks = marks  # a file that grows by one byte per bucket taken
        self.model: dict[str, bytes] = {}
        self.aborts = 0
        self.after_bucket: Callable[[int], None] = lambda number: None
        self.spoil = False
        self._fingerprint = fingerprint
        self._staged: dict[str, bytes] = {}
        self._tensors: tuple[Tensor, ...] = ()

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("arrays", max_samples=1, max_tokens=64, encodings=("full", "adapter"))

    def fingerprint(self) -> str:
        return self._fingerprint

    async def begin_update(self, manifest: Manifest, tensors: Any) -> None:
        self._tensors, self._staged = tuple(tensors), {}

    async def apply_bucket(self, number: int, data: Any) -> str:
        for tensor in self._tensors:
            if tensor.bucket == number:
                self._staged[tensor.name] = bytes(data[tensor.offset : tensor.offset + tensor.nbytes])
        self.after_bucket(number)
        if self.marks is not None:
            with self.marks.open("ab") as file:
                file.write(b"x")
        await asyncio.sleep(self.bucket_s)
        return ""

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        for tensor in self._tensors:
            if tensor.bucket == number:
                into[tensor.offset : tensor.offset + tensor.nbytes] = self.model[tensor.name]
        return True

    async def commit_update(self) -> str:
        self.model = self._staged
        if self.spoil:
            name = self._tensors[0].name
            self.model[name] = b"\x00" * len(self.model[name])
        return digest_tensors(self._tensors, self.model.__getitem__)[1]

    async def abort_update(self) -> None:
        self.aborts += 1
        self._staged = {}


class Member:
    """A receiver in a thread with its own event loop."""

    def __init__(
        self, world: "World", name: str, engine: Any = None, *, kind: type[Receiver] = Receiver, **settings: Any
    ) -> None:
        self.engine: Any = engine or ArrayEngine()
        self.receiver = kind(
            world.address, engine=self.engine, name=name, keys=world.keys, config=world.config.weightsync, **settings
        )
        self.error: AsyncRLError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        async def main() -> None:
            stop = asyncio.Event()
            running = asyncio.ensure_future(self.receiver.run(stop))
            while not running.done():
                if self._stop.is_set():
                    stop.set()
                await asyncio.sleep(0.02)
            await running

        try:
            asyncio.run(main())
        except AsyncRLError as error:
            self.error = error

    def holds(self, version: int) -> bool:
        return self.receiver.version == version and self.engine.model == {n: d.tobytes() for n, d in weights(version)}

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the receiver does not stop"


class World:
    """A run folder, a service in a thread, and what the test adds."""

    def __init__(self, root: Path, **settings: Any) -> None:
        sync = WeightSyncConfig(**{"timeout_s": 6.0, "member_timeout_s": 3.0, **settings})
        self.config = Config(
            run=RunConfig(dir=str(root / "run")),
            model=ModelConfig(path="none"),
            data=DataConfig(source="a:b"),
            reward=(RewardFunctionConfig(function="a:b"),),
            weightsync=sync,
        )
        self.run = RunDir(self.config.run_dir).create()
        self.run.config.write_text(dump(self.config))
        self.address = endpoint(self.config, "weightsync")
        self.keys: Keys | None = None
        self.cleanups: list[Callable[[], None]] = []
        self.start_service()

    def start_service(self) -> None:
        self.stop = role.Stop()
        stop = self.stop
        self.service = threading.Thread(
            target=lambda: asyncio.run(serve(self.config, stop, address=self.address, keys=self.keys)), daemon=True
        )
        self.service.start()

    def stop_service(self) -> None:
        self.stop.set("test")
        self.service.join(60)
        assert not self.service.is_alive()

    def publisher(self, *, epoch: int = 1, fingerprint: str = "model-a", name: str = "learner") -> Publisher:
        publisher = Publisher(
            self.address,
            keys=self.keys,
            config=self.config.weightsync,
            name=name,
            fingerprint=fingerprint,
            scratch=self.run.root / "scratch" / name,
        )
        publisher.start(epoch=epoch)
        self.cleanups.append(publisher.close)
        return publisher

    def member(self, name: str, engine: ArrayEngine | None = None, transports: Any = None) -> Member:
        member = Member(self, name, engine, transports=transports)
        self.cleanups.append(member.close)
        return member

    def process(self, name: str, *, bucket_s: float, marks: Path) -> "subprocess.Popen[bytes]":
        child = warm.popen(
            [sys.executable, __file__, str(self.run.config), name, str(bucket_s), str(marks)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

        def end() -> None:
            child.kill()
            child.wait(60)

        self.cleanups.append(end)
        return child

    def status(self) -> dict[str, Any]:
        client = ServiceClient(self.address, keys=self.keys, timeout_s=60)
        try:
            return client.status()
        finally:
            client.close()

    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.run.metrics / "weightsync.jsonl")

    def close(self) -> None:
        for cleanup in reversed(self.cleanups):
            cleanup()
        self.stop_service()


@pytest.fixture(params=["local", "collective", "stream", "disk"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "collective":
        import weightsync.transports.collective  # torch takes seconds, which a learner spent before  # noqa: F401  # torch takes seconds, which a learner spent before
    world = World(tmp_path, transport=request.param)
    yield world
    world.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, transport="local")
    yield world
    world.close()


def until(condition: Callable[[], Any], what: str, timeout_s: float = 90.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def test_two_members_get_every_version_with_its_digest(world: World) -> None:
    publisher = world.publisher()
    assert publisher.committed_version() == -1
    a, b = world.member("a"), world.member("b")
    for version in range(3):
        manifest = publisher.publish(version, PLAN, weights(version))
        publisher.wait_committed(version, members=2, timeout_s=90)
        assert a.holds(version) and b.holds(version)
        assert publisher.digests[version] == manifest.digest == a.receiver.digests[version]
    assert publisher.committed_version() == 2
    until(lambda: len([line for line in world.lines() if line["state"] == "committed"]) >= 3, "three lines")
    line = world.lines()[-1]
    assert line["version"] == 2 and line["transport"] == world.config.weightsync.transport
    assert set(line["members"].values()) == {publisher.digests[2]} and line["digest"] == publisher.digests[2]


def test_late_joiner_gets_the_version_without_a_new_publish(world: World) -> None:
    publisher = world.publisher()
    publisher.publish(4, PLAN, weights(4))
    a = world.member("a")
    publisher.wait_committed(4, members=1, timeout_s=90)
    late = world.member("late")
    publisher.wait_committed(4, members=2, timeout_s=90)
    assert a.holds(4) and late.holds(4)
    assert len(late.receiver.digests) == 1


def test_newer_version_supersedes(world: World) -> None:
    publisher = world.publisher()
    slow = world.member("slow", ArrayEngine(bucket_s=0.05))
    for version in range(6):
        publisher.publish(version, PLAN, weights(version))
        time.sleep(0.03)
    publisher.wait_committed(5, members=1, timeout_s=90)
    assert slow.holds(5)
    assert sorted(slow.receiver.digests) == list(slow.receiver.digests), "versions only grow"
    until(lambda: any(line["state"] == "superseded" for line in world.lines()), "a superseded round in the log")


@pytest.mark.long_except("local")
@pytest.mark.chaos_cases("stream", "disk")
def test_killed_and_stopped_members_hold_up_nobody(world: World, tmp_path: Path) -> None:
    """One is killed in the middle of a round, one is stopped: the third commits, the publisher is not blocked."""
    marks = [tmp_path / "killed", tmp_path / "stopped"]
    killed = world.process("killed", bucket_s=0.4, marks=marks[0])
    stopped = world.process("stopped", bucket_s=0.4, marks=marks[1])
    until(lambda: set(world.status()["members"]) == {"killed", "stopped"}, "both polled", timeout_s=60)
    fast = world.member("fast")
    until(lambda: len(world.status()["members"]) == 3, "all polled")
    publisher = world.publisher()
    publisher.publish(0, PLAN, weights(0))
    until(lambda: all(mark.exists() and mark.stat().st_size for mark in marks), "both in mid-round")
    assert all(mark.stat().st_size < len(PLAN.bucket_bytes) for mark in marks), "the faults must hit the round"
    os.kill(killed.pid, signal.SIGKILL)
    os.kill(stopped.pid, signal.SIGSTOP)
    started = time.monotonic()
    publisher.publish(1, PLAN, weights(1))
    assert time.monotonic() - started < world.config.weightsync.timeout_s, "publish blocks for its copy alone"
    publisher.wait_committed(1, members=1, timeout_s=world.config.weightsync.timeout_s * 2)
    assert fast.holds(1)
    until(lambda: world.status()["members"]["stopped"]["state"] == "dead", "the stopped one is dead")
    assert world.status()["members"]["killed"]["state"] == "dead"
    os.kill(stopped.pid, signal.SIGCONT)
    publisher.wait_committed(1, members=2, timeout_s=90)
    assert world.status()["members"]["stopped"]["digest"] == publisher.digests[1]


def test_flipped_byte_is_not_served(local: World) -> None:
    publisher = local.publisher()
    engine = ArrayEngine(bucket_s=0.02)
    member = local.member("a", engine)
    publisher.publish(0, PLAN, weights(0))
    publisher.wait_committed(0, members=1, timeout_s=90)

    def flip(number: int) -> None:
        if number == 1:
            publisher._offers.versions[-1].slot.view[-100] ^= 0xFF  # in the last bucket, while the transfer runs
            engine.after_bucket = lambda number: None

    engine.after_bucket = flip
    publisher.publish(1, PLAN, weights(1))
    until(lambda: engine.aborts >= 2, "the update is aborted, and again")
    assert member.receiver.version == 0 and 1 not in member.receiver.digests
    assert local.status()["members"]["a"]["version"] == 0
    publisher._offers.versions[-1].slot.view[-100] ^= 0xFF
    publisher.wait_committed(1, members=1, timeout_s=90)
    assert member.holds(1)
    failed = [line for line in local.lines() if line["version"] == 1 and line["state"] == "failed"]
    assert "another digest" in failed[0]["members"]["a"] and failed[0]["members_committed"] == 0


def test_wrong_model_after_commit_is_broken_and_never_serving(local: World) -> None:
    publisher = local.publisher()
    engine = ArrayEngine()
    engine.spoil = True
    member = local.member("a", engine)
    publisher.publish(0, PLAN, weights(0))
    until(lambda: member.error is not None, "the receiver ends")
    assert isinstance(member.error, WorkError) and member.error.code == "engine.broken"
    assert member.receiver.version == -1 and member.receiver.digests == {}
    assert local.status()["members"]["a"]["state"] != "serving" and local.status()["committed"] == -1
    with pytest.raises(WorkError, match=r"engine\.broken"):
        publisher.wait_committed(0, members=1, timeout_s=0.3)


@pytest.mark.long_except("disk")
@pytest.mark.chaos_cases("local", "stream")
def test_service_restart(world: World) -> None:
    """The service forgets everything; publisher and member tell it again, without a transfer of what is there."""
    publisher = world.publisher()
    member = world.member("a")
    publisher.publish(0, PLAN, weights(0))
    publisher.wait_committed(0, members=1, timeout_s=90)
    world.stop_service()
    publisher.publish(1, PLAN, weights(1))
    world.start_service()
    publisher.wait_committed(1, members=1, timeout_s=90)
    assert member.holds(1) and publisher.committed_version() == 1
    world.stop_service()
    world.start_service()
    until(lambda: world.status()["committed"] == 1, "the state is told again")
    assert len(member.receiver.digests) == 2
    late = world.member("late")
    until(lambda: late.receiver.version == 1, "a late joiner after the restart")
    assert late.holds(1)


def test_older_learner_is_fenced(local: World) -> None:
    old = local.publisher(name="old")
    member = local.member("a")
    old.publish(7, PLAN, weights(7))
    old.wait_committed(7, members=1, timeout_s=90)
    new = local.publisher(epoch=2, name="new")
    new.publish(3, PLAN, weights(3))
    new.wait_committed(3, members=1, timeout_s=90)
    assert member.holds(3), "a learner that went back to its checkpoint is followed"
    until(lambda: old._offers.error is not None, "the old learner hears of it")
    with pytest.raises(Fenced):
        old.publish(8, PLAN, weights(8))


def test_other_model_is_refused(local: World) -> None:
    publisher = local.publisher()
    publisher.publish(0, PLAN, weights(0))
    member = local.member("a", ArrayEngine(fingerprint="model-b"))
    until(lambda: member.error is not None, "the member is refused")
    assert isinstance(member.error, HandshakeError)
    assert member.error.code == "handshake.mismatch" and "model-b" in member.error.message


def test_another_layout_follows(local: World) -> None:
    """The plan changes between versions: members get the new layout once, files of another size are made."""
    publisher = local.publisher()
    member = local.member("a")
    publisher.publish(0, PLAN, weights(0))
    publisher.wait_committed(0, members=1, timeout_s=90)
    other = plan_buckets([*SPECS, TensorSpec("head", "BF16", (5000,))], bucket_bytes=20000)
    publisher.publish(1, other, weights(1, other))
    publisher.wait_committed(1, members=1, timeout_s=90)
    assert member.engine.model == {name: data.tobytes() for name, data in weights(1, other)}


def test_auto_says_why(tmp_path: Path) -> None:
    world = World(tmp_path, transport="auto")
    try:
        publisher = world.publisher()
        world.member("near")
        makers = built_in_transports()

        def elsewhere(instruction: Instruction) -> Any:
            return makers["local"](msgspec.structs.replace(instruction, address="/nowhere/asyncrl-1"))

        world.member("far", transports={**makers, "local": elsewhere})
        publisher.publish(0, PLAN, weights(0))
        publisher.wait_committed(0, members=2, timeout_s=90)
        members = world.status()["members"]
        assert members["near"]["transport"] == "local" and "same host" in members["near"]["transport_why"]
        far = members["far"]
        assert far["transport"] == "stream" and "not visible" in far["transport_why"] and far["source"] == "learner"
    finally:
        world.close()


def ways(world: World, version: int) -> dict[str, dict[str, Any]]:
    """How each member got the version, by the log."""
    lines = [line for line in world.lines() if line["version"] == version]
    return {name: way for line in lines for name, way in line["ways"].items() if way["bytes"]}


def test_members_relay_and_the_log_says_from_whom(tmp_path: Path) -> None:
    """One pull per source: the publisher serves the first, members the others; what was carried is in the log."""
    world = World(tmp_path, transport="stream", relay_fanout=1)
    try:
        members = [world.member(name, ArrayEngine(bucket_s=0.05)) for name in "abcd"]
        until(lambda: len(world.status()["members"]) == 4, "all polled")
        publisher = world.publisher()
        publisher.publish(0, PLAN, weights(0))
        publisher.wait_committed(0, members=4, timeout_s=30)
        assert all(member.holds(0) for member in members)
        until(lambda: len(ways(world, 0)) == 4, "all are in the log")
        sources = {name: way["source"] for name, way in ways(world, 0).items()}
        assert "learner" in sources.values() and set(sources.values()) & set("abcd"), sources
        carried = sum(line["carried_bytes"] for line in world.lines())
        assert carried == 4 * sum(PLAN.bucket_bytes)
        assert {member["source"] for member in world.status()["members"].values()} == set(sources.values())
    finally:
        world.close()


def test_a_late_member_gets_the_version_from_another_when_the_learner_is_gone(tmp_path: Path) -> None:
    world = World(tmp_path, transport="stream")
    try:
        publisher = world.publisher()
        world.member("a")
        publisher.publish(3, PLAN, weights(3))
        publisher.wait_committed(3, members=1, timeout_s=90)
        publisher.close()
        late = world.member("late")
        until(lambda: late.receiver.version == 3, "the late one has it", timeout_s=30)
        assert late.holds(3)
        until(lambda: "late" in ways(world, 3), "it is in the log")
        assert ways(world, 3)["late"]["source"] == "a"
    finally:
        world.close()


def test_changed_elements_alone_for_who_holds_the_version_before(tmp_path: Path) -> None:
    world = World(tmp_path, transport="stream", encoding="delta")
    try:
        publisher = world.publisher()
        a = world.member("a")
        old = dict(weights(0))
        publisher.publish(0, PLAN, iter(old.items()))
        publisher.wait_committed(0, members=1, timeout_s=90)
        new = {name: data.copy() for name, data in old.items()}
        new["layer.3"][8] ^= 1
        publisher.publish(1, PLAN, iter(new.items()))
        publisher.wait_committed(1, members=1, timeout_s=90)
        assert a.engine.model == {name: data.tobytes() for name, data in new.items()}
        until(lambda: "a" in ways(world, 1), "it is in the log")
        way = ways(world, 1)["a"]
        assert way["encoding"] == "delta" and way["bytes"] < sum(PLAN.bucket_bytes) / 20
        late = world.member("late")
        publisher.wait_committed(1, members=2, timeout_s=90)
        assert late.engine.model == a.engine.model
        until(lambda: "late" in ways(world, 1), "it is in the log")
        assert ways(world, 1)["late"]["encoding"] == "full"
    finally:
        world.close()


def test_over_tcp_with_keys(tmp_path: Path) -> None:
    world = World(tmp_path, transport="auto")
    world.stop_service()
    world.keys = write_keys(tmp_path / "keys.json")
    with socket.create_server(("127.0.0.1", 0)) as free:
        world.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    world.start_service()
    try:
        publisher, member = world.publisher(), world.member("a")
        publisher.publish(0, PLAN, weights(0))
        publisher.wait_committed(0, members=1, timeout_s=90)
        assert member.holds(0)
        stranger = ServiceClient(world.address, timeout_s=0.5)
        with pytest.raises(Unavailable):
            stranger.status()
        stranger.close()
    finally:
        world.close()


def test_files_are_removed_and_strangers_refused(local: World) -> None:
    publisher = local.publisher()
    publisher.publish(0, PLAN, weights(0))
    publisher.publish(1, PLAN, weights(1))
    paths = [offer.slot.path for offer in publisher._offers.versions]
    assert len(set(paths)) == 2 and all(path.stat().st_mode & 0o077 == 0 for path in paths)
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = paths[0].with_name(paths[0].name.replace(f"-{os.getpid()}-", f"-{int(ended.stdout)}-"))
    left.write_bytes(b"of a publisher that was killed")
    again = local.publisher(epoch=2)  # the same run, a new process
    assert not left.exists()
    again.publish(0, PLAN, weights(0))
    again.close()
    publisher.close()
    assert not any(path.exists() for path in paths)
    requester = Requester(local.address)
    with pytest.raises(AsyncRLError, match="LeaseRequest"):
        requester.request(LeaseRequest("p", 0, 1, 0.0), timeout_s=5)
    requester.close()


def test_stop_ends_service_and_members(local: World) -> None:
    member = local.member("a")
    until(lambda: "a" in local.status()["members"], "the member polled")
    client = ServiceClient(local.address, timeout_s=60)
    client.stop("test is over")
    client.close()
    local.service.join(60)
    assert not local.service.is_alive()
    until(lambda: not member._thread.is_alive(), "the member ends")
    assert member.error is None


@pytest.mark.long
def test_role_process_holds_the_lock(tmp_path: Path) -> None:
    """`python -m weightsync.main`: one per run, ends on SIGTERM, weights flow through it."""
    world = World(tmp_path, transport="local")
    world.stop_service()
    command = [sys.executable, "-m", "weightsync.main", "--config", str(world.run.config), "--name", "ws"]
    first = subprocess.Popen(command, cwd=ROOT)
    try:
        until((world.run.root / "weightsync.lock").exists, "the first holds the lock")
        publisher = world.publisher()
        member = world.member("a")
        publisher.publish(0, PLAN, weights(0))
        publisher.wait_committed(0, members=1, timeout_s=90)
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
        assert second.returncode == 75 and "service.duplicate" in second.stderr
        first.kill()
        first.wait(60)
        first = subprocess.Popen(command, cwd=ROOT)
        publisher.publish(1, PLAN, weights(1))
        publisher.wait_committed(1, members=1, timeout_s=90)
        assert member.holds(1)
        first.terminate()
        assert first.wait(60) == 0
    finally:
        first.kill()
        for cleanup in reversed(world.cleanups):
            cleanup()


def child(config: Path, name: str, bucket_s: float, marks: Path) -> None:
    """A member in a process of its own (this file as a program)."""
    from asyncrl.config import load

    loaded = load(config)
    if loaded.weightsync.transport == "collective":
        import weightsync.transports.collective  # torch takes seconds, which a real engine spent before  # noqa: F401  # torch takes seconds, which a real engine spent before
    engine: Any = ArrayEngine(bucket_s=bucket_s, marks=marks)
    receiver = Receiver(endpoint(loaded, "weightsync"), engine=engine, name=name, keys=None, config=loaded.weightsync)
    asyncio.run(receiver.run(asyncio.Event()))


if __name__ == "__main__":
    child(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))
