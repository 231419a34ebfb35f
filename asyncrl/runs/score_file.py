"""A file of scores: rewards of other functions for the archived samples of a run, or the log-probs of a teacher.

`asyncrl rescore` and `asyncrl replay --rewards` read it. JSON lines: a `Head`, then one `GroupScores` for every
archived group, in the order of the steps. Guarantees:
1. a file is complete or absent; an unreadable one is `rescore.file`;
2. a sample that could not be scored is in `failed` with the reason, never with a reward;
3. `content` identifies the scored samples: a group that was generated again since has another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import xxhash

from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.runtime.run_dir import write_atomic
from asyncrl.wire import IntArray

SAME = 1e-9  # rewards that differ by less are equal
FORMAT = 1


class Head(msgspec.Struct, frozen=True):
    """Origin of the scores."""

    run: str
    functions: tuple[str, ...]
    judge: str | None = None  # judge whose part of the reward was replaced; None: all parts
    versions: dict[str, str] = {}  # judge -> digest of its functions
    recorded: dict[str, int] = {}  # reward version in the run's log -> number of its scores
    format: int = FORMAT
    t: float = 0.0  # wall time
    teacher: str = ""  # the scores are mean log-probs of this teacher, not rewards


class GroupScores(msgspec.Struct, frozen=True):
    """One group: new and recorded rewards by sample."""

    step: int
    group: int
    content: str  # digest of the responses
    before: dict[int, float]
    rewards: dict[int, float] = {}
    parts: dict[int, dict[str, float]] = {}
    failed: dict[int, str] = {}  # sample -> reason and detail

    @property
    def changed(self) -> tuple[int, ...]:
        """Samples with another reward."""
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
    """Read a file. Raises `rescore.file` if it is missing, damaged, or no file of scores."""
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
