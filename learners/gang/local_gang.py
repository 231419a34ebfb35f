"""torchrun for a gang on one host: `python -m learners.gang.local_gang <arguments of torchrun>`.

Started by the launcher (`asyncrl.process_plan.plan`). The rendezvous of one host with itself needs no network:
torchrun's own opens
a store on every interface, in which it keeps pickles that whoever connects may write. Guarantees:
1. nothing listens: the store is in this process, the address that the ranks are given is loopback (`learners.gang.gang`
   listens there);
2. everything else is torchrun's: its arguments, its watch over the ranks, its report.
With several hosts it is torchrun itself (docs/clusters.md), on an isolated network.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import torch.distributed
from torch.distributed import run
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

BACKEND = "asyncrl-local"
HOST = "127.0.0.1"
dist: Any = torch.distributed


class LocalRendezvous(RendezvousHandler):
    """One node that meets nobody."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks make a store of their own."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """A store in memory, and a free port of loopback for rank 0."""
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo(HOST, _free_port()))

    def is_closed(self) -> bool:
        """Never: there is nobody to close it."""
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        """That of the command line."""
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)


def main(argv: list[str] | None = None) -> None:
    """torchrun with this rendezvous."""
    rendezvous_handler_registry.register(BACKEND, _make)
    words = list(sys.argv[1:] if argv is None else argv)
    # An endpoint that nobody opens: without one torchrun warns of a master address that is not used.
    run.main(
        ["--rdzv-backend", BACKEND, "--rdzv-endpoint", f"{HOST}:0", "--rdzv-id", "gang", "--local-addr", HOST, *words]
    )


if __name__ == "__main__":
    main()
