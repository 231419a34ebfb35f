"""The buffer's client for producers: leases, samples, pieces, returns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from asyncrl import wire
from asyncrl.engine import GenDelta
from asyncrl.errors import Unavailable, WireError
from asyncrl.images.folder import ImageFolder
from asyncrl.net.keys import Keys
from asyncrl.runtime.failpoints import failpoint
from asyncrl.versions import Runs
from asyncrl.wire import IntArray
from buffers.client.connection import MAX_BYTES, AsyncClient
from buffers.client.images import SLOWEST, cut_pieces, shared_folder
from buffers.client.partial_samples import BegunSample, PieceData, pack_pieces, unpack_begun
from buffers.client.place_writer import PlaceWriter

Rows = tuple[tuple[int, int], ...]
Turns = tuple[tuple[int, float], ...]
Images = tuple[tuple[int, str], ...]
Others = tuple[tuple[int, str, Runs], ...]
_I4, _F4 = wire.DTYPES["i4"], wire.DTYPES["f4"]


class ProducerClient(AsyncClient):
    """Leases groups, submits samples, returns leases. A newer `lease` ends the wait of an older one.

    `begun` holds the partial samples of other producers by (group, token), until the lease is started. On the service's
    host, payloads of at least `place_from` bytes (None: as the service says) are written to a file that the service
    reads.
    """

    role = "producer"
    place_from: int | None = None
    _writer: PlaceWriter | None = None
    _folder: ImageFolder | None = None  # of images, on the service's host

    def __init__(
        self, address: str, *, name: str, keys: Keys | None = None, max_bytes: int = MAX_BYTES, timeout_s: float = 60.0
    ) -> None:
        super().__init__(address, name=name, keys=keys, max_bytes=max_bytes, timeout_s=timeout_s)
        self.begun: dict[tuple[int, int], tuple[BegunSample, ...]] = {}
        self._max_bytes = max_bytes
        self._stored: set[str] = set()  # digests of images that the service has
        self._storing = asyncio.Lock()  # groups that share an image begin together: one of them sends it
        self._orphans: set[asyncio.Future[None]] = set()

    async def hello(
        self, fingerprint: str = "", role: str = "", run_id: str = "", *, evaluation_rows: int = 0
    ) -> wire.Welcome:
        """Introduce this process; must come first. Leases of an earlier process of this name are lost."""
        welcome = await super().hello(fingerprint, role, run_id, evaluation_rows=evaluation_rows)
        if self._writer is None:
            self._writer = PlaceWriter.open(welcome)
            self._folder = shared_folder(welcome.segments, welcome.nonce)
        if self.place_from is None:
            self.place_from = welcome.place_bytes
        return welcome

    def close(self) -> None:
        """Close the socket and the file."""
        super().close()
        if self._writer is not None:
            self._writer.close()

    async def lease(
        self, *, engine_version: int, max_groups: int, wait_s: float, kept: int = -1, rows: int = 0
    ) -> wire.Leases:
        """Groups to generate, maybe none; waits in the service up to `wait_s`. `kept`, `rows`: see `wire.LeaseRequest`.

        If the call is cancelled, the request is finished in the background and its leases are returned.
        """
        asked = asyncio.ensure_future(
            self._ask(wire.LeaseRequest(self.name, engine_version, max_groups, wait_s, kept, rows), wait_s=wait_s)
        )
        try:
            packet = await asyncio.shield(asked)
        except asyncio.CancelledError:
            orphan = asyncio.ensure_future(self._return_orphans(asked))
            self._orphans.add(orphan)
            orphan.add_done_callback(self._orphans.discard)
            raise
        leases: wire.Leases = packet.message
        self.begun |= unpack_begun(leases, packet.payloads)
        return leases

    async def keep(
        self, lease: wire.Lease, pieces: Sequence[PieceData], digests: Mapping[int, str]
    ) -> wire.PiecesReply:
        """Send pieces of unfinished samples: if this process dies, another producer continues them."""
        message, payload = pack_pieces(self.name, lease, pieces, digests)
        reply: wire.PiecesReply = (await self._ask(message, (payload,))).message
        return reply

    async def _return_orphans(self, asked: asyncio.Future[wire.Packet]) -> None:
        try:
            leases = (await asked).message.leases  # bounded: the request has its timeout
            await self.give_back(leases, reason="stop")
        except Unavailable:
            return  # the service is gone: the leases expire there

    async def submit(
        self,
        lease: wire.Lease,
        *,
        prompt_ids: IntArray,
        samples: Sequence[GenDelta],
        digests: Mapping[int, str],
        row: Mapping[str, Any],
        rewards: Mapping[int, float] | None = None,
        masks: Mapping[int, Any] | None = None,
        rows: Mapping[int, Rows] | None = None,
        turns: Mapping[int, Turns] | None = None,
        parts: Mapping[int, Mapping[str, float]] | None = None,
        images: Mapping[int, Images] | None = None,
        others: Mapping[int, Others] | None = None,
    ) -> wire.SamplesReply:
        """Submit finished samples of a leased group. `digests`: version -> digest of the weights in the engine.

        `masks` (sample index -> u1 `[T]`) are 0 at tokens that the policy did not sample; `rows`, `turns`, `images`
        and `others` are as in `wire.SampleHead`; `parts` are the parts of `rewards` by name.
        """
        rows, turns, images, others = rows or {}, turns or {}, images or {}, others or {}
        fields, payload = _pack_samples(prompt_ids, samples, masks)
        heads = [wire.SampleHead(item.index, len(item.token_ids), item.finish, item.runs) for item in samples]
        if rows or turns or images or others:
            heads = [
                msgspec.structs.replace(
                    head,
                    rows=rows.get(head.index, ()),
                    turns=turns.get(head.index, ()),
                    images=images.get(head.index, ()),
                    others=others.get(head.index, ()),
                )
                for head in heads
            ]
        used = {version for sample in samples for version, _ in sample.runs}
        message = wire.Samples(
            self.name,
            lease.group,
            lease.token,
            tuple(heads),
            {v: digests[v] for v in sorted(used) if v in digests},
            fields,
            msgspec.json.encode(row).decode(),
            fields[0].count,
            rewards=dict(rewards or {}),
            parts={index: dict(named) for index, named in (parts or {}).items()},
        )
        if self._writer is not None and len(payload) >= (self.place_from or 0):
            found = await self._submit_place(self._writer, message, payload)
            if found is not None:
                return found
        reply: wire.SamplesReply = (await self._ask(message, (payload,))).message
        return reply

    async def store_images(self, images: Mapping[str, bytes]) -> None:
        """Give the run images of rows and samples, before the samples: each digest once in the life of this process. An
        image
        that vanished from a folder which this process sees is stored again.

        Raises:
            WorkError: `image.invalid`, the service does not accept one.
        """
        if all(map(self._is_stored, images)):
            return
        async with self._storing:
            fresh = {digest: data for digest, data in images.items() if not self._is_stored(digest)}
            for piece in cut_pieces(fresh, max_bytes=self._max_bytes):
                if self._folder is None:
                    wait_s = sum(map(len, piece.values())) / SLOWEST
                    await self._ask(wire.StoreImages(self.name, tuple(piece)), list(piece.values()), wait_s=wait_s)
                else:
                    for data in piece.values():
                        await asyncio.to_thread(self._folder.put, data)
                self._stored |= piece.keys()

    def _is_stored(self, digest: str) -> bool:
        return digest in self._stored and (self._folder is None or self._folder.has(digest))

    async def _submit_place(
        self, writer: PlaceWriter, message: wire.Samples, payload: bytes
    ) -> wire.SamplesReply | None:
        """Submit samples with their payload in a file; None if the service cannot read it."""
        place = writer.write(wire.encode_header(message), payload)
        if place is None:
            return None
        failpoint("producer.after_place")
        try:
            reply: wire.SamplesReply = (await self._ask(wire.SamplesAt(self.name, place))).message
        except WireError as error:
            if error.code != "wire.place":
                raise
            writer.reject(place)
            return None
        writer.confirm()
        return reply

    async def give_back(self, leases: Sequence[wire.Lease], *, reason: str, dead: bool = False) -> None:
        """Return leases; with the reason "stop" the attempt does not count. With `dead` the prompt is not retried."""
        if leases:
            groups = tuple((lease.group, lease.token) for lease in leases)
            await self._ask(wire.LeaseReturn(self.name, groups, reason, dead))


def _pack_samples(
    prompt_ids: IntArray, samples: Sequence[GenDelta], masks: Mapping[int, Any] | None
) -> tuple[tuple[wire.Field, ...], bytes]:
    """Pack the arrays of finished samples; arguments as in `submit`."""
    arrays: dict[str, tuple[str, list[Any]]] = {
        "prompt": ("i4", [np.asarray(prompt_ids, _I4)]),
        "response": ("i4", [np.asarray(sample.token_ids, _I4) for sample in samples]),
        "logprobs": ("f4", [np.asarray(sample.logprobs, _F4) for sample in samples]),
    }
    if masks:
        ones = [masks.get(sample.index, np.ones(len(sample.token_ids), np.uint8)) for sample in samples]
        arrays["mask"] = ("u1", [np.asarray(mask, np.uint8) for mask in ones])
    support = wire.join_supports([(sample.support, len(sample.token_ids)) for sample in samples])
    if support is not None:
        arrays |= {name: ("u1", [coded]) for name, coded in wire.pack_support(support).items()}
    if not all(sample.experts is None for sample in samples):
        experts = wire.pack_experts([sample.experts if len(dict(sample.runs)) == 1 else None for sample in samples])
        arrays |= {name: (array.dtype.str[1:], [array]) for name, array in experts.items()}
    return wire.pack_parts(arrays)
