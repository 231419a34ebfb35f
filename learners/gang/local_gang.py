"""torchrun for a gang on one host: `python -m learners.gang.local_gang <arguments of torchrun>`.

torchrun's own rendezvous opens a store on every interface and stores pickles that any connection may write. On one host
no network is needed.

Guarantees:
1. nothing listens on other interfaces: the store is in this process, the ranks' address is loopback
   (`learners.gang.gang` listens there);
2. everything else is torchrun's: arguments, supervision of the ranks, report.

Several hosts use torchrun itself (docs/clusters.md), on an isolated network.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from asyncrl.launcher.fork_server import WaitingRank, fork_ranks, module_words
from asyncrl.launcher.forked import ForkedProcess

BACKEND = "asyncrl-local"
HOST = "127.0.0.1"
dist: Any = torch.distributed
handler: Any = subprocess_handler


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of one node."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks create their own store."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a store in memory, and a free loopback port for rank 0."""
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo(HOST, _free_port()))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)


def start_rank(ranks: list[WaitingRank], args: Sequence[str], *, env: Mapping[str, str], **how: Any) -> Any:
    """`subprocess.Popen` of a rank; one that waits for its command gets it."""
    words = module_words(args)
    if not ranks or not words:
        return subprocess.Popen(args, env=env, **how)
    return ForkedProcess(ranks.pop(0).tell(words, env))


def main(argv: list[str] | None = None) -> None:
    """Run torchrun with this rendezvous."""
    rendezvous_handler_registry.register(BACKEND, _make)
    words = list(sys.argv[1:] if argv is None else argv)
    ranks = fork_ranks(int(words[words.index("--nproc-per-node") + 1]), imported="learners.loop")
    handler.Popen = partial(start_rank, ranks)
    # The endpoint is never opened: without one torchrun warns of an unused master address.
    run.main(
        ["--rdzv-backend", BACKEND, "--rdzv-endpoint", f"{HOST}:0", "--rdzv-id", "gang", "--local-addr", HOST, *words]
    )


if __name__ == "__main__":
    main()
