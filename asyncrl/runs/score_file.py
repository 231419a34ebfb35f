"""A file of scores: what other reward functions say of the archived samples of a run.

Written by `asyncrl.runs.rescore`, read by it and by `asyncrl replay --rewards`. JSON lines: a `Head`, then one
`GroupScores`
for every archived group, in the order of the steps. Guarantees:
1. a file is whole or not there; one that cannot be read is `rescore.file`;
2. a sample that could not be scored stands in `failed` with the reason, never with a reward;
3. `content` tells the samples that were scored: a group that was made anew since is not the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import xxhash

from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.runtime.run_dir import write_atomic
from asyncrl.wire import IntArray

SAME = 1e-9  # rewards that differ by less are the same
FORMAT = 1


class Head(msgspec.Struct, frozen=True):
    """What was scored, by what."""

    run: str
    functions: tuple[str, ...]
    judge: str | None = None  # whose part of the reward was replaced; None: all of it
    versions: dict[str, str] = {}  # judge -> digest of its functions
    recorded: dict[str, int] = {}  # reward version that the run's log names -> how many scores of it
    format: int = FORMAT
    t: float = 0.0  # wall time


class GroupScores(msgspec.Struct, frozen=True):
    """One group: rewards by sample, as they would have been and as they were."""

    step: int
    group: int
    content: str  # digest of the responses
    before: dict[int, float]
    rewards: dict[int, float] = {}
    parts: dict[int, dict[str, float]] = {}
    failed: dict[int, str] = {}  # sample -> reason and detail

    @property
    def changed(self) -> tuple[int, ...]:
        """Samples whose reward would have been another one."""
        return tuple(index for index, reward in self.rewards.items() if abs(reward - self.before[index]) > SAME)


def responses_digest(responses: Iterable[IntArray]) -> str:
    """The digest of a group's responses, each `[T]`, in the order of the samples."""
    digest = xxhash.xxh3_64()
    for response in responses:
        digest.update(len(response).to_bytes(8, "little"))
        digest.update(response.tobytes())
    return digest.hexdigest()


def write_scores(path: Path, head: Head, groups: Sequence[GroupScores]) -> None:
    """Write or replace the file."""
    write_atomic(path, b"".join(msgspec.json.encode(line) + b"\n" for line in (head, *groups)))


def read_scores(path: Path) -> tuple[Head, list[GroupScores]]:
    """The file. Raises `rescore.file` where it is not there, damaged, or no file of scores."""
    try:
        first, *lines = path.read_bytes().splitlines()
        head = msgspec.json.decode(first, type=Head)
        if head.format != FORMAT:
            raise ConfigError("rescore.file", f"format {head.format}, this version reads {FORMAT}", where=str(path))
        return head, [msgspec.json.decode(line, type=GroupScores) for line in lines]
    except OSError as error:
        raise ConfigError("rescore.file", error.strerror or str(error), where=str(path)) from None
    except UNREADABLE as error:
        raise ConfigError("rescore.file", str(error), where=str(path)) from None
