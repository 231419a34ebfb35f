"""A job that runs: what listens, who can read its files, what its logs and arguments say, who may speak to it."""

import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ports import Listener, listeners, parsed

from asyncrl import wire
from asyncrl.errors import AsyncRLError, Unavailable
from asyncrl.net.keys import Keys, read_keys, write_keys
from asyncrl.net.requester import Requester
from asyncrl.runtime.host_facts import descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_scan_sees_what_is_open() -> None:
    """And says which of it others can reach."""
    with (
        socket.create_server(("0.0.0.0", 0)) as wide,
        socket.create_server(("127.0.0.1", 0)) as narrow,
        socket.create_server(("::", 0), family=socket.AF_INET6) as wide6,
    ):
        found = {one.port: one for one in listeners({os.getpid()})}
        ports = [each.getsockname()[1] for each in (wide, narrow, wide6)]
    assert [found[port].loopback for port in ports] == [False, True, False]
    assert parsed("0100007F:1F90") == ("127.0.0.1", 8080)
    assert (
        Listener("tcp6", "::ffff:127.0.0.1", 1, "").loopback and not Listener("tcp6", "::ffff:10.0.0.1", 1, "").loopback
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scan(run: Any, main: Any) -> list[Listener]:
    """Everything that the job opens while it makes a few steps."""
    found: dict[str, Listener] = {}
    first = max(run.steps(), default=0)
    deadline = time.monotonic() + 60
    while max(run.steps(), default=0) < first + 3 and time.monotonic() < deadline:
        found |= {one.inode: one for one in listeners({main.pid, *descendants(main.pid)})}
        time.sleep(0.05)
    return list(found.values())


def end(run: Any, main: Any) -> str:
    main.terminate()
    out, _ = main.communicate(timeout=90)
    assert run.living() == []
    return str(out)


def audit_files(root: Path) -> None:
    """Nobody but the owner gets in, and nothing inside relies on that where it is secret."""
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    for path in root.rglob("*"):
        about = path.lstat()
        mode = stat.S_IMODE(about.st_mode)
        closed = 0o177 if stat.S_ISSOCK(about.st_mode) or path.name in ("redis.acl", "redis.admin") else 0o077
        assert not mode & closed or stat.S_ISLNK(about.st_mode), f"{path}: {mode:o}"


def test_a_default_job_opens_no_port_but_on_loopback(run: Any) -> None:
    main = run.start("launch", "all", str(run.config), "--set", "learner.steps=2000")
    run.wait("step 1", lambda: 1 in run.steps())
    found = scan(run, main)
    audit_files(run.dir)
    end(run, main)
    assert all(one.loopback for one in found), found


class Job:
    """Everything that can listen at once: TCP services with keys, Redis, two ranks, Gloo, a source of weights."""

    def __init__(self, run: Any, *, more: Sequence[str] = ()) -> None:
        self.run = run
        self.folder: Path = run.folder
        self.keys: Keys = write_keys(self.folder / "server.key")
        self.join: Keys = read_keys(self.folder / "producer.key")
        self.ports = {name: free_port() for name in ("buffer", "weightsync")}
        settings = [f"network.{name}=tcp://127.0.0.1:{port}" for name, port in self.ports.items()]
        settings += [f"network.key_file={self.folder / 'server.key'}", "buffer.store=redis", "learner.ranks=2"]
        settings += ["weightsync.transport=collective", "learner.steps=3000", "producers.count=1", "log.sign=true"]
        words = [word for setting in (*settings, *more) for word in ("--set", setting)]
        self.main = run.start("launch", "all", str(run.config), *words)
        run.wait("step 1", lambda: 1 in run.steps())

    def address(self, name: str) -> str:
        return f"tcp://127.0.0.1:{self.ports[name]}"


@pytest.fixture
def job(run: Any) -> Iterator[Job]:
    if not (shutil.which("redis-server") or shutil.which("valkey-server")):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no redis-server or valkey-server on the PATH")
    run.fresh = True  # a forked role would have the memory of the launcher, which reads the owner's key
    yield Job(run)


def ask(address: str, keys: Keys | None, message: Any = None) -> Any:
    asker = Requester(address, keys=keys, resend_s=0.3)
    try:
        return asker.request(message or wire.StatusRequest(), timeout_s=0.8).message
    finally:
        asker.close()


@pytest.mark.long
def test_a_job_with_keys_is_closed_to_all_without(job: Job) -> None:
    run = job.run
    found = scan(run, job.main)
    assert {*job.ports.values()} <= {one.port for one in found}, "the scan sees the services"
    assert all(one.loopback for one in found), [one for one in found if not one.loopback]
    strangers = write_keys(job.folder / "strangers.key")
    bad = {
        "no keys": None,
        "another client": msgspec.structs.replace(strangers, server_public=job.keys.server_public),
        "another service": msgspec.structs.replace(job.keys, server_public=strangers.server_public),
    }
    for name in job.ports:
        for what, keys in bad.items():
            with pytest.raises(Unavailable):
                ask(job.address(name), keys)
                pytest.fail(f"{name} answered a client with {what}")
        assert isinstance(ask(job.address(name), job.join), wire.StatusReply)
        assert isinstance(ask(job.address(name), job.keys), wire.StatusReply)
    lead = [
        ("buffer", wire.Stop("mine")),
        ("buffer", wire.Tune('{"max_staleness":9}', "me", -1)),
        ("buffer", wire.Register("learner", 1, "h", 0, "{}", True, "fp", {})),
        ("weightsync", wire.Stop("mine")),
        ("weightsync", wire.Hello("learner", "l", 1, "h", "", "fp")),
    ]
    for name, message in lead:
        with pytest.raises(AsyncRLError) as caught:
            ask(job.address(name), job.join, message)
        assert caught.value.code == "config.forbidden", message
    trained = max(run.steps())
    run.wait("steps after all that", lambda: max(run.steps()) >= trained + 2)
    status = ask(job.address("weightsync"), job.join)
    assert '"forbidden":2' in status.json, status
    audit_files(run.dir)
    secrets = secrets_of(job)
    commands = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(job.main.pid))
    for name in ("producer-0", "reward-0"):
        assert not holds(run.pid(name), job.keys.secret.encode()), f"{name} holds more than it needs"
    own = read_keys(job.folder / "producer.key").secret.encode()
    assert holds(run.pid("producer-0"), own) and not holds(run.pid("reward-0"), own)
    assert holds(run.pid("buffer"), job.keys.server_secret.encode()), "the search finds what is there"
    out = end(run, job.main)
    found = run.audit()
    assert found["exit"] == 0 and found["signed"] == found["drains"] > 10, found
    said = commands.decode(errors="replace") + out
    assert not [name for name, secret in secrets.items() if secret in said]
    for path in run.dir.rglob("*"):
        if path.is_file() and path.name != "redis.admin":
            data = path.read_bytes()
            assert not [name for name, secret in secrets.items() if secret.encode() in data], path


def holds(pid: int, secret: bytes) -> bool:
    """Whether a process has these bytes in memory of its own."""
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except PermissionError:
        pytest.skip("this host lets no process read another one's memory")
    with os.fdopen(memory, "rb", buffering=0) as file:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, modes = line.split()[:2]
            if not modes.startswith("rw"):
                continue
            start, stop = (int(part, 16) for part in span.split("-"))
            try:
                file.seek(start)
                if secret in file.read(stop - start):
                    return True
            except OSError:  # it was given back meanwhile, or belongs to a device
                continue
    return False


def secrets_of(job: Job) -> dict[str, str]:
    """What nobody may find in a log: and that the search would find it is clear from where it is."""
    names = ("server_secret", "secret", "relay_secret", "run_key")
    found = {name: getattr(job.keys, name) for name in names}
    found["redis admin"] = (job.run.dir / "store" / "redis.admin").read_text()
    text = (job.folder / "server.key").read_text()
    assert all(found[name] in text for name in names) and all(len(secret) >= 40 for secret in found.values())
    assert re.fullmatch(r"[0-9a-f]{48}", found["redis admin"])
    return found
