"""Seconds of a version of the weights on its way from learner to engines, computed from bytes and speeds of links.

`python -m asyncrl.planner.weight_seconds` prints the table of docs/weightsync.md. Nothing in it was measured. Pure.
Each stage moves all bytes at the speed of its narrowest link; latencies, and the time of a group to form, are left out:

- `blocked`: the learner copies its weights to pinned host memory, every rank of a host a part, or rank 0 alone
  (tensor or expert places, adapters, Megatron, several hosts);
- `commit`: the workers of an engine copy their shares back, while nothing is decoded;
- `direct`: the learner's sending ranks broadcast to all workers, device to device, over the network of their hosts;
  nothing is decoded meanwhile either.

Example: 30.5 billion parameters in bfloat16 are 61 GB: rank 0 copies them at 50 GB/s in 1.2 s, and one port of 400
Gbit/s (45 GB/s of payload) carries them in 1.4 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from asyncrl.preflight.memory import BYTES
from asyncrl.preflight.model_shape import model_shape


class Links(NamedTuple):
    """Bytes per second; by default a host with eight H100 devices."""

    device_host: float = 50e9  # one device and pinned host memory: PCIe 5.0 x16
    host_memory: float = 200e9  # all copies of a host together
    device_device: float = 300e9  # between devices of a host, one way: NVLink 4
    network: float = 45e9  # one port of 400 Gbit/s


LINKS = Links()


class Seconds(NamedTuple):
    """Seconds of one version."""

    blocked: float
    commit: float
    direct: float


def weight_bytes(model: Mapping[str, Any], dtype: str) -> int:
    """Bytes of a version of a model with this config.json; 0 for an unknown architecture. `dtype`: as it is sent; int8
    and fp8 count a byte for each parameter, without scales and the vectors that stay whole."""
    shape = model_shape(model)
    return 0 if shape is None else shape.parameters * BYTES.get(dtype, 1)


def sync_seconds(nbytes: int, *, workers: int, copying: int = 1, senders: int = 1, links: Links = LINKS) -> Seconds:
    """Times of `nbytes`. `workers`: of one engine; `copying`: ranks of a host that copy different parts at once;
    `senders`: ports of the network that send different parts at once.

    >>> [round(one, 2) for one in sync_seconds(61_000_000_000, workers=4)]
    [1.22, 0.3, 1.36]
    """
    to_host = min(copying * links.device_host, links.host_memory)
    from_host = min(workers * links.device_host, links.host_memory)
    gathered = nbytes / links.device_device  # the shards of other ranks, before a rank sends
    return Seconds(nbytes / to_host, nbytes / from_host, max(nbytes / (senders * links.network), gathered))


FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim",
)  # fmt: skip


def _decoder(kind: str, *sizes: int, **more: int) -> dict[str, Any]:
    """A config.json with an output head of its own."""
    return {"model_type": kind, "tie_word_embeddings": False, **dict(zip(FIELDS, sizes, strict=True)), **more}


EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
#: Well-known models: the fields of their config.json that count, and the workers of one engine.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-7B": (_decoder("qwen2", 3584, 28, 28, 4, 18944, 128, vocab_size=152064), 1),
    "Qwen2.5-32B": (_decoder("qwen2", 5120, 64, 40, 8, 27648, 128, vocab_size=152064), 2),
    "Llama-3.3-70B": (_decoder("llama", 8192, 80, 64, 8, 28672, 128, vocab_size=128256), 4),
    "Qwen3-30B-A3B": (_decoder("qwen3_moe", 2048, 48, 32, 4, 6144, 128, **EXPERTS), 4),
    "Qwen3-235B-A22B": (
        _decoder("qwen3_moe", 4096, 94, 64, 4, 12288, 128, **EXPERTS | {"moe_intermediate_size": 1536}),
        8,
    ),
}
PORTS = 8  # and devices of a host


def table() -> Iterator[str]:
    """The lines of the table."""
    columns = (
        "model, workers of an engine",
        "GB",
        "blocked, 1 rank copies",
        "8 copy",
        "commit",
        "direct, 1 port",
        "8 ports",
    )
    yield f"| {' | '.join(columns)} |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, (model, workers) in MODELS.items():
        nbytes = weight_bytes(model, "bfloat16")
        one = sync_seconds(nbytes, workers=workers)
        every = sync_seconds(nbytes, workers=workers, copying=PORTS, senders=PORTS)
        times = (one.blocked, every.blocked, one.commit, one.direct, every.direct)
        yield f"| {name}, {workers} | {nbytes / 1e9:.1f} | " + " | ".join(f"{time:.2f} s" for time in times) + " |"


if __name__ == "__main__":
    print("\n".join(table()))
