"""The buffer's client for the learner: batches, commits, checkpoints.

Arrays of a claimed batch are read-only views into the received frames, or into bytes read from the service's segment
files if the learner sees them (measured: half the service's CPU for large payloads).
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.images.batches import add_images, digests_in
from asyncrl.net.keys import Keys
from asyncrl.net.requester import Requester
from asyncrl.wire.batch_arrays import ClaimedBatch, decode_batch
from buffers.client.connection import MAX_BYTES
from buffers.client.images import FETCH_S, ImageReader, shared_folder
from buffers.client.place_reader import PlaceReader


class LearnerClient:
    """For the learner; blocking. `heartbeat` may be called from another thread: it has a socket of its own."""

    def __init__(
        self, address: str, *, name: str, keys: Keys | None = None, max_bytes: int = MAX_BYTES, timeout_s: float = 60.0
    ) -> None:
        self.name = name
        self.epoch = 0
        self._step = 0  # steps in the weights, as told by `register` and `commit`
        self._batch: tuple[int, set[int]] = (0, set())  # step and groups of the newest batch, less those quarantined
        self._timeout_s = timeout_s
        self.answered = 0.0  # monotonic time of the newest answer to `claim`; what follows is reading
        self._pid, self._host = os.getpid(), socket.gethostname()
        self._requester = Requester(address, keys=keys, max_bytes=max_bytes)
        self._beats = Requester(address, keys=keys, max_bytes=max_bytes)
        self._places: PlaceReader | None = None
        self._images = ImageReader()

    def _ask(self, message: wire.Message, *, wait_s: float = 0.0) -> wire.Packet:
        return self._requester.request(message, timeout_s=self._timeout_s + wait_s, wait_s=wait_s)

    def hello(self, fingerprint: str = "", run_id: str = "") -> wire.Welcome:
        hello = wire.Hello("learner", self.name, self._pid, self._host, run_id, fingerprint)
        welcome: wire.Welcome = self._ask(hello).message
        return welcome

    def register(
        self,
        *,
        step: int,
        ledger: str,
        takeover: bool = False,
        fingerprint: str = "",
        digests: Mapping[int, str] | None = None,
    ) -> wire.Registered:
        """Become the run's learner, from a checkpoint of `step` with its ledger. May wait for signs of an
        earlier one.
        """
        message = wire.Register(
            self.name,
            self._pid,
            self._host,
            step,
            ledger,
            takeover,
            fingerprint,
            dict(digests or {}),
            secrets.randbits(63),
        )
        registered: wire.Registered = self._ask(message, wait_s=15.0).message
        self.epoch, self._step = registered.epoch, step
        self._places = PlaceReader.open(registered)
        self._images.folder = shared_folder(registered.segments, registered.nonce)
        return registered

    def claim(self, *, step: int, version: int, wait_s: float) -> ClaimedBatch | wire.NotYet:
        """The batch of `step`, with its images; `NotYet` with a diagnosis where it is not complete within `wait_s`."""
        by_place = self._places is not None
        packet = self._ask(wire.Claim(self.epoch, step, version, wait_s, by_place), wait_s=wait_s)
        self.answered = time.monotonic()
        batch = packet.message
        if isinstance(batch, wire.NotYet):
            return batch
        self._batch = (batch.step, {head.group for head in batch.groups})
        if self._places is None or not batch.places:
            return self._add_images(decode_batch(batch, packet.payloads))
        try:
            batch, payloads = self._places.fill(batch)
        except (OSError, WireError):
            self._places = None  # the files are not what they seemed: the service looks itself, and sends frames
            return self.claim(step=step, version=version, wait_s=wait_s)
        return self._add_images(decode_batch(batch, payloads))

    def _add_images(self, batch: ClaimedBatch) -> ClaimedBatch:
        digests = digests_in(batch)
        if not digests:
            return batch
        search = self._images.search(digests)
        while search.wanted:
            search.take_answer(self._ask(search.request(), wait_s=FETCH_S))
        return add_images(batch, search.images, search.problems)

    def commit(self, *, step: int, version: int, digest: str) -> str:
        """The optimizer step is done; `digest` is that of the weights of `version`. Return the head of the history's
        chain (asyncrl.runtime.history_chain), which covers the claim of the step.
        """
        self._step = step
        groups = tuple(sorted(self._batch[1])) if self._batch[0] == step else None
        done: wire.Ok = self._ask(wire.Commit(self.epoch, step, version, digest, groups)).message
        return done.detail

    def quarantine(self, *, step: int, groups: Sequence[int], reason: str) -> None:
        """Groups of a claimed step that cannot be used; they are dead."""
        self._ask(wire.Quarantine(self.epoch, step, tuple(groups), reason))
        self._batch[1].difference_update(groups)

    def ledger(self, *, step: int) -> str:
        """What to store in the checkpoint of `step`."""
        reply: wire.LedgerReply = self._ask(wire.LedgerRequest(self.epoch, step)).message
        return reply.ledger

    def checkpointed(self, *, step: int) -> None:
        """A checkpoint that contains `step` is durable."""
        self._ask(wire.Checkpointed(self.epoch, step))

    def evaluations(self, *, seen: int) -> tuple[list[dict[str, Any]], str]:
        """Evaluations that ended after round `seen`, as lines of metrics; and which one runs or waits, in words."""
        reply: wire.EvaluationsReply = self._ask(wire.EvaluationsRequest(seen)).message
        return [msgspec.json.decode(line) for line in reply.ended], reply.running

    def goodbye(self, *, done: bool, reason: str = "") -> None:
        """The learner ends; `done` when the run is complete."""
        self._ask(wire.Goodbye(self.epoch, done, reason, self._step))

    def heartbeat(self, stats: Mapping[str, float], *, waiting_for: str = "") -> None:
        """This process is alive."""
        beat = wire.Heartbeat("learner", self.name, self._pid, self._host, waiting_for, dict(stats))
        self._beats.request(beat, timeout_s=self._timeout_s)

    def close(self) -> None:
        self._requester.close()
        self._beats.close()
        if self._places is not None:
            self._places.close()
