"""Keys of a run: the command, the files and their modes, who may do what with which, and what they sign."""

import os
import stat
import sys
from pathlib import Path

import msgspec
import pytest
import warm
from bare_config import BARE

from asyncrl import wire
from asyncrl.config import Config, parse
from asyncrl.errors import ConfigError
from asyncrl.launcher.launch import worker_key
from asyncrl.net.auth import OWNER_ALONE, needs_owner
from asyncrl.net.keys import Keys, join_path, read_keys, worker_file, write_keys
from asyncrl.runtime.role import RoleArgs, join_key, run_key
from weightsync.plan.signature import is_genuine, sign


def config_with(*, key_file: str = "") -> Config:
    return parse(BARE + f'[network]\nkey_file = "{key_file}"\n')


MANIFEST = wire.Manifest(3, "plan", (64,), ("bucket",), "digest")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_command_makes_both_files_and_never_writes_over_one(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "keys"
    code = "import os, sys; os.umask(0); from asyncrl.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "keys", str(folder)]
    done = warm.run(words, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name: mode(path) for path in folder.iterdir()} == {"server.key": 0o600, "join.key": 0o600}
    assert mode(folder) == 0o700
    server, join = read_keys(folder / "server.key"), read_keys(folder / "join.key")
    assert server.join_keys() == join and server.leads and not join.leads
    held = (folder / "server.key").read_bytes()
    for secret in (server.server_secret, server.owner_secret, server.join_secret, server.run_key):
        assert secret not in done.stdout + done.stderr
    again = warm.run(words, timeout=60, capture_output=True, text=True)
    assert again.returncode == 2 and "never overwritten" in again.stderr and "->" in again.stderr
    assert (folder / "server.key").read_bytes() == held


def test_a_join_file_lacks_what_services_and_the_learner_have(tmp_path: Path) -> None:
    server = write_keys(tmp_path / "run.key")
    join = read_keys(tmp_path / "run.join.key")
    text = (tmp_path / "run.join.key").read_text()
    assert server.server_secret not in text and server.owner_secret not in text
    assert server.known == {server.join_public: "join", server.owner_public: "owner"}
    assert (join.client_public, server.client_public) == (server.join_public, server.owner_public)
    assert join.among_workers() == server.among_workers(), "whoever relays weights is known to whoever pulls them"


def test_a_worker_reads_the_join_file_and_keeps_nothing_else(tmp_path: Path) -> None:
    server = tmp_path / "server.key"
    assert worker_file(server) == tmp_path / "join.key", "the first launch will make it"
    keys = write_keys(server)
    assert worker_file(server) == tmp_path / "join.key"
    assert worker_file(tmp_path / "join.key") == tmp_path / "join.key", "what another host was given"
    found = config_with(key_file=str(server))
    args = RoleArgs(key="")
    assert run_key(args, found) == keys and join_key(args, found) == keys.join_keys()
    assert join_key(args, config_with()) is None
    (tmp_path / "join.key").unlink()
    assert worker_file(server) == server
    write_keys(tmp_path / "other.key")
    (tmp_path / "other.join.key").rename(tmp_path / "join.key")
    with pytest.raises(ConfigError, match="other keys") as caught:
        worker_file(server)
    assert str(tmp_path / "join.key") in caught.value.render() and "asyncrl keys" in caught.value.render()
    with pytest.raises(ConfigError, match="other keys"):
        worker_key(found, ("buffer", "producer"))
    assert worker_key(found, ("buffer", "learner")) == "", "who starts no worker does not look"
    assert worker_key(config_with(), ("producer",)) == ""


@pytest.mark.parametrize("bits", [0o604, 0o640, 0o610, 0o601, 0o666])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "server.key"
    write_keys(path)
    path.chmod(bits)
    with pytest.raises(ConfigError, match="readable by others") as caught:
        read_keys(path)
    assert f"chmod 600 {path}" in caught.value.render()


@pytest.mark.skipif(os.getuid() != 0, reason="giving a file away needs root")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.key"
    write_keys(path)
    os.chown(path, 4711, 4711)
    with pytest.raises(ConfigError, match="belongs to user 4711"):
        read_keys(path)


def test_damaged_files_are_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "server.key"
    keys = write_keys(path)
    good = path.read_bytes()
    broken = [
        b"", b"{}", b"\xff\xfe", good[:40], good.replace(b"server_public", b"server_pubic"),
        msgspec.json.encode(msgspec.structs.replace(keys, run_key="zz")),
        msgspec.json.encode(msgspec.structs.replace(keys, run_key="00")),
        msgspec.json.encode(msgspec.structs.replace(keys, server_public="short")),
        msgspec.json.encode(msgspec.structs.replace(keys, join_secret="\u00fc" * 40)),
        msgspec.json.encode(msgspec.structs.replace(keys, join_secret="")),
        b"[" * 100_000,
    ]  # fmt: skip
    for data in broken:
        path.write_bytes(data)
        with pytest.raises(ConfigError) as caught:
            read_keys(path)
        assert caught.value.code == "config.network" and str(path) in caught.value.render(), data[:60]
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "none.key")


def test_keys_in_a_log_show_no_secret(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "server.key")
    texts = (repr(keys), str(keys), f"{keys}", f"{keys!r}", repr({"keys": keys}), repr(list(keys.__rich_repr__())))
    for secret in (keys.server_secret, keys.owner_secret, keys.join_secret, keys.run_key):
        assert not any(secret in text for text in texts)
    assert join_path(tmp_path / "server.key") == tmp_path / "join.key"


def test_only_the_learners_manifest_is_genuine(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "server.key")
    join = read_keys(tmp_path / "join.key")
    manifest = sign(MANIFEST, keys)
    assert is_genuine(manifest, keys) and is_genuine(manifest, join)
    assert is_genuine(MANIFEST, None) and sign(MANIFEST, None) == MANIFEST
    others = write_keys(tmp_path / "others.key")
    for wrong in (MANIFEST, sign(MANIFEST, others), msgspec.structs.replace(manifest, signature="\u00fc")):
        assert not is_genuine(wrong, join)
    other_values = {
        "version": 4,
        "plan": "other",
        "bucket_bytes": (65,),
        "bucket_digests": ("x",),
        "digest": "x",
        "encoding": "adapter",
        "base": "b",
        "adapter": "{}",
    }
    assert {*other_values, "signature"} == set(wire.Manifest.__struct_fields__), "every field is covered"
    for name, value in other_values.items():
        assert not is_genuine(msgspec.structs.replace(manifest, **{name: value}), join), name


def test_parts_of_a_signature_cannot_be_shifted(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "server.key")
    assert keys.sign("p", b"ab", b"c") != keys.sign("p", b"a", b"bc")
    assert keys.sign("p", b"ab") != keys.sign("pa", b"b")
    assert keys.verify(keys.sign("p", b"ab"), "p", b"ab")


def test_what_only_the_owner_may_say() -> None:
    assert needs_owner(wire.Stop("now")) and needs_owner(wire.Tune("{}", "me", -1))
    for role, wanted in (("learner", True), ("producer", False), ("reward", False)):
        assert needs_owner(wire.Hello(role, "x", 1, "h", "", "")) is wanted
        assert needs_owner(wire.Heartbeat(role, "x", 1, "h", "", {})) is wanted
    changes = {wire.Stop, wire.Tune, wire.Checkpointed, wire.LedgerRequest, wire.EvaluationsRequest, wire.Goodbye}
    learners = {wire.Register, wire.Claim, wire.Commit, wire.Quarantine, wire.Publish, wire.RoundRequest}
    assert changes | learners == OWNER_ALONE
    workers = {wire.LeaseRequest, wire.Samples, wire.Scores, wire.MemberPoll, wire.Fetch, wire.StatusRequest}
    assert not workers & OWNER_ALONE


def test_a_key_file_may_not_hold_more_than_it_should() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"server_public": "", "join_public": "", "join_secret": "", "run_key": "", "more": 1}, Keys)
