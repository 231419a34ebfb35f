"""The contract between producers and engines: token ids in; token ids, behaviour log-probs and version runs out.

Implemented by `producers.engines` and by third parties (entry-point group `asyncrl.engines`), used by producers and by
the receiver of weight sync. Guarantees that every engine keeps, and that one suite checks on all of them:
1. the deltas of a sample follow each other without gap or overlap; `len(token_ids) == len(logprobs)` and the runs cover
   just these tokens. A token belongs to the version whose weights made its logits;
2. weights change between two decode steps; no token is lost or made twice by it. After it, K and V of samples under way
   stay (`keep`) or are computed again under the new weights (`recompute`: exact against a fresh engine). A new request
   never meets K and V of older weights, not from a prefix cache either;
3. log-probs are those of the full softmax after temperature (float32); top-p, top-k and min-p cut what is drawn, not
   what is recorded, unless the request wants the support of its draws: then log-probs are those of the distribution
   over it, and deltas hold it. An engine that cannot do so for a request refuses it (`sample.invalid`);
4. a failure before the commit leaves the old weights in force (but `in_place`); one from the beginning of the commit on
   raises `engine.broken` at once and in every later call: the process must be replaced, its prompts are leased again.

Example: a sample of 5 tokens with `delta_tokens = 2`, new weights after the third token: deltas (start 0, 2 tokens,
runs ((7, 2),)), (start 2, runs ((7, 1), (8, 1))), (start 4, 1 token, runs ((8, 1),), finish stop).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.errors import WorkError
from asyncrl.versions import Runs
from asyncrl.wire import Buffer, Instruction, Manifest, Support, Tensor, join_supports

#: Mean |engine - learner| of a log-prob under the same weights, in nats, above which something is wrong with either:
#: other weights, another temperature, a stale cache. By the coarser dtype of the two; bfloat16 gives about 0.03. With
#: quantised weights the policies do differ: int8 gave the demo's model 0.002, fp8 0.009; ten times that is as bfloat16.
GAP_LIMIT = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.03, "int8": 0.1, "fp8": 0.1}
KV = Literal["keep", "recompute"]
PauseMode = Literal["keep", "wait", "abort"]


class GenRequest(msgspec.Struct, frozen=True):
    """Generate some samples of one group. Sample `i` draws from its own stream, seeded by (`seed`, `i`).

    With `begun` the sample continues a partial sample: the last `begun` of `prompt_ids` are tokens of the response. The
    random stream continues at that place if the engine numbers its draws (`EngineCapabilities.continues`).
    """

    id: str
    prompt_ids: npt.NDArray[np.int32]  # [P]
    indices: tuple[int, ...]
    seed: int
    max_new_tokens: int  # beyond `prompt_ids`
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    stop_ids: tuple[int, ...] = ()
    begun: int = 0
    delta_tokens: int = 0  # send a delta after about that many new tokens; 0: one delta at the end
    priority: int = 0  # smaller first, if the engine can; else in the order of arrival
    support: bool = False  # record the support of each draw; log-probs are then of the distribution over it
    experts: bool = False  # record the experts that each token went through
    version: int = -1  # the version that makes every token, if the engine keeps it (`Keeping`); -1: the current one
    images: tuple[bytes, ...] = ()  # encoded images, in the order of their placeholders in `prompt_ids`
    #: Where the last of the images begin in `prompt_ids`; the others have its first placeholders. A placeholder that is
    #: in no image is a plain token: the policy may sample one.
    image_places: tuple[int, ...] = ()
    trained: bool = True  # False: of an evaluation, whose log-probs nothing reads


class GenDelta(msgspec.Struct, frozen=True):
    """New tokens of one sample: `token_ids` i4 `[T]` (including a stop token), `logprobs` f4 `[T]`, `runs` of versions
    over `[0, T)`, `start` the place of the first token among those of this request.

    `support`: the ids that top-p, top-k and min-p left for each token, if the request wants it.
    `finish`: empty while more will come, else stop (a stop token), length (`max_new_tokens`) or abort.
    `experts`: with `finish`, if the request wants them and one version made all tokens: the experts that each token of
    the prompt and of the response but the last went through, u1 or i2 `[P + T - 1, layers, chosen]`.
    """

    id: str
    index: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    runs: Runs
    finish: str
    start: int = 0
    support: Support | None = None
    experts: npt.NDArray[Any] | None = None


class EngineHealth(msgspec.Struct, frozen=True):
    """State of an engine: `running` samples are being decoded, `waiting` samples have no slot."""

    alive: bool
    version: int
    running: int
    waiting: int
    generated_tokens: int = 0
    busy_s: float = 0.0  # time spent in forward passes since the start
    swap_s: float = 0.0  # length of the last swap: how long decoding paused
    detail: str = ""
    kv_used: float = 0.0  # used share of the KV cache
    paused: bool = False
    preempted: int = 0  # preempted samples (the KV cache was full), recomputed later; since the start
    drafted: int = 0  # draft tokens that were fed, and those that came true; since the start
    accepted_drafts: int = 0

    def numbers(self) -> dict[str, float]:
        """Numbers of a heartbeat, by catalogue name."""
        drafts = {"drafted_tokens": self.drafted, "accepted_drafts": self.accepted_drafts} if self.drafted else {}
        return {
            "generated_tokens": self.generated_tokens,
            "kv_used": self.kv_used,
            "preempted_samples": self.preempted,
            "live_slots": self.running,
            "engine_version": self.version,
            "swap_s": self.swap_s,
            **drafts,
        }


class EngineCapabilities(msgspec.Struct, frozen=True):
    """Capabilities of an engine; constant after `start`."""

    name: str
    max_samples: int  # decoded at once
    max_tokens: int  # of prompt and response together
    kv_tokens: int = 0  # tokens of KV cache for all samples together; 0: unknown
    kv: tuple[KV, ...] = ("keep", "recompute")
    encodings: tuple[str, ...] = ("full",)  # encodings of manifests: full, adapter
    in_place: bool = False  # an update overwrites the weights: samples pause from `begin_update` to the commit,
    # and after an abort until a complete version has arrived
    continues: bool = False  # a sample with `begun` gets the same tokens as without the interruption
    priority: bool = False
    supports: bool = False  # it records the support of draws (`GenRequest.support`); others refuse such a request
    experts: bool = False  # it records chosen experts (`GenRequest.experts`); others refuse such a request
    seeded: bool = True  # the same seed and index give the same tokens, whatever else is decoded
    images: bool = False  # it takes `GenRequest.images`; others refuse such a request
    image_turns: bool = False  # and images with sampled tokens among them (`GenRequest.image_places`)
    second_weights: bool = False  # it keeps a version next to newer ones (`Keeping`)


class Engine(Protocol):
    """An inference engine. An update is `begin_update`, each bucket once, then `commit_update` or `abort_update`.

    Optional parts: `Attesting` (without it, weights are read by `read_bucket` and digested outside) and `Lending`. An
    engine that returns False from `read_bucket` gets only full weights. If `apply_bucket` returns "", the digest of the
    bytes that it was given counts. `begin_update` of a manifest with `encoding = "adapter"` keeps the full weights that
    were committed last, with the digest `manifest.base`, and raises `sync.failed` if it holds others.
    """

    async def start(self) -> None:
        """Load the model; the version is -1 until the first update is committed."""

    async def close(self, *, grace_s: float) -> None:
        """Stop decoding; samples in progress end with an error."""

    def capabilities(self) -> EngineCapabilities: ...

    def health(self) -> EngineHealth: ...

    def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        """Deltas of the request's samples, in order within a sample."""

    async def abort(self, ids: Sequence[str] | None) -> int:
        """Abort these requests (None: all): their iterators end early. Returns the number of samples."""

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Pause decoding; returns after the current step. `keep`: samples stay; `wait`: running samples finish first,
        new ones wait; `abort`: as `abort(None)`.
        """

    async def resume(self) -> None:
        """Continue after `pause`."""

    async def begin_update(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Prepare memory for a version."""

    async def apply_bucket(self, number: int, data: Buffer) -> str:
        """Take the bytes of one bucket (copied before this returns). Returns the digest of the bucket as it is now held
        (`weightsync.plan.digest.bucket_digest`), or the empty string if the engine cannot compute it.
        """

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        """Write the bytes of this bucket of the current version, for a delta; False if the engine cannot."""

    async def commit_update(self) -> str:
        """Make the new weights current between two decode steps; return the digest of the weights that the model now
        holds. `producers.kv_at_swap` decides about the KV cache of samples in progress. A paused engine stays paused.
        """

    async def abort_update(self) -> None:
        """Discard an update; the old version stays (unless in place)."""

    def fingerprint(self) -> str:
        """A short digest of model, tokenizer and dtype; it must be the same for all processes of a run."""


class Attesting(Protocol):
    """Optional part of an engine: digest its weights in device memory."""

    async def attest(self) -> str:
        """The digest of the weights that the model holds now, read again, in the layout of the last committed manifest.
        It equals that manifest's digest unless the weights changed since; empty before the first commit. Called now
        and then between commits, during generation (`weightsync.receiver.attestation`).
        """


class Lending(Protocol):
    """Optional part of an engine: memory for a bucket that its bytes can stay in, which saves a copy."""

    def bucket_room(self, number: int) -> memoryview | None:
        """Memory of the bucket's size for this bucket of the current update, before `apply_bucket` gets that very
        memory; None: no memory. After `abort_update` a transport may still write there for a moment, so the engine
        must not use it again then. After the commit it keeps the bucket until the `begin_update` that follows the
        next commit, because a generator relays versions from there.
        """


class Receiving(Protocol):
    """Optional part of an engine: it receives versions itself, from device to device (`weightsync.transport =
    "direct"`). Its weights are of no version from the first byte on, so its `in_place` is true.
    """

    async def receive_update(self, instruction: Instruction, tensors: Sequence[Tensor]) -> None:
        """Take part in the group of the instruction and take every bucket, in place of `begin_update` and
        `apply_bucket`; `commit_update` or `abort_update` follows. Raises `sync.failed` if a bucket did not come, or has
        another digest than its manifest says; the engine must not decode until another version is committed.
        """


class SlotMapping(Protocol):
    """Optional part of an engine: it loads versions from a mapped file, without a copy of its own."""

    async def begin_mapped(self, path: Path, manifest: Manifest, tensors: Sequence[Tensor]) -> bool:
        """In place of `begin_update`: use the slot of the publisher on this host. It is locked until `commit_update` or
        `abort_update`, so that the publisher does not overwrite it; `apply_bucket` digests the bytes in it. False:
        this engine needs a copy, `begin_update` follows. Raises `sync.failed` if the slot is being overwritten.
        """


class Keeping(Protocol):
    """Optional part of an engine: a second set of weights (`EngineCapabilities.second_weights`), for the evaluation of
    one version (`evaluation.lane = "second_weights"`).
    """

    async def keep_version(self, version: int, limit_s: float) -> bool:
        """Keep this version for requests that name it (`GenRequest.version`), while updates change the current one.
        Return whether it is kept: False if it was not current at the first call with it, or `limit_s` seconds after
        that call. A call with another version (-1: none) frees the weights of the one before and ends its requests like
        `abort`, and so does the end of the time.
        """


class Sleeping(Protocol):
    """Optional part of an engine, its attribute `sleeping`: it leaves its device to others (`cluster.devices =
    "turns"`). `start` ends awake.

    `loads_asleep`: updates and `attest` work while it sleeps. Any other engine is awake at `commit_update`.
    """

    loads_asleep: bool

    async def sleep(self) -> None:
        """Free the memory of weights, K and V on the device. No sample is in progress. Nothing if it sleeps."""

    async def wake(self) -> None:
        """Go back to the device, with the weights of the last commit. Nothing if it is awake."""


def join_deltas(deltas: Iterable[GenDelta]) -> GenDelta:
    """Join the deltas of one sample.

    Raises:
        WorkError: `engine.broken` if they do not follow each other.
    """
    parts = list(deltas)
    if len(parts) == 1 and parts[0].start == 0:
        return parts[0]
    runs: list[tuple[int, int]] = []
    at = 0
    for part in parts:
        if part.start != at or (part.finish and part is not parts[-1]):
            what = f"a delta starts at token {part.start}, {at} have come"
            raise WorkError("engine.broken", what, where=f"{part.id} sample {part.index}")
        at += len(part.token_ids)
        for version, count in part.runs:
            if runs and runs[-1][0] == version:
                runs[-1] = (version, runs[-1][1] + count)
            else:
                runs.append((version, count))
    last = parts[-1]
    tokens, logprobs = (np.concatenate([getattr(part, name) for part in parts]) for name in ("token_ids", "logprobs"))
    support = join_supports((part.support, len(part.token_ids)) for part in parts)
    return GenDelta(
        last.id, last.index, tokens, logprobs, tuple(runs), last.finish, support=support, experts=last.experts
    )


joined = join_deltas  # old name, for engines of third parties
