"""What `network.standby` needs, and what `asyncrl check` refuses with the remedy in the message."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from bare_config import BARE

from asyncrl.cli import main
from asyncrl.config import Config, load_all, parse
from asyncrl.errors import EXIT_CONFIG
from asyncrl.launcher.launch import LaunchOptions, _locks
from asyncrl.net import probe
from asyncrl.preflight.standby import check_address, check_folder
from asyncrl.process_plan.plan import Joining, plan
from asyncrl.runtime.host_facts import reachable
from asyncrl.runtime.run_dir import RunDir, buffer_address, sibling_address

GOOD = (
    "buffer.store=redis",
    "buffer.redis_url=redis://10.0.0.9:6379",
    "buffer.fsync=always",
    "network.buffer=tcp://10.0.0.1:5555",
    "network.standby=tcp://10.0.0.2:5555",
    "network.insecure_no_auth=true",
)


def good(*changes: str) -> Config:
    return parse(BARE, overrides=[*GOOD, *changes])


@pytest.mark.parametrize(
    ("change", "where", "says"),
    [
        ("buffer.store=sqlite", "buffer.store", "belongs to one host"),
        ("buffer.redis_url=", "buffer.redis_url", "private Redis dies with the buffer"),
        ("buffer.redis_url=unix:///run/redis.sock", "buffer.redis_url", "cannot reach this Redis"),
        ("buffer.redis_url=redis://localhost:6379", "buffer.redis_url", "cannot reach this Redis"),
        ("buffer.fsync=everysec", "buffer.fsync", 'set it to "always"'),
        ("network.buffer=auto", "network.buffer", "tcp://host:port"),
        ("network.standby=ipc:///run/buffer.sock", "network.standby", "tcp://host:port"),
        ("network.standby=tcp://10.0.0.1:5555", "network.standby", "the same as network.buffer"),
        ("network.insecure_no_auth=false", "network.standby", "network.key_file is empty"),
    ],
)
def test_refused(tmp_path: Path, change: str, where: str, says: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(BARE)
    errors = load_all(path, [*GOOD, change]).errors
    assert any(says in error.message and where in error.message for error in errors), errors
    assert all(error.exit_code == EXIT_CONFIG for error in errors)


def test_both_addresses_on_one_host_may_share_its_redis() -> None:
    here = [one.replace("10.0.0.1:", "127.0.0.1:").replace("10.0.0.2:5555", "127.0.0.1:5556") for one in GOOD]
    assert parse(BARE, overrides=[*here, "buffer.redis_url=redis://127.0.0.1:6379"]).network.standby


def test_clients_know_both_addresses() -> None:
    assert buffer_address(good()) == "tcp://10.0.0.1:5555,tcp://10.0.0.2:5555"
    assert buffer_address(good(), "tcp://node1:1") == "tcp://node1:1,tcp://10.0.0.2:5555"
    assert buffer_address(good(), "tcp://10.0.0.2:5555") == "tcp://10.0.0.2:5555"
    assert buffer_address(parse(BARE), "tcp://node1:1") == "tcp://node1:1"
    both = "tcp://10.0.0.1:5555,tcp://10.0.0.2:5555"
    assert sibling_address("tcp://0.0.0.0:5556", both) == "tcp://10.0.0.1:5556"


def test_one_of_two_addresses_is_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        open_ = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        assert reachable(f"tcp://127.0.0.1:1,{open_}") and not reachable("tcp://127.0.0.1:1,tcp://127.0.0.1:2")


@pytest.mark.parametrize(("kind", "refused"), [("ext4", True), ("overlay", True), ("nfs4", False), ("lustre", False)])
def test_payloads_that_one_host_alone_reads(tmp_path: Path, kind: str, refused: bool) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / {kind} rw 0 0\n")
    errors = [error.render() for error in check_folder(good(f"run.dir={tmp_path}/run"), mounts)]
    assert bool(errors) is refused
    if refused:
        assert f"local file system ({kind})" in errors[0] and "NFS" in errors[0]


def test_a_stand_by_needs_an_address_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    [unset] = check_address(parse(BARE))
    assert unset.code == "config.missing" and "network.standby" in unset.where
    here = {"tcp://10.0.0.1:5555"}
    monkeypatch.setattr(probe, "bind_problem", lambda address: None if address in here else ("config.network", "no"))
    assert not list(check_address(good()))
    here.clear()
    [elsewhere] = check_address(good())
    assert "neither" in elsewhere.message and "10.0.0.1" in elsewhere.message and "10.0.0.2" in elsewhere.message


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.toml"
    path.write_text(BARE)
    assert main(["launch", "all", str(path), "--standby"]) == EXIT_CONFIG
    assert "--standby goes with the target buffer" in capsys.readouterr().err
    assert main(["launch", "buffer", str(path), "--standby"]) == EXIT_CONFIG
    assert "network.standby" in capsys.readouterr().err


def test_the_process(tmp_path: Path) -> None:
    config = good()
    [one] = plan(config, ["buffer"], config_path=tmp_path, joining=Joining(standby=True, tag="node2-1"))
    assert one.name == "standby-node2-1" and one.argv[-1] == "--standby" and not one.ready
    run = RunDir(tmp_path / "run").create()
    serving, _ = _locks(run, LaunchOptions(target="buffer"))
    waiting, tag = _locks(run, LaunchOptions(target="buffer", standby=True))
    assert serving and waiting and tag
    for lock in (*serving, *waiting):
        lock.close()
