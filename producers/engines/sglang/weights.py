"""Loads one version from its file into an SGLang server, in a weight session.

Guarantees:
1. the server is paused from before the first byte on, and stays paused;
2. tensors go in plan order, one broadcast per contiguous piece; the last one carries the label, which is compared with
   the server's own report;
3. every failure is `engine.broken`; the server is of no version then.
"""

from __future__ import annotations

import time

from blake3 import blake3

from asyncrl.errors import WorkError
from producers.engines.group_sender import GroupSender, pieces
from producers.engines.sglang.control_api import SGLangServer
from producers.engines.staged_weights import StagedVersion
from weightsync.plan.digest import bucket_digest, version_digest

CHECKSUM_S = 1.0  # slower checksums are not taken at commits


class Checksums:
    """The server's own checksums of its weights: taken right after a commit if that is cheap, compared later."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._recorded = ""  # right after the commit; empty if they were not taken
        self._took_s = 0.0

    async def record(self, server: SGLangServer) -> None:
        """A commit is done."""
        self._recorded = ""
        if self._took_s < CHECKSUM_S:
            started = time.perf_counter()
            self._recorded = await self.take(server)
            self._took_s = time.perf_counter() - started

    async def take(self, server: SGLangServer) -> str:
        return await server.checksums(timeout_s=self._limit_s)

    def attest(self, found: str, digest: str) -> str:
        """`digest` if the checksums are those after the commit, else another; the first ones count if none were
        taken then."""
        self._recorded = self._recorded or found
        return digest if found == self._recorded else blake3(found.encode()).hexdigest(length=16)


async def load(server: SGLangServer, group: GroupSender, staged: StagedVersion, label: str, *, recompute: bool) -> None:
    """Pause the server and load the version. `recompute`: K/V of running requests is dropped and computed again."""
    await server.pause("retract" if recompute else "in_place")
    if recompute:
        await server.flush()
    await server.begin()
    todo = [(number, part) for number, tensors in enumerate(staged.groups) for part in pieces(tensors)]
    for place, (number, part) in enumerate(todo, start=1):
        data = staged.bucket(number)[part[0].offset : part[-1].offset + part[-1].nbytes]
        name = label if place == len(todo) else None
        await server.update(part, group=group.name, label=name, sending=group.send(data))
    await server.end()
    if (held := await server.label()) != label:
        raise WorkError("engine.broken", f"after the commit of {label} the server reports {held!r}")


def file_digest(staged: StagedVersion) -> str:
    """Digest of a version as it lies in its file."""
    groups = enumerate(staged.groups)
    return version_digest([bucket_digest(tensors, staged.bucket(number)) for number, tensors in groups])
