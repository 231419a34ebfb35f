"""Follows the chain of a history: which lines are not those that were written, and which heads are still there.

Violations:
  chain   a sealed line does not follow from the lines before it, or the lines after the last seal of a complete run
          have none
  anchor  a head that the learner kept (in a checkpoint, the archive, the result) is not in the history: the history was
          changed before that, and its chain was computed again
  sign    a seal has another signature than the key gives, or none although one before it has; or a run that signs its
          history has no seal with one
A break is reported once: the lines after it are compared with what they name as their beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from asyncrl.audit.findings import Audit
from asyncrl.runtime.history_chain import Chain, find_seal


class Anchor(NamedTuple):
    """A head of the chain that was kept outside of the history. `where` names the place."""

    head: str
    where: str
    step: int = 0  # of the checkpoint


class ChainReader:
    """Takes the lines of a history one by one. `anchors`: heads to look for; `key`: of signatures, empty: unknown."""

    def __init__(self, *, anchors: Sequence[Anchor] = (), key: bytes = b"") -> None:
        self.anchors = anchors
        self._missing = {anchor.head for anchor in anchors}
        self._key = key
        self._chain = Chain(key)
        self._drains = self._signed = 0
        self._sealed_to = 0  # number of the newest line with a seal
        self._lines = 0
        self._breaks: list[tuple[int, int]] = []  # first and last line of a drain that does not follow
        self._unsigned: list[int] = []  # numbers of lines
        self._plain = 0  # of them, those before the first signature, and without any

    def take(self, line: bytes) -> None:
        """The next line with its end; a line without one was cut and is left out."""
        if not line.endswith(b"\n"):
            return
        self._lines += 1
        seal = find_seal(line)
        if seal is None:
            self._chain.add(line)
            return
        if not self._chain.follow(line, seal):
            self._breaks.append((self._sealed_to + 1, self._lines))
        self._drains += 1
        self._signed += bool(seal.sign)
        if self._key and not self._chain.is_signed(seal):
            self._unsigned.append(self._lines)
            self._plain += not self._signed
        self._missing.discard(seal.head)
        self._sealed_to = self._lines

    @property
    def found_heads(self) -> set[str]:
        """Those of the anchors that have come."""
        return {anchor.head for anchor in self.anchors} - self._missing

    def judge(self, found: Audit, *, elsewhere: Iterable[str] = (), expects_signatures: bool = False) -> None:
        """Record the result. `elsewhere`: heads of another history, the parent's of a fork."""
        found.drains, found.signed = self._drains, self._signed
        for first, last in self._breaks:
            what = f"line {last} does" if first == last else f"lines {first} to {last} do"
            found.violation("chain", f"{what} not follow from what was written before: changed, moved or missing")
        rest = self._lines - self._sealed_to
        if not self._drains and expects_signatures and (found.done or found.steps):
            found.violation("sign", "log.sign is set and no line has a seal")
        elif not self._drains:
            found.notes.append("the history has no chain: a build without one wrote it")
        elif rest and found.done:
            found.violation("chain", f"the run is done and its last {rest} lines have no seal")
        elif rest:
            found.notes.append(f"the last {rest} lines have no seal: the buffer was killed or still writes them")
        gone = self._missing.difference(elsewhere)
        found.anchors = len(self.anchors)
        for anchor in self.anchors:
            if anchor.head in gone:
                found.violation("anchor", f"{anchor.where} names the head {anchor.head}: the history does not have it")
        self._judge_signatures(found, expected=expects_signatures)

    def _judge_signatures(self, found: Audit, *, expected: bool) -> None:
        if self._key and (expected or self._signed):
            # The first signature covers the lines before it: the run did not sign from its beginning.
            for line in self._unsigned[self._plain if self._signed else 0 :]:
                found.violation("sign", f"the seal in line {line} is not signed with the key of the run")
        elif expected or self._signed:
            found.notes.append("signatures are not checked: network.key_file cannot be read here")
