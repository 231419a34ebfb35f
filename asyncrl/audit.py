"""Proves from `history.jsonl` alone that nothing was lost, trained twice, too old or made by unknown weights.

Called by `asyncrl audit`, the demo, the summary and the report. Guarantees:
1. every issued group is counted in exactly one of: trained, dropped and dead (by reason), superseded, in flight, lost;
2. it keeps no state of the service it audits and shares no code with it: only the log is believed;
3. a last line cut by a crash is left out and noted; a damaged line elsewhere is a violation.
It does not look at weights or samples themselves.

What it checks, and the name of each violation:
  lost       the run is done and an issued group has no ending
  doubled    a group in two different steps of the surviving history, or with two endings
  unknown    a group is trained, dropped or dead that was never issued or claimed for that step
  lag        a trained group is older than its bound (on_late = train allows it: then it is a note)
  digest     a span's digest is not that of the committed version, or is missing
  steps      a step was left out, or did not train as many groups as a batch has (less its quarantined groups)
  log        a line in the middle cannot be read

A restart from the checkpoint of step s takes back the commits after s of older learner epochs: their groups are claimed
again until the same step is committed once more. Example: commits of steps 1 2 3, register(step=1), commits 2 3 4 with
the same groups in 2 and 3: steps 1..4, doubled 0. A store that lost everything issues again what no checkpoint holds:
then the groups it forgot count as superseded until they are issued once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

_HANDLED = frozenset(
    {"service", "register", "issue", "lease", "lost", "sample", "claim", "commit", "drop", "dead", "end"}
)  # fmt: skip
SHOWN = 20  # violations of one kind that are spelled out


class Audit(msgspec.Struct):
    """The verdict and the counts it rests on."""

    ok: bool = True
    ended: bool = False
    done: bool = False
    issued: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    dead: dict[str, int] = {}
    superseded: int = 0
    in_flight: int = 0
    lost: int = 0
    doubled: int = 0
    steps: int = 0
    batch_groups: int = 0
    lag_max: int = 0
    lag_mean: float = 0.0
    bound_max: int = 0
    over_bound: int = 0
    lag_counts: dict[int, int] = {}  # lag -> trained groups
    spans: int = 0
    spans_matched: int = 0
    learner_starts: int = 0
    service_starts: int = 0
    replayed_steps: int = 0
    lost_leases: int = 0
    torn: bool = False
    violations: list[str] = []
    notes: list[str] = []


class _Group:
    """What the log says of one group."""

    __slots__ = ("bound", "dead", "digests", "dropped", "oldest", "steps", "versions")

    def __init__(self) -> None:
        self.bound = 0
        self.oldest: dict[int, int] = {}  # sample -> its oldest version
        self.versions: dict[int, set[int]] = {}  # sample -> versions of its spans
        self.digests: dict[int, dict[int, str]] = {}  # sample -> version -> digest
        self.dropped = ""
        self.dead = ""
        self.steps: set[int] = set()  # steps of the surviving history that trained it


class _Commit(msgspec.Struct):
    version: int
    epoch: int
    digest: str
    groups: tuple[int, ...]


def audit_file(path: Path, *, allow_over_bound: bool = False) -> Audit:
    """The audit of a history file."""
    events: list[dict[str, Any]] = []
    damaged: list[int] = []
    texts = path.read_bytes().split(b"\n") if path.exists() else []
    torn = bool(texts and texts[-1].strip())
    for number, text in enumerate(texts[:-1] if torn else texts, start=1):
        if not text.strip():
            continue
        try:
            events.append(msgspec.json.decode(text, type=dict[str, Any]))
        except msgspec.DecodeError:
            damaged.append(number)
    if torn:
        try:  # whole, only its newline is missing
            events.append(msgspec.json.decode(texts[-1], type=dict[str, Any]))
            torn = False
        except msgspec.DecodeError:
            pass
    found = audit(events, allow_over_bound=allow_over_bound)
    found.torn = torn
    if torn:
        found.notes.append("the last line was cut and is left out")
    for number in damaged:
        _violation(found, "log", f"line {number} cannot be read")
    if not events:
        _violation(found, "log", "the history has no events")
    return found


def audit(events: Iterable[dict[str, Any]], *, allow_over_bound: bool = False) -> Audit:
    """The audit of a sequence of events."""
    reader = _Reader()
    for event in events:
        reader.take(event)
    return reader.verdict(allow_over_bound=allow_over_bound)


def _violation(found: Audit, kind: str, text: str) -> None:
    found.ok = False
    shown = sum(line.startswith(f"{kind}:") for line in found.violations)
    if shown < SHOWN:
        found.violations.append(f"{kind}: {text}")
    elif shown == SHOWN:
        found.violations.append(f"{kind}: and more")


class _Reader:
    """Follows the log; `verdict` judges what is left at its end."""

    def __init__(self) -> None:
        self.found = Audit(dropped={}, dead={}, violations=[], notes=[])
        self.groups: dict[int, _Group] = {}
        self.commits: dict[int, _Commit] = {}  # the surviving history, by step
        self.claims: dict[int, tuple[int, tuple[int, ...]]] = {}  # step -> version it starts from, groups
        self.taken_back: dict[int, _Commit] = {}  # commits that a restart has undone, until they are done again
        self.forgotten: set[int] = set()  # issued by a life of the store that was lost, and not again since
        self.digests: dict[int, set[str]] = {}  # version -> digests it was committed with

    def take(self, event: dict[str, Any]) -> None:
        """Follow one event; events this audit does not need are passed over."""
        name = event.get("e")
        handler = getattr(self, f"_{name}") if name in _HANDLED else None
        if handler is not None:
            try:
                handler(event)
            except (KeyError, TypeError, ValueError) as error:
                _violation(self.found, "log", f"event {event.get('e')!r} lacks or garbles a field: {error!r}")

    # ------------------------------------------------------------ events

    def _service(self, event: dict[str, Any]) -> None:
        self.found.service_starts += 1
        self.found.ended = self.found.done = False

    def _register(self, event: dict[str, Any]) -> None:
        self.found.learner_starts += 1
        self.found.ended = self.found.done = False
        start = int(event["step"])
        for step in sorted(step for step in self.commits if step > start):
            commit = self.commits.pop(step)
            self.taken_back[step] = commit
            for number in commit.groups:
                self.groups[number].steps.discard(step)

    def _issue(self, event: dict[str, Any]) -> None:
        number = int(event["g"])
        known = self.groups.get(number)
        if known is None:
            self.groups[number] = _Group()
        elif known.steps:
            self._bad("doubled", f"group {number} was issued again after step {min(known.steps)} had trained it")
        else:  # the store was lost: it knows nothing of this group and of those after it
            self.forgotten |= {other for other, group in self.groups.items() if other > number and not group.steps}
            self.groups[number] = _Group()
        self.forgotten.discard(number)

    def _lease(self, event: dict[str, Any]) -> None:
        self._group(event).bound = int(event["bound"])

    def _lost(self, event: dict[str, Any]) -> None:
        self.found.lost_leases += 1

    def _sample(self, event: dict[str, Any]) -> None:
        group, index = self._group(event), int(event["i"])
        versions = {int(version) for version, _ in event["runs"]}
        group.versions[index] = versions
        if versions:
            group.oldest[index] = min(versions)
        group.digests[index] = {int(version): str(digest) for version, digest in event["digests"].items()}

    def _claim(self, event: dict[str, Any]) -> None:
        step = int(event["step"])
        self.claims[step] = (int(event["version"]), tuple(event["groups"]))
        self.found.replayed_steps += bool(event.get("replayed"))

    def _commit(self, event: dict[str, Any]) -> None:
        step = int(event["step"])
        commit = _Commit(int(event["version"]), int(event["epoch"]), str(event["digest"]), tuple(event["groups"]))
        self.digests.setdefault(commit.version, set()).add(commit.digest)
        earlier = self.commits.get(step)
        if earlier is not None and set(earlier.groups) != set(commit.groups):
            self._bad("doubled", f"step {step} was committed twice with other groups")
        self.commits[step] = commit
        undone = self.taken_back.pop(step, None)
        if undone is not None:
            self._compare(step, undone, commit)
        if len(set(commit.groups)) < len(commit.groups):
            self._bad("doubled", f"step {step} holds a group twice")
        claimed = set(self.claims.get(step, (0, ()))[1])
        for number in commit.groups:
            if number not in self.groups or number not in claimed:
                self._bad("unknown", f"step {step} trained group {number}, which was not claimed for it")
            self.groups.setdefault(number, _Group()).steps.add(step)

    def _compare(self, step: int, undone: _Commit, commit: _Commit) -> None:
        if set(undone.groups) != set(commit.groups):
            self.found.notes.append(f"step {step} was trained again with other groups")

    def _drop(self, event: dict[str, Any]) -> None:
        self._group(event).dropped = str(event["reason"])

    def _dead(self, event: dict[str, Any]) -> None:
        self._group(event).dead = str(event["reason"])

    def _end(self, event: dict[str, Any]) -> None:
        self.found.ended = True
        self.found.done = bool(event["done"])

    def _group(self, event: dict[str, Any]) -> _Group:
        number = int(event["g"])
        if number not in self.groups:
            self._bad("unknown", f"group {number} has a {event['e']!r} but was never issued")
            self.groups[number] = _Group()
        return self.groups[number]

    def _bad(self, kind: str, text: str) -> None:
        if kind == "doubled":
            self.found.doubled += 1
        _violation(self.found, kind, text)

    # ------------------------------------------------------------ judgement

    def verdict(self, *, allow_over_bound: bool) -> Audit:
        """Judge what the log leaves behind."""
        self._count_endings()
        self._check_steps()
        self._check_lags(allow_over_bound=allow_over_bound)
        self._check_digests()
        return self.found

    def _count_endings(self) -> None:
        found = self.found
        dropped: Counter[str] = Counter()
        dead: Counter[str] = Counter()
        for number, group in sorted(self.groups.items()):
            found.issued += 1
            endings = bool(group.steps) + bool(group.dropped) + bool(group.dead)
            if len(group.steps) > 1:
                self._bad("doubled", f"group {number} was trained in steps {sorted(group.steps)}")
            if endings > 1:
                reason = group.dropped or group.dead
                self._bad("doubled", f"group {number} has two endings: trained or dropped, and {reason!r}")
            if group.steps:
                found.trained += 1
            elif group.dropped:
                dropped[group.dropped] += 1
            elif group.dead:
                dead[group.dead] += 1
            elif number in self.forgotten:
                found.superseded += 1
            elif found.ended and found.done:
                found.lost += 1
                _violation(found, "lost", f"group {number} was issued and has no ending although the run is done")
            else:
                found.in_flight += 1
        found.dropped, found.dead = dict(dropped), dict(dead)

    def _check_steps(self) -> None:
        found = self.found
        found.steps = len(self.commits)
        found.batch_groups = max((len(groups) for _, groups in self.claims.values()), default=0)
        if not self.commits:
            return
        first, last = min(self.commits), max(self.commits)
        for step in range(first, last + 1):
            commit = self.commits.get(step)
            if commit is None:
                _violation(found, "steps", f"step {step} was left out")
                continue
            if commit.version != step:
                _violation(found, "steps", f"step {step} was committed as version {commit.version}")
            claimed = self.claims.get(step, (0, ()))[1]
            removed = [n for n in claimed if n not in commit.groups and n in self.groups and self.groups[n].dead]
            if len(commit.groups) + len(removed) != found.batch_groups:
                _violation(found, "steps", f"step {step} trained {len(commit.groups)} groups of {found.batch_groups}")

    def _check_lags(self, *, allow_over_bound: bool) -> None:
        found, lags = self.found, []
        for step, commit in sorted(self.commits.items()):
            start = self.claims.get(step, (commit.version - 1, ()))[0]
            for number in commit.groups:
                group = self.groups[number]
                if not group.oldest:
                    _violation(found, "lag", f"group {number} of step {step} has no samples in the log")
                    continue
                lag = start - min(group.oldest.values())
                lags.append(lag)
                found.bound_max = max(found.bound_max, group.bound)
                if lag < 0:
                    _violation(found, "lag", f"group {number} of step {step} is newer than its weights ({lag})")
                if lag > group.bound:
                    found.over_bound += 1
                    text = f"group {number} was trained in step {step} with lag {lag}, its bound is {group.bound}"
                    if allow_over_bound:
                        found.notes.append(text)
                    else:
                        _violation(found, "lag", text)
        found.lag_counts = dict(sorted(Counter(lags).items()))
        found.lag_max = max(lags, default=0)
        found.lag_mean = sum(lags) / len(lags) if lags else 0.0

    def _check_digests(self) -> None:
        found = self.found
        first: dict[int, str] = {}  # versions without a commit in this log (0, the start weights): all must agree
        for step, commit in sorted(self.commits.items()):
            for number in commit.groups:
                group = self.groups[number]
                for index, versions in sorted(group.versions.items()):
                    for version in sorted(versions):
                        found.spans += 1
                        digest = group.digests[index].get(version, "")
                        known = self.digests.get(version) or {first.setdefault(version, digest)}
                        if digest and digest in known:
                            found.spans_matched += 1
                            continue
                        what = f"is {digest}, committed was {', '.join(sorted(known))}" if digest else "is missing"
                        _violation(found, "digest", f"group {number} sample {index} (step {step}): the digest of "
                                   f"version {version} {what}")  # fmt: skip


def render(found: Audit) -> str:
    """The text that `asyncrl audit` prints."""
    state = "done" if found.done else "stopped" if found.ended else "not ended"
    parts = [f"trained {found.trained}", f"dropped {_by_reason(found.dropped)}", f"dead {_by_reason(found.dead)}"]
    parts += [f"superseded {found.superseded}"] if found.superseded else []
    parts += [f"in flight {found.in_flight}", f"lost {found.lost}"]
    planned = found.steps * found.batch_groups
    lines = [
        f"audit: {'OK' if found.ok else 'FAILED'} (the run is {state})",
        f"  issued {found.issued} = {' + '.join(parts)}",
        f"  doubled {found.doubled}",
        f"  {found.steps} steps x {found.batch_groups} groups = {planned}, trained {found.trained}",
        f"  lag mean {found.lag_mean:.2f}, max {found.lag_max}, bound {found.bound_max}, over it {found.over_bound}",
        f"  weights: {found.spans_matched} of {found.spans} spans carry the digest of the committed version",
        f"  starts: learner {found.learner_starts}, buffer {found.service_starts}; "
        f"steps replayed {found.replayed_steps}; leases lost {found.lost_leases}",
    ]
    lines += [f"  note: {note}" for note in found.notes[:SHOWN]]
    lines += [f"  violation: {violation}" for violation in found.violations]
    return "\n".join(lines)


def _by_reason(counts: dict[str, int]) -> str:
    if not counts:
        return "0"
    return f"{sum(counts.values())} ({', '.join(f'{reason} {count}' for reason, count in sorted(counts.items()))})"


def audit_run(root: Path) -> Audit:
    """The audit of a run folder. Its config.toml, where there is one, says whether lag above a bound is allowed."""
    from asyncrl.config import load
    from asyncrl.errors import AsyncRLError
    from asyncrl.rundir import RunDir

    run = RunDir(root)
    try:
        allow = load(run.config).buffer.on_late == "train"
    except AsyncRLError:
        allow = False
    return audit_file(run.history, allow_over_bound=allow)


def audit_command(root: Path, *, as_json: bool) -> int:
    """`asyncrl audit`: 0 where nothing was found, else 1."""
    from asyncrl.errors import ConfigError

    if not (root / "history.jsonl").exists():
        raise ConfigError("run.missing", "no history.jsonl in it", where=str(root))
    found = audit_run(root)
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if as_json else render(found))
    return 0 if found.ok else 1
