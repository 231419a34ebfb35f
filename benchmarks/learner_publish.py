"""The gather of a publish as bench_learner.py measures it: `torchrun learner_publish.py MODEL OUT ROUNDS`.

Rank 0 copies every whole tensor to its place in buckets that are there already (`weightsync.plan.buckets`), as a
publisher
does, without digests. Ways, turn by turn: `streamed`: `Backend.iter_hf_weights`; `per_parameter`: `full_tensor()` of
each parameter, cast to the dtype that is sent; `state_dict`: `get_model_state_dict` with all of it on rank 0. Figures
of rank 0 go to OUT by dtype of the model: medians in ms, ratios within a round, and the most bytes that were resident
beyond those before.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from bench_packing import Setting, make_config  # noqa: E402, RUF100
from children import forget_peak, resident  # noqa: E402, RUF100

from asyncrl.config import WeightSyncConfig  # noqa: E402, RUF100
from learners.backends.base import DTYPES, tensor_bytes
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.backends.fsdp2.sharded_module import OWN
from learners.gang.gang import Gang
from weightsync.plan.buckets import TensorSpec, plan_buckets

Chunks = Iterator[tuple[str, Any]]
SHAPE = ["learner.ranks=2"]


class Rounds:
    """One model on both ranks, and rank 0's buckets."""

    def __init__(self, folder: Path, dtype: str, gang: Gang) -> None:
        config = make_config(folder, Setting(), [*SHAPE, f"model.dtype={dtype}"])
        self.gang = gang
        self.backend = FSDP2Backend(config, gang)
        self.sent = DTYPES[dtype][1]
        specs = [TensorSpec(spec.name, spec.dtype, spec.shape) for spec in self.backend.weight_specs()]
        self.plan = plan_buckets(specs, bucket_bytes=WeightSyncConfig().bucket_bytes)
        self.buckets = [np.ones(size, np.uint8) for size in self.plan.bucket_bytes]
        self.ways: dict[str, Callable[[], Chunks]] = {
            "streamed": self.streamed,
            "per_parameter": self.per_parameter,
            "state_dict": self.state_dict,
        }

    def streamed(self) -> Chunks:
        """As the learner does it."""
        return self.backend.iter_hf_weights(lambda: None)  # what was given is copied at once

    @torch.no_grad()
    def per_parameter(self) -> Chunks:
        """One gather each."""
        root = self.backend._policy
        for tensor in self.plan.tensors:
            parameter: Any = root.get_parameter(OWN + tensor.name)
            whole = parameter.full_tensor()
            if self.gang.lead:
                yield tensor.name, tensor_bytes(whole, self.sent, lend=True)

    @torch.no_grad()
    def state_dict(self) -> Chunks:
        """All at once."""
        whole = get_model_state_dict(
            self.backend._policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if self.gang.lead:
            for tensor in self.plan.tensors:
                yield tensor.name, tensor_bytes(whole[OWN + tensor.name], self.sent, lend=True)

    def take(self, way: str) -> tuple[float, int]:
        """Seconds until the last byte is in its bucket, and extra bytes."""
        self.gang.barrier()
        before = resident("VmRSS")
        forget_peak()
        started = time.perf_counter()
        tensors = iter(self.plan.tensors)
        for name, data in self.ways[way]():
            tensor = next(tensors)
            assert tensor.name == name
            self.buckets[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes] = data
        return time.perf_counter() - started, resident("VmHWM") - before

    def run(self, rounds: int) -> dict[str, Any]:
        """Figures of all ways."""
        seconds: dict[str, list[float]] = {way: [] for way in self.ways}
        extra: dict[str, int] = dict.fromkeys(self.ways, 0)
        kept: list[Any] = []
        for round_ in range(rounds + 1):  # the first is a warm-up, and checks that all give the same bytes
            for way in self.ways:
                spent, more = self.take(way)
                if round_:
                    seconds[way].append(spent)
                    extra[way] = max(extra[way], more)
                elif not kept:
                    kept = [bucket.copy() for bucket in self.buckets]
                else:
                    assert all(map(np.array_equal, kept, self.buckets)), way
                if not round_:
                    for bucket in self.buckets:
                        bucket.fill(1)

        def times(way: str) -> float:
            return round(statistics.median(b / a for a, b in zip(seconds["streamed"], seconds[way], strict=True)), 2)

        return {
            "tensors": len(self.plan.tensors),
            "bytes": self.plan.nbytes,
            "ms": {way: round(1e3 * statistics.median(taken), 1) for way, taken in seconds.items()},
            "extra_mib": {way: round(most / (1 << 20), 1) for way, most in extra.items()},
            "times_per_parameter": times("per_parameter"),
            "times_state_dict": times("state_dict"),
        }


def main() -> None:
    """Both dtypes."""
    folder, out, rounds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    gang = Gang.join(make_config(folder, Setting(), SHAPE))
    found = {dtype: Rounds(folder, dtype, gang).run(rounds) for dtype in ("float32", "bfloat16")}
    if gang.lead:
        out.write_bytes(msgspec.json.encode(found))
    gang.leave()


if __name__ == "__main__":
    main()
