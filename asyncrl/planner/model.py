"""What a forecast is made of: the plant (what was measured), a scenario (what is asked), the forecast (the answer).

Guarantees:
1. values only, no decision; each encodes to JSON and back;
2. every field has its unit in its name or in its comment.

Example: an engine with `decode_s = 0.02` and `decode_sample_s = 0.001` needs 20 + 32 * 1 = 52 ms for a step of 32
samples: 32 / 0.052 = 615 tokens per second.
"""

from __future__ import annotations

import msgspec


class Plant(msgspec.Struct, frozen=True):
    """What the machines do, measured from a run or given. Times are of processes that have the cores they ask for.

    Where `cores` is 0 nothing is shared: accelerators. Else producers and learner slow each other down beyond it.
    """

    decode_s: float  # of one decode step, whatever the number of samples
    decode_sample_s: float  # more for each sample that is decoded at once
    train_s: float  # of one learner step, whatever its batch: what is not in tokens
    train_token_s: float  # more for each response token in the batch
    lengths: tuple[tuple[int, ...], ...]  # response tokens of the samples of each group, in the order of the run
    train_noise: tuple[float, ...] = (1.0,)  # measured / fitted, of the steps
    reward_s: float = 0.0  # of one sample
    fetch_s: float = 0.0  # and assembly: between a claim and the training
    publish_s: float = 0.0  # that blocks the learner
    commit_s: float = 0.0
    checkpoint_s: float = 0.0  # of one that blocks
    sync_s: tuple[float, ...] = (0.05,)  # from a publish to the swap, of the rounds
    swap_s: float = 0.0  # that an engine stands still
    request_s: float = 0.002  # of a message and its answer
    cores: float = 0.0
    other_demand: float = 0.0  # cores that the other roles use
    producer_threads: int = 1
    learner_threads: int = 1
    group_bytes: float = 0.0  # payload of a group
    members: int = 1  # generators that `sync_s` was measured with


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
    late_timeout_s: float = 120.0
    max_reuse: int = 1
    max_groups_in_flight: int = 0
    reward_workers: int = 1
    reward_batch: int = 64
    checkpoint_every: int = 0  # 0: none that blocks
    engines: float = 1.0  # real producers that one of `producers` stands for
    learner_speed: float = 1.0  # of the tokens' part of a step, against the plant
    sync_factor: float = 1.0
    seed: int = 0


class Forecast(msgspec.Struct, frozen=True):
    """What came out. Shares and rates are of the time after the first steps, in which the pipeline fills."""

    name: str
    steps: int
    wall_s: float
    steps_s: float  # steps per second
    tokens_s: float  # response tokens trained per second
    groups_s: float
    lag_mean: float
    lags: dict[int, float]  # lag -> share of the groups
    learner_wait_share: float  # of its time, waiting for a batch
    producer_idle_share: float  # of theirs, without a sample to decode
    dropped: int = 0  # groups that were late


class Request(msgspec.Struct, frozen=True):
    """What goes to the process."""

    plant: Plant
    scenarios: tuple[Scenario, ...]


def tokens_per_s(plant: Plant, samples: float) -> float:
    """Of one engine that decodes so many samples at once.

    >>> round(tokens_per_s(Plant(0.02, 0.001, 0, 0, ((1,),)), 32))
    615
    """
    return samples / max(1e-12, plant.decode_s + plant.decode_sample_s * samples)
