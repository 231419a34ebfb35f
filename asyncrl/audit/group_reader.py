"""Follows groups through a history for the audit: issues, leases, samples, scores, endings.

Guarantees:
1. an event that is impossible when it is read is a violation at once;
2. the order of a group's events is judged within one life of the service: a store may be restored to its state of a
   second before a crash, and then repeats what the history has already.
"""

from __future__ import annotations

from typing import Any

from asyncrl.audit.findings import Audit
from asyncrl.audit.records import TOKEN_SHIFT, Group, Origin, to_count
from asyncrl.metrics.length_bias import DISCARDS

FORGETFUL = DISCARDS


class GroupReader:
    """State of every group; `found` collects violations. With `keeps_origins` it knows what made each sample."""

    def __init__(self, found: Audit, *, keeps_origins: bool = False) -> None:
        self.found = found
        self.groups: dict[int, Group] = {}
        self.discarded: list[tuple[int, ...]] = []  # lengths of samples whose group is made again
        self.forgotten: set[int] = set()  # issued in a lost life of the store, and not again since
        self.services: set[int] = set()  # epochs
        self.newest = 0  # version that was ever committed or registered
        self.bounds: set[int] | None = set()  # values that max_staleness ever had; None: unknown in older logs
        self._issued = -1  # newest group that this service issued
        self._made: dict[Any, tuple[frozenset[int], dict[int, str]]] = {}  # samples made alike share what is kept
        self.keeps_origins = keeps_origins

    def start_life(self, epoch: int) -> None:
        """A service has started."""
        self.services.add(epoch)
        self._issued = -1

    def note_bound(self, bound: Any) -> None:
        """Record a new value of `max_staleness`; None: bounds of leases are unknown from then on."""
        self.bounds = None if bound is None or self.bounds is None else {*self.bounds, int(bound)}

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
        if number <= self._issued:
            self._bad("issue", f"group {number} was issued after group {self._issued}")
        self._issued = max(self._issued, number)
        self.groups[number] = Group(uses, issued=self.found.service_starts)
        self.forgotten.discard(number)

    def on_lease(self, event: dict[str, Any]) -> None:
        group, token, bound = self.find(event), int(event["token"]), to_count(event["bound"])
        life, version = self.found.service_starts, to_count(event["w"])
        if group.holder and group.life == life:
            self._bad("lease", f"group {event['g']} was leased under token {token} while {group.holder} held it")
        elif life in (group.unscored, group.ready):
            self._bad("lease", f"group {event['g']} was leased under token {token} although it was complete")
        self.goes_on(group, event)
        self._is_published(f"group {event['g']} was leased to an engine", version)
        if int(event["deadline"]) > version + bound:
            text = f"the deadline of group {event['g']} is {event['deadline']}, its lease allows {version + bound}"
            self._bad("bound", text)
        if token >= 1 << TOKEN_SHIFT and token >> TOKEN_SHIFT not in self.services:
            self._bad(
                "epoch",
                f"token {token} of group {event['g']} is of service epoch {token >> TOKEN_SHIFT}, which never started",
            )
        if group.oldest and group.bound not in (-1, bound):
            self._bad("bound", f"group {event['g']} was leased under bound {bound} and held samples of {group.bound}")
        elif self.bounds and bound not in self.bounds:
            known = ", ".join(map(str, sorted(self.bounds)))
            self._bad("bound", f"group {event['g']} was leased under bound {bound}, max_staleness was {known}")
        group.bound, group.holder, group.life = bound, token, life
        group.tokens[token] = str(event["producer"])

    def goes_on(self, group: Group, event: dict[str, Any]) -> None:
        """A group that has ended in this life has no further events; one that may be trained again may come back."""
        if group.ended == self.found.service_starts and group.uses == 1:
            reason = group.dropped or group.dead
            self._bad("doubled", f"group {event['g']} has a {event['e']!r} after its end ({reason})")

    def _is_published(self, what: str, version: int) -> None:
        """A version is published before it is committed, and only the next one is."""
        if version > self.newest + 1:
            self._bad("version", f"{what} of version {version} when {self.newest} was the newest one committed")

    def on_lost(self, event: dict[str, Any]) -> None:
        self.found.lost_leases += 1
        group = self.find(event)
        self._release(group, event)
        if str(event["why"]) in FORGETFUL:
            if group.steps:  # a store restored to an older state does not know the step that trained it
                group.given_up = True
            else:
                if event["why"] != "store_lost":  # a store loses samples of every length
                    self.discarded.append(tuple(group.lengths.values()))
                group.forget(self.found.service_starts)
        if event["why"] == "store_lost":  # including its end, unless a checkpoint knows it: it is issued again
            group.dropped, group.dead, group.ended = "", "", 0

    def on_cancel(self, event: dict[str, Any]) -> None:
        self.found.cancelled_leases += 1
        self._release(self.find(event), event)

    def _release(self, group: Group, event: dict[str, Any]) -> None:
        """The group's newest lease is over."""
        token, life = int(event["token"]), self.found.service_starts
        producer = group.tokens.get(token, "") if token else ""
        held = group.holder if group.life == life else 0
        if token and (token not in group.tokens or held not in (0, token)):
            self._bad("lease", f"token {token} of group {event['g']} was taken back, which did not hold it")
        elif producer and event.get("producer") not in (None, "", producer):
            self._bad("lease", f"token {token} of group {event['g']} was of {producer}, not of {event['producer']}")
        group.holder, group.life = 0, life

    def on_sample(self, event: dict[str, Any]) -> None:
        group, index, token = self.find(event), int(event["i"]), int(event["token"])
        name = f"group {event['g']} sample {index}"
        life, producer = self.found.service_starts, str(event["producer"])
        self.goes_on(group, event)
        if token not in group.tokens:
            self._bad("lease", f"{name} came under token {token}, which no lease has")
        elif group.tokens[token] != producer:
            self._bad("lease", f"{name} came from {producer} under token {token} of {group.tokens[token]}")
        elif group.accepted.get(index) == self.found.service_starts:  # a store may have forgotten an earlier life's
            self._bad("sample", f"{name} was accepted twice")
        elif life in (group.unscored, group.ready):
            self._bad("sample", f"{name} came after its group was {'ready' if group.ready else 'complete'}")
        elif group.life == life and group.holder != token:
            self._bad("lease", f"{name} came under token {token}, which does not hold the group")
        runs = [(to_count(version), to_count(count)) for version, count in event["runs"]]
        digests = {int(version): str(digest) for version, digest in event["digests"].items()}
        length, covered = to_count(event["length"]), sum(count for _, count in runs)
        if length < 0 or index < 0:
            raise ValueError(f"{name} has {length} tokens")
        if covered != length:
            self._bad("sample", f"{name}: its spans cover {covered} of {length} tokens")
        versions = tuple(version for version, _ in runs)
        made = self._made.setdefault((versions, *digests.items()), (frozenset(versions), digests))
        group.versions[index], group.digests[index] = made
        if runs:
            group.oldest[index] = min(versions)
            self._is_published(f"{name} has tokens", max(versions))
        group.lengths[index] = length
        group.accepted[index] = self.found.service_starts
        reward = event.get("reward")
        if self.keeps_origins:
            group.origins[index] = Origin(token, producer, length, tuple(runs), digests, reward)
        if reward is not None:
            group.scored[index] = life

    def on_score(self, event: dict[str, Any]) -> None:
        group, index, life = self.find(event), int(event["i"]), self.found.service_starts
        name = f"group {event['g']} sample {index}"
        self.goes_on(group, event)
        if index not in group.lengths and group.forgot in (0, life):  # a store may remember what an earlier life forgot
            self._bad("score", f"{name} was scored before it came")
        elif group.ready == life:
            self._bad("score", f"{name} was scored after its group was ready")
        elif group.scored.get(index) == life:
            self._bad("score", f"{name} was scored twice")
        group.scored[index] = life
        if index in group.origins:
            group.origins[index] = group.origins[index]._replace(reward=float(event["reward"]))

    def on_judged(self, event: dict[str, Any]) -> None:
        """An answer of one judge; only what a teacher said is compared with the archive."""
        group, index = self.groups.get(int(event["g"])), int(event["i"])
        if group is not None and "logprobs" in event and index in group.origins:
            group.origins[index] = group.origins[index]._replace(teaching=str(event["logprobs"]))

    def on_unscored(self, event: dict[str, Any]) -> None:
        group, life = self.find(event), self.found.service_starts
        self.goes_on(group, event)
        if group.unscored == life:
            self._bad("sample", f"group {event['g']} was complete twice")
        group.unscored, group.holder, group.life = max(1, life), 0, life

    def on_ready(self, event: dict[str, Any]) -> None:
        group, life = self.find(event), self.found.service_starts
        self.goes_on(group, event)
        if not group.unscored or group.ready == life:
            self._bad("ready", f"group {event['g']} was ready {'twice' if group.ready else 'before it was complete'}")
        elif unscored := group.lengths.keys() - group.scored.keys():
            self._bad("score", f"group {event['g']} was ready before sample {min(unscored)} was scored")
        group.ready, group.holder = max(1, life), 0

    def on_drop(self, event: dict[str, Any]) -> None:
        group, reason = self.find(event), str(event["reason"])
        self.goes_on(group, event)
        group.ended = self.found.service_starts
        if event["e"] == "drop":
            group.dropped = reason
        else:
            group.dead = reason
        group.holder = 0
        self.found.rolled_back += reason == "rolled_back"

    on_dead = on_drop

    def find(self, event: dict[str, Any]) -> Group:
        number = int(event["g"])
        if number not in self.groups:
            if event.get("why") != "store_lost":  # a checkpoint knew it and the store did not: it is issued again
                self._bad("unknown", f"group {number} has a {event['e']!r} but was never issued")
            self.groups[number] = Group()
        return self.groups[number]

    def _bad(self, kind: str, text: str) -> None:
        self.found.violation(kind, text)
