"""Status of rounds and members as builtin values, for `asyncrl status` and metrics/weightsync.jsonl. Pure.

Guarantees:
1. every member has a reason in words: why it does not serve, and why its weights take this route;
2. an error that a member reports outside of its part in a round (it cannot relay versions, its weights changed) is
   displayed as `said` until its next success, and gets its own line in the log (`complaint_line`).
"""

from __future__ import annotations

from typing import Any

from asyncrl.wire import Instruction
from weightsync.coordinator.records import Member, Round, State
from weightsync.coordinator.rounds import Rounds
from weightsync.coordinator.routing import Scene
from weightsync.encoding import DELTA, FULL


def explain(rounds: Rounds, member: Member, *, now: float) -> str:
    """Why the member is not SERVING; empty if it is."""
    state = rounds.queries.state_for(member)
    if state is State.SERVING:
        return ""
    if state is State.DEAD:
        return f"silent for more than {rounds.state.config.member_timeout_s:g} s; {member.error}".rstrip("; ")
    if reason := rounds.queries.mismatch(member) or member.error:
        return reason
    if member.part is not None:
        return f"{member.part.deadline - now:.0f} s left"
    return rounds.router.choose(member, rounds.queries.scene(now)).why


def wait(rounds: Rounds, name: str, *, now: float) -> Instruction:
    """The answer to a poll at the end of its wait."""
    member = rounds.state.members.get(name)
    detail = explain(rounds, member, now=now) if member else ""
    return Instruction("wait", version=rounds.state.committed, detail=detail)


def status(rounds: Rounds, *, now: float) -> dict[str, Any]:
    """Everything about a service."""
    state = rounds.state
    target, current = state.target, state.current
    return {
        "epoch": state.epoch,
        "version": target.manifest.version if target is not None else -1,
        "digest": target.manifest.digest if target is not None else "",
        "bytes": sum(target.manifest.bucket_bytes) if target is not None else 0,
        "publisher": target.publisher if target is not None else "",
        "committed": state.committed,
        "round": current.number if current is not None else 0,
        "round_state": current.state if current is not None else "",
        "members": {name: _member(rounds, member, now) for name, member in state.members.items()},
    }


def _member(rounds: Rounds, member: Member, now: float) -> dict[str, Any]:
    return {
        "state": str(rounds.queries.state_for(member)),
        "version": member.version,
        "digest": member.digest,
        "pid": member.pid,
        "host": member.host,
        "silent_s": round(now - member.last_seen, 3),
        "why": explain(rounds, member, now=now),
        "said": member.complaint,
        "relay": member.relay,
        **_route(rounds, member, rounds.queries.scene(now)),
    }


def _route(rounds: Rounds, member: Member, scene: Scene) -> dict[str, str]:
    """How its weights come: by the transfer under way, the last one, or the one that would be chosen now."""
    part = member.part
    if part is None and rounds.queries.state_for(member) is State.SERVING:
        if member.last is None:
            return {"transport": "", "encoding": "", "source": "", "transport_why": "it held the version before"}
        part = member.last
    if part is not None:
        route, encoding = part.route, part.encoding
    else:
        route = rounds.router.choose(member, scene)
        encoding = DELTA if route.hops else scene.target.manifest.encoding if scene.target is not None else ""
        encoding = FULL if route.base else encoding
    return {
        "transport": route.transport,
        "encoding": encoding if route.transport else "",
        "source": route.source,
        "transport_why": route.why,
    }


def complaint_line(rounds: Rounds, name: str, error: str) -> tuple[dict[str, float], dict[str, Any]]:
    """A member's error outside of a round, for the log."""
    member = rounds.state.members[name]
    return {"version": member.version}, {"state": "said", "member": name, "said": error, "digest": member.digest}


def round_line(round_: Round, *, ended: float) -> tuple[dict[str, float], dict[str, Any]]:
    """The numbers and the text of a decided round, for the log. Bytes are of transfers that arrived whole."""
    manifest, parts = round_.target.manifest, round_.parts
    committed = sum(part.committed for part in parts.values())
    arrived = {name: part.nbytes if part.whole or part.committed else 0 for name, part in parts.items()}
    numbers: dict[str, float] = {
        "round": round_.number,
        "version": manifest.version,
        "round_s": round(ended - round_.started, 6),
        "round_bytes": sum(manifest.bucket_bytes),
        "carried_bytes": sum(arrived.values()),
        "members_committed": committed,
        "members_left_out": len(parts) - committed,
    }
    text = {
        "digest": manifest.digest,
        "state": round_.state,
        "detail": round_.detail,
        "transport": ",".join(sorted({part.route.transport for part in parts.values()})),
        "encoding": ",".join(sorted({part.encoding for part in parts.values()})),
        "members": {name: part.result for name, part in parts.items()},
        "ways": {
            name: {
                "transport": part.route.transport,
                "encoding": part.encoding,
                "source": part.route.source,
                "bytes": arrived[name],
                "why": part.route.why,
            }
            for name, part in parts.items()
        },
    }
    return numbers, text
