"""One rank of a learner on simulated NPUs whose ranks write their rows into the slot of a version.

Run as `python row_ranks.py CONFIG`, with RANK and WORLD_SIZE. Rank 0 prints what a publish copied and needed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch_npu
from torch_npu import _C

from asyncrl.config import load
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.gang.gang import Gang
from learners.main import publish_plans
from learners.row_weights import RowWeights
from weightsync.staging import Fill, Staging

assert torch_npu is not None


class Services:
    """What `RowWeights` asks of rank 0's connections."""

    def __init__(self, plan: Any, folder: Path) -> None:
        self.plan, self.staging = plan, Staging(folder)
        self.found: tuple[bytes, tuple[str, ...]] = (b"", ())

    def publish(self, version: int, fill: Fill) -> None:
        slot, digests = fill(self.staging)
        self.found = bytes(slot.view), digests


def main() -> None:
    config = load(Path(sys.argv[1]))
    gang = Gang.join(config)
    backend = FSDP2Backend(config, gang)
    plan, _ = publish_plans(backend, bucket_bytes=config.weightsync.bucket_bytes)
    services = Services(plan, Path(sys.argv[1]).parent) if gang.lead else None
    weights = RowWeights(config, gang=gang, backend=backend, services=services)  # type: ignore[arg-type]
    assert weights.publish(1)  # what is made once
    gang.barrier()
    torch.npu.synchronize()
    used, before = _C.used(gang.rank), _C.copies()
    _C.reset_peak(gang.rank)
    assert weights.publish(2)
    after, peak = _C.copies(), _C.peak(gang.rank)
    own = [parameter.to_local().nbytes for parameter in backend._policy.parameters()]
    staged = dict(backend.iter_hf_weights())
    if services is not None:
        slot, digests = services.staging.fill(plan, staged.items())
        assert (bytes(slot.view), digests) == services.found, "the version is that of a gathering"
        services.staging.close()
        found = {name: after[name] - before[name] for name in after}
        found |= {"peak": peak - used, "largest_bucket": max(plan.bucket_bytes), "buckets": len(plan.bucket_bytes)}
        found |= {"own": sum(own), "bytes": sum(tensor.nbytes for tensor in plan.tensors)}
        print("found", json.dumps(found), flush=True)
    gang.leave()


if __name__ == "__main__":
    main()
