"""Messages of the weight sync: manifests, rounds, instructions to generators, pulled pieces."""

from __future__ import annotations

from asyncrl.wire.base import Message, Name, Text, Version, Whole


class Tensor(Message, frozen=True):
    """One tensor of a manifest: where its bytes lie. `dtype` is a safetensors name (F32, BF16, ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int


class Manifest(Message, frozen=True):
    """Content of a version. `plan` is the digest of the layout; `digest` that of all bytes in bucket order.

    `encoding` "full": all weights. "adapter": the tensors of a LoRA adapter on top of weights with the digest `base`;
    `adapter` is its configuration as JSON, and both enter `digest`.
    """

    version: Whole
    plan: str
    bucket_bytes: tuple[int, ...]
    bucket_digests: tuple[str, ...]
    digest: str
    encoding: str = "full"
    base: str = ""
    adapter: str = ""
    signature: str = ""  # signature of all other fields by the run's key, if it has one


class Hop(Message, frozen=True):
    """A lossless step from one version to the next: `nbytes[k]` encoded bytes turn bucket k of `base` into the next."""

    base: Whole
    base_digest: str
    nbytes: tuple[int, ...]


class BaseOffer(Message, frozen=True):
    """The full weights under an adapter, for members that lack them."""

    manifest: Manifest
    offers: dict[str, str]
    tensors: tuple[Tensor, ...] = ()  # sent once per layout


class Publish(Message, frozen=True, tag=60):
    """The learner offers `manifest` on the transports of `offers` (name -> address). Answer: `Published`."""

    publisher: str
    epoch: Whole
    manifest: Manifest
    offers: dict[str, str]
    tensors: tuple[Tensor, ...] = ()  # sent once per layout
    hops: tuple[Hop, ...] = ()  # oldest first; the last one leads to this version, each one to the base of the next
    base: BaseOffer | None = None  # full weights under an adapter


class Published(Message, frozen=True, tag=61):
    """The round of the version. `needs_tensors`: send again with the layout."""

    round: int
    needs_tensors: bool = False


class RoundRequest(Message, frozen=True, tag=62):
    """The publisher asks for the state of a round, and waits up to `wait_s` for a change. Answer: `RoundReply`."""

    epoch: Whole
    round: Whole
    wait_s: float
    seen: str = ""  # state that the publisher already knows
    transport_done: str = ""  # "" | sent | failed:<why>


class RoundReply(Message, frozen=True, tag=63):
    """State of a round: preparing | transferring | committed | superseded | failed."""

    round: int
    state: str
    generation: int = 0  # of the collective group
    members: dict[str, str] = {}  # member -> its state
    ranks: dict[str, int] = {}  # member -> rank in the collective; the publisher is rank 0
    rendezvous: str = ""
    detail: str = ""
    hops: tuple[Hop, ...] = ()  # the collective carries these instead of the buckets, if there are any
    hops_wanted: bool = True  # whether a member could take hops; else they need not be encoded
    digest: str = ""  # of the version that the collective carries; empty: no group is formed


class MemberPoll(Message, frozen=True, tag=64):
    """A generator reports its state and asks for an instruction; also its heartbeat. Answer: `Instruction`."""

    member: Name
    pid: Whole
    host: Name
    fingerprint: Text
    state: Text  # joining | stale | prepared | serving | holding (serving, and wants no newer version now)
    version: Version
    digest: Text
    round: Whole
    wait_s: float
    transports: tuple[Text, ...] = ()
    has_plan: Text = ""
    error: str = ""
    encodings: tuple[Text, ...] = ("full",)
    relay: Text = ""  # address where it relays its version to others (transport `stream`)
    order: int = 0  # grows with every poll on its host (a monotonic clock): an older one is a late copy; 0: unknown
    base: Text = ""  # digest of its full weights, without the adapter


class Instruction(Message, frozen=True, tag=65):
    """The next action of a generator: wait | receive | commit | abort | stop."""

    action: str
    round: int = 0
    manifest: Manifest | None = None
    tensors: tuple[Tensor, ...] = ()
    transport: str = ""
    address: str = ""
    rank: int = 0
    world_size: int = 0
    generation: int = 0
    deadline_s: float = 0.0
    version: int = -1  # newest committed version
    detail: str = ""
    hops: tuple[Hop, ...] = ()  # receive: these in order instead of the buckets; empty: the buckets
    source: str = ""  # sender of the version: the publisher, or a member that relays


class Fetch(Message, frozen=True, tag=66):
    """Ask the holder of a version for a piece of it; may be repeated. Answer: `Fetched`, one payload frame.

    `digest` names the version. Blob `blob` is a bucket of it, or with `base` (the digest of the version that the first
    hop starts from) bucket `blob % buckets` of hop `blob // buckets`. Refused with `sync.failed` if the version is
    gone.
    """

    digest: str
    base: str
    blob: int
    offset: int
    nbytes: int


class Fetched(Message, frozen=True, tag=67):
    """The bytes from `offset` of a blob of `size` bytes: as many as requested, fewer at its end."""

    blob: int
    offset: int
    size: int
