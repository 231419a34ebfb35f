"""One version from its file into an SGLang server, in a weight session.

Guarantees:
1. the server is paused from before the first byte on, and stays paused;
2. tensors go in plan order, one broadcast per piece that lies back to back; the last one carries the label, and what
   the server says that it holds is compared with it;
3. every failure is `engine.broken`; the server is of no version then.
"""

from __future__ import annotations

from asyncrl.errors import WorkError
from producers.engines.group_sender import GroupSender, pieces
from producers.engines.sglang.control_api import SGLangServer
from producers.engines.staged_weights import StagedVersion
from weightsync.plan.digest import bucket_digest, version_digest


async def load(server: SGLangServer, group: GroupSender, staged: StagedVersion, label: str, *, recompute: bool) -> None:
    """Pause the server and load the version. `recompute`: K/V of what runs is given up and will be made again."""
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
        raise WorkError("engine.broken", f"after the commit of {label} the server says that it holds {held!r}")


def digest_of(staged: StagedVersion) -> str:
    """Digest of a version as it lies in its file."""
    groups = enumerate(staged.groups)
    return version_digest([bucket_digest(tensors, staged.bucket(number)) for number, tensors in groups])
