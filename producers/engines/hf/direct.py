"""Transport `direct`: the buckets of a version go from the group's device memory into the model's parameters."""

from __future__ import annotations

from typing import Any

from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import Instruction
from producers.engines.hf.weights import ModelWeights
from weightsync.transports.base import TransportError


def receive(weights: ModelWeights, instruction: Instruction, kept: list[Any]) -> None:
    """Take every bucket of a begun update. `kept` holds the process groups of this engine.

    Raises TransportError if a bucket does not come in time, or what the model then holds has another digest.
    """
    from weightsync.transports.collective_inbox import CollectiveInbox
    from weightsync.transports.kept_groups import Groups

    kept.extend([] if kept else [Groups()])
    assert instruction.manifest is not None
    device = weights.device
    backend = instruction.address.partition("://")[0]
    inbox = CollectiveInbox(instruction, device=str(device) if backend != "gloo" else "", groups=kept[0])
    try:
        inbox.open()
        wrong = ""
        for number, data in enumerate(inbox.tensors()):
            held = weights.take(number, data)
            failpoint("weightsync.after_direct_bucket")
            if held != instruction.manifest.bucket_digests[number]:
                wrong = wrong or f"bucket {number} of version {instruction.manifest.version}"
        if wrong:  # after the last bucket: the others in the group get theirs
            raise TransportError(f"{wrong} has another digest than published")
    finally:
        inbox.close()
