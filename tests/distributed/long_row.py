"""`torchrun long_row.py MODEL OUT TOKENS`: one sample in a row over all ranks, forward, backward and update.

Rank 0 writes log-probs, loss, gradient norm, and the bytes by which the resident memory of each rank rose at most. The
model has one head of keys and values and is tiny: activations of the row are nearly all of it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import backend_contract as contract
import msgspec
import numpy as np
import ranks

from learners.batch.assembly import _minibatch
from learners.batch.micro_batches import Minibatch, Sample
from learners.gang.gang import Gang
from learners.step.update import train_step


def share_of(tokens: int, gang: Gang) -> Minibatch:
    rng = np.random.default_rng(tokens)
    count = tokens // 2
    drawn = rng.integers(3, 20, tokens).astype(np.int32)
    sample = Sample(drawn, tokens - count, np.full(count, -3, "f4"), np.ones(count, np.uint8), 1.0, 0)
    return _minibatch([sample], ranks=1, max_tokens=tokens, packing=True)[gang.topology.share]


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def main() -> None:
    model, out, tokens = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    joined = Gang.join(ranks.lone_config())
    layout = f"learner.ranks={joined.size};learner.parallel.sequence={joined.size}"
    gang = ranks.in_layout(joined, layout)
    extra = f"{layout};learner.micro_batch_tokens={tokens};learner.gradient_checkpointing=true"
    config = contract.make_config(model / ranks.LONE_KV, extra=extra)
    backend: Any = contract.make_backend(config, gang)
    backend.self_check()
    train_step([share_of(512, gang)], backend=backend, gang=gang, config=config.learner, step=1)  # all that stays
    part = share_of(tokens, gang)
    logprobs = backend.forward_logprobs(part.micro)[0]
    gang.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before = resident("VmRSS")
    metrics = train_step([part], backend=backend, gang=gang, config=config.learner, step=2).metrics
    rose = [int(text) for text in gang.gather(str(resident("VmHWM") - before).encode())]
    if gang.lead:
        found = {"rose": rose, "logprobs": logprobs.tolist(), **{key: metrics[key] for key in ("loss", "grad_norm")}}
        (out / f"ranks_{gang.size}.json").write_bytes(msgspec.json.encode(found))
    joined.leave()


if __name__ == "__main__":
    main()
