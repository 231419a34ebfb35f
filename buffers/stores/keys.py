"""Every Redis key of asyncrl, in one place.

All keys of a run share one hash tag, so they lie in one slot of a cluster.

    arl:{<run>}:head   HASH   epoch: of the service that may write; seq: number of the last applied write
    arl:{<run>}:rows   HASH   row key -> row (msgpack), see buffers.groups.book
    arl:{<run>}:lease  HASH   the buffer that serves a run with a stand-by, see buffers.stores.lease; expires
"""

from __future__ import annotations

PREFIX = "arl:"


def head_key(run: str) -> str:
    """Epoch and sequence number of a run.

    >>> head_key("demo")
    'arl:{demo}:head'
    """
    return f"{PREFIX}{{{_plain(run)}}}:head"


def rows_key(run: str) -> str:
    """The rows of a run."""
    return f"{PREFIX}{{{_plain(run)}}}:rows"


def lease_key(run: str) -> str:
    """The lease of a run with a stand-by."""
    return f"{PREFIX}{{{_plain(run)}}}:lease"


def _plain(run: str) -> str:
    return run.replace("{", "(").replace("}", ")")
