"""The configurations that are searched: SMALLEST by `make test`, SHORT and LONG by `make chaos`."""

from __future__ import annotations

from model_world import Case

SMALLEST = (
    Case(batch=1, size=1, eta=0, depth=0, producers=2),
    Case(batch=2, size=2, eta=0, depth=0, producers=2, late=True),
    Case(batch=1, size=1, eta=1, depth=1, producers=3, returns=True),
    Case(batch=1, size=2, eta=2, depth=1, producers=2),
    Case(batch=2, size=1, eta=1, depth=1, producers=2, losses=False),
    # tokens that are older than the lease: (F) may break, the bound may not
    Case(batch=1, size=2, eta=1, depth=1, producers=2, older=1, late=True),
    # tuned at any moment
    Case(batch=1, size=1, eta=1, depth=1, producers=1, tunes=((0, 0), (1, 1), (2, 1))),
    # samples under way are checkpointed, and continued by others
    Case(batch=1, size=1, eta=1, depth=1, producers=2, checkpoints=True),
    Case(batch=1, size=2, eta=1, depth=1, producers=1, checkpoints=True),
    Case(batch=1, size=1, eta=1, depth=1, producers=1, checkpoints=True, tunes=((0, 0), (1, 1), (2, 1))),
    # rewards by themselves, filters
    Case(batch=1, size=2, eta=1, depth=1, producers=1, scored=True, filtered=True),
    # two judges about every sample, either may fail
    Case(batch=1, size=1, eta=1, depth=1, producers=1, scored=True, judges=2),
    # learners that are killed and come back
    Case(batch=1, size=1, eta=1, depth=1, producers=1, restarts=True, unsaved=2),
    # trained twice
    Case(batch=1, size=1, eta=1, depth=1, producers=2, reuse=2),
    # producers have shares; one of them never comes
    Case(batch=2, size=1, eta=0, depth=0, producers=3, shared=True),
    Case(batch=1, size=1, eta=1, depth=1, producers=3, shared=True, deaf=1),
    # runs that end, the last batch smaller
    Case(batch=2, size=1, eta=1, depth=1, producers=1, total=3, late=True, restarts=True, unsaved=1),
    Case(batch=1, size=1, eta=1, depth=1, producers=2, total=3, late=True, reissue=0, counted=2),
)
SHORT = (
    *SMALLEST,
    Case(batch=1, size=1, eta=2, depth=2, producers=2),
    Case(batch=1, size=1, eta=3, depth=2, producers=1, late=True),
    Case(batch=1, size=1, eta=3, depth=3, producers=2, losses=False, inflight=False),
    Case(batch=1, size=2, eta=2, depth=2, producers=1, late=True),
    # tokens that are older than the lease: (F) may break, the bound may not
    Case(batch=1, size=2, eta=1, depth=1, producers=2, older=1, late=True, on_late="drop"),
    # tuned at any moment
    Case(batch=1, size=1, eta=1, depth=1, producers=2, losses=False, tunes=((1, 1), (2, 2))),
    # samples under way are checkpointed, and continued by others
    Case(batch=1, size=1, eta=2, depth=2, producers=1, checkpoints=True),
)
LONG = (
    Case(batch=2, size=2, eta=1, depth=1, producers=1),
    Case(batch=1, size=1, eta=3, depth=3, producers=1, late=True),
    Case(batch=1, size=1, eta=1, depth=1, producers=2, restarts=True, unsaved=1),
    Case(batch=2, size=1, eta=1, depth=1, producers=2, late=True),
    Case(batch=1, size=2, eta=2, depth=2, producers=2, losses=False),
    Case(batch=1, size=1, eta=2, depth=2, producers=3, inflight=False),
    Case(batch=2, size=1, eta=1, depth=1, producers=1, total=5, restarts=True, unsaved=1),
    Case(batch=1, size=1, eta=2, depth=1, producers=1, reuse=2, unsaved=1),
    Case(batch=2, size=1, eta=1, depth=1, producers=1, reuse=2),
    Case(batch=1, size=1, eta=2, depth=2, producers=1, restarts=True, unsaved=1),
    Case(batch=1, size=1, eta=1, depth=1, producers=2, tunes=((0, 0), (1, 1), (2, 2))),
    Case(batch=2, size=1, eta=2, depth=2, producers=1, losses=False, inflight=False),
    Case(batch=1, size=2, eta=2, depth=2, producers=1, older=1, late=True, on_late="drop"),
    Case(batch=2, size=1, eta=1, depth=1, producers=1, checkpoints=True),
    Case(batch=1, size=1, eta=1, depth=1, producers=1, checkpoints=True, restarts=True, unsaved=1),
    Case(batch=1, size=2, eta=1, depth=1, producers=1, scored=True, judges=2),
    Case(batch=1, size=1, eta=1, depth=1, producers=2, scored=True, judges=2),
)
