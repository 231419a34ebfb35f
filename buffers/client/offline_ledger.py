"""A ledger that goes on without the buffer: what the learner's weights hold beyond the last ledger it was given.

Guarantees:
1. every group of the later steps is in `trained`, so that nothing in the gradient is ever trained again;
2. `steps` names their steps, so that the history hears of commits that never arrived;
3. a group stands in `trained` or among the dead, never in both;
4. pure: text in, text out.
What the buffer dropped since the base ledger is not in it: a buffer that still knows says so itself, one that has
forgotten generates those prompts again.

>>> text = grown_ledger("", epoch=3, step=2, trained={1: [0, 1], 2: [3]}, dead={2: "loss: inf"})
>>> found = ledger_of(text); found.step, found.cursor, found.trained, found.dead, found.steps
(2, 4, ((0, 2), (3, 4)), {'poison:loss': ((2, 3),)}, {1: (0, 1), 2: (3,)})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from buffers.groups.records import ledger_of
from buffers.values.id_set import IdSet, ranges_of


def grown_ledger(
    base: str, *, epoch: int, step: int, trained: Mapping[int, Sequence[int]], dead: Mapping[int, str]
) -> str:
    """The ledger `base` after more steps: `trained` is step -> groups, `dead` is group -> reason of its quarantine."""
    ledger = ledger_of(base)
    groups = [number for numbers in trained.values() for number in numbers]
    ids = IdSet([*ledger.trained, *ranges_of(groups)])
    by_reason = {reason: IdSet(ranges) for reason, ranges in ledger.dead.items()}
    for number, reason in dead.items():
        if number not in ids:
            by_reason.setdefault(f"poison:{reason.split(':', maxsplit=1)[0]}", IdSet()).add(number)
    cursor = max([ledger.cursor, *(number + 1 for number in (*groups, *dead))])
    grown = msgspec.structs.replace(
        ledger,
        step=step,
        epoch=max(epoch, ledger.epoch),
        cursor=cursor,
        trained=ids.ranges(),
        dead={reason: found.ranges() for reason, found in by_reason.items()},
        uses={
            number: (*before, *(at for at, found in sorted(trained.items()) if number in found))
            for number, before in ledger.uses.items()
        },
        steps={**ledger.steps, **{number: tuple(found) for number, found in sorted(trained.items())}},
    )
    return grown.to_json()


def epoch_of(text: str) -> int:
    """The learner epoch that wrote a ledger; 0 for the empty one."""
    return ledger_of(text).epoch
