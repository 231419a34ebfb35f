"""One rank of a learner that publishes by `direct` on simulated NPUs, and on rank 0 an engine's end of the group.

Run as `python direct_ranks.py CONFIG`, with RANK and WORLD_SIZE. Rank 0 prints what a publish copied and needed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch_npu
from torch_npu import _C

from asyncrl.config import load
from asyncrl.wire import Instruction, Manifest, RoundReply
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.direct_weights import DirectWeights
from learners.gang.gang import Gang
from learners.main import publish_plans
from learners.row_weights import RowWeights
from weightsync.plan.buckets import group_by_bucket
from weightsync.plan.digest import bucket_digest, version_digest
from weightsync.publisher.direct import Direct
from weightsync.publisher.senders import Peers
from weightsync.transports.collective import CollectiveOutbox
from weightsync.transports.collective_inbox import CollectiveInbox
from weightsync.transports.kept_groups import Groups

assert torch_npu is not None
ENGINE_DEVICE = 3


class Services:
    """What `DirectWeights` asks of rank 0's connections and of the publisher, without a weight-sync service."""

    def __init__(self, plan: Any) -> None:
        self.plan, self.direct, self.groups = plan, Direct(), Groups()
        self.outbox = CollectiveOutbox("127.0.0.1", timeout_s=60.0, backend="hccl", device="npu:0")
        self.address = self.outbox.open()
        self.buckets: list[torch.Tensor] = []
        self.manifest: Manifest | None = None
        self.generation = self.senders = 0
        self.settle = self.direct.settle
        self.publisher = self

    def record_digest(self, version: int, manifest: Manifest) -> None:
        assert manifest is self.manifest and manifest.version == version

    def announce(self, version: int, plan: Any, digests: tuple[str, ...]) -> Manifest:
        digest = version_digest(digests)
        self.manifest = Manifest(version, self.plan.digest, self.plan.bucket_bytes, digests, digest)
        self.direct.open(digest)
        self.generation += 1
        reply = RoundReply(1, "transferring", self.generation, {}, {"engine": 1}, digest=digest)
        work = [
            threading.Thread(target=self.direct.hand_over, args=(reply, self.outbox), kwargs={"limit_s": 60.0}),
            threading.Thread(target=self.receive),
        ]
        for one in work:
            one.start()
        return self.manifest

    def receive(self) -> None:
        torch.npu.set_device(ENGINE_DEVICE)
        order = Instruction(
            "receive", 1, self.manifest, (), "direct", self.address, 1, 2, self.generation, deadline_s=60.0
        )
        inbox = CollectiveInbox(order, device=f"npu:{ENGINE_DEVICE}", groups=self.groups)
        inbox.open()
        self.buckets = [bucket.clone() for bucket in inbox.tensors()]
        inbox.close()

    def wait_group(self) -> bool:
        return self.direct.wait_group()

    def send_direct(self, plan: Any, tensors: Any, peers: Peers) -> str:
        self.senders = peers.senders
        result = self.direct.send(tensors, plan, self.outbox, limit_s=60.0, peers=peers)
        assert result == "sent", result
        return result


def main() -> None:
    config = load(Path(sys.argv[1]))
    gang = Gang.join(config)
    backend = FSDP2Backend(config, gang)
    plan, _ = publish_plans(backend, bucket_bytes=config.weightsync.bucket_bytes)
    services = Services(plan) if gang.lead else None
    given: Any = {"gang": gang, "backend": backend, "services": services}
    weights = DirectWeights(config, **given, rows=RowWeights(config, **given))
    weights.publish(1)  # what is made once
    gang.barrier()
    torch.npu.synchronize()
    used, before = _C.used(0), _C.copies()
    _C.reset_peak(0)
    weights.publish(2)
    after, peak = _C.copies(), _C.peak(0)
    staged = dict(backend.iter_hf_weights())
    if services is not None:
        assert services.manifest is not None
        groups = group_by_bucket(plan.tensors, len(plan.bucket_bytes))
        for number, bucket in enumerate(services.buckets):
            data = bucket.cpu().numpy()
            assert bucket_digest(groups[number], data, like="sum:") == services.manifest.bucket_digests[number]
            for place in groups[number]:
                assert data[place.offset : place.offset + place.nbytes].tobytes() == staged[place.name].tobytes()
        found = {name: after[name] - before[name] for name in after}
        found |= {"peak": peak - used, "largest_bucket": max(plan.bucket_bytes), "buckets": len(plan.bucket_bytes)}
        found |= {
            "senders": services.senders,
            "formed": services.outbox.formed,
            "bytes": plan.nbytes,
            "arrived": len(services.buckets),
        }
        print("found", json.dumps(found), flush=True)
        services.groups.close()
        services.outbox.close()
    gang.leave()
    os._exit(0)  # daemons of the test


if __name__ == "__main__":
    main()
