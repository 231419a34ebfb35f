"""What third parties implement: engines, rewards, prompt sources, trackers, found by name.

Called by producers (engines, prompt sources), reward workers and the front door (trackers). Guarantees:
1. a name is looked up in the built-in table first, then in the entry-point group; an unknown name is an error that
   lists the known ones;
2. nothing heavy is imported before a plugin is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.errors import ConfigError
from asyncrl.versions import Runs
from asyncrl.wire import Buffer, Manifest, Tensor


class GenRequest(msgspec.Struct, frozen=True):
    """Generate some samples of one group. Sample `i` draws from its own stream, seeded by (`seed`, `i`)."""

    id: str
    prompt_ids: npt.NDArray[np.int32]  # [P]
    indices: tuple[int, ...]
    seed: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    stop_ids: tuple[int, ...] = ()


class GenSample(msgspec.Struct, frozen=True):
    """A finished sample: `token_ids` i4 `[T]` (with the stop token), `logprobs` f4 `[T]` of the distribution sampled
    from, `runs` of versions over `[0, T)`, `finish` stop | length | abort."""

    id: str
    index: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    runs: Runs
    finish: str


class EngineHealth(msgspec.Struct, frozen=True):
    """How an engine is: `running` samples being decoded, `waiting` samples without a slot."""

    alive: bool
    version: int
    running: int
    waiting: int
    generated_tokens: int = 0
    busy_s: float = 0.0  # time spent in forward passes since the start
    swap_s: float = 0.0  # length of the last swap
    detail: str = ""


class Engine(Protocol):
    """Token ids in, token ids with behaviour log-probs and version runs out; swaps weights between decode steps.

    An update is `begin_update`, every bucket once, `commit_update` or `abort_update`. Nothing of it is visible to
    samples before the commit, which happens between two decode steps. A failure after the commit began raises
    `engine.broken`: the engine must be rebuilt.

    What an engine may leave out: `in_place` (then it is taken for False), `attest` of `Attesting` (then what it holds
    is read by `read_bucket` and digested outside of it), and `bucket_room` of `Lending`. One that answers False to
    `read_bucket` gets whole weights alone; where `apply_bucket` answers "", the digest of what it was handed counts.
    `begin_update` of a manifest with `encoding = "adapter"` keeps the whole weights that were committed last, whose
    digest is `manifest.base`, and raises `sync.failed` where it holds others.
    """

    async def start(self) -> None:
        """Load the model; the version is -1 until the first update is committed."""

    async def close(self, *, grace_s: float) -> None:
        """Stop decoding; samples under way end with an error."""

    def health(self) -> EngineHealth:
        """Cheap; any thread."""

    def generate(self, request: GenRequest) -> AsyncIterator[GenSample]:
        """The samples of the request, each as soon as it has finished, in any order."""

    async def abort(self, ids: Sequence[str] | None) -> int:
        """Give up these requests (None: all): their iterators end without the missing samples. How many samples."""

    @property
    def in_place(self) -> bool:
        """Whether an update overwrites the weights: samples stand still from `begin_update` to the commit, and after
        an abort too, until a whole version came."""

    async def begin_update(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Prepare room for a version."""

    async def apply_bucket(self, number: int, data: Buffer) -> str:
        """Take the bytes of one bucket (copied before this returns); the digest of what is held of it now
        (`weightsync.digest.bucket_digest`), or the empty string from an engine that cannot say."""

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        """Write the bytes of this bucket of the version in force, for a delta; False from an engine that cannot."""

    async def commit_update(self) -> str:
        """Make the new weights current between two decode steps; the digest of what the model now holds."""

    async def abort_update(self) -> None:
        """Forget a begun update; the old version stays (unless `in_place`)."""

    def fingerprint(self) -> str:
        """Model, tokenizer and dtype as a short digest; both ends of a run must agree."""


class Attesting(Protocol):
    """What an engine may offer besides: to digest its weights where they lie."""

    async def attest(self) -> str:
        """The digest of what the model holds now, read anew, laid out as in the manifest of the last commit: that
        manifest's digest unless the weights have changed since; empty before the first commit. Called now and then
        between commits, beside generation (`weightsync.attest`)."""


class Lending(Protocol):
    """What an engine may offer besides: room for a bucket where its bytes can stay, which saves a copy."""

    def bucket_room(self, number: int) -> memoryview | None:
        """Where the bytes of this bucket of the update under way may be written, of the bucket's size, before
        `apply_bucket` gets that very memory; None: nowhere. After `abort_update` somebody may still write there for a
        moment, so an engine must not use it again then. After the commit it holds the bucket until the
        `begin_update` that follows the next commit: a generator passes versions on from there."""


RewardFunction = Callable[..., Any]


class Tracker(Protocol):
    """Where metrics go beside the JSONL files."""

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Numbers of one step."""

    def close(self) -> None:
        """Write what is left."""


BUILT_IN: dict[str, dict[str, str]] = {
    "asyncrl.engines": {"hf": "producers.engines.hf:HFEngine", "dataset": "producers.dataset:DatasetEngine"},
    "asyncrl.backends": {"fsdp2": "learners.backends.fsdp2:FSDP2Backend"},
    "asyncrl.trackers": {"tensorboard": "learners.trackers:TensorBoardTracker"},
}


def find(group: str, name: str) -> Any:
    """The plugin of that name in the group. Raises `config.type` listing the known names."""
    known = dict(BUILT_IN.get(group, {}))
    known.update({point.name: point.value for point in entry_points(group=group)})
    if name not in known:
        raise ConfigError("config.type", f"{name!r} is not in {group}: one of {', '.join(sorted(known))}")
    return load_object(known[name], code="config.extra")


def load_object(dotted: str, *, code: str, where: str = "") -> Any:
    """The object behind 'module:name'. Raises an error with `code` that says which half is missing."""
    module_name, _, name = dotted.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(code, f"{dotted!r}: {error}", where=where) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(code, f"{dotted!r}: module {module_name} has no {part!r}", where=where)
        found = getattr(found, part)
    return found
