"""What the learner kept of a run outside of its history: heads of the chain, digests of versions, claimed batches.

Violations:
  digest   a checkpoint knows other digests of a version than those it was committed with
  archive  a group of a trained step has other samples or rewards in the history than in the archived batch
Damaged files are noted, not judged. The archive is compared with what the history says when the step was claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash

from asyncrl import wire
from asyncrl.audit.chain import Anchor
from asyncrl.audit.reader import Reader
from asyncrl.audit.records import Origin
from asyncrl.errors import UNREADABLE, WireError
from asyncrl.runtime import batch_file
from asyncrl.runtime.run_dir import RunDir, read_object


class Checkpoint(msgspec.Struct, frozen=True):
    """What the audit reads of a checkpoint's `state.json`."""

    step: int
    ledger: str = ""
    digests: dict[int, str] = {}


class _Ledger(msgspec.Struct, frozen=True):
    """What the audit reads of a ledger."""

    history: str = ""


class Witnesses:
    """Everything outside of the history. Create it before the history is read: a run that goes on only adds to both."""

    def __init__(self, run: RunDir) -> None:
        self.anchors: list[Anchor] = []
        self.checkpoints: list[Checkpoint] = []
        self.notes: list[str] = []
        self._archive = run.archive
        self.steps = batch_file.steps_in(run.archive)  # archived
        self._read_checkpoints(run.checkpoints)
        ledger = read_object(run.result).get("ledger")
        if isinstance(ledger, dict):
            self._add(str(ledger.get("history", "")), "result.json")
        for step in self.steps:
            path = batch_file.batch_path(run.archive, step)
            try:
                self._add(batch_file.read_meta(path).history, path.name)
            except (OSError, WireError) as error:
                self.notes.append(f"{path.name} cannot be read: {error}")

    def _read_checkpoints(self, folder: Path) -> None:
        for path in sorted(folder.glob("step_*/state.json")):
            try:
                state = msgspec.json.decode(path.read_bytes(), type=Checkpoint)
                head = msgspec.json.decode(state.ledger, type=_Ledger).history if state.ledger else ""
            except FileNotFoundError:
                continue  # a newer checkpoint has replaced it
            except (OSError, *UNREADABLE) as error:
                self.notes.append(f"checkpoint {path.parent.name} cannot be read: {error}")
                continue
            self.checkpoints.append(state)
            self._add(head, f"checkpoint {path.parent.name}", state.step)

    def _add(self, head: str, where: str, step: int = 0) -> None:
        if head:
            self.anchors.append(Anchor(head, where, step))

    def judge(self, reader: Reader, *, fork_step: int = 0) -> None:
        """Compare the history with checkpoints later than `fork_step`, and with the archive."""
        reader.found.notes.extend(self.notes)
        for state in self.checkpoints:
            if state.step > fork_step:
                _compare_digests(reader, state)
        for step in self.steps:
            if step not in reader.commits:
                continue
            path = batch_file.batch_path(self._archive, step)
            try:
                file = batch_file.read(path)
                payloads = iter(file.payloads)
                archived = {
                    head.group: dict(_origins(head, [next(payloads) for _ in head.records]))
                    for head in file.batch.groups
                }
            except (OSError, WireError) as error:
                reader.found.notes.append(f"{path.name} cannot be read: {error}")
                continue
            for number in reader.commits[step].groups:
                if why := _find_difference(reader.batches.get(step, {}).get(number, {}), archived.get(number)):
                    reader.found.violation("archive", f"group {number} of step {step}: {why}")


def _compare_digests(reader: Reader, state: Checkpoint) -> None:
    """Of versions that this log committed, and whose commit came from their learner."""
    for version, digest in sorted(state.digests.items()):
        known = reader.digests.get(version)
        if known and digest not in known and version not in reader.adopted:
            text = f"checkpoint of step {state.step}: the digest of version {version} is {digest}, committed was "
            reader.found.violation("digest", text + ", ".join(sorted(known)))


def _origins(head: wire.GroupHead, payloads: Sequence[wire.Buffer]) -> Iterator[tuple[int, Origin]]:
    """What made the samples of an archived group. If two records hold a sample, the first one counts."""
    seen: set[int] = set()
    messages = [wire.decode_record(record) for record in head.records]
    taught: dict[int, str] = {}
    for record, payload, message in zip(head.records, payloads, messages, strict=True):
        if isinstance(message, wire.TeacherLogprobs):
            taught.setdefault(message.index, f"{_checksum(record, payload):016x}")
    for message in messages:
        if isinstance(message, wire.TeacherLogprobs):
            continue
        for item in message.samples:
            if item.index in seen or item.index not in head.rewards:
                continue
            seen.add(item.index)
            digests = {version: message.digests.get(version, "") for version, _ in item.runs}
            reward, teaching = head.rewards[item.index], taught.get(item.index, "")
            yield item.index, Origin(message.token, message.producer, item.length, item.runs, digests, reward, teaching)


def _checksum(header: wire.Buffer, payload: wire.Buffer) -> int:
    """As of the message that brought them."""
    digest = xxhash.xxh3_64(header)
    digest.update(payload)
    return digest.intdigest()


def _find_difference(history: Mapping[int, Origin], archived: Mapping[int, Origin] | None) -> str:
    """How the samples of a group differ; empty if they do not."""
    if archived is None:
        return "it is not in the archived batch"
    if history.keys() != archived.keys():
        return f"its samples are {sorted(history)}, archived are {sorted(archived)}"
    for index, right in sorted(archived.items()):
        for name, told, kept in zip(Origin._fields, history[index], right, strict=True):
            if told != kept:
                return f"{name} of sample {index} is {told}, archived is {kept}"
    return ""
