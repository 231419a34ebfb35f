"""Messages between producers and the buffer: leases, samples and partial samples."""

from __future__ import annotations

from asyncrl.versions import Runs
from asyncrl.wire.base import Field, Message, Name, Place, Version, Whole


class LeaseRequest(Message, frozen=True, tag=20):
    """Ask for up to `max_groups` groups to generate; waits in the service up to `wait_s`. Answer: `Leases`."""

    producer: Name
    engine_version: Version
    max_groups: Whole
    wait_s: float


class Lease(Message, frozen=True):
    """One group to generate. `token` fences: an answer under an older token of the group is refused.

    `missing` are the sample indices still wanted (all of them at the first attempt).
    """

    group: int
    token: int
    attempt: int
    missing: tuple[int, ...]
    seed: int
    deadline_version: int


class Begun(Message, frozen=True):
    """The beginning of a sample that another producer could not finish. It has a payload frame of its own with
    `response` i4 `[length]` and `logprobs` f4 `[length]`; `digests` are of the versions in `runs`.
    """

    group: int
    index: int
    length: int
    runs: Runs
    digests: dict[int, str]
    fields: tuple[Field, ...]


class Leases(Message, frozen=True, tag=21):
    """Granted leases, maybe none; `reason` says what a producer without work waits for, `done` that none will come.

    `begun`: what is there of missing samples, to be continued from there or begun anew.
    """

    leases: tuple[Lease, ...]
    version: int
    reason: str = ""
    done: bool = False
    begun: tuple[Begun, ...] = ()


class SampleHead(Message, frozen=True):
    """What is known of one sample beside its arrays.

    `length` response tokens; `runs` cover them; `finish` is stop | length | abort.

    `rows`: where the context of a session was not a pure extension of what came before, the tokens of several
    sequences stand in one sample. A row that starts at token `start` of the response has a prompt of its own instead of
    the group's: its first `prompt_tokens` tokens, which `mask` leaves out. Without a row that starts at 0 the first
    sequence goes on from the group's prompt. `turns`: rewards of single turns, each at the turn's last token; the
    sample's reward contains them.
    """

    index: int
    length: int
    finish: str
    runs: Runs
    rows: tuple[tuple[int, int], ...] = ()  # (start, prompt_tokens), ascending
    turns: tuple[tuple[int, float], ...] = ()  # (place of a sampled token, reward), ascending


class Samples(Message, frozen=True, tag=22):
    """Finished samples of one group. Answer: `SamplesReply`.

    The payload holds `prompt` i4 `[P]`, `response` i4 `[sum T]`, `logprobs` f4 `[sum T]` (of the distribution sampled
    from) and, where a token was not sampled by the policy, `mask` u1 `[sum T]`.
    """

    producer: Name
    group: int
    token: int
    samples: tuple[SampleHead, ...]
    digests: dict[Whole, str]  # version -> digest of the weights that this engine loaded for it
    fields: tuple[Field, ...]
    row: str  # JSON of the prompt's row: data_source, ground_truth, extra_info; at the first answer of a lease
    prompt_tokens: int
    logprobs_of: str = "processed"  # processed: after temperature; raw: temperature 1
    rewards: dict[int, float] = {}  # from an environment that scores itself: these samples skip the reward workers
    parts: dict[int, dict[str, float]] = {}  # of these rewards, by name


class SamplesReply(Message, frozen=True, tag=23):
    """What became of them: `accepted`, `duplicate`, or refused with a reason per sample index."""

    accepted: tuple[int, ...]
    duplicate: tuple[int, ...] = ()
    refused: dict[int, str] = {}
    cancelled: tuple[tuple[int, int], ...] = ()  # leases (group, token): generate nothing more for them


class SamplesAt(Message, frozen=True, tag=25):
    """Finished samples that a producer on the service's host wrote into a file of its own: header and payload of a
    `Samples`. Answer: `SamplesReply`; `Refused` with `wire.place` where they are not there: then they are sent.
    """

    producer: Name
    place: Place


class Piece(Message, frozen=True):
    """Tokens `start .. start + count` of a sample that is being generated; `runs` cover these."""

    index: int
    start: int
    count: int
    runs: Runs


class Pieces(Message, frozen=True, tag=28):
    """Checkpoints of samples under way, of one group. Answer: `PiecesReply`.

    The payload holds `response` i4 `[sum count]` and `logprobs` f4 `[sum count]`, in the order of `samples`.
    """

    producer: Name
    group: int
    token: int
    samples: tuple[Piece, ...]
    digests: dict[Whole, str]  # version -> digest of the weights that this engine loaded for it
    fields: tuple[Field, ...]


class PiecesReply(Message, frozen=True, tag=29):
    """`kept`: sample -> tokens of it that the service holds now; the next piece starts there. `refused`: why a sample
    needs no more of them."""

    kept: dict[int, int]
    refused: dict[int, str] = {}
    cancelled: tuple[tuple[int, int], ...] = ()  # leases (group, token): generate nothing more for them


class LeaseReturn(Message, frozen=True, tag=24):
    """A producer gives leases back (it stops, or cannot make them). Answer: `Ok`.

    With `dead` set the group is not tried again: the prompt itself is at fault (too long, not encodable).
    """

    producer: Name
    groups: tuple[tuple[int, int], ...]  # (group, token)
    reason: str
    dead: bool = False
