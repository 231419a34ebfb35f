"""Quantised versions through service, publisher and receiver: by every transport, as deltas, relayed, and damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from receiver_lab import Engine, Member
from test_receiver_in_service import make_world
from test_weightsync_service import World, until

from asyncrl.wire import Tensor
from weightsync.encoding.quantised import dequantise, quantise, quantise_all, quantised_specs
from weightsync.plan.buckets import Plan, TensorSpec, plan_buckets
from weightsync.publisher.publisher import Publisher

assert make_world  # a fixture
SHAPES = {
    "model.embed_tokens.weight": (64, 24),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(3)
        for name, shape in (("norm", (24,)), ("up", (96, 24)), ("down", (24, 96)))
    },
    "model.norm.weight": (24,),
}
TYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def weights(version: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Small steps from the first version on, as an optimizer takes them."""
    random = torch.Generator().manual_seed(7)
    start = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    step = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    return {name: (start[name] + 1e-4 * version * step[name]).to(dtype) for name in SHAPES}


def plan_for(kind: str, held: str) -> Plan:
    """Buckets that are smaller than the largest matrix, so that scales and matrices lie in different ones."""
    specs = [(name, held, shape) for name, shape in SHAPES.items()]
    return plan_buckets([TensorSpec(*spec) for spec in quantised_specs(specs, kind)], bucket_bytes=1200)


def publish(publisher: Publisher, version: int, kind: str, held: str = "F32") -> None:
    def chunks() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in quantise_all(weights(version, TYPES[held]).items(), kind):
            yield name, tensor.contiguous().view(-1).view(torch.uint8).numpy()

    publisher.publish(version, plan_for(kind, held), chunks())
    publisher.wait_committed(version, members=1, timeout_s=90)


class Decoded(Engine):
    """Remembers the tensors that it was given."""

    tensors: tuple[Tensor, ...] = ()

    async def begin_update(self, manifest: Any, tensors: Any) -> None:
        self.tensors = tuple(tensors)
        await super().begin_update(manifest, tensors)

    def holds(self, version: int, kind: str, held: str = "F32") -> bool:
        """Whether its weights are the decoded ones of this version."""
        wanted = weights(version, TYPES[held])
        assert [one.name for one in self.tensors] == list(SHAPES)
        return all(torch.equal(self._tensor(one), decoded(one.name, wanted[one.name], kind)) for one in self.tensors)

    def _tensor(self, place: Tensor) -> torch.Tensor:
        raw = bytearray(self.held[place.bucket][place.offset : place.offset + place.nbytes])
        return torch.frombuffer(raw, dtype=TYPES[place.dtype]).view(place.shape)


def decoded(name: str, value: torch.Tensor, kind: str) -> torch.Tensor:
    matrix = ".layers." in name and value.ndim == 2
    return dequantise(*quantise(value, kind), value.dtype) if matrix else value


@pytest.mark.parametrize("transport", ["local", "collective", "stream", "disk"])
@pytest.mark.parametrize(("kind", "held"), [("int8", "F32"), ("fp8", "BF16")])
def test_an_engine_gets_the_decoded_weights_and_the_digest_is_that_of_the_codes(
    make_world: Callable[..., World], transport: str, kind: str, held: str
) -> None:
    world = make_world(transport=transport, dtype=kind)
    publisher, member = world.publisher(), Member(world, "a", Decoded())
    for version in range(2):
        publish(publisher, version, kind, held)
        assert member.engine.holds(version, kind, held)
        assert member.receiver.digests[version] == publisher.digests[version]
    plain = sum(np.prod(shape) for shape in SHAPES.values()) * TYPES[held].itemsize
    assert publisher.stats["publish_bytes"] < plain * (0.5 if held == "F32" else 0.8)
    member.close()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_deltas_are_of_codes_and_a_step_changes_few(make_world: Callable[..., World], kind: str) -> None:
    world = make_world(transport="stream", encoding="delta", dtype=kind, timeout_s=10.0)
    publisher, member = world.publisher(), Member(world, "a", Decoded())
    for version in range(3):
        publish(publisher, version, kind)
        assert member.engine.holds(version, kind)
    until(lambda: len([line for line in world.lines() if line["state"] == "committed"]) == 3, "three rounds")
    lines = [line for line in world.lines() if line["state"] == "committed"]
    assert [line["encoding"] for line in lines] == ["full", "delta", "delta"]
    member.close()


def test_an_engine_in_place_gets_the_decoded_weights(make_world: Callable[..., World]) -> None:
    world = make_world(transport="stream", in_place=True, dtype="int8")
    publisher, member = world.publisher(), Member(world, "a", Decoded(in_place=True))
    for version in range(2):
        publish(publisher, version, "int8")
        assert member.engine.holds(version, "int8")
    member.close()


def test_codes_are_relayed(make_world: Callable[..., World]) -> None:
    world = make_world(transport="stream", dtype="int8")
    publisher, first = world.publisher(), Member(world, "a", Decoded())
    publish(publisher, 0, "int8")
    until(lambda: first.receiver._relay.address, "a relay")
    publisher.close()
    second = Member(world, "b", Decoded())
    until(lambda: second.receiver.version == 0, "a version from the other generator")
    assert second.engine.holds(0, "int8") and second.receiver.digests == first.receiver.digests
    first.close()
    second.close()


def test_bits_that_flip_in_the_decoded_weights_end_the_receiver(make_world: Callable[..., World]) -> None:
    world = make_world(transport="local", dtype="int8")
    publisher, member = world.publisher(), Member(world, "a", Decoded(), attest_every_s=0.2)
    publish(publisher, 0, "int8")
    member.engine.held[1][30] ^= 1
    until(lambda: member.error is not None, "the check")
    assert member.error is not None and member.error.code == "engine.broken"
    assert "have changed since the commit" in member.error.message
    member.close()


def test_a_copy_that_the_engine_spoils_is_not_committed(make_world: Callable[..., World]) -> None:
    class Spoils(Decoded):
        async def commit_update(self) -> str:
            self._staged[0][40] ^= 1
            return await super().commit_update()

    world = make_world(transport="local", dtype="int8")
    publisher, member = world.publisher(), Member(world, "a", Spoils())
    publisher.publish(0, plan_for("int8", "F32"), chunks_of(0))
    until(lambda: member.error is not None, "the digest after the commit")
    assert member.error is not None and member.error.code == "engine.broken"
    member.close()


def chunks_of(version: int) -> Iterator[tuple[str, np.ndarray]]:
    for name, tensor in quantise_all(weights(version, torch.float32).items(), "int8"):
        yield name, tensor.contiguous().view(-1).view(torch.uint8).numpy()


def test_codes_are_decoded_into_memory_that_the_engine_lends(make_world: Callable[..., World], tmp_path: Path) -> None:
    class LendsDecoded(Decoded):
        lent = 0

        def bucket_room(self, number: int) -> memoryview:
            self.lent += 1
            self._staged[number] = bytearray(self._update[0].bucket_bytes[number])
            return memoryview(self._staged[number])

    world = make_world(transport="stream", dtype="fp8")
    publisher, member = world.publisher(), Member(world, "a", LendsDecoded())
    publish(publisher, 0, "fp8")
    assert member.engine.holds(0, "fp8") and member.engine.lent >= 3
    member.close()
