"""The chain of a history: over kills, older builds and cut lines; its heads kept elsewhere; signatures; the archive."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from synthetic_run import digest_of, good_history, issue, register, train, write_history, write_run

from asyncrl import wire
from asyncrl.audit.chain import Anchor, ChainReader
from asyncrl.audit.findings import Audit, render
from asyncrl.audit.prove import audit_file, audit_run
from asyncrl.audit.verdict import Expected
from asyncrl.config import dump, load
from asyncrl.net.keys import read_keys, write_keys
from asyncrl.runtime import batch_file
from asyncrl.runtime.history_chain import find_seal, signing_key
from asyncrl.runtime.run_dir import RunDir
from buffers.service.event_log import History


def drains(count: int) -> list[bytes]:
    """A good history in parts."""
    lines = [msgspec.json.encode({"t": 1.0 + n, **event}) + b"\n" for n, event in enumerate(good_history())]
    size = -(-len(lines) // count)
    return [b"".join(lines[at : at + size]) for at in range(0, len(lines), size)]


def write(path: Path, parts: list[bytes], *, key: bytes = b"", last: bytes = b"") -> list[str]:
    """One service: its heads."""
    history, heads = History(path, last=last, key=key), []
    for part in parts:
        history.write(history.seal(part))
        heads.append(history.head)
    history.close()
    return heads


def kinds(found: Audit) -> set[str]:
    return {violation.partition(":")[0] for violation in found.violations}


def test_every_drain_is_sealed_once_over_services(tmp_path: Path) -> None:
    path, parts = tmp_path / "history.jsonl", drains(6)
    heads = [*write(path, parts[:2]), *write(path, parts[2:4]), *write(path, parts[4:])]
    found = audit_file(path)
    assert found.ok and found.drains == 6 == len(set(heads))
    assert "chain: 6 drains, 0 signed; 0 heads kept by the learner" in render(found)
    one = tmp_path / "one.jsonl"
    write(one, parts)
    assert one.read_bytes() == path.read_bytes()  # a restart leaves no trace in the chain


def test_lines_of_an_older_build_belong_to_the_next_seal(tmp_path: Path) -> None:
    path, parts = tmp_path / "history.jsonl", drains(4)
    path.write_bytes(b"".join(parts[:2]))
    assert audit_file(path).ok and "has no chain" in " ".join(audit_file(path).notes)
    write(path, parts[2:3])
    with path.open("ab") as file:
        file.write(parts[3][: parts[3].index(b"\n") + 1])  # the older build once more, then this one
    write(path, [parts[3][parts[3].index(b"\n") + 1 :]])
    found = audit_file(path)
    assert found.ok and found.drains == 2 and not found.notes
    path.write_bytes(path.read_bytes().replace(b'"g":0', b'"g":7', 1))
    assert "chain" in kinds(audit_file(path))


@pytest.mark.parametrize("kept", [0, 5, 100, 300])
def test_a_drain_that_a_kill_cut_is_completed_with_its_seal(tmp_path: Path, kept: int) -> None:
    path, parts = tmp_path / "history.jsonl", drains(4)
    history = History(path)
    history.write(history.seal(parts[0]))
    row = history.seal(parts[1])  # in the store, and in the file only in part
    history.write(row[:kept])
    history.close()
    write(path, parts[2:], last=row)
    assert audit_file(path).ok and audit_file(path).drains == 4


def test_lines_of_a_cut_drain_that_the_store_forgot_are_sealed(tmp_path: Path) -> None:
    path, parts = tmp_path / "history.jsonl", drains(4)
    history = History(path)
    first = history.seal(parts[0])
    history.write(first)
    second = history.seal(parts[1])
    history.write(second[: second.rfind(b"\n", 0, len(second) - 1) + 1])
    history.close()
    found = audit_file(path)
    assert found.ok and "have no seal" in found.notes[0]
    write(path, [second[second.rfind(b"\n", 0, len(second) - 1) + 1 :], *parts[2:]], last=first)
    assert "chain" not in kinds(audit_file(path))


def test_lines_that_a_loss_of_power_took_are_found(tmp_path: Path) -> None:
    """The store kept the newest drain, the disk of the history did not keep the one before."""
    path, parts = tmp_path / "history.jsonl", drains(6)
    history = History(path)
    sealed = [history.seal(part) for part in parts[:4]]
    history.close()
    path.write_bytes(b"".join(sealed[:2]))
    write(path, parts[4:], last=sealed[3])
    found = audit_file(path)
    assert sum(text.startswith("chain:") for text in found.violations) == 1  # once, not for every line after it


def test_a_done_run_ends_with_a_seal(tmp_path: Path) -> None:
    path, parts = tmp_path / "history.jsonl", drains(3)
    write(path, parts)
    with path.open("ab") as file:
        file.write(b'{"t":99999.0,"e":"discard","g":1,"i":0,"why":"x","tokens":1}\n')
    assert kinds(audit_file(path)) == {"chain"}


def test_a_head_that_is_kept_elsewhere_is_looked_for(tmp_path: Path) -> None:
    path, parts = tmp_path / "history.jsonl", drains(4)
    heads = write(path, parts)
    chain = ChainReader(anchors=[Anchor(heads[1], "a"), Anchor("f" * 32, "b")])
    for line in path.read_bytes().splitlines(keepends=True):
        chain.take(line)
    found = Audit(violations=[], notes=[])
    chain.judge(found)
    assert chain.found_heads == {heads[1]} and found.anchors == 2
    assert found.violations == [f"anchor: b names the head {'f' * 32}: the history does not have it"]


def test_result_and_checkpoints_keep_heads(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    run.history.unlink()
    heads = write(run.history, drains(4))
    ledger = msgspec.json.encode({"history": heads[1]}).decode()
    folder = run.checkpoints / "step_000002"
    folder.mkdir(parents=True)
    state = {"step": 2, "ledger": ledger, "digests": {"2": f"{2:032x}"}}
    (folder / "state.json").write_bytes(msgspec.json.encode(state))
    run.result.write_bytes(msgspec.json.encode({"done": True, "ledger": {"history": heads[2]}}))
    assert audit_run(run.root).ok and audit_run(run.root).anchors == 2
    (folder / "state.json").write_bytes(msgspec.json.encode({**state, "digests": {"2": "f" * 32}}))
    assert kinds(audit_run(run.root)) == {"digest"}
    (folder / "state.json").write_bytes(b"{")
    assert audit_run(run.root).ok and "step_000002 cannot be read" in audit_run(run.root).notes[0]
    write_history(run.history, good_history())  # without a chain: the heads are missed
    assert kinds(audit_run(run.root)) == {"anchor"}


def test_fork_from_a_checkpoint_that_its_parent_inherited(tmp_path: Path) -> None:
    """Neither the parent's log nor its chain has the steps of that checkpoint: they are those of the first run."""
    heads = write(RunDir(tmp_path / "first").create().history, drains(4))
    state = {"step": 2, "ledger": msgspec.json.encode({"history": heads[1]}).decode(), "digests": {"2": digest_of(2)}}
    for epoch, name, parent in ((2, "second", "first"), (3, "third", "second")):
        run = RunDir(tmp_path / name).create()
        folder = run.checkpoints / "step_000002"
        folder.mkdir(parents=True)
        (folder / "state.json").write_bytes(msgspec.json.encode(state))
        (run.root / "fork.json").write_text(f'{{"parent": "../{parent}", "step": 2}}')
        events = [{"e": "service", "service_epoch": epoch}, register(epoch, 2)]
        events += [*issue(4, version=2), *issue(5, version=2), *train(3, [4, 5], epoch=epoch)]
        lines = [msgspec.json.encode({"t": 1.0, **event}) + b"\n" for event in events]
        write(run.history, [b"".join(lines)])
        found = audit_run(run.root)
        assert found.ok and found.anchors == 1 and found.fork_of == f"../{parent}", found.violations
    run.history.unlink()
    write(run.history, [b"".join(lines).replace(digest_of(2).encode(), b"f" * 32)])
    assert kinds(audit_run(run.root)) == {"digest"}
    (tmp_path / "first" / "fork.json").write_text('{"parent": "../third", "step": 2}')  # damaged: a circle
    assert not audit_run(run.root).ok
    shutil.rmtree(tmp_path / "first")
    assert "anchor" not in kinds(audit_run(run.root)), "it is on another host"


# ---------------------------------------------------------------- the archive


def archive(run: RunDir, step: int, groups: list[int], *, head: str = "", reward: float = 0.5) -> None:
    """The batch of a step of `good_history`, as the learner claimed it."""
    version, heads = max(0, step - 2), []
    for group in groups:
        samples = tuple(wire.SampleHead(index, 5, "stop", ((version, 5),)) for index in range(2))
        digests = {version: digest_of(version)}
        record = wire.Samples("producer-0", group, group + 1, samples, digests, (), "", 1)
        heads.append(wire.GroupHead(group, 2, "", (wire.encode_header(record),), {0: 0.5, 1: reward}, {}))
    run.archive.mkdir(exist_ok=True)
    batch = wire.Batch(step, step - 1, tuple(heads))
    path = batch_file.batch_path(run.archive, step)
    batch_file.write(path, batch, [b""] * len(heads), meta=batch_file.Meta(history=head))


def test_history_and_archive_must_agree(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    run.history.unlink()
    heads = write(run.history, drains(4))
    archive(run, 1, [0, 1])
    archive(run, 2, [2, 3], head=heads[0])
    found = audit_run(run.root)
    assert found.ok and found.anchors == 1
    archive(run, 2, [2, 3], head=heads[0], reward=0.25)
    assert audit_run(run.root).violations == [
        "archive: group 2 of step 2: reward of sample 1 is 0.5, archived is 0.25",
        "archive: group 3 of step 2: reward of sample 1 is 0.5, archived is 0.25",
    ]
    archive(run, 2, [2], head="f" * 32)
    assert kinds(audit_run(run.root)) == {"anchor", "archive"}
    batch_file.batch_path(run.archive, 2).write_bytes(b"ARLBATCH")
    assert audit_run(run.root).ok and "cannot be read" in audit_run(run.root).notes[0]


# ---------------------------------------------------------------- signatures


def test_only_a_holder_of_the_server_key_signs_and_checks(tmp_path: Path) -> None:
    path, keys = tmp_path / "history.jsonl", write_keys(tmp_path / "server.key")
    key = signing_key(keys)
    assert len(key) == 32 and signing_key(read_keys(tmp_path / "producer.key")) == b"" == signing_key(None)
    write(path, drains(4), key=key)
    found = audit_file(path, expected=Expected(signed=True, key=key))
    assert found.ok and (found.drains, found.signed) == (4, 4)
    assert kinds(
        audit_file(path, expected=Expected(signed=True, key=signing_key(write_keys(tmp_path / "other.key"))))
    ) == {"sign"}
    unknown = audit_file(path)
    assert unknown.ok and unknown.notes == ["signatures are not checked: network.key_file cannot be read here"]


def test_a_chain_that_a_forger_computed_again_has_no_signatures(tmp_path: Path) -> None:
    path, key = tmp_path / "history.jsonl", signing_key(write_keys(tmp_path / "server.key"))
    write(path, drains(4), key=key)
    forged = tmp_path / "forged.jsonl"
    write(forged, [part.replace(b'"reward":0.5', b'"reward":0.9') for part in drains(4)])
    assert audit_file(forged).ok
    assert kinds(audit_file(forged, expected=Expected(signed=True, key=key))) == {"sign"}
    lines = path.read_bytes().splitlines(keepends=True)
    seals = [seal for line in lines if (seal := find_seal(line)) is not None]
    forged.write_bytes(path.read_bytes().replace(seals[1].sign.encode(), b"0" * 32))
    assert kinds(audit_file(forged, expected=Expected(key=key))) >= {"sign", "chain"}


def test_a_run_that_signs_has_seals(tmp_path: Path) -> None:
    path, key = tmp_path / "history.jsonl", signing_key(write_keys(tmp_path / "server.key"))
    path.write_bytes(b"".join(drains(4)))
    assert audit_file(path).ok, "of an older build"
    for known in (key, b""):
        assert kinds(audit_file(path, expected=Expected(signed=True, key=known))) == {"sign"}
    path.write_bytes(drains(20)[0])
    assert audit_file(path, expected=Expected(signed=True, key=key)).ok, "killed before its first seal"


def test_a_run_may_begin_to_sign_later(tmp_path: Path) -> None:
    """The first signature covers what was written before it; after it none may be missing."""
    path, key = tmp_path / "history.jsonl", signing_key(write_keys(tmp_path / "server.key"))
    write(path, drains(6)[:2])
    write(path, drains(6)[2:], key=key)
    found = audit_file(path, expected=Expected(signed=True, key=key))
    assert found.ok and (found.drains, found.signed) == (6, 4), found.violations
    forged = path.read_bytes().replace(b'"reward":0.5', b'"reward":0.9', 1)
    path.write_bytes(forged)
    assert kinds(audit_file(path, expected=Expected(signed=True, key=key))) == {"chain"}
    path.unlink()
    write(path, drains(6)[:2], key=key)
    write(path, drains(6)[2:])
    assert kinds(audit_file(path, expected=Expected(signed=True, key=key))) == {"sign"}


def test_a_run_is_checked_with_its_key_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    keys = tmp_path / "server.key"
    override = [f'network.key_file="{keys}"', "log.sign=true"]
    run.config.write_text(dump(load(run.config, override)))
    run.history.unlink()
    write(run.history, drains(4), key=signing_key(write_keys(keys)))
    run.result.unlink()
    found = audit_run(run.root)
    assert found.ok and found.signed == 4 and not found.notes
    run.history.unlink()
    write(run.history, drains(4))
    assert kinds(audit_run(run.root)) == {"sign"}
