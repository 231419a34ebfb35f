"""`[buffer]`: staleness, admission and storage."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.sections.base import Count, Positive, Seconds, Section, Share

#: Most groups that may be ahead of the learner. The service keeps about 1 KB for each, besides its samples.
MOST_IN_FLIGHT_GROUPS = 1_000_000


class BufferConfig(Section, frozen=True):
    """`[buffer]`: staleness, admission and storage."""

    max_staleness: Count = 4  # largest lag that may reach a gradient; 0 is synchronous
    pipeline_depth: Count | Literal["max", "auto"] = "auto"  # batches of work ahead of the one in training
    learner_idle_target: Share = 0.03  # pipeline_depth = auto: smallest depth with a smaller idle share
    batch_groups: Positive = 16  # groups in the batch of one learner step
    on_late: Literal["wait", "drop", "train"] = "wait"  # what to do with a group that is due but not ready
    late_timeout_s: Seconds = 300.0  # on_late = wait: drop the group after this time; half of run.hang_timeout_s
    max_reissue: Count = 3  # further attempts at a prompt after a lost lease or a late drop
    lease_timeout_s: Seconds = 30.0  # a producer that is silent for this long loses its leases
    store: Literal["auto", "sqlite", "redis"] = "sqlite"  # auto: redis if a URL or a server is found, else sqlite
    redis_url: str = ""  # redis, rediss, unix, redis+sentinel, redis+cluster; empty: a private server
    redis_max_outage_s: Seconds = 60.0  # after this time the buffer ends with exit code 69
    fsync: Literal["never", "everysec", "always"] = "everysec"  # what a power failure may lose; a crash loses nothing
    segment_bytes: Positive = 256 << 20  # size of one payload file
    cache_bytes: Count = 256 << 20  # payloads kept in memory; others are read from the segments
    place_bytes: Count = 16 << 10  # payloads of at least this size go by file if producer and buffer share a host
    max_poison_rate: Share = 0.5  # of the last 64 groups; above it the run ends and names the most frequent reason
    max_reuse: Positive = 1  # most steps that may train one group, all within its staleness bound
    replay_order: Literal["deadline", "priority"] = "deadline"  # of used groups; priority: drawn by reward spread
    fresh_first: bool = True  # prefer fresh groups, fill with used ones; false: order both by replay_order
    priority_exponent: Annotated[float, Meta(ge=0)] = 1.0  # replay_order = priority: weight = spread to this power
    filters: tuple[str, ...] = ()  # reasons not to train a group: zero_variance, accuracy_band, or 'file.py:name'
    max_filtered_rate: Share = 0.98  # of the last 256 groups; at or above it the run ends with the top reason

    @property
    def depth(self) -> int:
        """Pipeline depth in batches: `pipeline_depth`; max_staleness for "max", at most max_staleness for "auto"."""
        return self.max_staleness if isinstance(self.pipeline_depth, str) else self.pipeline_depth

    @property
    def max_in_flight_groups(self) -> int:
        """(depth + 1) * batch_groups: the batch in training and `depth` more."""
        return (self.depth + 1) * self.batch_groups
