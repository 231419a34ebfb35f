"""Exhaustive search over all interleavings of small weight-sync systems, breadth first.

Guarantees:
1. every state that can be reached is visited once, every move out of it is made and checked;
2. a violation comes with the trace from the start, one of the shortest;
3. liveness twice: from every state a state where everybody serves the target can be reached without failures and
   without a publish (`stuck` counts those where not); and from every n-th state healthy parties, each at its pace,
   really get there within `HEALED_S` seconds (`slowest`).
"""

from __future__ import annotations

import gc
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable
from unittest.mock import patch

import msgspec
from sync_world import EXPECTED, Case, Node, World, key

from weightsync.coordinator.rounds import Parts

HEALED_S = 20


class Found(msgspec.Struct):
    """What the search of one case saw."""

    case: str
    states: int = 0
    transitions: int = 0
    served: int = 0  # states in which everybody serves the target
    stuck: int = 0  # states from which that cannot be reached without failures
    slowest: int = 0  # seconds that healthy parties needed at most
    violation: str = ""
    trace: tuple[str, ...] = ()
    seconds: float = 0.0
    cut: bool = False

    def line(self) -> str:
        """One row of figures."""
        text = (
            f"{self.case}: {self.states} states, {self.transitions} transitions, {self.served} served, "
            f"{self.stuck} stuck, healed within {self.slowest} s"
        )
        return text + (f", VIOLATION {self.violation}" if self.violation else "") + (" (CUT)" if self.cut else "")


class Search:
    """The search of one case."""

    def __init__(self, case: Case, *, parts: Parts | None = None, limit: int = 1 << 40, every: int = 29) -> None:
        self.world = World(case, parts)
        self.limit, self.every = limit, every
        self.found = Found(str(case))
        self.number: dict[object, int] = {}
        self.parent: list[tuple[int, str]] = []
        self.edges = array("q")  # pairs (from, to) of good moves
        self.goals: list[int] = []

    def run(self) -> Found:
        """Search; stops at the first violation. Pauses are one second: the length of a pause adds states, no cases."""
        began = time.perf_counter()
        pauses = {"FIRST_PAUSE_S": 1.0, "LONGEST_PAUSE_S": 1.0}
        gc.disable()  # nothing here is in a cycle that grows, and the graph of states is large
        try:
            with (
                patch.multiple("weightsync.coordinator.transfers", **pauses),
                patch("weightsync.coordinator.queries.FORM_S", 1.0),
            ):
                self._run()
        finally:
            gc.enable()
        self.found.states = len(self.parent)
        if not self.found.violation and not self.found.cut:
            self._liveness()
        self.found.seconds = time.perf_counter() - began
        return self.found

    def _run(self) -> None:
        place = 0
        try:
            node = self.world.start()
            queue: deque[Node] = deque([node])
            self.number[key(node)] = 0
            self.parent.append((-1, "start"))
            while queue and len(self.parent) < self.limit:
                self._expand(place, queue.popleft(), queue)
                place += 1
            self.found.cut = bool(queue)
        except EXPECTED as error:
            self.found.violation = f"{type(error).__name__}: {error}"
            self.found.trace = self.trace(place)

    def _expand(self, place: int, node: Node, queue: deque[Node]) -> None:
        self.world.check_state(node)
        if self.world.complete(node):
            self.found.served += 1
            self.goals.append(place)
        for move in self.world.moves(node):
            self.found.transitions += 1
            target = self.number.setdefault(key(move.node), len(self.parent))
            if target == len(self.parent):
                self.parent.append((place, move.label))
                queue.append(move.node)
            if move.good and target != place:
                self.edges.extend((place, target))
        if node.learner.staged and place % self.every == 0:
            self._heal(node)

    def _heal(self, node: Node) -> None:
        seconds, _ = self.world.heal(node, limit=HEALED_S)
        if seconds < 0:
            raise AssertionError(f"not healed within {HEALED_S} s")
        self.found.slowest = max(self.found.slowest, seconds)

    def _liveness(self) -> None:
        back: dict[int, list[int]] = {}
        for at in range(0, len(self.edges), 2):
            back.setdefault(self.edges[at + 1], []).append(self.edges[at])
        live, todo = set(self.goals), list(self.goals)
        while todo:
            for before in back.get(todo.pop(), ()):
                if before not in live:
                    live.add(before)
                    todo.append(before)
        published = [place for place in range(len(self.parent)) if place not in live and self._published(place)]
        self.found.stuck = len(published)
        if published:
            self.found.trace = self.trace(published[0])

    def _published(self, place: int) -> bool:
        return any(label.startswith("publish") for label in self.trace(place))

    def trace(self, place: int) -> tuple[str, ...]:
        """The moves from the start to a state."""
        labels = []
        while place >= 0:
            place, label = self.parent[place]
            labels.append(label)
        return tuple(reversed(labels))


def search(case: Case, *, parts: Parts | None = None, limit: int = 1 << 40, every: int = 29) -> Found:
    """Search one case."""
    return Search(case, parts=parts, limit=limit, every=every).run()


def main(cases: Iterable[Case]) -> int:
    """Print a line per case; 1 where one of them is not proved."""
    total, failed = Found("all"), 0
    for case in cases:
        found = search(case)
        print(f"{found.line()} ({found.seconds:.1f} s)", flush=True)
        for label in found.trace:
            print("   ", label)
        failed += bool(found.violation or found.stuck or found.cut)
        total.states += found.states
        total.transitions += found.transitions
        total.seconds += found.seconds
    print(f"{total.states} states, {total.transitions} transitions in {total.seconds:.1f} s")
    return int(failed > 0)


if __name__ == "__main__":
    from sync_cases import LONG, SHORT

    sys.exit(main(LONG if "--long" in sys.argv else SHORT))
