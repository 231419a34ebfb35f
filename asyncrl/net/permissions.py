"""Messages that only the owner of a run may send.

Guarantee: the holder of a join key cannot take over the learner, train or drop groups, change settings, end the run, or
announce weights.
"""

from __future__ import annotations

from asyncrl import wire

#: Messages of the learner, and of commands that change or end a run.
OWNER_ALONE: frozenset[type] = frozenset(
    {
        wire.Stop,
        wire.Tune,
        wire.Register,
        wire.Claim,
        wire.Commit,
        wire.Quarantine,
        wire.LedgerRequest,
        wire.Checkpointed,
        wire.Goodbye,
        wire.EvaluationsRequest,
        wire.Publish,
        wire.RoundRequest,
    }
)


def needs_owner(message: wire.Message) -> bool:
    """Whether only the owner may send this message. A `Hello` of the learner needs the owner's key too.

    >>> [needs_owner(wire.Hello(role, "x", 1, "h", "", "")) for role in ("learner", "producer")]
    [True, False]
    """
    if isinstance(message, (wire.Hello, wire.Heartbeat)):
        return message.role == "learner"
    return type(message) in OWNER_ALONE
