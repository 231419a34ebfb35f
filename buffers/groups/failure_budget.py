"""Groups that are not trained: poisoned, failed or filtered ones, and the budgets that end a run of nothing else.

Guarantees:
1. a poisoned group is DEAD with its reason; more than `max_poison_rate` of the last `poison_window` groups end the run
   with the most frequent reason (`poison.budget`);
2. a group with all rewards is shown to the filters, in order; if one gives a reason, the group is DROPPED
   (`zero_variance` or `filtered`) and its place is refilled. If `max_filtered_rate` of the last `filter_window` groups
   are filtered, the run ends (`filter.rate`): it would never train;
3. a group whose filter raises or returns no text is DEAD (`filter_failed`); more than `max_failed_groups` of these end
   the run (`filter.budget`), as do as many failed rewards (`reward.budget`) or groups whose environment failed at every
   attempt (`environment.budget`);
4. all counts are persisted: a restart of the service grants no new budget. A run that ended by one of them starts with
   a fresh one, because something was changed before it was started again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.plugins import load_object
from buffers.groups.group_table import GroupTable
from buffers.groups.live_settings import LiveSettings
from buffers.groups.records import Budget, Change, Group, State
from buffers.groups.transaction import Transaction

#: Names of reward parts that a run may have: each becomes a metric of every step.
MOST_PARTS = 256
LONGEST_PART = 200
TOO_MANY_PARTS = f"a run has at most {MOST_PARTS} names of parts, of at most {LONGEST_PART} letters"
ENVIRONMENT_FAILED = "environment_failed"  # reason of a dead group: its environment failed at every attempt
ZERO_VARIANCE = "zero_variance"
LOW, HIGH = 0.2, 0.8  # of accuracy_band

#: A user's filter is called as `function(rewards=[...], lengths=[...], parts=[{...}], group=7)`, one entry per sample.
#: It returns the reason not to train on the group as a text, or "" to keep it. It runs inside the buffer service, so it
#: must be quick and free of side effects.
Filter = Callable[..., Any]
#: The end of a group that is not READY: state, reason, detail.
Verdict = tuple[State, str, str]
#: Reason of a dead group -> the error that ends the run, and what failed.
_CODES = {
    "reward_failed": ("reward.budget", "reward"),
    "filter_failed": ("filter.budget", "filter"),
    ENVIRONMENT_FAILED: ("environment.budget", "environment"),
}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Budget).decode


def zero_variance(*, rewards: Sequence[float], **_: Any) -> str:
    """All rewards are equal, so every advantage would be 0.

    >>> zero_variance(rewards=[1.0, 1.0]), zero_variance(rewards=[0.0, 1.0]), zero_variance(rewards=[1.0])
    ('every reward is 1', '', '')
    """
    same = len(rewards) > 1 and min(rewards) == max(rewards)
    return f"every reward is {rewards[0]:g}" if same else ""


def accuracy_band(*, rewards: Sequence[float], **_: Any) -> str:
    """The mean reward is below 0.2 or above 0.8: too hard or too easy (PRIME, arXiv 2502.01456).

    >>> accuracy_band(rewards=[1.0, 0.0]), accuracy_band(rewards=[0.0, 0.1])
    ('', 'the mean reward of 0.05 is outside 0.2 to 0.8')
    """
    mean = sum(rewards) / max(len(rewards), 1)
    return "" if LOW <= mean <= HIGH else f"the mean reward of {mean:g} is outside {LOW:g} to {HIGH:g}"


BUILT_IN: dict[str, Filter] = {ZERO_VARIANCE: zero_variance, "accuracy_band": accuracy_band}


def load_filters(names: Sequence[str]) -> list[tuple[str, Filter]]:
    """The filters of the configuration, by name. Raises `config.filter` if one cannot be loaded."""
    return [(name, BUILT_IN.get(name) or load_object(name, code="config.filter")) for name in names]


class FailureBudget:
    """Counts failures and holds the `fault` (code, message) that ends the run. `filters` are asked in their order."""

    def __init__(
        self, tx: Transaction, table: GroupTable, live: LiveSettings, filters: Sequence[tuple[str, Filter]]
    ) -> None:
        self.tx = tx
        self.table = table
        self.live = live
        self.filters = tuple(filters)
        self.counts = Budget()
        self.fault: tuple[str, str] | None = None
        self.part_names: set[str] = set()  # of rewards, since the service started

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Take over the persisted row. A budget that was spent is granted again."""
        for key, value in rows:
            if key == "budget":
                self.counts = _decode(value)
        if self.counts.spent:
            self.counts.spent, self.counts.poison, self.counts.filtered = False, [], []
            self.counts.forgiven = {reason: self.table.ended_counts[State.DEAD, reason] for reason in _CODES}
            self._put()

    def rows(self) -> list[Change]:
        """The row, for a store that lost its own."""
        return [Change("budget", self.row("budget"))]

    def row(self, key: str) -> bytes | None:
        return _encode(self.counts)

    def _put(self) -> None:
        self.tx.put("budget", self)

    def accept_parts(self, parts: Mapping[str, float]) -> bool:
        """Record these names of reward parts; False if the run would have too many, or one is too long."""
        names = parts.keys() - self.part_names
        if not names:
            return True
        if len(self.part_names) + len(names) > MOST_PARTS or any(len(name) > LONGEST_PART for name in names):
            return False
        self.part_names |= names
        return True

    def _spend(self, code: str, message: str) -> None:
        if self.fault is None:
            self.fault = (code, message)
            self.counts.spent = True
        self._put()

    # ------------------------------------------------------------ poison

    def poison(self, group: Group, reason: str) -> None:
        """The group's samples may not be trained on."""
        kind = reason.split(":", maxsplit=1)[0]
        self.table.end(group, State.DEAD, f"poison:{kind}", reason)
        self.count_poison(reason)

    def count_poison(self, reason: str) -> None:
        """Count a poisoned group."""
        counts, settings = self.counts, self.live.current
        counts.poisoned += 1
        window = settings.poison_window
        at = self.table.meta.sequence + counts.poisoned  # groups that were ready or poisoned so far
        counts.poison = [entry for entry in counts.poison if entry[0] > at - window] + [(at, reason[:200])]
        self._put()
        bad = [text for _, text in counts.poison]
        if len(bad) > settings.max_poison_rate * window:
            top, count = _most_frequent([text.split(":")[0] for text in bad])
            last = [text for text in bad if text.split(":")[0] == top][-1]
            self._spend(
                "poison.budget",
                f"{len(bad)} of the last {min(at, window)} groups were poisoned, most by {top} ({count}); "
                f"the last: {last}",
            )

    # ------------------------------------------------------------ failures with a fixed budget

    def count_failed(self, reason: str, detail: str) -> None:
        """Count a group that is DEAD by one of the reasons of `_CODES`."""
        code, what = _CODES[reason]
        failed = self.table.ended_counts[State.DEAD, reason] - self.counts.forgiven.get(reason, 0)
        limit = self.live.current.max_failed_groups
        if failed > limit:
            self._spend(code, f"{failed} groups failed in their {what}, {limit} are allowed; the last: {detail}")

    # ------------------------------------------------------------ filters

    def filter(self, group: Group) -> Verdict | None:
        """The end of a group with all rewards if a filter rejects it; None: it is READY."""
        if not self.filters:
            return None
        samples = [group.samples[index] for index in sorted(group.samples)]
        rewards = [sample.reward or 0.0 for sample in samples]
        for name, function in self.filters:
            lengths, parts = [sample.length for sample in samples], [dict(sample.parts) for sample in samples]
            try:
                reason = function(rewards=list(rewards), lengths=lengths, parts=parts, group=group.id)
            except Exception as error:  # a user's function: whatever it raises ends this group, not the service
                return State.DEAD, "filter_failed", f"{name}: {type(error).__name__}: {error}"
            if not isinstance(reason, str):
                return State.DEAD, "filter_failed", f"{name}: it returned {type(reason).__name__}, not a text"
            if reason:
                return State.DROPPED, "zero_variance" if name == ZERO_VARIANCE else "filtered", f"{name}: {reason}"
        return None

    def reject(self, group: Group, verdict: Verdict) -> None:
        """End a group that a filter rejected."""
        state, reason, detail = verdict
        self.table.end(group, state, reason, detail)
        if state == State.DEAD:
            self.count_failed(reason, detail)
        else:
            self._count_filtered(detail)

    def _count_filtered(self, detail: str) -> None:
        counts, settings = self.counts, self.live.current
        counts.filtered_total += 1
        window = settings.filter_window
        at = self.table.meta.sequence + counts.filtered_total  # groups that were ready or filtered so far
        counts.filtered = [entry for entry in counts.filtered if entry[0] > at - window] + [(at, detail[:200])]
        self._put()
        dropped = [text for _, text in counts.filtered]
        if at >= window and len(dropped) >= max(1.0, settings.max_filtered_rate * window):
            top, count = _most_frequent([text.split(":")[0] for text in dropped])
            self._spend(
                "filter.rate",
                f"{len(dropped)} of the last {window} groups were filtered, most by {top} ({count}); "
                f"the last: {dropped[-1]}",
            )


def _most_frequent(kinds: list[str]) -> tuple[str, int]:
    top = max(sorted(set(kinds)), key=kinds.count)
    return top, kinds.count(top)
