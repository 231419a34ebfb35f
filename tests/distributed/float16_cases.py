"""Training in float16 with a loss scale: gradients against float32, overflows on one rank, a checkpoint.

`ranks` runs `run_all` on two ranks, `test_float16_ranks.py` on one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import backend_contract as contract
import msgspec
import torch
from torch.distributed.tensor import DTensor

from learners.backends.fsdp2.loss_scale import MOST, START
from learners.gang.gang import Gang
from learners.step.update import train_step

HALF = "model.dtype=float16"
#: The loss is a mean over so many tokens, so the gradient of one token is that of such a step. Micro-batches add up
#: in float32: those of some tokens show the error of all.
TOKENS = (100_000, 1_000_000)


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    return {
        "gradients": [gradients(model, gang, tokens) for tokens in TOKENS],
        "overflow": overflow(model, gang),
        "one_rank": one_rank(model, gang),
        "steps": steps(model, gang),
        "broken": broken(model, gang),
        "resume": contract.resume(model, gang, out / "checkpoint", HALF) | kept(model, gang, out / "checkpoint"),
    }


def make(model: Path, gang: Gang, extra: str = HALF) -> tuple[Any, Any]:
    config = contract.make_config(model, extra=extra)
    return config, contract.make_backend(config, gang)


def say(gang: Gang, value: Any) -> list[Any]:
    """The value of every rank."""
    return [msgspec.json.decode(text) for text in gang.gather(msgspec.json.encode(value))]


# ---------------------------------------------------------------- gradients


def gradient(model: Path, gang: Gang, tokens: int, *, extra: str, scaled: bool = True) -> torch.Tensor:
    """The whole gradient of a mean over so many tokens, as one row."""
    config, backend = make(model, gang, extra)
    if not scaled:
        backend._sharded.scale = None
    (part,) = contract.cut(14, 1, config, gang)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, micro: Any, number: int) -> Any:
        return -(logprobs * micro.advantages * micro.mask).sum() / tokens, {}

    backend.train(part.micro, loss)
    grads = [one.grad for one in backend._policy.parameters() if one.grad is not None]
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten().double() for g in grads])


def gradients(model: Path, gang: Gang, tokens: int) -> dict[str, float]:
    """Distance from the gradient in float32 as a share of it, with and without the scale."""
    wanted = gradient(model, gang, tokens, extra="model.dtype=float32")
    found = {"scaled": gradient(model, gang, tokens, extra=HALF)}
    found["plain"] = gradient(model, gang, tokens, extra=HALF, scaled=False)
    return {name: float((got - wanted).norm() / wanted.norm()) for name, got in found.items()}


# ---------------------------------------------------------------- overflows


def overflow(model: Path, gang: Gang) -> dict[str, Any]:
    """A step that overflows at first, and one that begins at the scale where the other ended."""
    found: dict[str, Any] = {}
    start = MOST
    for name in ("falls", "fits"):
        config, backend = make(model, gang)
        scale = backend._sharded.scale
        scale.kept[0] = start
        share = contract.cut(14, 1, config, gang)
        result = train_step(share, backend=backend, gang=gang, config=config.learner, step=1)
        found[name] = {
            "metrics": result.metrics,
            "weights": sorted(result.weights.items()),
            "counts": result.log._table.tolist(),
            "digest": contract.digest(backend)[1],
            "kept": say(gang, scale.kept.tolist()),
        }
        start = float(scale.kept[0])
    return found


def one_rank(model: Path, gang: Gang) -> dict[str, Any]:
    """A gradient that overflows on the last rank alone."""
    config, backend = make(model, gang)
    scale = backend._sharded.scale
    (part,) = contract.cut(14, 1, config, gang)
    factor = 30.0 if gang.rank == gang.size - 1 else 1e-3

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, micro: Any, number: int) -> Any:
        return factor * (logprobs * micro.mask).sum(), {}

    backend.train(part.micro, loss)
    info = backend.step(lr=1e-3, max_norm=1.0)
    return {"info": say(gang, info), "kept": say(gang, scale.kept.tolist())}


def broken(model: Path, gang: Gang) -> dict[str, Any]:
    """A gradient that is not finite at any scale: nothing changes."""
    _, backend = make(model, gang)
    config = contract.make_config(model, extra=HALF)
    (part,) = contract.cut(14, 1, config, gang)
    before = contract.digest(backend)[1]

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, micro: Any, number: int) -> Any:
        return (logprobs - logprobs.detach()).sum() * float("inf"), {}

    backend.train(part.micro, loss)
    info = backend.step(lr=1e-3, max_norm=1.0)
    same = contract.digest(backend)[1] == before
    return {"skipped": say(gang, info.skipped), "same": same, "kept": backend._sharded.scale.kept.tolist()}


def steps(model: Path, gang: Gang) -> dict[str, Any]:
    """Three steps beside those in float32."""
    found = contract.case(model, gang, extra=HALF)
    return {"metrics": found["metrics"], "wanted": contract.case(model, gang, extra="")["metrics"]}


def kept(model: Path, gang: Gang, folder: Path) -> dict[str, Any]:
    """The scale in a checkpoint, here one that is not that of the start, as another backend loads it."""
    _, backend = make(model, gang)
    backend.load(folder)
    after_two = backend._sharded.scale.kept.tolist()
    backend._sharded.scale.kept.copy_(torch.tensor([START / 8, 77.0]))
    other = folder.parent / "other"
    if gang.lead:
        other.mkdir()
    gang.barrier()
    backend.save(other)
    gang.barrier()
    _, again = make(model, gang)
    again.load(other)
    return {"after_two": after_two, "kept": say(gang, again._sharded.scale.kept.tolist())}
