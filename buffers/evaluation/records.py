"""The records of evaluations and the rows that they are kept in.

Guarantees:
1. it has rows of its own (`vmeta`, `v<id>` of prompts, `w<number>` of evaluations that ended) and touches no row, index
   or counter of groups: of those it reads the workers, the digests and the settings, and takes new tokens;
2. indexes are derived from the rows: `check` builds them anew and compares;
3. every edit is noted: `take` gives the rows to persist, the events to log, the payloads that are free, the samples
   and the evaluations that ended, once; `load` of the persisted rows gives the same state.
No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError
from asyncrl.evaluation.ids import MARK, NO_SOURCE
from buffers.groups.changes import Worker
from buffers.groups.judgements import Judged, open_judges
from buffers.groups.leasing import Leasing
from buffers.groups.records import Change, Record
from buffers.groups.score_queue import ScoreQueue, let_go


class HeldOut(msgspec.Struct, array_like=True, gc=False):
    """One finished sample of an evaluation."""

    token: int  # lease under which it arrived
    length: int
    oldest: int  # smallest version of its tokens
    newest: int
    record: int  # index into the prompt's records
    finish: str
    reward: float | None = None
    parts: dict[str, float] = {}
    answer: str = ""  # by which a majority is counted
    failures: int = 0  # in rows of before judges had names; now in `judged`
    failed_by: tuple[str, ...] = ()
    judged: dict[str, Judged] = {}  # what judges said, until all have answered


class Prompt(msgspec.Struct, array_like=True, gc=False):
    """A prompt of the evaluation that runs, once it was leased."""

    id: int
    token: int = 0  # 0: nobody holds it
    holder: str = ""
    pid: int = 0
    request: int = 0
    attempt: int = 0
    samples: dict[int, HeldOut] = {}
    records: list[Record] = []
    source: str = NO_SOURCE
    failed: str = ""  # why it will not be scored
    scored: bool = False


class Round(msgspec.Struct, array_like=True):
    """The evaluation that runs. `number` is a token: no other evaluation has it."""

    number: int
    step: int
    digest: str
    rows: int
    begun: float  # wall time
    cursor: int = 0  # rows below it were leased at least once


class EvaluationMeta(msgspec.Struct, array_like=True):
    """What belongs to no prompt."""

    rows: int = 0  # prompts of an evaluation; 0: no producer has said
    known: dict[int, str] = {}  # step -> digest of its weights, of all evaluations that ended or were skipped
    waiting: tuple[int, str] | None = None  # step and digest of the next one
    round: Round | None = None
    ended: int = 0  # how many did


class EvaluationTaken(msgspec.Struct, frozen=True):
    """What happened since the last `take`."""

    changes: list[Change]
    events: list[dict[str, Any]]
    freed: list[Record]
    samples: list[dict[str, Any]]  # scored ones, with their text
    ended: list[dict[str, Any]]  # evaluations that ended: a line of metrics each


_encode = msgspec.msgpack.Encoder().encode
_prompt = msgspec.msgpack.Decoder(Prompt).decode
_meta = msgspec.msgpack.Decoder(EvaluationMeta).decode
_line = msgspec.json.Decoder(dict[str, Any]).decode


class EvaluationBook:
    def __init__(self, config: Config, groups: Leasing) -> None:
        self.config = config.evaluation
        self.whole = config
        self.groups = groups
        self.meta = EvaluationMeta()
        self.prompts: dict[int, Prompt] = {}
        self.ended: list[dict[str, Any]] = []  # every evaluation that ended, in order
        self.held: dict[str, set[int]] = {}
        self.pending: set[int] = set()  # leased to nobody, not complete
        self.scores_due = ScoreQueue()
        self.named: dict[int, float] = {}  # leased prompt -> when its holder last named it
        self.over = 0  # prompts scored or failed
        self.generation = 0
        self._dirty: dict[str, None] = {}
        self._events: list[dict[str, Any]] = []
        self._freed: list[Record] = []
        self._samples: list[dict[str, Any]] = []
        self._told = 0  # of `ended`, those that `take` gave

    # ------------------------------------------------------------ rows

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Take over persisted rows; others are left alone."""
        lines: dict[int, dict[str, Any]] = {}
        for key, value in rows:
            if key == "vmeta":
                self.meta = _meta(value)
            elif key[0] == "v" and key[1:].isdigit():
                prompt = _prompt(value)
                self.prompts[prompt.id] = prompt
                self._index(prompt)
            elif key[0] == "w" and key[1:].isdigit():
                lines[int(key[1:])] = _line(value)
        self.ended = [line for _, line in sorted(lines.items())]
        self._told = 0  # the metrics may lack the last ones: the service looks

    def rows(self) -> list[Change]:
        """Everything as rows, for a store that lost its own."""
        self._dirty = dict.fromkeys([*(f"v{number}" for number in self.prompts), "vmeta"])
        self._dirty |= dict.fromkeys(f"w{place}" for place in range(len(self.ended)))
        return self._changes()

    def take(self) -> EvaluationTaken:
        """What happened since the last call."""
        ended, self._told = self.ended[self._told :], len(self.ended)
        taken = EvaluationTaken(self._changes(), self._events, self._freed, self._samples, ended)
        self._events, self._freed, self._samples = [], [], []
        return taken

    def records(self) -> dict[Record, int]:
        """The payloads that are needed, and whose they are."""
        return {record: prompt.id for prompt in self.prompts.values() for record in prompt.records}

    def _changes(self) -> list[Change]:
        changes = [Change(key, self._row(key)) for key in self._dirty]
        self._dirty = {}
        return changes

    def _row(self, key: str) -> bytes | None:
        if key == "vmeta":
            return _encode(self.meta)
        number = int(key[1:])
        if key[0] == "w":
            return msgspec.json.encode(self.ended[number])
        return _encode(self.prompts[number]) if number in self.prompts else None

    # ------------------------------------------------------------ edits

    def _touch(self, key: str) -> None:
        self._dirty[key] = None
        self.generation += 1

    def _event(self, now: float, name: str, **fields: Any) -> None:
        self._events.append({"t": round(now + self.groups.wall_offset, 6), "e": MARK + name, **fields})

    def _whole(self, prompt: Prompt) -> bool:
        return len(prompt.samples) == self.config.samples

    def _index(self, prompt: Prompt) -> None:
        """Put it into the indexes."""
        if prompt.failed or prompt.scored:
            self.over += 1
            return
        if prompt.holder:
            self.held.setdefault(prompt.holder, set()).add(prompt.id)
        elif not self._whole(prompt):
            self.pending.add(prompt.id)
        judges = self.judges_of(prompt)
        for index, sample in prompt.samples.items():
            for judge in open_judges(sample, judges):
                self.scores_due.offer((prompt.id, index, judge))

    def judges_of(self, prompt: Prompt) -> tuple[str, ...]:
        """Who is asked about its samples: by the data source of its row, which comes with the first of them."""
        return self.groups.judges_of_source("" if prompt.source == NO_SOURCE else prompt.source)

    def _out(self, prompt: Prompt) -> None:
        """Take it out of the indexes, to be edited; `_in` puts it back."""
        if prompt.failed or prompt.scored:
            self.over -= 1
        self.pending.discard(prompt.id)
        self.named.pop(prompt.id, None)
        if prompt.holder:
            let_go(self.held, prompt.holder, prompt.id)

    def _in(self, prompt: Prompt) -> None:
        self._index(prompt)
        self._touch(f"v{prompt.id}")

    def _forget_samples(self, prompt: Prompt) -> None:
        """Its payloads are free, its reward leases void. What was scored stays."""
        self._withdraw(prompt)
        self._freed.extend(prompt.records)
        prompt.records = []

    def _withdraw(self, prompt: Prompt) -> None:
        """None of its samples is to be scored, by anybody."""
        for index in prompt.samples:
            for judge in self.groups.judge_names():
                self.scores_due.release((prompt.id, index, judge))

    def _seen(self, role: str, name: str, now: float) -> Worker:
        """The worker; after a restart of the service everybody starts anew."""
        return self.groups.workers.get((role, name)) or self.groups.saw(role, name, now)

    def check(self) -> None:
        """Every derived index against the rows. Raises `internal` where they disagree."""
        fresh = EvaluationBook(self.whole, self.groups)
        for prompt in self.prompts.values():
            fresh._index(prompt)
        if fresh.scores_due.keys() != self.scores_due.keys():
            raise AsyncRLError("internal", "evaluation: the samples to score disagree with the rows")
        for name in ("pending", "over"):
            if getattr(fresh, name) != getattr(self, name):
                raise AsyncRLError(
                    "internal", f"evaluation: {name} is {getattr(self, name)}, the rows say {getattr(fresh, name)}"
                )
        if {name: ids for name, ids in self.held.items() if ids} != fresh.held:
            raise AsyncRLError("internal", "evaluation: the lease holders disagree with the rows")
