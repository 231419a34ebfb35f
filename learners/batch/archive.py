"""The learner's archive: every claimed batch as a file, written before its step trains.

The folder also holds the configurations (`config-<digest>.toml`) and the quarantined groups (`quarantined.jsonl`).

Guarantees:
1. the batch of a step is complete and synced on disk before the step trains; a file is never half written;
2. a batch that comes again after a restart is compared with the file. If groups, samples or rewards differ, a warning
   is printed and the file is replaced, because the weights will contain the new batch;
3. a full disk loses the archive of that step; it is reported and counted, and the run continues;
4. `read_step` returns a batch exactly as `LearnerClient.claim` returned it.

Cost: about 8 bytes per token (ids and log-probs) and one fsync per step; nothing is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncrl import wire
from asyncrl.config import Config, dump
from asyncrl.errors import WireError
from asyncrl.images.batches import read_images
from asyncrl.images.folder import ImageFolder
from asyncrl.metrics import open_lines
from asyncrl.runtime import batch_file
from asyncrl.runtime.batch_file import BatchFile, Meta, Note
from asyncrl.runtime.run_dir import RunDir, write_atomic
from asyncrl.wire.batch_arrays import decode_batch

if TYPE_CHECKING:
    from asyncrl.wire.batch_arrays import ClaimedBatch

Say = Callable[[str], None]


class Archive:
    """Writes batches. `lost` counts the steps that could not be written."""

    def __init__(self, config: Config, *, say: Say) -> None:
        self.folder = RunDir(config.run_dir).archive
        self.lost = 0
        self._say = say
        text = dump(config)
        self._config = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self._text = text

    def put(self, batch: ClaimedBatch, *, epoch: int, history: str = "") -> None:
        """Record the batch as it was claimed, unless the file has it. `history`: newest known head of the chain."""
        if batch.frames is None:  # made by hand, not claimed
            return
        path = batch_file.batch_path(self.folder, batch.step)
        try:
            self._prepare()
            if path.exists() and self._is_there(path, batch):
                return
            meta = Meta(config=self._config, epoch=epoch, t=time.time(), history=history)
            plain = msgspec.structs.replace(batch.frames.batch, places=(), replayed=False)
            batch_file.write(path, plain, batch.frames.payloads, meta=meta)
        except OSError as error:
            self.lost += 1
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # the batch that an earlier learner got is not the one that is trained
            self._say(f"ERROR: the batch of step {batch.step} is not archived ({self.lost} so far): {error}")

    def quarantine(self, step: int, group: int, reason: str) -> None:
        """Record that a group of the step was quarantined."""
        try:
            self._prepare()
            with open_lines(self.folder / batch_file.NOTES) as file:
                file.write(msgspec.json.encode(Note(step, group, reason)) + b"\n")
        except OSError as error:
            self._say(f"ERROR: the archive does not know that group {group} was quarantined: {error}")

    def _prepare(self) -> None:
        path = batch_file.config_path(self.folder, self._config)
        if not path.exists():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, self._text.encode())

    def _is_there(self, path: Path, batch: ClaimedBatch) -> bool:
        try:
            found = batch_file.read(path)
        except WireError as error:
            self._say(f"warning: {path.name} is written again: {error.message}")
            return False
        out = batch_file.read_quarantine(self.folder).get(batch.step, {})
        if why := find_difference(found, batch, out):
            if batch.replayed:  # otherwise the buffer made a new batch after losing state
                self._say(f"warning: the batch of step {batch.step} came back and is not the one in the archive: {why}")
            return False
        return found.meta.config == self._config


def find_difference(found: BatchFile, batch: ClaimedBatch, out: dict[int, str]) -> str:
    """Describe how a claimed batch differs from the recorded one, without the groups `out` quarantined since."""
    assert batch.frames is not None
    recorded, claim = _contents(found.batch, found.payloads), _contents(batch.frames.batch, batch.frames.payloads)
    expected = [number for number in recorded if number in claim or number not in out]
    if expected != list(claim):
        return f"its groups are {list(claim)[:8]}, recorded were {expected[:8]}"
    changed = [number for number, content in claim.items() if content != recorded[number]]
    if changed:
        return f"group {changed[0]} has other samples or rewards"
    return "" if found.batch.tuning == batch.frames.batch.tuning else "it has other tuned settings"


def _contents(batch: wire.Batch, payloads: tuple[wire.Buffer, ...]) -> dict[int, object]:
    """Return group -> what training uses of it."""
    contents: dict[int, object] = {}
    place = 0
    for head in batch.groups:
        mine = payloads[place : place + len(head.records)]
        place += len(head.records)
        contents[head.group] = (head.bound, head.records, head.rewards, [bytes(payload) for payload in mine])
    return contents


def read_step(folder: Path, step: int) -> tuple[ClaimedBatch, Meta]:
    """Return the batch of a step as it was claimed. Raises `WireError` if the file is damaged, OSError if it is
    missing.
    """
    found = batch_file.read(batch_file.batch_path(folder, step))
    images = ImageFolder(RunDir(folder.parent).images)
    return read_images(decode_batch(found.batch, found.payloads), images), found.meta
