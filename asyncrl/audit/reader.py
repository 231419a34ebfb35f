"""Follows the events of a history for the audit: lives of services and learners, steps, versions, the clock.

Guarantees:
1. an event that is impossible when it is read is a violation at once; `asyncrl.audit.verdict` judges the rest at the
   end;
2. the surviving history: a learner that registers at step s takes back the commits after s;
3. state in the service's memory (holders of leases, the order of a group's events, the clock) is judged within one of
   its lives: a store may be restored to its state of a second before the crash.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from asyncrl.audit.choices import ChoiceReader
from asyncrl.audit.evaluation import EvaluationReader
from asyncrl.audit.findings import Audit, Tuned
from asyncrl.audit.group_reader import GroupReader
from asyncrl.audit.records import Claim, Commit, Group, Life, Origin, to_count
from asyncrl.evaluation.ids import MARK

#: Events that nothing is concluded from.
SKIPPED = frozenset({"continue", "discard"})
#: What a buffer writes to agree with the ledger of a learner, before the learner's `register`.
RECONCILES = frozenset({"commit", "drop", "lost", "dead", "cancel", "discard"})


class Reader:
    """Follows the log event by event; `found` collects immediate violations. `keeps_batches`: note the origin of the
    samples of every claim, in `batches`.
    """

    def __init__(self, *, keeps_batches: bool = False) -> None:
        self.found = Audit(dropped={}, dead={}, violations=[], notes=[], tuned=[])
        self.held_out = EvaluationReader(self.found)
        self.work = GroupReader(self.found, keeps_origins=keeps_batches)
        self.choices = ChoiceReader(self.found, self.work)
        self.groups, self.forgotten = self.work.groups, self.work.forgotten
        self.commits: dict[int, Commit] = {}  # the surviving history, by step
        self.claims: dict[int, Claim] = {}
        self.lives: dict[int, Life] = {}  # number of a service -> its settings
        self.taken_back: dict[int, Commit] = {}  # commits undone by a restart, until they are repeated
        self.digests: dict[int, set[str]] = {}  # version -> digests it was committed with
        self.retired = 0
        self.started_at: int | None = None  # step of the first registration
        self._epoch = 0
        self._life = 0  # life of the service at the last registration
        self._tuned_before = 0  # changes in earlier lives of the service
        self._events = 0
        self._suspects: list[tuple[int, int]] = []  # commits by another epoch than the registered one
        self._keeps_batches = keeps_batches
        self.batches: dict[int, dict[int, dict[int, Origin]]] = {}  # step -> group -> sample, as claimed last
        self.adopted: set[int] = set()  # versions whose commit is from the ledger of a checkpoint: digests are unsure
        self._time: float | None = None  # of the newest event

    def take(self, event: dict[str, Any]) -> None:
        """Follow one event; irrelevant ones are skipped."""
        name = str(event.get("e"))
        self._events += 1
        if self._events == 1 and name != "service":
            self._bad("log", f"it begins with {name!r}, not with the start of a service: lines are missing")
        if self._suspects and name not in RECONCILES:
            self.settle(believed=name == "register")
        held_out = name.startswith(MARK)
        owner = next((one for one in (self, self.choices) if hasattr(one, f"on_{name}")), self.work)
        handler = partial(self.held_out.take, name) if held_out else getattr(owner, f"on_{name}", None)
        if handler is None and name not in SKIPPED:
            self._bad("log", f"no event is of the kind {name[:200]!r}")
        try:
            self._follow_time(name, event)
            if handler is not None:
                handler(event)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self._bad("log", f"event {name!r} lacks or garbles a field: {error!r}")

    def _follow_time(self, name: str, event: dict[str, Any]) -> None:
        """The time of a service never runs backwards; that of a later one may."""
        time = event.get("t")
        if not isinstance(time, int | float):
            if self._time is not None:
                self._bad("log", f"event {name!r} has no time")
            return
        time = float(time)
        if self._time is not None and time < self._time:
            text = f"event {name!r} is {self._time - time:.6f} s earlier than the one before it"
            if name == "service":
                self.found.notes.append(f"time: {text}: the clock was set back between two services")
            else:
                self._bad("time", text)
        self._time = time

    # ------------------------------------------------------------ lives

    def on_service(self, event: dict[str, Any]) -> None:
        epoch = int(event["service_epoch"])
        if epoch <= (newest := max(self.work.services, default=-1)):
            self._bad("epoch", f"a service started with epoch {epoch} after epoch {newest}")
        self.work.start_life(epoch)
        self.work.note_bound(event.get("max_staleness"))
        self.found.service_starts += 1
        self._tuned_before = len(self.found.tuned)  # a store that lost its state counts changes from 1 again
        self.lives[self.found.service_starts] = Life(
            to_count(event.get("batch_groups", 0)), str(event.get("on_late", ""))
        )
        self.found.ended = self.found.done = False

    def on_register(self, event: dict[str, Any]) -> None:
        epoch, start = int(event["epoch"]), to_count(event["step"])
        lost_all = not start and self._life != self.found.service_starts  # no process knows the old epochs any more
        if epoch <= self._epoch and not lost_all:
            self._bad("epoch", f"a learner registered with epoch {epoch} after epoch {self._epoch}")
        self._epoch, self._life, self.retired = epoch, self.found.service_starts, start  # of a durable checkpoint
        self.work.newest = max(self.work.newest, start)
        self.started_at = start if self.started_at is None else self.started_at
        self.found.learner_starts += 1
        self.found.ended = self.found.done = False
        for step in sorted(step for step in self.commits if step > start):
            commit = self.commits.pop(step)
            self.taken_back[step] = commit
            for number in commit.groups:
                self.groups[number].take_back(step, self._life)

    def on_end(self, event: dict[str, Any]) -> None:
        self.found.ended = True
        self.found.done = bool(event["done"])

    def on_fenced(self, _event: dict[str, Any]) -> None:
        self.found.fenced += 1

    def on_tune(self, event: dict[str, Any]) -> None:
        number = int(event["n"])
        change = (event["old"], event["new"])
        if event["key"] == "buffer.max_staleness":
            self.work.note_bound(event["new"])
        last = self.found.tuned[-1] if len(self.found.tuned) > self._tuned_before else None
        if last is not None and last.n == number:  # one change of several settings
            last.changed[str(event["key"])] = change
            return
        if last is not None and number < last.n:
            self._bad("tune", f"change {number} came after change {last.n}")
        self.found.tuned.append(
            Tuned(
                number,
                float(event.get("t", 0)),
                str(event["author"]),
                {str(event["key"]): change},
                max(self.commits, default=0),
                bool(event.get("undo")),
                lag_counts={},
            )
        )

    # ------------------------------------------------------------ steps

    def on_claim(self, event: dict[str, Any]) -> None:
        step, epoch = to_count(event["step"]), int(event["epoch"])
        claim = Claim(
            to_count(event["version"]), epoch, tuple(map(int, event["groups"])), life=self.found.service_starts
        )
        self._current(f"claim of step {step}", epoch)
        if claim.version != step - 1:
            self._bad("version", f"step {step} was claimed to start from version {claim.version}")
        self.held_out.trains(claim.groups, f"the batch of step {step}")
        earlier = self.claims.get(step)
        if event.get("replayed") or (earlier is not None and earlier.epoch == epoch):
            claim = self._same_batch(step, earlier, claim)
        if len(set(claim.groups)) < len(claim.groups):
            self._bad("doubled", f"the batch of step {step} holds a group twice")
        if not event.get("replayed"):
            self._could_be_trained(step, claim)
        self.claims[step] = claim
        if self._keeps_batches:
            known = (number for number in claim.groups if number in self.groups)
            self.batches[step] = {number: dict(self.groups[number].origins) for number in known}
        self.found.replayed_steps += bool(event.get("replayed"))

    def _could_be_trained(self, step: int, claim: Claim) -> None:
        """Every group of a new batch is ready and scored at this moment, not only at the end of the log."""
        for number in claim.groups:
            group = self.groups.get(number)
            if group is None:
                continue  # reported when the step is committed
            self.work.goes_on(group, {"g": number, "e": "claim"})
            if not group.ready:
                self._bad("ready", f"group {number} was handed out for step {step} before it was ready")
            elif unscored := group.lengths.keys() - group.scored.keys():
                self._bad(
                    "score", f"group {number} was handed out for step {step} before sample {min(unscored)} was scored"
                )

    def _same_batch(self, step: int, earlier: Claim | None, claim: Claim) -> Claim:
        """A recorded batch is returned unchanged and in order, except for groups quarantined since."""
        if earlier is None:
            self._bad("claim", f"step {step} was replayed, but no batch of it was recorded")
            return claim
        gone = {number for number in earlier.groups if number in self.groups and self.groups[number].removed}
        left = [number for number in earlier.groups if number not in gone or number in claim.groups]
        if list(claim.groups) != left or claim.version != earlier.version:
            self._bad(
                "claim",
                f"step {step} was handed out again with other groups: {list(claim.groups)[:8]} after {left[:8]}",
            )
        gone_so_far = earlier.gone.union(gone).difference(claim.groups)
        return msgspec.structs.replace(claim, gone=gone_so_far, life=earlier.life)

    def on_commit(self, event: dict[str, Any]) -> None:
        step = to_count(event["step"])
        commit = Commit(
            to_count(event["version"]),
            int(event["epoch"]),
            str(event["digest"]),
            tuple(map(int, event["groups"])),
            len(self.found.tuned),
        )
        if commit.epoch != self._epoch:  # from a checkpoint's ledger, right before its learner registers?
            self._suspects.append((step, commit.epoch))
        self.work.newest = max(self.work.newest, commit.version)
        if commit.digest:
            self.digests.setdefault(commit.version, set()).add(commit.digest)
        earlier = self.commits.get(step)
        if earlier is not None and set(earlier.groups) != set(commit.groups):
            self._bad("doubled", f"step {step} was committed twice with other groups")
        elif earlier is None and self.commits and step < max(self.commits):
            self._bad("version", f"step {step} was committed after step {max(self.commits)}")
        self.held_out.trains(commit.groups, f"step {step}")
        self.commits[step] = commit
        undone = self.taken_back.pop(step, None)
        if undone is not None and set(undone.groups) != set(commit.groups):
            self.found.notes.append(f"step {step} was trained again with other groups")
        if len(set(commit.groups)) < len(commit.groups):
            self._bad("doubled", f"step {step} holds a group twice")
        claimed = set(self.claims[step].groups) if step in self.claims else set()
        for number in commit.groups:
            if number not in self.groups or number not in claimed:
                self._bad("unknown", f"step {step} trained group {number}, which was not claimed for it")
            self.groups.setdefault(number, Group()).steps.add(step)

    def on_retire(self, event: dict[str, Any]) -> None:
        before, self.retired = self.retired, to_count(event["step"])
        if self.retired < before:
            self._bad("version", f"step {self.retired} was retired after step {before}")
        if self.retired > max(self.commits, default=0):
            self._bad("version", f"step {self.retired} was retired before it was committed")

    # ------------------------------------------------------------ helpers

    def settle(self, *, believed: bool = False) -> None:
        """Judge commits of another epoch than the registered one; also at the end of the log."""
        if believed:
            self.adopted.update(step for step, _ in self._suspects)
        for step, epoch in () if believed else self._suspects:
            self._current(f"commit of step {step}", epoch)
        self._suspects = []

    def _current(self, what: str, epoch: int) -> None:
        if epoch != self._epoch:
            self.found.fenced += 1
            self._bad("epoch", f"{what} by learner epoch {epoch}, registered was {self._epoch}")

    def _bad(self, kind: str, text: str) -> None:
        self.found.violation(kind, text)
