"""How much work one producer requests: as much as its engine's KV cache holds, estimated from finished samples.

Guarantees:
1. work in flight is counted in samples, not in groups: the long tail of a group occupies only its own places;
2. samples to decode in parallel: as many as the engine decodes (`max_samples`) and as its KV cache holds at the average
   size of a sample (`tokens_per_sample`); with `AHEAD` times as many leased, a free place never waits for a lease;
3. after the engine preempted samples (its KV cache was too small) it requests a tenth less, and recovers slowly;
4. at least one group is always requested; `producers.max_groups_in_flight` overrides all of this.
The buffer's quota and its bound on staleness come on top: they decide what is granted.

Example: a KV cache of 10,000 tokens, samples that hold 500 on average: 18 at once (0.9 of the cache), 36 leased; with
30 in flight in groups of 4, one more group is requested."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from asyncrl.config import Config
from asyncrl.engine import EngineCapabilities

AHEAD = 2  # leased samples for each that is decoded
FILL = 0.9  # of the KV cache: lengths vary
WINDOW = 256  # samples of the average
LESS, MORE = 0.9, 0.01  # after a preemption; after a sample without one
LEAST = 0.25


class Capacity:
    """`prior_tokens` is the size of a sample before any has finished."""

    def __init__(
        self, capable: EngineCapabilities, *, group_samples: int, prior_tokens: float, max_groups: int = 0
    ) -> None:
        self._capable = capable
        self._group_samples = group_samples
        self._prior = prior_tokens
        self._max_groups = max_groups
        self._seen: deque[tuple[int, int]] = deque(maxlen=WINDOW)  # (prompt, response) tokens
        self._open: dict[Hashable, int] = {}
        self._share = 1.0
        self._preempted = 0

    @property
    def leased_samples(self) -> int:
        """Samples leased and not finished."""
        return sum(self._open.values())

    @property
    def tokens_per_sample(self) -> float:
        """Tokens of KV cache of a sample, averaged over the time that samples live (decode steps).

        A sample of prompt P and response T lives for T steps and holds P + T / 2 on average, so the mean is
        sum(T (P + T / 2)) / sum(T): samples are weighted by their lifetime.
        """
        steps = sum(response for _, response in self._seen)
        if not steps:
            return self._prior
        return sum(response * (prompt + response / 2) for prompt, response in self._seen) / steps

    @property
    def parallel_samples(self) -> int:
        """Samples meant to be decoded at the same time."""
        samples = self._capable.max_samples
        if self._capable.kv_tokens:
            samples = min(samples, int(FILL * self._capable.kv_tokens / max(1.0, self.tokens_per_sample)))
        return max(1, int(samples * self._share))

    def add_group(self, key: Hashable, samples: int) -> None:
        self._open[key] = samples

    def end_sample(self, key: Hashable, *, prompt_tokens: int, response_tokens: int) -> None:
        self._open[key] = max(0, self._open.get(key, 0) - 1)
        self._seen.append((prompt_tokens, response_tokens))
        self._share = min(1.0, self._share + MORE)

    def end_group(self, key: Hashable) -> None:
        """The group is done, or aborted."""
        self._open.pop(key, None)

    def groups_wanted(self, *, preempted: int = 0) -> int:
        """Groups to request now; `preempted` is the engine's count since its start."""
        if preempted > self._preempted:
            self._share = max(LEAST, self._share * LESS)
        self._preempted = preempted
        if self._max_groups:
            return max(0, self._max_groups - len(self._open))
        room = AHEAD * self.parallel_samples - self.leased_samples
        if not self._open:
            return max(1, -(-room // self._group_samples))
        return max(0, -(-room // self._group_samples))


def make_capacity(config: Config, capable: EngineCapabilities) -> Capacity:
    """The capacity of this producer. The prior of a sample is half of the longest one."""
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    return Capacity(
        capable,
        group_samples=config.sampling.asked_samples,
        prior_tokens=longest / 2,
        max_groups=config.producers.max_groups_in_flight,
    )
