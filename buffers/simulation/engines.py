"""A producer in virtual time: it asks for groups as `producers.main` does and decodes them as an engine does.

Guarantees:
1. every live sample gets a token per decode step, of `decode_s + decode_sample_s * live` seconds of work; `slots` are
   decoded at once, the others wait in the order of their leases;
2. twice as many samples as slots are leased (`producers.rollout.capacity`); a request names the version that the engine
   holds; one that waits is repeated when the version changes, and after `POLL_S`;
3. a sample's oldest version is that of the engine when its first token is made.
A sample ends when the engine's count of tokens per live sample has grown by its length: one number for all of them, so
an event costs the logarithm of what is live.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

import msgspec

from asyncrl.planner.model import Plant, Scenario
from asyncrl.wire import Lease
from buffers.simulation.clock import Clock

POLL_S = 0.25
AHEAD = 2


class Decoding(msgspec.Struct):
    lease: Lease
    index: int
    length: int
    oldest: int = 0


class Engine:
    """`ask(version, groups)` puts a request to the buffer; `finished(sample)` says whether its lease still stands."""

    def __init__(
        self,
        clock: Clock,
        plant: Plant,
        scenario: Scenario,
        *,
        ask: Callable[[int, int], None],
        finished: Callable[[Decoding], bool],
        length_of: Callable[[int, int], int],
    ) -> None:
        self.version = -1
        self.busy_s = 0.0
        self._clock = clock
        self._plant = plant
        self._scenario = scenario
        self._ask = ask
        self._finished = finished
        self._length_of = length_of
        self._slots = max(1, round(scenario.slots * scenario.engines))
        self._live: list[tuple[float, int, Decoding]] = []
        self._waiting: deque[Decoding] = deque()
        self._open: dict[int, int] = {}  # lease token -> samples that are not finished
        self._made = 0.0  # tokens per live sample so far
        self._seen = (0.0, 0.0)  # work, time of the last look
        self._plan = 0  # number of the newest plan for the next end
        self._asked = False
        self._looks = 0
        self._number = 0
        self._still = 0  # swaps under way

    # ------------------------------------------------------------ asking

    def look(self) -> None:
        """The producer's loop: ask where there is room, else wait for a group to end."""
        if self._asked:
            return
        self._looks += 1
        groups = self._count_wanted()
        if groups > 0:
            self._asked = True
            self._ask(self.version, groups)
        else:
            mine = self._looks
            self._clock.schedule(POLL_S, lambda: self.look() if self._looks == mine else None)

    def _count_wanted(self) -> int:
        most = round(self._scenario.max_groups_in_flight * self._scenario.engines)
        if most:
            return max(0, most - len(self._open))
        room = AHEAD * self._slots - sum(self._open.values())
        groups = -(-room // self._scenario.asked_samples)
        return max(0 if self._open else 1, groups)

    def take_answer(self, leases: tuple[Lease, ...]) -> None:
        """The buffer's answer: start what was leased, and look again."""
        self._asked = False
        for lease in leases:
            self._open[lease.token] = len(lease.missing)
            for index in lease.missing:
                self._waiting.append(Decoding(lease, index, self._length_of(lease.group, index)))
        if leases:
            self._advance()
            self._seat()
        self._clock.schedule(self._plant.request_s, self.look)

    # ------------------------------------------------------------ decoding

    @property
    def _step_s(self) -> float:
        return self._plant.decode_s + self._plant.decode_sample_s * len(self._live) / self._scenario.engines

    def _advance(self) -> None:
        """Count what was made since the last look."""
        work, now = self._clock.work, self._clock.now
        if self._live:
            self.busy_s += now - self._seen[1]
            if not self._still:
                self._made += (work - self._seen[0]) / self._step_s
        self._seen = (work, now)

    def _seat(self) -> None:
        """Fill free slots and plan the next end."""
        before = bool(self._live)
        while self._waiting and len(self._live) < self._slots:
            sample = self._waiting.popleft()
            if sample.lease.token not in self._open:
                continue  # its group was completed without it
            sample.oldest = self.version
            self._number += 1
            heapq.heappush(self._live, (self._made + sample.length, self._number, sample))
        if bool(self._live) != before:
            self._demand(bool(self._live))
        self._plan += 1
        if self._live and not self._still:
            mine = self._plan
            left = max(0.0, self._live[0][0] - self._made) * self._step_s
            self._clock.schedule_work(left, lambda: self._end(mine))

    def _demand(self, works: bool) -> None:
        cores = self._plant.producer_threads * self._scenario.engines
        self._clock.ask(cores if works else -cores)

    def _end(self, plan: int) -> None:
        """The shortest of the live samples is done, and all that end with the same token."""
        if plan != self._plan:
            return
        self._advance()
        ended = []
        while self._live and self._live[0][0] <= self._made + 1e-6:
            ended.append(heapq.heappop(self._live)[2])
        over = False
        for sample in ended:
            token = sample.lease.token
            if token not in self._open:
                continue
            self._open[token] -= 1
            if not self._finished(sample):
                self._drop(token)
            elif self._open[token] == 0:
                del self._open[token]
            over = over or token not in self._open
        if not self._live:
            self._demand(False)
        self._seat()
        if over:
            self.look()

    def _drop(self, token: int) -> None:
        """The lease is over: what is still decoded of it is given up."""
        del self._open[token]
        kept = [entry for entry in self._live if entry[2].lease.token != token]
        if len(kept) < len(self._live):
            self._live = kept
            heapq.heapify(self._live)

    # ------------------------------------------------------------ weights

    def swap(self, version: int) -> None:
        """New weights: the engine stands still for a moment, then makes tokens with them."""
        self._advance()
        self._still += 1
        self._plan += 1
        self._clock.schedule(self._plant.swap_s, lambda: self._finish_swap(version))

    def _finish_swap(self, version: int) -> None:
        self._advance()
        self._still -= 1
        first = self.version < 0
        self.version = max(self.version, version)
        self._seat()
        if first:
            self.look()
        elif self._asked:
            self._ask(self.version, self._count_wanted())
