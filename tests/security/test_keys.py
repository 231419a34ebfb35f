"""Keys of a run: the command, the files and their modes, who may do what with which, and what they sign."""

import os
import stat
import subprocess
import sys
import typing
from pathlib import Path

import msgspec
import pytest
import warm
from bare_config import BARE

from asyncrl import wire
from asyncrl.config import Config, parse
from asyncrl.errors import ConfigError
from asyncrl.launcher.launch import worker_keys
from asyncrl.net import auth
from asyncrl.net.auth import ALLOWED, is_allowed
from asyncrl.net.keys import GUESTS, Holder, Keys, add_key, read_keys, revoke_key, worker_file, write_keys
from asyncrl.runtime.role import RoleArgs, run_key, worker_key
from buffers.service.service import BufferService
from weightsync.plan.signature import is_genuine, sign


def config_with(*, key_file: str = "") -> Config:
    return parse(BARE + f'[network]\nkey_file = "{key_file}"\n')


MANIFEST = wire.Manifest(3, "plan", (64,), ("bucket",), "digest")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def run_command(*words: str) -> "subprocess.CompletedProcess[str]":
    code = "import os, sys; os.umask(0); from asyncrl.cli import main; sys.exit(main(sys.argv[1:]))"
    return warm.run([sys.executable, "-c", code, "keys", *words], timeout=60, capture_output=True, text=True)


def test_the_command_makes_a_file_for_each_role_and_never_writes_over_one(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "keys"
    done = run_command(str(folder))
    assert done.returncode == 0, done.stderr
    names = ("server.key", "producer.key", "reward.key", "observer.key")
    assert {path.name: mode(path) for path in folder.iterdir()} == dict.fromkeys(names, 0o600)
    assert mode(folder) == 0o700
    server = read_keys(folder / "server.key")
    assert server.leads and not any(read_keys(folder / name).leads for name in names[1:])
    held = (folder / "server.key").read_bytes()
    for secret in (server.server_secret, server.secret, server.relay_secret, server.run_key):
        assert secret not in done.stdout + done.stderr
    again = run_command(str(folder))
    assert again.returncode == 2 and "never overwritten" in again.stderr and "->" in again.stderr
    assert (folder / "server.key").read_bytes() == held


def test_keys_are_added_listed_and_revoked_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    run_command(str(folder))
    added = run_command(str(folder), "--add", "producer", "--name", "lab-b")
    assert added.returncode == 0 and "lab-b.key" in added.stdout, added.stderr
    made = read_keys(folder / "lab-b.key")
    assert (made.name, made.role, mode(folder / "lab-b.key")) == ("lab-b", "producer", 0o600)
    assert made.public != read_keys(folder / "producer.key").public
    listed = run_command(str(folder), "--list").stdout.split()
    words = ["owner", "owner", "lab-b", "producer", "producer", "producer", "reward", "reward", "observer", "observer"]
    assert listed == words
    assert run_command(str(folder), "--revoke", "lab-b").returncode == 0
    assert made.public not in read_keys(folder / "server.key").known and mode(folder / "server.key") == 0o600
    for wrong in (["--revoke", "lab-b"], ["--add", "reward", "--name", "reward"], ["--add", "reward"], ["--name", "x"]):
        refused = run_command(str(folder), *wrong)
        assert refused.returncode == 2 and "->" in refused.stderr, wrong


def test_a_guests_file_lacks_what_services_and_the_learner_have(tmp_path: Path) -> None:
    server = write_keys(tmp_path / "run.key")
    guests = {role: read_keys(tmp_path / f"run.{role}.key") for role in GUESTS}
    for role, guest in guests.items():
        text = (tmp_path / f"run.{role}.key").read_text()
        assert server.server_secret not in text and server.secret not in text and guest.role == role
        shares = role == "producer"
        assert (server.run_key in text) is shares and (server.relay_secret in text) is shares
    assert server.known == {server.public: Holder("owner", "owner")} | {
        guest.public: Holder(role, role) for role, guest in guests.items()
    }
    relays = guests["producer"].among_workers()
    assert relays == server.among_workers(), "whoever relays weights is known to whoever pulls them"


def test_a_worker_reads_the_file_of_its_role_and_no_other(tmp_path: Path) -> None:
    server = tmp_path / "server.key"
    assert worker_file(server, "reward") == tmp_path / "reward.key", "the first launch will make it"
    keys = write_keys(server)
    assert worker_file(server, "producer") == tmp_path / "producer.key"
    assert worker_file(tmp_path / "producer.key", "producer") == tmp_path / "producer.key", (
        "what another host was given"
    )
    with pytest.raises(ConfigError, match="the key of a producer, not of a reward"):
        worker_file(tmp_path / "producer.key", "reward")
    found = config_with(key_file=str(server))
    args = RoleArgs(key="")
    assert run_key(args, found) == keys
    with pytest.raises(ConfigError, match="a producer was given the key of role owner"):
        worker_key(args, found, "producer")
    own = config_with(key_file=str(tmp_path / "producer.key"))
    assert worker_key(args, own, "producer") == read_keys(tmp_path / "producer.key")
    assert worker_key(args, config_with(), "producer") is None
    (tmp_path / "reward.key").unlink()
    with pytest.raises(ConfigError, match="the key of a reward is missing"):
        worker_file(server, "reward")
    write_keys(tmp_path / "other.key")
    (tmp_path / "other.reward.key").rename(tmp_path / "reward.key")
    with pytest.raises(ConfigError, match="not a key of this run") as caught:
        worker_file(server, "reward")
    assert str(tmp_path / "reward.key") in caught.value.render() and "asyncrl keys" in caught.value.render()
    with pytest.raises(ConfigError, match="not a key of this run"):
        worker_keys(found, ("buffer", "reward"))
    assert worker_keys(found, ("buffer", "learner")) == {}, "who starts no worker does not look"
    assert worker_keys(config_with(), ("producer",)) == {}


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
        msgspec.json.encode(msgspec.structs.replace(keys, secret="\u00fc" * 40)),
        msgspec.json.encode(msgspec.structs.replace(keys, secret="")),
        msgspec.json.encode(msgspec.structs.replace(keys, role="producer")),
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
    for secret in (keys.server_secret, keys.secret, keys.relay_secret, keys.run_key):
        assert not any(secret in text for text in texts)


def test_only_the_learners_manifest_is_genuine(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "server.key")
    join = read_keys(tmp_path / "producer.key")
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


def test_a_key_file_may_not_hold_more_than_it_should() -> None:
    known = {"name": "x", "role": "reward", "server_public": "", "public": "", "secret": ""}
    msgspec.convert(known, Keys)
    for wrong in ({**known, "more": 1}, {**known, "role": "everything"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, Keys)


def test_every_request_of_the_wire_is_in_the_table_of_roles() -> None:
    handled = set(BufferService.__init__.__code__.co_names) & {kind.__name__ for kind in ALLOWED}
    answers = {"Leases", "Ok", "Refused", "Replies", "StatusReply", "Tuned", "Welcome", "SamplesReply", "PiecesReply"}
    answers |= {"RewardWork", "ScoresReply", "Registered", "NotYet", "Batch", "LedgerReply", "EvaluationsReply"}
    answers |= {"Published", "RoundReply", "Instruction", "Fetched", "Images"}
    messages = {kind.__name__ for kind in typing.get_args(wire.AnyMessage)}
    assert messages - answers == {kind.__name__ for kind in ALLOWED} and len(handled) > 15
    for kind, roles in ALLOWED.items():
        assert "owner" in roles, kind
    assert {kind for kind, roles in ALLOWED.items() if "observer" in roles} == {
        wire.Hello, wire.Heartbeat, wire.StatusRequest
    }  # fmt: skip
    assert not [kind for kind, roles in ALLOWED.items() if {"producer", "reward"} < roles and "observer" not in roles]


def test_a_guest_may_not_speak_as_another_role() -> None:
    for role in GUESTS:
        for claimed in (*GUESTS, "learner", "owner", ""):
            assert is_allowed(wire.Hello(claimed, "x", 1, "h"), role) is (claimed == role)
            assert is_allowed(wire.Heartbeat(claimed, "x", 1, "h", ""), role) is (claimed == role)
    assert is_allowed(wire.Hello("learner", "x", 1, "h"), "owner")


def test_a_change_of_the_list_reaches_a_running_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "LOOK_S", 0.0)
    path = tmp_path / "server.key"
    admission = auth.Admission(write_keys(path), path)
    public = read_keys(add_key(path, "reward", "lab-c")).public.encode()
    assert admission.find(public) == Holder("lab-c", "reward")
    revoke_key(path, "lab-c")
    assert admission.find(public) is None and admission.find(read_keys(path).public.encode()) is not None
    path.write_text("broken")
    assert admission.find(read_keys(tmp_path / "reward.key").public.encode()) == Holder("reward", "reward")
