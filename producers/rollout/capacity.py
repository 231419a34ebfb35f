"""How much work one producer asks for: as much as its engine's K/V holds, by what samples have cost so far.

Guarantees:
1. what is in flight is counted in samples, not in groups: the long tail of a group keeps its own places alone;
2. samples meant to be decoded at once: as many as the engine decodes (`max_samples`) and as its K/V holds at what a
   sample holds on average (`held_tokens`); with `AHEAD` times as many leased, a free place never waits for a lease;
3. where the engine had to throw samples out for want of K/V, it asks for a tenth less, and gives that back slowly;
4. at least one group is always asked for; `producers.max_groups_in_flight` overrides all of it.
The buffer's own quota and its bound on staleness stand above this: they decide what is granted.

Example: K/V of 10,000 tokens, samples that hold 500 on average: 18 at once (0.9 of the K/V), 36 leased; with 30 in
flight in groups of 4, one more group is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from asyncrl.config import Config
from asyncrl.engine import EngineCapabilities

AHEAD = 2  # leased samples for each that is decoded
FILL = 0.9  # of the K/V: lengths scatter
WINDOW = 256  # samples that the average looks back on
LESS, MORE = 0.9, 0.01  # after a preemption; after a sample without one
LEAST = 0.25


class Capacity:
    """See the module. `prior_tokens` is what a sample holds as long as none has finished."""

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
    def in_flight(self) -> int:
        """Samples leased and not finished."""
        return sum(self._open.values())

    @property
    def held_tokens(self) -> float:
        """Tokens of K/V that a sample holds, averaged over the time that samples live (decode steps).

        A sample of prompt P and response T lives for T steps and holds P + T / 2 on average, so the mean is
        sum(T (P + T / 2)) / sum(T): long samples count for as long as they are there.
        """
        steps = sum(response for _, response in self._seen)
        if not steps:
            return self._prior
        return sum(response * (prompt + response / 2) for prompt, response in self._seen) / steps

    @property
    def at_once(self) -> int:
        """Samples meant to be decoded at the same time."""
        samples = self._capable.max_samples
        if self._capable.kv_tokens:
            samples = min(samples, int(FILL * self._capable.kv_tokens / max(1.0, self.held_tokens)))
        return max(1, int(samples * self._share))

    def leased(self, key: Hashable, samples: int) -> None:
        """A group was leased."""
        self._open[key] = samples

    def finished(self, key: Hashable, *, prompt_tokens: int, response_tokens: int) -> None:
        """A sample of it is done."""
        self._open[key] = max(0, self._open.get(key, 0) - 1)
        self._seen.append((prompt_tokens, response_tokens))
        self._share = min(1.0, self._share + MORE)

    def ended(self, key: Hashable) -> None:
        """The group is done, or given up."""
        self._open.pop(key, None)

    def wanted(self, *, preempted: int = 0) -> int:
        """Groups to ask for now; `preempted` is the engine's count since its start."""
        if preempted > self._preempted:
            self._share = max(LEAST, self._share * LESS)
        self._preempted = preempted
        if self._max_groups:
            return max(0, self._max_groups - len(self._open))
        room = AHEAD * self.at_once - self.in_flight
        if not self._open:
            return max(1, -(-room // self._group_samples))
        return max(0, -(-room // self._group_samples))


def capacity_of(config: Config, capable: EngineCapabilities) -> Capacity:
    """What this producer may have in flight. Half of the longest sample stands for one as long as none is done."""
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    return Capacity(
        capable,
        group_samples=config.sampling.asked_samples,
        prior_tokens=longest / 2,
        max_groups=config.producers.max_groups_in_flight,
    )
