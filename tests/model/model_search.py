"""Exhaustive search over all interleavings, breadth first: the first violation found is one of the shortest.

Guarantees:
1. every state that can be reached is visited once, every transition out of it is made and checked;
2. a violation comes with the trace from the start;
3. liveness: from every state a step can be committed (with `total`: the run can be completed) by what healthy parties
   do, without losses, tuning or patience that ends; found by going back from these transitions.
"""

from __future__ import annotations

import gc
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable

import msgspec
from model_checks import Violation
from model_world import Case, Node, World

from asyncrl.errors import AsyncRLError
from buffers.groups.machine import DEFAULT_PARTS, Parts


class Found(msgspec.Struct):
    """What the search of one case saw."""

    case: str
    states: int = 0
    transitions: int = 0
    max_lag: int = -1
    deadlocks: int = 0  # states that cannot be left, and are not the end
    stuck: int = 0  # states from which no completion can be reached by healthy parties
    violation: str = ""
    trace: tuple[str, ...] = ()
    seconds: float = 0.0
    cut: bool = False

    def line(self) -> str:
        """One row of figures."""
        text = (
            f"{self.case}: {self.states} states, {self.transitions} transitions, max lag {self.max_lag}, "
            f"{self.deadlocks} deadlocks, {self.stuck} stuck"
        )
        return text + (f", VIOLATION {self.violation}" if self.violation else "") + (" (CUT)" if self.cut else "")


class Search:
    """The search of one case."""

    def __init__(self, case: Case, *, parts: Parts = DEFAULT_PARTS, limit: int = 1 << 40, only: bool = False) -> None:
        self.world = World(case, parts, only=only)
        self.limit = limit
        self.found = Found(str(case))
        self.number: dict[bytes, int] = {}
        self.world.seen = self.number
        self.parent: list[tuple[int, str]] = []
        self.edges = array("q")  # pairs (from, to) of good transitions
        self.goals: set[int] = set()

    def run(self) -> Found:
        """Search; stops at the first violation."""
        began = time.perf_counter()
        place = 0
        gc.disable()  # nothing here is in a cycle, and the graph of states is large
        try:
            node, key = self.world.start()
            queue: deque[Node] = deque([node])
            self.number[key] = 0
            self.parent.append((-1, "start"))
            while queue and len(self.parent) < self.limit:
                self._expand(place, queue.popleft(), queue)
                place += 1
            self.found.cut = bool(queue)
        except (Violation, AsyncRLError, KeyError, IndexError, ValueError) as error:
            self.found.violation = f"{type(error).__name__}: {error}"
            self.found.trace = self.trace(place)
        finally:
            gc.enable()
        self.found.states = len(self.parent)
        if not self.found.violation and not self.found.cut:
            self._liveness()
        self.found.seconds = time.perf_counter() - began
        return self.found

    def _expand(self, place: int, node: Node, queue: deque[Node]) -> None:
        out = 0
        for move in self.world.moves(node):
            self.found.transitions += 1
            self.found.max_lag = max(self.found.max_lag, move.lag)
            target = self.number.setdefault(move.key, len(self.parent))
            if target == len(self.parent):
                self.parent.append((place, move.label))
                queue.append(move.node)
            out += target != place
            if move.goal:
                self.goals.add(place)
            elif move.good and target != place:
                self.edges.append(place)
                self.edges.append(target)
        if not out and not self._over(node):
            self.found.deadlocks += 1

    def _over(self, node: Node) -> bool:
        book = self.world.load(node)
        over = self.world.complete(book)
        if over:
            self.goals.add(self.number[self.world.key(node, book)])
        return over

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
        stuck = [place for place in range(len(self.parent)) if place not in live]
        self.found.stuck = len(stuck)
        if stuck:
            self.found.trace = self.trace(stuck[0])

    def trace(self, place: int) -> tuple[str, ...]:
        """The transitions from the start to a state."""
        labels = []
        while place >= 0:
            place, label = self.parent[place]
            labels.append(label)
        return tuple(reversed(labels))


def search(case: Case, *, parts: Parts = DEFAULT_PARTS, limit: int = 1 << 40, only: bool = False) -> Found:
    """Search one case; `only`: for what the theorem says, not for the conditions that it is proved from."""
    return Search(case, parts=parts, limit=limit, only=only).run()


def main(cases: Iterable[Case]) -> int:
    """Print a line per case; 1 where one of them is not proved."""
    total, failed = Found("all"), 0
    for case in cases:
        found = search(case)
        print(f"{found.line()} ({found.seconds:.1f} s)", flush=True)
        for label in found.trace:
            print("   ", label)
        failed += bool(found.violation or found.deadlocks or found.stuck or found.cut)
        total.states += found.states
        total.transitions += found.transitions
        total.seconds += found.seconds
    print(f"{total.states} states, {total.transitions} transitions in {total.seconds:.1f} s")
    return int(failed > 0)


if __name__ == "__main__":
    from model_cases import LONG, SHORT

    sys.exit(main(LONG if "--long" in sys.argv else SHORT))
