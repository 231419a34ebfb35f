"""`[buffer]`: staleness, admission and storage."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.sections.base import Count, Positive, Seconds, Section, Share


class BufferConfig(Section, frozen=True):
    """`[buffer]`: staleness, admission and storage."""

    max_staleness: Count = 4  # largest lag that may reach a gradient; 0 is synchronous
    pipeline_depth: Count | Literal["max", "auto"] = "max"  # batches of work ahead of the one in training
    learner_idle_target: Share = 0.03  # pipeline_depth = auto: the smallest depth with the learner idle for less
    batch_groups: Positive = 16  # B: groups that one learner step consumes
    on_late: Literal["wait", "drop", "train"] = "wait"  # what happens to a group that is due and not ready
    late_timeout_s: Seconds = 120.0  # on_late = wait: then dropped
    max_reissue: Count = 3  # attempts of a prompt after a lost lease or a late drop
    lease_timeout_s: Seconds = 30.0  # a producer silent for this long loses its leases
    store: Literal["auto", "sqlite", "redis"] = "sqlite"  # auto: redis where a URL or a server is found
    redis_url: str = ""  # empty with store = redis: a private server is started; a password is kept out of every dump
    redis_max_outage_s: Seconds = 60.0  # then the buffer ends with exit code 69
    fsync: Literal["never", "everysec", "always"] = "everysec"  # what a loss of power may cost; a crash costs nothing
    segment_bytes: Positive = 256 << 20  # size of one payload file
    cache_bytes: Count = 256 << 20  # payloads kept in memory; the rest is read back from the segments
    place_bytes: Count = 16 << 10  # payloads from here on go by file where producer and buffer share a host
    max_poison_rate: Share = 0.5  # of the last 64 groups; above it the run ends with the top reason
    max_reuse: Positive = 1  # steps that may train one group, all of them within its bound
    replay_order: Literal["deadline", "priority"] = "deadline"  # of used groups; priority: drawn by reward spread
    fresh_first: bool = True  # used groups fill only what the fresh ones leave; false: both by replay_order
    priority_exponent: Annotated[float, Meta(ge=0)] = 1.0  # replay_order = priority: weight is spread to this power
    filters: tuple[str, ...] = ()  # zero_variance, accuracy_band, or 'module:function': reasons not to train a group
    max_filtered_rate: Share = 0.98  # of the last 256 groups; at or above it the run ends with the top reason

    @property
    def depth(self) -> int:
        """Pipeline depth in batches: `pipeline_depth`; max_staleness where it says max, at most that where auto."""
        return self.max_staleness if isinstance(self.pipeline_depth, str) else self.pipeline_depth

    @property
    def max_in_flight_groups(self) -> int:
        """(depth + 1) * batch_groups: the batch in training and `depth` more."""
        return (self.depth + 1) * self.batch_groups
