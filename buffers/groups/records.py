"""The records of the buffer: groups, samples, batches, the ledger, and the settings that decisions read.

Guarantees:
1. a record encodes to a small msgpack row and back without loss; new fields go last and have defaults;
2. `Ledger` is what a checkpoint of the learner stores: enough to never train a group twice, even without the store.
It decides nothing.
"""

from __future__ import annotations

import enum
import math
from typing import Any, Literal

import msgspec

from asyncrl.config import Config
from asyncrl.config.judges import list_judges
from asyncrl.config.mode import staleness_bound, streams
from asyncrl.config.sections.reward import DEFAULT
from asyncrl.errors import UNREADABLE, AsyncRLError
from asyncrl.versions import Runs
from buffers.groups.judgements import Judgement, JudgeRule
from buffers.values.archive import Archived


class State(enum.IntEnum):
    """Where a prompt that was ever issued is; exactly one of these."""

    LEASED = 0  # being generated, or waiting to be leased again
    UNSCORED = 1  # all samples in
    READY = 2  # all rewards in
    CLAIMED = 3  # in a recorded batch that is not committed
    TRAINED = 4  # in a committed step
    RETIRED = 5  # in a durable checkpoint
    DROPPED = 6  # not trained, by rule
    DEAD = 7  # quarantined: something was wrong with it


#: The states by name: Python 3.11 looks up a member of an enumeration ten times as slowly.
LEASED, UNSCORED, READY, CLAIMED, TRAINED = list(State)[:5]
#: States whose groups still compete for a place in a batch: `n(u)` of staleness.md counts them.
COMPETING = (LEASED, UNSCORED, READY)


class Settings(msgspec.Struct, frozen=True):
    """What decisions read. The service may replace the object while it runs; a group keeps the bound of its lease."""

    group_size: int
    batch_groups: int
    max_staleness: int
    depth: int
    total_groups: int
    on_late: Literal["wait", "drop", "train"] = "wait"
    late_timeout_s: float = 300.0
    max_reissue: int = 3
    lease_timeout_s: float = 30.0
    reward_retries: int = 2
    max_failed_groups: int = 64
    max_reward: float = math.inf
    max_poison_rate: float = 0.5
    poison_window: int = 64
    learner_timeout_s: float = 10.0
    seed: int = 0
    depth_rule: Literal["fixed", "max", "auto"] = "fixed"  # max: depth is max_staleness; auto: it is found
    learner_idle_target: float = 0.03
    max_groups_in_flight: int = 0  # that one producer may hold; 0: as many as it asks for
    steps: int = 0  # of the run; 0: ceil(total_groups / batch_groups)
    max_reuse: int = 1  # steps that may train one group
    algorithm: dict[str, Any] = {}  # `learner.algorithm` of the configuration, opaque here
    over_issue: int = 0  # samples of a group that are asked for beyond group_size
    max_filtered_rate: float = 0.98
    filter_window: int = 256
    replay_order: Literal["deadline", "priority"] = "deadline"
    fresh_first: bool = True
    priority_exponent: float = 1.0
    continues: bool = False  # single answers are kept: another attempt continues them with the same random numbers
    judges: tuple[JudgeRule, ...] = ()  # none: the default judge alone, for all rows, with reward_retries
    chooses: bool = False  # the buffer chooses the rows of groups (data.sampler)


#: Batches ahead with which `pipeline_depth = "auto"` begins: old samples cost most in the first updates.
FIRST_DEPTH = 1


def settings_of(config: Config) -> Settings:
    """The part of the configuration that decisions read."""
    buffer = config.buffer
    rule: Literal["fixed", "max", "auto"] = "fixed"
    if isinstance(buffer.pipeline_depth, str) and not streams(config):  # rows of a data set do not age
        rule = buffer.pipeline_depth
    return Settings(
        group_size=config.sampling.group_samples,
        batch_groups=buffer.batch_groups,
        max_staleness=staleness_bound(config),
        depth=min(FIRST_DEPTH, buffer.max_staleness) if rule == "auto" else buffer.depth,
        total_groups=config.total_groups,
        on_late=buffer.on_late,
        late_timeout_s=buffer.late_timeout_s,
        max_reissue=buffer.max_reissue,
        lease_timeout_s=buffer.lease_timeout_s,
        reward_retries=config.reward_workers.retries,
        max_failed_groups=config.reward_workers.max_failed_groups,
        max_reward=config.reward_workers.max_reward,
        max_poison_rate=buffer.max_poison_rate,
        seed=config.run.seed,
        depth_rule=rule,
        learner_idle_target=buffer.learner_idle_target,
        max_groups_in_flight=config.producers.max_groups_in_flight,
        steps=config.learner.steps,
        max_reuse=buffer.max_reuse,
        over_issue=config.sampling.over_issue,
        max_filtered_rate=buffer.max_filtered_rate,
        replay_order=buffer.replay_order,
        fresh_first=buffer.fresh_first,
        priority_exponent=buffer.priority_exponent,
        algorithm=msgspec.to_builtins(config.learner.algorithm),
        judges=_rules_of(config),
        continues=config.producers.checkpoint_tokens > 0 and all(one.is_single_turn for one in config.environments),
        chooses=config.data.chosen_by_buffer,
    )


def _rules_of(config: Config) -> tuple[JudgeRule, ...]:
    judges = list_judges(config)
    if [judge.name for judge in judges] in ([], [DEFAULT]):
        return ()
    return tuple(
        JudgeRule(judge.name, judge.retries, judge.data_sources, judge.teacher is not None) for judge in judges
    )


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the bytes of one accepted `Samples` message lie, and their checksum (which also tells duplicates)."""

    segment: int
    offset: int
    header_bytes: int
    payload_bytes: int
    checksum: int


class Sample(msgspec.Struct, array_like=True, gc=False):
    """One finished sample of a group."""

    token: int  # lease under which it arrived
    length: int
    oldest: int  # smallest version of its tokens
    record: int  # index into the group's records
    finish: str
    reward: float | None = None
    parts: dict[str, float] = {}
    failures: int = 0  # in rows of older builds; now in `judged`
    failed_by: tuple[str, ...] = ()
    judged: dict[str, Judgement] = {}  # answers of judges, until all have answered
    newest: int = -1  # largest version of its tokens; -1 in rows of older builds: then none is above `oldest`


class PartialSample(msgspec.Struct, array_like=True, gc=False):
    """The checkpoint of a sample that is being generated: its first `length` tokens."""

    token: int  # lease under which the newest piece arrived
    length: int
    runs: Runs
    digests: dict[int, str]  # version -> digest of the weights, of the versions in `runs`
    pieces: list[Record]  # their bytes, in order

    @property
    def oldest(self) -> int:
        """The smallest version of its tokens."""
        return min(version for version, _ in self.runs)


class Group(msgspec.Struct, array_like=True, gc=False):
    """A prompt that is not at its end. `deadline` is None while it has neither a holder nor a sample."""

    id: int
    state: int = State.LEASED
    attempt: int = 0
    token: int = 0  # 0: it has no holder
    holder: str = ""
    pid: int = 0
    request: int = 0  # request number of the lease: a request sent again gets the same leases
    bound: int = 0  # largest lag; fixed by the first lease
    deadline: int | None = None  # the last version that may train it
    samples: dict[int, Sample] = {}
    records: list[Record] = []
    sequence: int = 0  # order of becoming ready
    step: int = 0  # of the last batch it is in
    issued: float = 0.0  # wall time; so are the next three
    unscored: float = 0.0
    ready: float = 0.0
    claimed: float = 0.0
    uses: list[int] = []  # steps of the batches it is in, ascending; after a checkpoint also of those it was in
    max_uses: int = 1  # steps that may train it; fixed when it is issued
    partial: dict[int, PartialSample] = {}  # checkpoints of missing samples
    source: str | None = None  # data source of its row, where judges are chosen by it; None: not known yet

    @property
    def newest(self) -> int:
        """The largest version of its samples' tokens; -1 without samples."""
        return max([max(sample.oldest, sample.newest) for sample in self.samples.values()], default=-1)


class Ended(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A group that was dropped or is dead. `step` is that of the batch it was quarantined from, else 0."""

    id: int
    state: int
    reason: str
    detail: str = ""
    step: int = 0


class Batch(msgspec.Struct, array_like=True):
    """The recorded batch of a step: which groups, in which order."""

    step: int
    version: int
    epoch: int  # of the learner that claimed it first
    groups: list[int]
    claimed: float = 0.0  # wall time
    tuning: str = ""  # JSON of the learner's overrides in force at the claim: the batch comes back with them


class Budget(msgspec.Struct, array_like=True):
    """What was used of the budgets that end a run (`buffers.groups.judging`)."""

    poison: list[tuple[int, str]] = []  # (which of all groups judged, reason), those of the window
    poisoned: int = 0
    filtered: list[tuple[int, str]] = []
    filtered_total: int = 0
    forgiven: dict[str, int] = {}  # reason of dead groups -> how many of before do not count
    spent: bool = False  # the run has ended by one of them


class Meta(msgspec.Struct, array_like=True):
    """What belongs to the run rather than to a group."""

    cursor: int = 0  # prompts issued
    version: int = 0  # learner steps committed
    epoch: int = 0  # of the learner
    newest: int = 0  # newest version that was heard of, less those that a learner went back from
    sequence: int = 0
    done: bool = False
    learner: tuple[str, int, str] = ("", 0, "")  # name, pid, host of the registered one
    registered_step: int = -1  # step of its registration until its first claim: a Register sent again is the same
    registrations: tuple[tuple[int, int], ...] = ()  # the newest: (random number of the message, epoch given)
    emptied: bool = False  # the store lost state under this run, and no learner has registered since
    abandoned: tuple[str, ...] = ()  # digests of versions that a learner went back from and has not made again


class Change(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One row to write (or, without a value, to delete). A list of them is applied by the store as one step."""

    key: str
    value: bytes | None


class Ledger(msgspec.Struct, frozen=True):
    """What a checkpoint of `step` says about groups; ids as ranges `[first, end)`."""

    step: int = 0
    cursor: int = 0
    epoch: int = 0
    trained: tuple[tuple[int, int], ...] = ()
    dropped: dict[str, tuple[tuple[int, int], ...]] = {}
    dead: dict[str, tuple[tuple[int, int], ...]] = {}
    steps: dict[int, tuple[int, ...]] = {}  # trained steps whose commit the buffer may not know: their groups
    tuning: str = ""  # JSON of the row `tuning`, where something was tuned
    uses: dict[int, tuple[int, ...]] = {}  # of groups in `trained` that may be trained again: the steps that did
    history: str = ""  # head of the history's chain when the buffer wrote this ledger
    archived: Archived = Archived()  # prompts at their end that stand in none of the above, by their numbers

    def to_json(self) -> str:
        """The text that goes into the checkpoint."""
        return msgspec.json.encode(self).decode()


def ledger_of(text: str) -> Ledger:
    """The ledger of a checkpoint; the empty text is the empty ledger. Raises `learner.checkpoint` where
    it is damaged.
    """
    try:
        return msgspec.json.decode(text, type=Ledger) if text else Ledger()
    except UNREADABLE as error:
        raise AsyncRLError("learner.checkpoint", f"its ledger cannot be read: {error}") from None
