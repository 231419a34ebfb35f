"""Values of a forecast: the plant (measured), a scenario (settings), the forecast (result).

Guarantees:
1. values only; each encodes to JSON and back;
2. every field has its unit in its name or in its comment.

Example: an engine with `decode_s = 0.02` and `decode_sample_s = 0.001` needs 20 + 32 * 1 = 52 ms for a step of 32
samples: 32 0.052 = 615 tokens per second.
"""

from __future__ import annotations

import msgspec


class Plant(msgspec.Struct, frozen=True):
    """Speed of the machines, measured from a run or given. Times are of processes with all the cores they need.

    With `cores` = 0 nothing is shared (accelerators). Else producers and learner slow each other down beyond it.
    """

    decode_s: float  # of one decode step, independent of the number of samples
    decode_sample_s: float  # more for each sample in the step
    train_s: float  # of one learner step, independent of the number of tokens
    train_token_s: float  # more for each response token in the batch
    lengths: tuple[tuple[int, ...], ...]  # response tokens of the samples of each group, in the order of the run
    train_noise: tuple[float, ...] = (1.0,)  # measured / fitted, of the steps
    reward_s: float = 0.0  # of one sample
    fetch_s: float = 0.0  # and assembly: between a claim and the training
    publish_s: float = 0.0  # that blocks the learner
    commit_s: float = 0.0
    checkpoint_s: float = 0.0  # of one that blocks
    sync_s: tuple[float, ...] = (0.05,)  # from a publish to the swap, of the rounds
    swap_s: float = 0.0  # pause of an engine
    request_s: float = 0.002  # of a message and its answer
    cores: float = 0.0
    other_demand: float = 0.0  # cores used by the other roles
    producer_threads: int = 1
    learner_threads: int = 1
    group_bytes: float = 0.0  # payload of a group
    members: int = 1  # generators in the measurement of `sync_s`


class Scenario(msgspec.Struct, frozen=True):
    """One set of settings to play."""

    name: str = ""
    steps: int = 30
    producers: int = 1
    slots: int = 64  # of one producer
    group_size: int = 8  # samples that make a group complete
    asked_samples: int = 8  # samples that are asked for
    batch_groups: int = 16
    max_staleness: int = 2
    depth: int = 2
    auto_depth: bool = False
    learner_idle_target: float = 0.03
    on_late: str = "wait"
    late_timeout_s: float = 300.0
    max_reuse: int = 1
    max_groups_in_flight: int = 0
    reward_workers: int = 1
    reward_batch: int = 64
    checkpoint_every: int = 0  # 0: none that blocks
    engines: float = 1.0  # real producers per simulated one
    learner_speed: float = 1.0  # cost of the tokens of a step, relative to the plant
    sync_factor: float = 1.0
    seed: int = 0


class Forecast(msgspec.Struct, frozen=True):
    """The result. Shares and rates exclude the first steps, during which the pipeline fills."""

    name: str
    steps: int
    wall_s: float
    steps_s: float  # steps per second
    tokens_s: float  # response tokens trained per second
    groups_s: float
    lag_mean: float
    lags: dict[int, float]  # lag -> share of the groups
    learner_wait_share: float  # share of time that the learner waits for a batch
    producer_idle_share: float  # share of time that producers have no sample to decode
    dropped: int = 0  # groups that were late


class Request(msgspec.Struct, frozen=True):
    """Input of the simulation process."""

    plant: Plant
    scenarios: tuple[Scenario, ...]


def tokens_per_s(plant: Plant, samples: float) -> float:
    """Rate of an engine that decodes `live` samples at once.

    >>> round(tokens_per_s(Plant(0.02, 0.001, 0, 0, ((1,),)), 32))
    615
    """
    return samples / max(1e-12, plant.decode_s + plant.decode_sample_s * samples)
