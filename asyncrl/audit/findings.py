"""Result of an audit: counts, violations, and their text.

A violation is one line, `kind: text`; `asyncrl.audit.prove` lists the kinds.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from asyncrl.metrics.length_bias import Lengths

SHOWN = 20  # violations of one kind that are printed


class Tuned(msgspec.Struct):
    """A change of settings, and the lags of the groups trained between it and the next change."""

    n: int
    t: float
    author: str
    changed: dict[str, tuple[Any, Any]]  # key -> (old, new)
    step: int  # last step committed before it
    undo: bool = False
    steps: int = 0  # committed while it was in force
    lag_counts: dict[int, int] = {}  # lag -> groups


class Audit(msgspec.Struct):
    """The verdict and its counts."""

    ok: bool = True
    ended: bool = False
    done: bool = False
    issued: int = 0
    trained: int = 0
    trainings: int = 0  # more than `trained` if groups are reused
    dropped: dict[str, int] = {}
    dead: dict[str, int] = {}
    superseded: int = 0
    rolled_back: int = 0  # groups whose training a restart from an older checkpoint took back permanently
    in_flight: int = 0
    lost: int = 0
    doubled: int = 0
    steps: int = 0
    first_step: int = 0  # of this log; a fork begins later
    fork_of: str = ""
    batch_groups: int = 0
    lag_max: int = 0
    lag_mean: float = 0.0
    bound_max: int = 0
    over_bound: int = 0
    lag_counts: dict[int, int] = {}  # lag -> trained groups
    lag_before_tuning: dict[int, int] = {}  # of the steps before the first change
    tuned: list[Tuned] = []
    spans: int = 0
    spans_matched: int = 0
    learner_starts: int = 0
    service_starts: int = 0
    replayed_steps: int = 0
    lost_leases: int = 0
    cancelled_leases: int = 0
    fenced: int = 0  # messages of replaced learners or services in the log
    evaluations: list[int] = []  # steps of finished evaluations
    evaluation_prompts: dict[str, int] = {}  # of all of them: prompts, scored, failed, missing
    evaluation_samples: int = 0  # that were scored
    torn: bool = False
    drains: int = 0  # seals of the chain
    signed: int = 0  # of them with a signature
    anchors: int = 0  # heads of the chain that the learner kept
    lengths: Lengths = msgspec.field(default_factory=Lengths)
    violations: list[str] = []
    notes: list[str] = []

    def violation(self, kind: str, text: str) -> None:
        """Record a violation; many of one kind are truncated."""
        self.ok = False
        if kind == "doubled":
            self.doubled += 1
        shown = sum(line.startswith(f"{kind}:") for line in self.violations)
        if shown < SHOWN:
            self.violations.append(f"{kind}: {text}")
        elif shown == SHOWN:
            self.violations.append(f"{kind}: and more")


def render(found: Audit) -> str:
    """The text that `asyncrl audit` prints."""
    state = "done" if found.done else "stopped" if found.ended else "not ended"
    parts = [
        f"trained {found.trained}",
        f"dropped {_reason_counts(found.dropped)}",
        f"dead {_reason_counts(found.dead)}",
    ]
    parts += [f"superseded {found.superseded}"] if found.superseded else []
    parts += [f"in flight {found.in_flight}", f"lost {found.lost}"]
    planned = found.steps * found.batch_groups
    again = f" ({found.trainings} times)" if found.trainings > found.trained else ""
    lines = [
        f"audit: {'OK' if found.ok else 'FAILED'} (the run is {state})",
        *([f"  fork of {found.fork_of}: its steps begin at {found.first_step}"] if found.fork_of else []),
        f"  issued {found.issued} = {' + '.join(parts)}",
        f"  doubled {found.doubled}; rolled back {found.rolled_back}",
        f"  {found.steps} steps x {found.batch_groups} groups = {planned}, trained {found.trained}{again}",
        f"  lag mean {found.lag_mean:.2f}, max {found.lag_max}, bound {found.bound_max}, over it {found.over_bound}; "
        f"groups by lag: {counts_text(found.lag_counts)}",
        *_tuning_lines(found),
        f"  weights: {found.spans_matched} of {found.spans} spans carry the digest of the committed version",
        f"  starts: learner {found.learner_starts}, buffer {found.service_starts}; steps replayed "
        f"{found.replayed_steps}; leases lost {found.lost_leases}, cancelled {found.cancelled_leases}; "
        f"fenced {found.fenced}",
        *_evaluation_lines(found),
        f"  chain: {found.drains} drains, {found.signed} signed; {found.anchors} heads kept by the learner",
        *_length_lines(found.lengths),
    ]
    lines += [f"  note: {note}" for note in found.notes[:SHOWN]]
    lines += [f"  violation: {violation}" for violation in found.violations]
    return "\n".join(lines)


def _tuning_lines(found: Audit) -> list[str]:
    if not found.tuned:
        return []
    lines = [f"  before tuning: groups by lag: {counts_text(found.lag_before_tuning)}"]
    for change in found.tuned:
        what = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in change.changed.items())
        lines.append(
            f"  tune {change.n}{' (undo)' if change.undo else ''} after step {change.step}, {moment_text(change.t)} by "
            f"{change.author}: {what}; {change.steps} steps since, groups by lag: "
            f"{counts_text(change.lag_counts)}"
        )
    return lines


def _evaluation_lines(found: Audit) -> list[str]:
    if not found.evaluations:
        return []
    count = found.evaluation_prompts
    trained = any(violation.startswith("evaluation:") for violation in found.violations)
    return [
        f"  evaluations: {len(found.evaluations)} of steps {', '.join(map(str, found.evaluations))}; prompts "
        f"{count['prompts']} = scored {count['scored']} + failed {count['failed']} + missing {count['missing']}; "
        + ("see the violations" if trained else f"none of their {found.evaluation_samples} scored samples was trained")
    ]


def _length_lines(found: Lengths) -> list[str]:
    if not found.made_mean:
        return []
    means = [("trained", found.trained_mean), ("dropped", found.dropped_mean), ("dead", found.dead_mean)]
    shown = ", ".join(f"{name} {mean:.1f}" for name, mean in means if mean)
    verdict = f"ALARM: {found.alarm}" if found.alarm else "no bias"
    lines = [
        f"  lengths: mean made {found.made_mean:.1f}, {shown} tokens; KS {found.ks:.3f} (limit "
        f"{found.ks_limit:.3f}); {verdict}"
    ]
    return lines + ([f"  early steps: {found.early}"] if found.early else [])


def moment_text(t: float) -> str:
    """Local date and time; a number that is no time stays one.

    >>> moment_text(1e300)
    '1e+300'
    """
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))
    except (OverflowError, ValueError, OSError):  # of a damaged line
        return str(t)


def counts_text(counts: dict[int, int]) -> str:
    """`0: 4, 1: 12`."""
    return ", ".join(f"{lag}: {count}" for lag, count in sorted(counts.items())) or "none"


def _reason_counts(counts: dict[str, int]) -> str:
    if not counts:
        return "0"
    return f"{sum(counts.values())} ({', '.join(f'{reason} {count}' for reason, count in sorted(counts.items()))})"
