"""Ranks that write their own rows into the slot of a version, next to the weights gathered on rank 0.

`ranks` runs `run_all` on two and on four ranks, `test_row_ranks.py` has what must come out.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

import backend_contract as contract
import msgspec
import pytest
import ranks
import torch

from asyncrl.errors import Unavailable
from learners.backends.base import tensor_bytes
from learners.backends.fsdp2 import own_rows
from learners.direct_weights import exhaust_all, send_weights
from learners.gang.gang import Gang
from learners.main import publish_plans
from learners.rank_zero import Services
from learners.row_weights import RowWeights
from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model
from weightsync.encoding.quantised import FORMATS, quantise_all
from weightsync.plan.digest import PIECE_BYTES
from weightsync.publisher import direct
from weightsync.staging import Fill, Slot, Staging
from weightsync.transports.base import TransportUnusable
from weightsync.transports.shared_memory import Maps

#: Model below the dense one, settings, and whether the ranks can write their rows.
Case = tuple[str, str, bool]
CASES: dict[int, dict[str, Case]] = {
    2: {
        "float32": ("", "", True),
        "bfloat16": ("", "model.dtype=bfloat16", True),
        "narrow": ("", "weightsync.dtype=bfloat16", True),
        "odd": ("odd", "model.dtype=bfloat16", True),
        "experts": (ranks.MOE, "model.dtype=bfloat16", True),
        "expert parallel": (ranks.MOE, "learner.ranks=2;learner.parallel.expert=2", False),
    },
    4: {
        "odd": ("odd", "", True),
        "hsdp": ("odd", "learner.ranks=4;learner.parallel.replicate=2", True),
        "tensor": ("", "learner.ranks=4;learner.parallel.tensor=2", False),
    },
}


class Publisher:
    """What `RowWeights` asks of rank 0's connections, with a staging of its own."""

    def __init__(self, plan: Any, folder: Path) -> None:
        self.plan, self.staging = plan, Staging(folder)
        self.slot: Slot | None = None
        self.digests: tuple[str, ...] = ()
        self.full = False

    def publish(self, version: int, fill: Fill) -> None:
        if self.full:
            raise Unavailable("disk.full", "no room")
        self.slot, self.digests = fill(self.staging)


def make_odd(folder: Path) -> Path:
    """Rows that no number of ranks divides, and an embedding of several pieces."""
    tokenizer = make_tokenizer(folder)
    save_model(folder, make_tiny_qwen3(3001, hidden_size=180, layers=1, head_dim=6, mlp_size=31))
    del tokenizer
    return folder


def publish(model: Path, gang: Gang, out: Path, settings: str) -> dict[str, Any]:
    """Two versions by rows, and the same weights gathered."""
    config = contract.make_config(model, extra=settings)
    backend = contract.make_backend(config, gang)
    plan, _ = publish_plans(backend, bucket_bytes=config.weightsync.bucket_bytes)
    publisher = Publisher(plan, out) if gang.lead else None
    weights = RowWeights(config, gang=gang, backend=backend, services=cast(Services | None, publisher))
    published = [weights.publish(version) for version in (1, 2)]
    found: dict[str, Any] = {"published": [word.decode() for word in gang.gather(repr(published).encode())]}
    gathered: list[tuple[Slot, tuple[str, ...]]] = []
    found |= by_turns(backend, gang)
    settle = publisher.staging.settle if publisher is not None else lambda: None
    take = None if publisher is None else lambda all_: gathered.append(publisher.staging.fill(plan, all_))
    send_weights(backend.iter_hf_weights(settle), take)
    if publisher is not None:
        slot, digests = gathered[0]
        if publisher.slot is not None:
            found |= {"same": bytes(slot.view) == bytes(publisher.slot.view), "digests": digests == publisher.digests}
        publisher.staging.close()
    return found


def quantised(model: Path, gang: Gang) -> dict[str, list[str]]:
    """Codes and scales of the weights of all ranks, gathered, and those of the whole weights."""
    found = {"got": list[str](), "wanted": list[str]()}
    for kind in FORMATS:
        backend = contract.make_backend(contract.make_config(model, extra=f"weightsync.dtype={kind}"), gang)
        specs = backend.weight_specs()
        sent = [(name, hashed(data)) for name, data in backend.iter_hf_weights(lambda: None)]
        assert not gang.lead or [name for name, _ in sent] == [spec.name for spec in specs]
        plain = contract.make_backend(contract.make_config(model), gang)
        shapes = {spec.name: spec.shape for spec in plain.weight_specs()}
        whole = [
            (name, torch.from_numpy(data).view(torch.float32).view(shapes[name]))
            for name, data in plain.iter_hf_weights()
        ]
        found["got"] += [text for _, text in sent]
        for _, tensor in quantise_all(whole, kind):
            found["wanted"].append(hashed(tensor_bytes(tensor, tensor.dtype, lend=False)))
    return found


def hashed(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def by_turns(backend: Any, gang: Gang) -> dict[str, Any]:
    """Digests of the tensors that are whole on each rank: as one sends them, and as several do by buckets."""
    plan, _ = publish_plans(backend, bucket_bytes=1 << 15)
    buckets = {one.name: one.bucket for one in plan.tensors}
    out, found = backend.weights_out, {}
    for way, given in (("one", None), ("several", buckets if out.turns().senders > 1 else None)):
        whole = out.iter_device(lambda: None, part_bytes=1 << 15, buckets=given)
        mine = {name: hashed(tensor_bytes(tensor, tensor.dtype, lend=False)) for name, tensor in whole}
        found[way] = [msgspec.json.decode(part) for part in gang.gather(msgspec.json.encode(mine))]
    return {"senders": out.turns().senders, "buckets": buckets, "sums": sums_of_rows(backend, gang, plan)} | found


def sums_of_rows(backend: Any, gang: Gang, plan: Any) -> list[bool]:
    """Whether the digests of transport `direct` from the rows of all ranks are those of the gathered tensors."""
    rows, whole = backend.own_rows(), backend.weights_out.iter_device(lambda: None, part_bytes=1 << 15)
    wanted = direct.digest_tensors(whole, plan) if gang.lead else exhaust_all(whole)
    if rows is None:
        return []
    parts = gang.gather(msgspec.msgpack.encode(direct.sum_rows(rows.chunks(), plan)))
    own = [msgspec.msgpack.decode(part, type=direct.Summed) for part in parts]
    if not gang.lead:
        return []
    with pytest.raises(ValueError, match="bytes were digested"):
        direct.join_sums(plan, own[1:])
    return [one == two for one, two in zip(direct.join_sums(plan, own), wanted or (), strict=True)]


def failures(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """No room on rank 0; then a rank that does not see the slot."""
    config = contract.make_config(model)
    backend = contract.make_backend(config, gang)
    plan, _ = publish_plans(backend, bucket_bytes=config.weightsync.bucket_bytes)
    publisher = Publisher(plan, out) if gang.lead else None
    weights = RowWeights(config, gang=gang, backend=backend, services=cast(Services | None, publisher))
    said = []
    if publisher is not None:
        publisher.full = True
    try:
        said.append(str(weights.publish(1)))
    except Unavailable as error:
        said.append(error.code)
    if publisher is not None:
        publisher.full = False
    with pytest.MonkeyPatch.context() as patch:
        if not gang.lead:
            patch.setattr(Maps, "view", blind)
        said += [str(weights.publish(version)) for version in (2, 3)]
    if publisher is not None:
        said.append(str(publisher.slot))
        publisher.staging.close()
    return {"said": [word.decode() for word in gang.gather(" ".join(said).encode())]}


def blind(*_: object) -> None:
    raise TransportUnusable("local: not visible here")


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """Results by case."""
    odd = out / "odd"
    if gang.lead:
        make_odd(odd)
    gang.barrier()
    models = {"": model, "odd": odd, ranks.MOE: model / ranks.MOE}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_rows, "PART_BYTES", PIECE_BYTES)
        found = {
            name: publish(models[below], ranks.in_layout(gang, settings), out, settings)
            for name, (below, settings, _) in CASES[gang.size].items()
        }
    if gang.size == 2:
        found |= {"failures": failures(model, gang, out), "quantised": quantised(models[ranks.MOE], gang)}
    return found
