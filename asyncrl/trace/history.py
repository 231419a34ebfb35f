"""What a run has recorded of a group: events of its history, read line by line, its dead letters, and its texts in the
archived batch of a step that claimed it.

Guarantees for the texts:
1. a damaged or missing file gives a sentence, never an error: the rest of the story does not depend on it;
2. text if the model folder has a `tokenizer.json`, else token ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.errors import ConfigError, WireError
from asyncrl.images.folder import ImageFolder
from asyncrl.metrics import decode_line
from asyncrl.runtime import batch_file
from asyncrl.runtime.run_dir import RunDir
from asyncrl.versions import Runs
from asyncrl.wire import decode_samples, unpack_arrays, validate_samples
from asyncrl.wire.batch_arrays import decode_batch

Event = dict[str, Any]
_GROUP = re.compile(rb'"g":(\d+)[,}]')
_BATCHED = (b'"e":"claim"', b'"e":"commit"', b'"e":"register"', b'"e":"retire"', b'"e":"tune"')


def history_lines(run: RunDir) -> Iterator[bytes]:
    """The complete lines of the history. Raises `run.missing` without one."""
    if not run.history.exists():
        raise ConfigError("run.missing", "no history.jsonl in it: the buffer has not started", where=str(run.root))
    with run.history.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def history_events(run: RunDir) -> Iterator[Event]:
    """The events of the history, without damaged lines. Raises `run.missing` without one."""
    yield from (event for line in history_lines(run) if (event := decode_line(line)) is not None)


def group_events(run: RunDir, groups: Iterable[int]) -> Iterator[Event]:
    """The events of some groups, and of the learner."""
    wanted = {b"%d" % group for group in groups}
    for line in history_lines(run):
        found = _GROUP.search(line)
        if found[1] in wanted if found else any(word in line for word in _BATCHED):
            event = decode_line(line)
            if event is not None:
                yield event


def quarantined_groups(run: RunDir) -> list[Event]:
    """Every quarantined group in the history."""
    found = (decode_line(line) for line in history_lines(run) if b'"e":"dead"' in line)
    return [event for event in found if event is not None]


def find_claim(run: RunDir, step: int) -> Event:
    """The newest claim of a step. Raises `trace.unknown` without one."""
    newest: Event | None = None
    for line in history_lines(run):
        if b'"e":"claim"' in line:
            event = decode_line(line)
            newest = event if event is not None and event.get("step") == step else newest
    if newest is None:
        raise ConfigError("trace.unknown", f"step {step} was never claimed", where=str(run.history))
    return newest


class Letter(msgspec.Struct):
    """A dead letter: its readable part, and its defect."""

    path: str
    size: int
    wrong: str
    producer: str = ""
    indexes: tuple[int, ...] = ()
    head: str = ""  # first bytes, if nothing can be decoded


def load_letters(run: RunDir, config: Config, *, group: int | None = None) -> list[Letter]:
    """The recorded dead letters (of one group), oldest first."""
    if not run.dead.exists():
        return []
    found = run.dead.glob(f"g{'*' if group is None else group}-t*.frames")
    paths = sorted(found, key=lambda path: (path.stat().st_mtime, path.name))
    return [_letter(path, config) for path in paths]


def _letter(path: Path, config: Config) -> Letter:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, payload = data[8 : 8 + size], data[8 + size :]
    try:
        message = decode_samples(header)
    except WireError as error:
        return Letter(str(path), len(data), error.message, head=header[:32].hex(" "))
    indexes = tuple(item.index for item in message.samples)
    try:
        wrong = validate_samples(message, payload, group_size=config.sampling.asked_samples)
        unpack_arrays(message.fields, payload)
    except WireError as error:
        wrong = error.message
    return Letter(str(path), len(data), wrong or "the message itself is whole", message.producer, indexes)


Decode = Callable[[Sequence[int]], str]


class Words(msgspec.Struct):
    """Texts of a group in the archive. `problem` says why there are none."""

    step: int = 0
    prompt: str = ""
    responses: dict[int, str] = {}
    turns: dict[int, list[tuple[int, float]]] = {}  # (a turn's last token, its reward, not 0), by sample
    finish: dict[int, str] = {}  # stop | length | abort, by sample
    tuning: str = ""  # tuned settings of the learner in this step
    quarantined: str = ""  # why the learner removed the group from the step
    problem: str = ""
    images: dict[int, list[str]] = {}  # that an environment showed, in words, by sample
    others: dict[int, list[tuple[int, str, Runs]]] = {}  # turns of other policies, by sample


def load_words(run: RunDir, config: Config, *, group: int, steps: Sequence[int]) -> Words | None:
    """The texts in the newest archived step with the group; None if no step is archived."""
    archived = set(batch_file.steps_in(run.archive))
    problem = ""
    for step in sorted(archived.intersection(steps), reverse=True):
        try:
            found = _words(run, config, group, step)
        except (WireError, OSError) as error:
            problem = problem or f"the archived batch of step {step} cannot be read: {error}"
            continue
        if found is not None:
            found.quarantined = batch_file.read_quarantine(run.archive).get(step, {}).get(group, "")
            return found
    return Words(problem=problem) if problem else None


def _words(run: RunDir, config: Config, group: int, step: int) -> Words | None:
    file = batch_file.read(batch_file.batch_path(run.archive, step))
    batch = decode_batch(file.batch, file.payloads)
    if group in batch.invalid:
        return Words(step, problem=f"it does not pass validation: {batch.invalid[group]}")
    folder = ImageFolder(run.images)
    for data in batch.groups:
        if data.group == group:
            decode = decoder(Path(config.model.path))
            return Words(
                step,
                decode(data.prompt_ids.tolist()),
                {sample.index: decode(sample.response.tolist()) for sample in data.samples},
                {sample.index: list(sample.turns) for sample in data.samples if sample.turns},
                {sample.index: sample.finish for sample in data.samples},
                batch.tuning,
                images={one.index: [folder.describe(digest) for _, digest in one.images] for one in data.samples},
                others={one.index: list(one.others) for one in data.samples if one.others},
            )
    return None


def decoder(folder: Path) -> Decode:
    """Token ids to text with the model's tokenizer; the ids as text if it cannot be used."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the package raises plain Exception for a missing or damaged file
        return lambda ids: " ".join(map(str, ids))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode
