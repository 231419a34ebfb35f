"""Which groups fill a batch: fresh ones by their deadline, and trained ones that may be trained again.

Guarantees:
1. the first `needed` fresh groups of the order by deadline are in the batch: they hold r(u) for every u;
2. used groups fill only what is left: with `fresh_first` what the fresh ones do not fill, else by the same order or
   the same draw as those;
3. the draw is without replacement, with probabilities in proportion to weights; the randomness is handed in.
Entries are `(deadline, sequence, id)`, earliest first.
"""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Callable, Iterable, Sequence

from buffers.groups.records import Group, Settings

Entry = tuple[int, int, int]


def fill(
    fresh: Sequence[Entry],
    used: Sequence[Entry],
    *,
    size: int,
    needed: int,
    settings: Settings,
    draw: Callable[[Sequence[Entry], int], list[Entry]],
) -> list[int]:
    """The ids of a batch of `size`, from at least as many entries. `draw` takes so many of some entries by priority.

    >>> order = Settings(group_size=1, batch_groups=1, max_staleness=1, depth=1, total_groups=9)
    >>> fill([(2, 8, 8)], [(1, 3, 3), (2, 4, 4)], size=2, needed=1, settings=order, draw=lambda some, n: [])
    [8, 3]
    """
    certain = size if settings.fresh_first else needed
    chosen = list(fresh[:certain])
    others = list(used) if settings.fresh_first else sorted([*fresh[certain:], *used])
    missing = size - len(chosen)
    if missing > 0:
        chosen += draw(others, missing) if settings.replay_order == "priority" else others[:missing]
    return [number for _, _, number in chosen]


def spread(group: Group) -> float:
    """Standard deviation of the group's rewards: what its advantages are made of."""
    return statistics.pstdev([sample.reward or 0.0 for sample in group.samples.values()]) if group.samples else 0.0


def weighted(entries: Iterable[Entry], weights: Callable[[int], float], count: int, seed: str) -> list[Entry]:
    """`count` of the entries, drawn without replacement by weight; the same seed draws the same.

    >>> weighted([(1, 1, 1), (1, 2, 2)], {1: 0.0, 2: 1.0}.__getitem__, 1, "seed")
    [(1, 2, 2)]
    """
    generator = random.Random(hashlib.blake2b(seed.encode(), digest_size=8).digest())
    keyed = []
    for entry in entries:  # Efraimidis and Spirakis: the largest of u ** (1 / weight) are such a draw
        weight, u = max(weights(entry[2]), 1e-9), generator.random()
        keyed.append((u ** (1.0 / weight) if u > 0 else 0.0, entry))
    keyed.sort(key=lambda pair: (-pair[0], pair[1]))
    return [entry for _, entry in keyed[:count]]
