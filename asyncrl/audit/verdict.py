"""Judges a history at its end: endings, steps, lags, digests, lengths.

Guarantees: every group is counted in exactly one of trained, dropped, dead, superseded, in flight and lost; every
violation names its group or step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from asyncrl.audit.findings import Audit
from asyncrl.audit.reader import Reader
from asyncrl.audit.records import Claim, Commit, Group, Life
from asyncrl.config.mode import DATA_PREFIX
from asyncrl.errors import UNREADABLE
from asyncrl.metrics.length_bias import Story, compare


class Expected(msgspec.Struct, frozen=True):
    """Facts from outside of the log. `parent`: commits of the parent of a fork, by step; `parent_heads`: heads of its
    chain. `signed`: whether the configuration asks for signatures; `key`: to check them, empty if it is unknown.
    """

    group_size: int = 0  # samples of a group; 0: those of the largest one
    batch_groups: int = 0
    allow_over_bound: bool = False  # where the log does not name the settings of its services
    fork_of: str = ""
    fork_step: int = 0
    parent: dict[int, Commit] = {}
    parent_heads: frozenset[str] = frozenset()
    signed: bool = False
    key: bytes = b""
    correct_above: float | None = None  # a sample is correct above this reward; None: unknown


def judge(reader: Reader, expected: Expected) -> Audit:
    reader.settle()
    verdict = _Verdict(reader, expected)
    verdict.endings()
    verdict.steps()
    verdict.work()
    verdict.lags()
    verdict.digests()
    verdict.lengths()
    verdict.evaluations()
    return reader.found


class _Verdict:
    def __init__(self, reader: Reader, expected: Expected) -> None:
        self.reader = reader
        self.found = reader.found
        self.groups = reader.groups
        self.commits = dict(sorted(reader.commits.items()))
        self.expected = expected

    def endings(self) -> None:
        """One ending per group; nothing is lost if the run is done."""
        found = self.found
        counts: dict[str, Counter[str]] = {"dropped": Counter(), "dead": Counter()}
        inherited = {number for commit in self.expected.parent.values() for number in commit.groups}
        for number, group in sorted(self.groups.items()):
            found.issued += 1
            found.trainings += len(group.steps)
            self._one_ending(number, group, inherited)
            if group.steps:
                found.trained += 1
            elif group.dropped:
                counts["dropped"][group.dropped] += 1
            elif group.dead:
                counts["dead"][group.dead] += 1
            elif number in self.reader.forgotten:
                found.superseded += 1
            elif found.ended and found.done:
                found.lost += 1
                found.violation("lost", f"group {number} was issued and has no ending although the run is done")
            else:
                found.in_flight += 1
        found.dropped, found.dead = dict(counts["dropped"]), dict(counts["dead"])

    def _one_ending(self, number: int, group: Group, inherited: set[int]) -> None:
        if len(group.steps) > group.uses:
            often = f", {group.uses} times are allowed" if group.uses > 1 else ""
            self.found.violation("doubled", f"group {number} was trained in steps {sorted(group.steps)}{often}")
        reused = group.uses > 1 and group.steps and group.dropped and not group.dead  # its further uses were dropped
        if bool(group.steps) + bool(group.dropped) + bool(group.dead) > 1 and not reused:
            reasons = " and ".join(filter(None, ("trained" if group.steps else "", group.dropped, group.dead)))
            self.found.violation("doubled", f"group {number} has two endings: {reasons}")
        if group.steps and number in inherited:
            self.found.violation("doubled", f"group {number} was trained here and by the run this is a fork of")

    def steps(self) -> None:
        """No step is missing; each trained a full batch and has the number of its version."""
        found, claims = self.found, self.reader.claims
        found.steps = len(self.commits)
        found.batch_groups = max((len(claim.groups) for claim in claims.values()), default=0)
        found.fork_of = self.expected.fork_of
        if not self.commits:
            return
        found.first_step, last = min(self.commits), max(self.commits)
        before = found.first_step - 1
        begin = self.expected.fork_step + 1
        if found.first_step != begin:
            where = f"a fork at step {begin - 1}" if found.fork_of else "a whole log"
            found.violation("steps", f"the first step is {found.first_step}, {where} begins with {begin}")
        for step, commit in self.commits.items():
            if step != before + 1:  # a damaged number may be huge: do not walk the gap
                many = f" and those up to {step - 1}" if step - before > 2 else ""
                found.violation("steps", f"step {before + 1}{many} was left out")
            before = step
            if commit.version != step:
                found.violation("version", f"step {step} was committed as version {commit.version}")
            self._whole_batch(step, commit)
        if found.done and self.reader.retired < last:
            found.violation("steps", f"the run is done and step {last} was never in a durable checkpoint")

    def _whole_batch(self, step: int, commit: Commit) -> None:
        claim = self.reader.claims.get(step)
        claimed = claim.groups if claim is not None else ()
        removed = [n for n in claimed if n not in commit.groups and n in self.groups and self.groups[n].removed]
        missing = [n for n in claimed if n not in commit.groups and n not in removed]
        if missing:
            self.found.violation("steps", f"step {step} did not train group {missing[0]} of its batch")
        if claim is None or any("buffer.batch_groups" in change.changed for change in self.found.tuned):
            return
        largest, size = self.found.batch_groups, self._settings(claim).batch_groups
        # The checkpoint of a fork may know changes of its parent, which the log of the fork does not name.
        sizes = {size, largest} if self.expected.fork_of else {size or largest}
        if len(commit.groups) + len(claim.gone.union(removed)) not in sizes:
            size = max(sizes)
            self.found.violation("steps", f"step {step} trained {len(commit.groups)} groups of {size}")

    def _settings(self, claim: Claim | None) -> Life:
        """Settings of the service that recorded a batch: a run may go on with others."""
        return self.reader.lives.get(claim.life if claim is not None else 0, Life())

    def work(self) -> None:
        """Every ready or trained group was leased, complete and scored; no other group was trained."""
        size = self.expected.group_size or max((len(group.lengths) for group in self.groups.values()), default=0)
        for number, group in sorted(self.groups.items()):
            if not group.ready and not group.steps:
                continue
            who = f"group {number}" + (f" of step {min(group.steps)}" if group.steps else "")
            if not group.tokens:
                self.found.violation("lease", f"{who} was never leased")
            if len(group.lengths) < size:
                self.found.violation("sample", f"{who} has {len(group.lengths)} samples of {size}")
            unscored = sorted(group.lengths.keys() - group.scored.keys())
            if unscored:
                self.found.violation("score", f"{who}: sample {unscored[0]} was never scored")
            if not group.ready:
                self.found.violation("ready", f"{who} was trained before it was ready")

    def lags(self) -> None:
        """The lag of the oldest token of every trained group, against the bound of its own lease."""
        found, lags = self.found, []
        for step, commit in self.commits.items():
            claim = self.reader.claims.get(step)
            start = claim.version if claim is not None else commit.version - 1
            for number in commit.groups:
                group = self.groups[number]
                if not group.oldest:
                    found.violation("lag", f"group {number} of step {step} has no samples in the log")
                    continue
                lag = start - min(group.oldest.values())
                lags.append(lag)
                self._count_lag(commit, lag)
                found.bound_max = max(found.bound_max, group.bound)
                if lag < 0:
                    found.violation("lag", f"group {number} of step {step} is newer than its weights ({lag})")
                if lag > max(group.bound, 0):
                    self._judge_over_bound(step, commit, number, lag)
            if 0 < commit.tuning <= len(found.tuned):
                found.tuned[commit.tuning - 1].steps += 1
        found.lag_counts = dict(sorted(Counter(lags).items()))
        found.lag_max = max(lags, default=0)
        found.lag_mean = sum(lags) / len(lags) if lags else 0.0

    def _count_lag(self, commit: Commit, lag: int) -> None:
        tuned = self.found.tuned
        counts = tuned[commit.tuning - 1].lag_counts if commit.tuning else self.found.lag_before_tuning
        if tuned:
            counts[lag] = counts.get(lag, 0) + 1

    def _judge_over_bound(self, step: int, commit: Commit, number: int, lag: int) -> None:
        """A violation, unless the settings of its service or a change before the commit allow it."""
        self.found.over_bound += 1
        text = f"group {number} was trained in step {step} with lag {lag}, its bound is {self.groups[number].bound}"
        changes = [change.changed.get("buffer.on_late") for change in self.found.tuned[: commit.tuning]]
        on_late = self._settings(self.reader.claims.get(step)).on_late
        allowed = on_late == "train" if on_late else self.expected.allow_over_bound
        if allowed or any(change and change[1] == "train" for change in changes):
            self.found.notes.append(text)
        else:
            self.found.violation("lag", text)

    def digests(self) -> None:
        """Weights with the committed digest of their version generated every span of tokens."""
        found = self.found
        known = {commit.version: {commit.digest} for commit in self.expected.parent.values() if commit.digest}
        for version, digests in self.reader.digests.items():
            known.setdefault(version, set()).update(digests)
        first: dict[int, str] = {}  # versions without a digest in this log (0, the start weights): all must agree
        for step, commit in self.commits.items():
            for number in commit.groups:
                group = self.groups[number]
                for index, versions in sorted(group.versions.items()):
                    for version in sorted(versions):
                        found.spans += 1
                        digest = group.digests[index].get(version, "")
                        right = known.get(version) or {first.setdefault(version, digest)}
                        if digest and digest in right:
                            found.spans_matched += 1
                            continue
                        what = f"is {digest}, committed was {', '.join(sorted(right))}" if digest else "is missing"
                        found.violation(
                            "digest",
                            f"group {number} sample {index} (step {step}): the digest of version {version} {what}",
                        )
        self._told_digests(version for version, digest in first.items() if not digest.startswith(DATA_PREFIX))

    def _told_digests(self, unknown: Iterable[int]) -> None:
        """The digest of a used version was committed; a learner that resumes may not know it."""
        for version in sorted(version for version in unknown if version in self.commits):
            text = f"step {version} was committed without the digest of its weights"
            if self.found.learner_starts > 1:
                self.found.notes.append(text)
            else:
                self.found.violation("digest", text)

    def evaluations(self) -> None:
        """No sample of an evaluation was trained, and its reported figures are correct."""
        trained = (set(group.tokens) for group in self.groups.values() if group.steps)
        known = {version: set(digests) for version, digests in self.reader.digests.items()}
        for commit in self.expected.parent.values():
            known.setdefault(commit.version, set()).update({commit.digest} if commit.digest else ())
        above = self.expected.correct_above
        self.reader.held_out.judge(trained=trained, digests=known, correct_above=above)

    def lengths(self) -> None:
        """Lengths of trained, dropped and quarantined samples; those of a group that was made again were dropped."""
        size = self.expected.group_size or max((len(group.lengths) for group in self.groups.values()), default=0)
        discarded = filter(None, self.reader.work.discarded)
        stories = [Story(lengths, "dropped", unfinished=max(0, size - len(lengths))) for lengths in discarded]
        for number, group in self.groups.items():
            if number in self.reader.forgotten:
                continue
            fate = "trained" if group.steps else "dropped" if group.dropped else "dead" if group.dead else "in_flight"
            lengths = tuple(group.lengths.values())
            oldest = min(group.oldest.values(), default=0)
            stories.append(Story(lengths, fate, tuple(sorted(group.steps)), max(0, size - len(lengths)), oldest))
        self.found.lengths = compare(stories)


def fork_origin(root: Path) -> tuple[str, int]:
    """Parent and step in a fork's `fork.json`; ("", 0) if the run is not a fork."""
    try:
        found = msgspec.json.decode((root / "fork.json").read_bytes(), type=dict[str, object])
        return str(found["parent"]), int(str(found["step"]))
    except (OSError, KeyError, *UNREADABLE):
        return "", 0
