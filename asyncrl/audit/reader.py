"""Follows the events of a history for the audit: the state of every group, step, lease and epoch.

Guarantees:
1. an event that is impossible when it is read is a violation at once; `asyncrl.audit.verdict` judges the rest at the
   end;
2. the surviving history: a learner that registers at step s takes back the commits after s;
3. state in the service's memory (holders of leases) is judged within one of its lives: a store may be restored to its
   state of a second before the crash.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from asyncrl.audit.evaluation import EvaluationReader
from asyncrl.audit.findings import Audit, Tuned
from asyncrl.audit.records import TOKEN_SHIFT, Claim, Commit, Group
from asyncrl.evaluation.ids import MARK

#: Reasons of a lost lease that also discard the group's samples.
FORGETFUL = frozenset({"late", "payload_lost", "store_lost", "abandoned"})


class Reader:
    """Follows the log event by event; `found` collects immediate violations."""

    def __init__(self) -> None:
        self.found = Audit(dropped={}, dead={}, violations=[], notes=[], tuned=[])
        self.held_out = EvaluationReader(self.found)
        self.groups: dict[int, Group] = {}
        self.commits: dict[int, Commit] = {}  # the surviving history, by step
        self.claims: dict[int, Claim] = {}
        self.taken_back: dict[int, Commit] = {}  # commits undone by a restart, until they are repeated
        self.forgotten: set[int] = set()  # issued in a lost life of the store, and not again since
        self.digests: dict[int, set[str]] = {}  # version -> digests it was committed with
        self.retired = 0
        self.started_at: int | None = None  # step of the first registration
        self._epoch = 0
        self._life = 0  # life of the service at the last registration
        self._services: set[int] = set()
        self._events = 0
        self._made: dict[Any, tuple[frozenset[int], dict[int, str]]] = {}  # samples made alike share what is kept
        self._bounds: set[int] | None = set()  # values that max_staleness ever had; None: unknown in older logs
        self._suspects: list[tuple[int, int]] = []  # commits by another epoch than the registered one

    def take(self, event: dict[str, Any]) -> None:
        """Follow one event; irrelevant ones are skipped."""
        name = str(event.get("e"))
        self._events += 1
        if self._events == 1 and name != "service":
            self._bad("log", f"it begins with {name!r}, not with the start of a service: lines are missing")
        if self._suspects and name not in ("commit", "drop", "lost"):
            self.settle(believed=name == "register")
        held_out = name.startswith(MARK)
        handler = partial(self.held_out.take, name) if held_out else getattr(self, f"on_{name}", None)
        if handler is not None:
            try:
                handler(event)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                self._bad("log", f"event {name!r} lacks or garbles a field: {error!r}")

    # ------------------------------------------------------------ lives

    def on_service(self, event: dict[str, Any]) -> None:
        epoch = int(event["service_epoch"])
        if self._services and epoch <= max(self._services):
            self._bad("epoch", f"a service started with epoch {epoch} after epoch {max(self._services)}")
        self._services.add(epoch)
        self._note_bound(event.get("max_staleness"))
        self.found.service_starts += 1
        self.found.ended = self.found.done = False

    def on_register(self, event: dict[str, Any]) -> None:
        epoch, start = int(event["epoch"]), int(event["step"])
        lost_all = not start and self._life != self.found.service_starts  # no process knows the old epochs any more
        if epoch <= self._epoch and not lost_all:
            self._bad("epoch", f"a learner registered with epoch {epoch} after epoch {self._epoch}")
        self._epoch, self._life, self.retired = epoch, self.found.service_starts, min(self.retired, start)
        self.started_at = start if self.started_at is None else self.started_at
        self.found.learner_starts += 1
        self.found.ended = self.found.done = False
        for step in sorted(step for step in self.commits if step > start):
            commit = self.commits.pop(step)
            self.taken_back[step] = commit
            for number in commit.groups:
                self.groups[number].take_back(step)

    def _note_bound(self, bound: Any) -> None:
        """Record a new value of `max_staleness`; None: bounds of leases are unknown from then on."""
        self._bounds = None if bound is None or self._bounds is None else {*self._bounds, int(bound)}

    def on_end(self, event: dict[str, Any]) -> None:
        self.found.ended = True
        self.found.done = bool(event["done"])

    def on_fenced(self, _event: dict[str, Any]) -> None:
        self.found.fenced += 1

    def on_tune(self, event: dict[str, Any]) -> None:
        number = int(event["n"])
        change = (event["old"], event["new"])
        if event["key"] == "buffer.max_staleness":
            self._note_bound(event["new"])
        last = self.found.tuned[-1] if self.found.tuned else None
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

    # ------------------------------------------------------------ groups

    def on_issue(self, event: dict[str, Any]) -> None:
        number, uses = int(event["g"]), int(event.get("uses", 1))
        known = self.groups.get(number)
        if known is not None and known.steps:
            self._bad("doubled", f"group {number} was issued again after step {min(known.steps)} had trained it")
            return
        if known is not None and known.issued == self.found.service_starts:
            self._bad("doubled", f"group {number} was issued twice")
        elif known is not None:  # the store was lost: it does not know this group and later ones
            self.forgotten |= {other for other, group in self.groups.items() if other > number and not group.steps}
        self.groups[number] = Group(uses, issued=self.found.service_starts)
        self.forgotten.discard(number)

    def on_lease(self, event: dict[str, Any]) -> None:
        group, token, bound = self._group(event), int(event["token"]), int(event["bound"])
        life = self.found.service_starts
        if group.holder and group.life == life:
            self._bad("lease", f"group {event['g']} was leased under token {token} while {group.holder} held it")
        if token >= 1 << TOKEN_SHIFT and token >> TOKEN_SHIFT not in self._services:
            self._bad(
                "epoch",
                f"token {token} of group {event['g']} is of service epoch {token >> TOKEN_SHIFT}, which never started",
            )
        if group.oldest and group.bound not in (-1, bound):
            self._bad("bound", f"group {event['g']} was leased under bound {bound} and held samples of {group.bound}")
        elif self._bounds and bound not in self._bounds:
            known = ", ".join(map(str, sorted(self._bounds)))
            self._bad("bound", f"group {event['g']} was leased under bound {bound}, max_staleness was {known}")
        group.bound, group.holder, group.life = bound, token, life
        group.tokens.add(token)

    def on_lost(self, event: dict[str, Any]) -> None:
        self.found.lost_leases += 1
        group = self._group(event)
        group.holder = 0
        if str(event["why"]) in FORGETFUL:
            if group.steps:  # a store restored to an older state does not know the step that trained it
                group.given_up = True
            else:
                group.forget()
        if event["why"] == "store_lost":  # including its end, unless a checkpoint knows it: it is issued again
            group.dropped = group.dead = ""

    def on_cancel(self, event: dict[str, Any]) -> None:
        self.found.cancelled_leases += 1
        self._group(event).holder = 0

    def on_sample(self, event: dict[str, Any]) -> None:
        group, index, token = self._group(event), int(event["i"]), int(event["token"])
        name = f"group {event['g']} sample {index}"
        if token not in group.tokens:
            self._bad("lease", f"{name} came under token {token}, which no lease has")
        elif group.accepted.get(index) == self.found.service_starts:  # a store may have forgotten an earlier life's
            self._bad("sample", f"{name} was accepted twice")
        elif group.ready == self.found.service_starts and group.ready:
            self._bad("sample", f"{name} came after its group was ready")
        runs = [(int(version), int(count)) for version, count in event["runs"]]
        digests = {int(version): str(digest) for version, digest in event["digests"].items()}
        length, covered = int(event["length"]), sum(count for _, count in runs)
        if length < 0 or index < 0:
            raise ValueError(f"{name} has {length} tokens")
        if covered != length:
            self._bad("sample", f"{name}: its spans cover {covered} of {length} tokens")
        versions = tuple(version for version, _ in runs)
        made = self._made.setdefault((versions, *digests.items()), (frozenset(versions), digests))
        group.versions[index], group.digests[index] = made
        if runs:
            group.oldest[index] = min(versions)
        group.lengths[index] = length
        group.accepted[index] = self.found.service_starts
        if event.get("reward") is not None:
            group.scored.add(index)

    def on_score(self, event: dict[str, Any]) -> None:
        self._group(event).scored.add(int(event["i"]))

    def on_ready(self, event: dict[str, Any]) -> None:
        group = self._group(event)
        group.ready, group.holder = max(1, self.found.service_starts), 0

    def on_drop(self, event: dict[str, Any]) -> None:
        group, reason = self._group(event), str(event["reason"])
        if event["e"] == "drop":
            group.dropped = reason
        else:
            group.dead = reason
        group.holder = 0
        self.found.rolled_back += reason == "rolled_back"

    on_dead = on_drop

    # ------------------------------------------------------------ steps

    def on_claim(self, event: dict[str, Any]) -> None:
        step, epoch = int(event["step"]), int(event["epoch"])
        claim = Claim(int(event["version"]), epoch, tuple(map(int, event["groups"])))
        self._current(f"claim of step {step}", epoch)
        self.held_out.trains(claim.groups, f"the batch of step {step}")
        earlier = self.claims.get(step)
        if event.get("replayed") or (earlier is not None and earlier.epoch == epoch):
            self._same_batch(step, earlier, claim)
        if len(set(claim.groups)) < len(claim.groups):
            self._bad("doubled", f"the batch of step {step} holds a group twice")
        if not event.get("replayed"):
            self._could_be_trained(step, claim)
        self.claims[step] = claim
        self.found.replayed_steps += bool(event.get("replayed"))

    def _could_be_trained(self, step: int, claim: Claim) -> None:
        """Every group of a new batch is ready and scored at this moment, not only at the end of the log."""
        for number in claim.groups:
            group = self.groups.get(number)
            if group is None:
                continue  # reported when the step is committed
            if not group.ready:
                self._bad("ready", f"group {number} was handed out for step {step} before it was ready")
            elif unscored := group.lengths.keys() - group.scored:
                self._bad(
                    "score", f"group {number} was handed out for step {step} before sample {min(unscored)} was scored"
                )

    def _same_batch(self, step: int, earlier: Claim | None, claim: Claim) -> None:
        """A recorded batch is returned unchanged and in order, except for groups quarantined since."""
        if earlier is None:
            self._bad("claim", f"step {step} was replayed, but no batch of it was recorded")
            return
        gone = {number for number in earlier.groups if number in self.groups and self.groups[number].removed}
        left = [number for number in earlier.groups if number not in gone or number in claim.groups]
        if list(claim.groups) != left or claim.version != earlier.version:
            self._bad(
                "claim",
                f"step {step} was handed out again with other groups: {list(claim.groups)[:8]} after {left[:8]}",
            )

    def on_commit(self, event: dict[str, Any]) -> None:
        step = int(event["step"])
        commit = Commit(
            int(event["version"]),
            int(event["epoch"]),
            str(event["digest"]),
            tuple(map(int, event["groups"])),
            len(self.found.tuned),
        )
        if commit.epoch != self._epoch:  # from a checkpoint's ledger, right before its learner registers?
            self._suspects.append((step, commit.epoch))
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
        self.retired = int(event["step"])
        if self.retired > max(self.commits, default=0):
            self._bad("version", f"step {self.retired} was retired before it was committed")

    # ------------------------------------------------------------ helpers

    def settle(self, *, believed: bool = False) -> None:
        """Judge commits of another epoch than the registered one; also at the end of the log."""
        for step, epoch in () if believed else self._suspects:
            self._current(f"commit of step {step}", epoch)
        self._suspects = []

    def _current(self, what: str, epoch: int) -> None:
        if epoch != self._epoch:
            self.found.fenced += 1
            self._bad("epoch", f"{what} by learner epoch {epoch}, registered was {self._epoch}")

    def _group(self, event: dict[str, Any]) -> Group:
        number = int(event["g"])
        if number not in self.groups:
            if event.get("why") != "store_lost":  # a checkpoint knew it and the store did not: it is issued again
                self._bad("unknown", f"group {number} has a {event['e']!r} but was never issued")
            self.groups[number] = Group()
        return self.groups[number]

    def _bad(self, kind: str, text: str) -> None:
        self.found.violation(kind, text)
