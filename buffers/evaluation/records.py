"""The table of an evaluation: its held-out prompts, and the evaluations that ended.

Guarantees:
1. its rows (`vmeta`, `v<id>` of prompts, `w<number>` of ended evaluations) are separate from those of training groups;
2. indexes are derived from the rows: `check` rebuilds them and compares;
3. `load` of the persisted rows gives the same table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.evaluation.ids import MARK, NO_SOURCE
from buffers.groups.judgements import Judgement, Judges, ScoreQueue, open_judges, release
from buffers.groups.records import Change, Record
from buffers.groups.transaction import Edit, Transaction
from buffers.groups.workers import Workers


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
    answer: str = ""  # key that a majority vote counts
    failures: int = 0  # in rows older than named judges; now in `judged`
    failed_by: tuple[str, ...] = ()
    judged: dict[str, Judgement] = {}  # answers of judges, until all have answered


class Prompt(msgspec.Struct, array_like=True, gc=False):
    """A prompt of the current evaluation, once it was leased."""

    id: int
    token: int = 0  # 0: it has no holder
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
    """The current evaluation. `number` is a token: no other evaluation has it."""

    number: int
    step: int
    digest: str
    rows: int
    begun: float  # wall time
    cursor: int = 0  # rows below it were leased at least once
    version: int = -1  # version that makes all its samples: that of the first lease; -1: none was granted
    restarts: int = 0  # times that it began again because its version was lost
    refused: int = 0  # samples that another version made, at least in part
    weights: str = ""  # digest of the weights that made its samples; empty: no sample came, or producers name none


class EvaluationMeta(msgspec.Struct, array_like=True):
    """State of the evaluations as a whole."""

    rows: int = 0  # prompts of an evaluation; 0: no producer has reported it
    known: dict[int, str] = {}  # step -> digest of its weights, of skipped evaluations; ended ones have their rows
    waiting: tuple[int, str] | None = None  # step and digest of the next one
    round: Round | None = None
    ended: int = 0  # number of evaluations that ended
    skipped: int = 0  # number of evaluations that came due and never began


_encode = msgspec.msgpack.Encoder().encode
_decode_prompt = msgspec.msgpack.Decoder(Prompt).decode
_decode_meta = msgspec.msgpack.Decoder(EvaluationMeta).decode
_decode_line = msgspec.json.Decoder(dict[str, Any]).decode


class PromptIndexes:
    """Indexes over the prompts of the current evaluation. `size`: samples of a complete prompt."""

    def __init__(self, judges: Judges, queue: ScoreQueue, size: int) -> None:
        self.judges = judges
        self.queue = queue
        self.size = size
        self.held: dict[str, set[int]] = {}  # by producer
        self.named: dict[int, float] = {}  # leased prompt -> when its holder last named it
        self.pending: set[int] = set()  # without a holder and not complete
        self.over = 0  # prompts that are scored or failed

    def add(self, prompt: Prompt) -> None:
        """Put the prompt into the indexes that its state asks for."""
        if prompt.failed or prompt.scored:
            self.over += 1
            return
        if prompt.holder:
            self.held.setdefault(prompt.holder, set()).add(prompt.id)
        elif len(prompt.samples) < self.size:
            self.pending.add(prompt.id)
        judges = self.judges_for(prompt)
        for index, sample in prompt.samples.items():
            for judge in open_judges(sample, judges):
                self.queue.offer((prompt.id, index, judge))

    def remove(self, prompt: Prompt) -> None:
        """Take the prompt out of every index."""
        if prompt.failed or prompt.scored:
            self.over -= 1
        self.pending.discard(prompt.id)
        self.named.pop(prompt.id, None)
        if prompt.holder:
            release(self.held, prompt.holder, prompt.id)

    def judges_for(self, prompt: Prompt) -> tuple[str, ...]:
        """The judges of the prompt's data source, which arrives with its first samples."""
        return self.judges.judges_for("" if prompt.source == NO_SOURCE else prompt.source)


class PromptTable:
    """Prompts of the current evaluation by id, and a line per evaluation that ended."""

    event_prefix = MARK

    def __init__(self, tx: Transaction, workers: Workers, judges: Judges, *, samples: int) -> None:
        self.tx = tx
        self.workers = workers
        self.judges = judges
        self.samples = samples
        self.queue = ScoreQueue()
        self.indexes = PromptIndexes(judges, self.queue, samples)
        self.meta = EvaluationMeta()
        self.prompts: dict[int, Prompt] = {}
        self.ended: list[dict[str, Any]] = []  # a line of metrics per evaluation that ended
        self._ended_digests: dict[int, str] = {}  # step -> digest of its weights, by the last of these lines

    # ------------------------------------------------------------ rows

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Take over persisted rows. Rows of other tables are ignored."""
        lines: dict[int, dict[str, Any]] = {}
        for key, value in rows:
            if key == "vmeta":
                self.meta = _decode_meta(value)
            elif key[0] == "v" and key[1:].isdigit():
                prompt = _decode_prompt(value)
                self.prompts[prompt.id] = prompt
                self.indexes.add(prompt)
            elif key[0] == "w" and key[1:].isdigit():
                lines[int(key[1:])] = _decode_line(value)
        self.ended, self._ended_digests = [], {}
        for _, line in sorted(lines.items()):
            self._note_ended(line)
        for step in self._ended_digests:  # rows of older services repeat them
            self._forget_known(step)

    def rows(self) -> list[Change]:
        """All rows, for a store that lost its own."""
        keys = ["vmeta", *(f"v{number}" for number in self.prompts), *(f"w{at}" for at in range(len(self.ended)))]
        return [Change(key, self.row(key)) for key in keys]

    def row(self, key: str) -> bytes | None:
        if key == "vmeta":
            return _encode(self.meta)
        number = int(key[1:])
        if key[0] == "w":
            return msgspec.json.encode(self.ended[number])
        return _encode(self.prompts[number]) if number in self.prompts else None

    def row_key(self, prompt: Prompt) -> str:
        return f"v{prompt.id}"

    def put(self, key: str) -> None:
        """Write a row with the transaction."""
        self.tx.put(key, self)

    # ------------------------------------------------------------ edits

    def known_digest(self, step: int) -> str | None:
        """Digest of the weights of the step's last evaluation that ended or was skipped; None: there was none."""
        return self.meta.known.get(step, self._ended_digests.get(step))

    def end(self, line: dict[str, Any]) -> None:
        """Add the line of an evaluation that ended. `vmeta`, which is written for every prompt, does not repeat it."""
        self._note_ended(line)
        self.meta.known.pop(line["step"], None)
        self.meta.ended = len(self.ended)
        self.put("vmeta")
        self.put(f"w{len(self.ended) - 1}")

    def skip(self, step: int, digest: str) -> None:
        """An evaluation that waited will not begin."""
        self.meta.known[step] = digest
        self._forget_known(step)
        self.put("vmeta")

    def _forget_known(self, step: int) -> None:
        """The line of an ended evaluation says the same."""
        if self.meta.known.get(step) == self._ended_digests.get(step):
            self.meta.known.pop(step, None)

    def _note_ended(self, line: dict[str, Any]) -> None:
        self.ended.append(line)
        if "step" in line:
            self._ended_digests[line["step"]] = line.get("digest", "")

    def get(self, number: int) -> Prompt | None:
        """The prompt, while it can still be scored."""
        prompt = self.prompts.get(number)
        return None if prompt is None or prompt.failed else prompt

    def edit(self, prompt: Prompt) -> Edit:
        """A context in which the prompt may be edited."""
        return self.tx.edit(self, prompt)

    def add(self, prompt: Prompt) -> None:
        """Add a prompt."""
        self.prompts[prompt.id] = prompt
        self.indexes.add(prompt)
        self.put(self.row_key(prompt))

    def remove(self, prompt: Prompt) -> None:
        """Remove a prompt: its evaluation has ended."""
        self.cancel(prompt)
        self.indexes.remove(prompt)
        self.free(prompt)
        del self.prompts[prompt.id]
        self.put(self.row_key(prompt))

    def event(self, name: str, **fields: Any) -> None:
        """Append a line to the history."""
        self.tx.event(self.event_prefix + name, **fields)

    def is_generated(self) -> bool:
        """Whether no prompt of the current evaluation needs a producer any more."""
        current = self.meta.round
        if current is None or current.cursor < current.rows or self.indexes.pending:
            return current is None
        return not any(self.indexes.held.values())

    def is_complete(self, prompt: Prompt) -> bool:
        """Whether all samples of the prompt have arrived."""
        return len(prompt.samples) == self.samples

    def cancel(self, prompt: Prompt) -> None:
        """Tell the holder of the prompt to stop."""
        if prompt.holder:
            self.workers.cancel(prompt.holder, prompt.id, prompt.token, self.tx.now)

    def free(self, prompt: Prompt) -> None:
        """Free the prompt's payloads and end its reward leases. Scores stay."""
        self.withdraw(prompt)
        self.tx.free(prompt.records)
        prompt.records = []

    def withdraw(self, prompt: Prompt) -> None:
        """Take the prompt's samples out of the score queue."""
        for index in prompt.samples:
            for judge in self.judges.names:
                self.queue.remove((prompt.id, index, judge))

    def fail(self, prompt: Prompt, reason: str, detail: str = "") -> None:
        """The prompt will not be scored; its holder is asked to stop."""
        self.cancel(prompt)
        with self.edit(prompt):
            self.free(prompt)
            prompt.failed, prompt.token = reason, 0
            prompt.holder = ""
        self.event("failed", g=prompt.id, reason=reason, detail=detail[:500])

    # ------------------------------------------------------------ checks

    def records(self) -> dict[Record, int]:
        """The payloads that are needed, and their prompts."""
        return {record: prompt.id for prompt in self.prompts.values() for record in prompt.records}

    def check(self) -> None:
        """Compare every index with the rows. Raises `internal` if they disagree."""
        fresh = PromptIndexes(self.judges, ScoreQueue(), self.samples)
        for prompt in self.prompts.values():
            fresh.add(prompt)
        if fresh.queue.keys() != self.queue.keys():
            raise AsyncRLError("internal", "evaluation: the samples to score disagree with the rows")
        for name in ("pending", "over"):
            if getattr(fresh, name) != getattr(self.indexes, name):
                raise AsyncRLError(
                    "internal",
                    f"evaluation: {name} is {getattr(self.indexes, name)}, the rows say {getattr(fresh, name)}",
                )
        if {name: ids for name, ids in self.indexes.held.items() if ids} != fresh.held:
            raise AsyncRLError("internal", "evaluation: the lease holders disagree with the rows")
