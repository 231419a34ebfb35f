"""The place of a rank in the layout of `[learner.parallel]`: its share of a batch, and whether its sums count. Pure.

Ranks are numbered as in Megatron-core and the device meshes of transformers: tensor places are neighbours, then
sequence places, then shares, then pipeline stages; `replicate` divides the shares, `expert` the ranks of a stage that
hold one copy of the weights.

Guarantees:
1. ranks that differ only in tensor, sequence or pipeline place have the same share of every batch;
2. exactly one rank of each share counts: tensor and sequence place 0 of the last stage, which computes losses;
3. a size that the layout does not divide is `config.conflict`, never a smaller layout.

Example: 8 ranks with tensor = 2 and pipeline = 2 have 2 shares. Rank 5 is tensor place 1 of share 0 in stage 1 and does
not count; rank 4 counts; rank 0 leads and does not count.
"""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.config import ParallelConfig
from asyncrl.errors import ConfigError


class Topology(NamedTuple):
    """One rank of a gang; `replicate`, `tensor`, `sequence`, `pipeline`, `expert` as in `ParallelConfig`."""

    rank: int = 0
    size: int = 1
    replicate: int = 1
    tensor: int = 1
    sequence: int = 1
    pipeline: int = 1
    expert: int = 1

    @staticmethod
    def from_config(config: ParallelConfig, *, rank: int, size: int) -> Topology:
        """Return the place of a rank.

        Raises:
            ConfigError: `config.conflict`: the ranks do not divide into the layout.
        """
        found = Topology(rank, size, config.replicate, config.tensor, config.sequence, config.pipeline, config.expert)
        each = config.tensor * config.sequence * config.pipeline
        if size % each:
            raise _refusal(f"{size} ranks do not divide by tensor * sequence * pipeline = {each}")
        if found.shares % config.replicate:
            raise _refusal(f"{found.shares} shares do not divide by replicate = {config.replicate}")
        copy = size // (config.pipeline * config.replicate)
        if copy % config.expert:
            raise _refusal(f"the {copy} ranks of a stage's copy do not divide by expert = {config.expert}")
        return found

    @property
    def shares(self) -> int:
        """Number of shares of a batch: `size / (tensor * sequence * pipeline)`."""
        return self.size // (self.tensor * self.sequence * self.pipeline)

    @property
    def tensor_place(self) -> int:
        """0 .. tensor - 1."""
        return self.rank % self.tensor

    @property
    def sequence_place(self) -> int:
        """0 .. sequence - 1."""
        return self.rank // self.tensor % self.sequence

    @property
    def share(self) -> int:
        """The share of this rank, 0 .. shares - 1."""
        return self.rank // (self.tensor * self.sequence) % self.shares

    @property
    def expert_place(self) -> int:
        """Which experts this rank has, 0 .. expert - 1: neighbouring ranks of a stage have different ones."""
        return self.rank % (self.size // self.pipeline) % self.expert

    @property
    def stage(self) -> int:
        """Pipeline stage, 0 .. pipeline - 1."""
        return self.rank // (self.tensor * self.sequence * self.shares)

    @property
    def counts(self) -> bool:
        """Whether the sums of this rank count: one rank of each share, in the last stage."""
        return self.tensor_place == 0 and self.sequence_place == 0 and self.stage == self.pipeline - 1

    @property
    def lead(self) -> bool:
        """Whether this rank talks to the services and publishes."""
        return self.rank == 0

    def peer(self, rank: int) -> Topology:
        """Return the place of another rank of the same gang."""
        return self._replace(rank=rank)

    @property
    def counting(self) -> list[int]:
        """The counting ranks, by share."""
        found = [place for place in map(self.peer, range(self.size)) if place.counts]
        return [place.rank for place in sorted(found, key=lambda place: place.share)]


def _refusal(why: str) -> ConfigError:
    return ConfigError("config.conflict", why, where="learner.parallel")
