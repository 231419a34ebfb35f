"""Messages between producers and the buffer: leases, samples and partial samples."""

from __future__ import annotations

from asyncrl.versions import Runs
from asyncrl.wire.base import Field, Message, Name, Place, Version, Whole


class LeaseRequest(Message, frozen=True, tag=20):
    """Ask for up to `max_groups` groups to generate; waits in the service up to `wait_s`. Answer: `Leases`.

    With `max_groups` 0 a producer asks for held-out prompts alone. `kept`: an older version that its engine keeps for
    held-out prompts next to `engine_version`. `rows`: number of rows of its data, if the buffer chooses among them
    (`data.sampler = "difficulty"`).
    """

    producer: Name
    engine_version: Version
    max_groups: Whole
    wait_s: float
    kept: Version = -1  # -1: none
    rows: Whole = 0  # 0: the buffer does not choose


class Lease(Message, frozen=True):
    """One group to generate. `token` fences: an answer under an older token of the group is refused.

    `missing` are the sample indices still needed (all of them at the first attempt). Samples of a held-out prompt must
    be of `deadline_version` alone. `row`: the row of the data that the buffer chose.
    """

    group: int
    token: int
    attempt: int
    missing: tuple[int, ...]
    seed: int
    deadline_version: int
    row: int = -1  # -1: by the number of the group


class Begun(Message, frozen=True):
    """A partial sample that another producer could not finish. It has its own payload frame with `response` i4
    `[length]`, `logprobs` f4 `[length]` and the support as in `Samples`; `digests` belong to the versions in `runs`.
    """

    group: int
    index: int
    length: int
    runs: Runs
    digests: dict[int, str]
    fields: tuple[Field, ...]


class Leases(Message, frozen=True, tag=21):
    """Granted leases, possibly none; `reason` says why a producer without work waits, `done` that no more work will
    come.

    `begun`: partial samples among the missing ones, to continue from or to discard. `hold`: the version that an
    evaluation needs from this producer; it takes no newer weights before an answer names another one or none, or keeps
    the version next to them (`kept`).
    """

    leases: tuple[Lease, ...]
    version: int
    reason: str = ""
    done: bool = False
    begun: tuple[Begun, ...] = ()
    hold: int = -1  # -1: none


class SampleHead(Message, frozen=True):
    """A sample without its arrays.

    `length` response tokens; `runs` cover them; `finish` is stop | length | abort.

    `rows`: if the context of a session was not a pure extension of the previous one, the tokens of several sequences
    form one sample. A row that starts at token `start` of the response has its own prompt instead of the group's: its
    first `prompt_tokens` tokens, which `mask` leaves out. Without a row that starts at 0 the first sequence continues
    the group's prompt. `turns`: rewards of single turns, each at the turn's last token; the sample's reward contains
    them. `images`: those among the response tokens, by the place of the first token of each and the digest of its
    bytes (`StoreImages`); images of the prompt are in the row. `others`: turns of other policies in the session, which
    are no tokens of the sample: after how many own turns, whose, and the versions of their tokens.
    """

    index: int
    length: int
    finish: str
    runs: Runs
    rows: tuple[tuple[int, int], ...] = ()  # (start, prompt_tokens), ascending
    turns: tuple[tuple[int, float], ...] = ()  # (place of a sampled token, reward), ascending
    images: tuple[tuple[int, str], ...] = ()  # (place of a token that was not sampled, digest), ascending
    others: tuple[tuple[int, Name, Runs], ...] = ()  # (own turns before it, policy, runs)


class Samples(Message, frozen=True, tag=22):
    """Finished samples of one group. Answer: `SamplesReply`.

    The payload holds `prompt` i4 `[P]`, `response` i4 `[sum T]`, `logprobs` f4 `[sum T]` (of the distribution that was
    sampled from) and, if the policy did not sample all tokens, `mask` u1 `[sum T]`. If draws are cut exactly, it holds
    the support of each (`asyncrl.wire.support`): log-probs are then those of the distribution over it. With routing
    replay it holds the experts of the tokens (`asyncrl.wire.experts`).
    """

    producer: Name
    group: int
    token: int
    samples: tuple[SampleHead, ...]
    digests: dict[Whole, str]  # version -> digest of the weights that this engine loaded for it
    fields: tuple[Field, ...]
    row: str  # JSON of the prompt's row: data_source, ground_truth, extra_info; in the first answer of a lease
    prompt_tokens: int
    logprobs_of: str = "processed"  # processed: after temperature; raw: temperature 1
    rewards: dict[int, float] = {}  # of an environment that scores itself: these samples skip the reward workers
    parts: dict[int, dict[str, float]] = {}  # parts of these rewards, by name


class SamplesReply(Message, frozen=True, tag=23):
    """Result per sample: `accepted`, `duplicate`, or refused with a reason."""

    accepted: tuple[int, ...]
    duplicate: tuple[int, ...] = ()
    refused: dict[int, str] = {}
    cancelled: tuple[tuple[int, int], ...] = ()  # leases (group, token) to stop generating


class SamplesAt(Message, frozen=True, tag=25):
    """Finished samples that a producer on the service's host wrote into its own file: header and payload of a
    `Samples`. Answer: `SamplesReply`; `Refused` with `wire.place` if they are not there: then the producer sends
    them.
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
    """Partial samples of one group. Answer: `PiecesReply`.

    The payload holds `response` i4 `[sum count]` and `logprobs` f4 `[sum count]`, in the order of `samples`, and their
    support as in `Samples`.
    """

    producer: Name
    group: int
    token: int
    samples: tuple[Piece, ...]
    digests: dict[Whole, str]  # version -> digest of the weights that this engine loaded for it
    fields: tuple[Field, ...]


class PiecesReply(Message, frozen=True, tag=29):
    """`kept`: sample -> tokens of it that the service holds now; the next piece starts there. `refused`: sample -> why
    it needs no more pieces.
    """

    kept: dict[int, int]
    refused: dict[int, str] = {}
    cancelled: tuple[tuple[int, int], ...] = ()  # leases (group, token) to stop generating


class LeaseReturn(Message, frozen=True, tag=24):
    """A producer returns leases (it stops, or cannot generate them). Answer: `Ok`.

    With `dead` the group is not tried again: the prompt itself is invalid (too long, not encodable).
    """

    producer: Name
    groups: tuple[tuple[int, int], ...]  # (group, token)
    reason: str
    dead: bool = False
