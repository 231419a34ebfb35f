"""The searched weight-sync systems: SMALLEST by `make test`, SHORT and LONG by `make chaos`."""

from __future__ import annotations

from sync_world import Case

SMALLEST = (
    Case(members=1),  # two versions, any one failure at any moment
    Case(members=1, versions=1, adapter=True),
    Case(members=1, versions=1, transport="auto", spread=True),
    Case(members=1, kinds=("hold",)),
    Case(members=1, faults=0, transport="direct", in_place=True, says_dirty=True),
)
SHORT = (
    *SMALLEST,
    # one member, two versions, any one failure at any moment
    Case(members=1, delta=True),
    Case(members=1, in_place=True, says_dirty=True),
    Case(members=1, transport="collective"),
    Case(members=1, versions=1, transport="direct", in_place=True, says_dirty=True),
    # adapters: who lacks the base gets it first
    Case(members=1, versions=1, transport="collective", adapter=True),
    # two members, one source at a time: relays
    Case(versions=1, kinds=("transfer",)),
)
LONG = (
    Case(members=1, faults=2),
    Case(members=1, faults=2, kinds=("hold", "double", "learner")),
    Case(members=1, in_place=True),
    Case(members=1, adapter=True),
    Case(members=1, versions=1, faults=2, adapter=True),
    Case(members=2, versions=1, adapter=True, kinds=("transfer",)),
    Case(members=2, versions=1, transport="auto", spread=True, adapter=True, faults=0),
    Case(members=1, faults=2, in_place=True, says_dirty=True),
    Case(members=1, faults=2, transport="collective"),
    Case(versions=1, kinds=("crash", "learner")),
    Case(versions=1, kinds=("digest", "spoil", "service")),
    Case(versions=1, kinds=("loss", "double")),
    Case(versions=1, fanout=2, kinds=("transfer",)),
    Case(versions=1, fanout=0, kinds=("learner",)),
    Case(versions=1, transport="collective", kinds=("crash", "learner", "transfer")),
    Case(versions=1, faults=0, transport="auto", spread=True),
    Case(versions=1, faults=0, transport="direct", in_place=True, says_dirty=True),
    Case(versions=1, transport="auto", spread=True, kinds=("crash", "learner", "transfer")),
    Case(versions=2, faults=0),
    Case(versions=2, faults=0, delta=True),
)
