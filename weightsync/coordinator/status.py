"""Where rounds and members stand, as builtin values: `asyncrl status` and the lines of metrics/weightsync.jsonl. Pure.

Guarantees:
1. every member has a reason in words: why it does not serve, and why its weights come the way they come;
2. an error that a member reports outside of its part in a round (it cannot pass versions on, its weights changed) is
   shown as `said` until its next success, and is a line of its own in the log (`complaint_line`).
"""

from __future__ import annotations

from typing import Any

from asyncrl.wire import Instruction
from weightsync.coordinator.records import Member, Round, State
from weightsync.coordinator.rounds import Rounds
from weightsync.coordinator.routing import DELTA, Scene, choose
from weightsync.encoding.full import NAME as FULL


def why(rounds: Rounds, member: Member, *, now: float) -> str:
    """Why the member is not SERVING; empty where it is."""
    state = rounds.state_of(member)
    if state is State.SERVING:
        return ""
    if state is State.DEAD:
        return f"silent for more than {rounds.config.member_timeout_s:g} s; {member.error}".rstrip("; ")
    if reason := rounds.mismatch(member) or member.error:
        return reason
    if member.part is not None:
        return f"{member.part.deadline - now:.0f} s left"
    return choose(member, rounds.scene(now)).why


def wait(rounds: Rounds, name: str, *, now: float) -> Instruction:
    """The answer to a poll that was held for its whole time."""
    member = rounds.members.get(name)
    return Instruction("wait", version=rounds.committed, detail=why(rounds, member, now=now) if member else "")


def status(rounds: Rounds, *, now: float) -> dict[str, Any]:
    """Everything about a service."""
    target, current = rounds.target, rounds.current
    return {
        "epoch": rounds.epoch,
        "version": target.manifest.version if target is not None else -1,
        "digest": target.manifest.digest if target is not None else "",
        "bytes": sum(target.manifest.bucket_bytes) if target is not None else 0,
        "publisher": target.publisher if target is not None else "",
        "committed": rounds.committed,
        "round": current.number if current is not None else 0,
        "round_state": current.state if current is not None else "",
        "members": {name: _member(rounds, member, now) for name, member in rounds.members.items()},
    }


def _member(rounds: Rounds, member: Member, now: float) -> dict[str, Any]:
    return {
        "state": str(rounds.state_of(member)),
        "version": member.version,
        "digest": member.digest,
        "pid": member.pid,
        "host": member.host,
        "silent_s": round(now - member.last_seen, 3),
        "why": why(rounds, member, now=now),
        "said": member.said,
        "relay": member.relay,
        **_way(rounds, member, rounds.scene(now)),
    }


def _way(rounds: Rounds, member: Member, scene: Scene) -> dict[str, str]:
    """How its weights come: of the transfer under way, of what it serves, or of what would be chosen now."""
    part = member.part
    if part is None and rounds.state_of(member) is State.SERVING:
        if member.last is None:
            return {"transport": "", "encoding": "", "source": "", "transport_why": "it held the version before"}
        part = member.last
    if part is not None:
        way, encoding = part.way, part.encoding
    else:
        way = choose(member, scene)
        encoding = DELTA if way.hops else scene.target.manifest.encoding if scene.target is not None else ""
        encoding = FULL if way.base else encoding
    return {
        "transport": way.transport,
        "encoding": encoding if way.transport else "",
        "source": way.source,
        "transport_why": way.why,
    }


def complaint_line(rounds: Rounds, name: str, error: str) -> tuple[dict[str, float], dict[str, Any]]:
    """What a member said outside of a round, for the log."""
    member = rounds.members[name]
    return {"version": member.version}, {"state": "said", "member": name, "said": error, "digest": member.digest}


def round_line(round_: Round, *, ended: float) -> tuple[dict[str, float], dict[str, Any]]:
    """The numbers and the words of a decided round, for the log. Bytes are of transfers that arrived whole."""
    manifest, parts = round_.target.manifest, round_.parts
    committed = sum(part.committed for part in parts.values())
    numbers: dict[str, float] = {
        "round": round_.number, "version": manifest.version, "round_s": round(ended - round_.started, 6),
        "round_bytes": sum(manifest.bucket_bytes),
        "carried_bytes": sum(part.nbytes for part in parts.values() if part.whole or part.committed),
        "members_committed": committed, "members_left_out": len(parts) - committed,
    }  # fmt: skip
    words = {
        "digest": manifest.digest, "state": round_.state, "detail": round_.detail,
        "transport": ",".join(sorted({part.way.transport for part in parts.values()})),
        "encoding": ",".join(sorted({part.encoding for part in parts.values()})),
        "members": {name: part.result for name, part in parts.items()},
        "ways": {
            name: {"transport": part.way.transport, "encoding": part.encoding, "source": part.way.source,
                   "bytes": part.nbytes if part.whole or part.committed else 0, "why": part.way.why}
            for name, part in parts.items()
        },
    }  # fmt: skip
    return numbers, words
