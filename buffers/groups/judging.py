"""What may not be trained on: poison, failed rewards, filters; and the budgets that end a run which makes only that.

Called through `buffers.groups.machine.Groups`; the layer above `tunable`. Guarantees:
1. poison is DEAD with its reason; more than `max_poison_rate` of the last `poison_window` groups end the run with the
   top reason (`poison.budget`);
2. a group whose rewards are all in is shown to the filters, in order: what one of them names a reason for is DROPPED
   (`zero_variance` or `filtered`) and its place is refilled; where that happens to `max_filtered_rate` of the last
   `filter_window` groups, the run ends (`filter.rate`): it would go on for ever without training anything;
3. a filter that raises or answers no text makes the group DEAD (`filter_failed`); more than `max_failed_groups` of
   these end the run (`filter.budget`), as do as many failed rewards (`reward.budget`) or groups whose environment
   failed at every attempt (`environment.budget`);
4. all of these counts are persisted: a restart of the service grants no new budget. Only a run that had ended by one of
   them starts with a fresh one: whoever starts it again has changed something.
A filter is a pure function that is handed in; nothing here loads code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from buffers.groups.filters import ZERO_VARIANCE, Filter
from buffers.groups.records import Group, Settings, State
from buffers.groups.tunable import Tunable

#: Names of parts of rewards that a run may have: each becomes a metric of every step.
MOST_PARTS = 256
LONGEST_PART = 200
TOO_MANY_PARTS = f"a run has at most {MOST_PARTS} names of parts, of at most {LONGEST_PART} letters"
ENVIRONMENT_FAILED = "environment_failed"  # a dead group's reason: its environment failed at every attempt

#: Where a group goes that is not READY: state, reason, detail.
Verdict = tuple[State, str, str]


class Judging(Tunable):
    """Tunable plus what is not trained on. `filters`: by name, in the order in which they are asked."""

    def __init__(
        self,
        settings: Settings,
        *,
        epoch: int = 1,
        wall_offset: float = 0.0,
        filters: Sequence[tuple[str, Filter]] = (),
    ) -> None:
        super().__init__(settings, epoch=epoch, wall_offset=wall_offset)
        self.filters = tuple(filters)
        self.part_names: set[str] = set()  # of rewards, since the service started

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Take over persisted rows. A budget that had been spent is granted again."""
        super().load(rows)
        if self.budget.spent:
            self.budget.spent, self.budget.poison, self.budget.filtered = False, [], []
            self.budget.forgiven = {reason: self.ended_counts[State.DEAD, reason] for reason in _CODES}
            self._touch("budget")

    def parts_known(self, parts: Mapping[str, float]) -> bool:
        """Note these names of parts; False where the run would have too many, or one is too long."""
        names = parts.keys() - self.part_names
        if len(self.part_names) + len(names) > MOST_PARTS or any(len(name) > LONGEST_PART for name in names):
            return False
        self.part_names |= names
        return True

    def _spend(self, code: str, message: str) -> None:
        if self.fault is None:
            self.fault = (code, message)
            self.budget.spent = True
        self._touch("budget")

    # ------------------------------------------------------------ poison

    def _poisoned(self, group: Group, reason: str, now: float) -> None:
        kind = reason.split(":", maxsplit=1)[0]
        self._end(group, State.DEAD, f"poison:{kind}", now, reason)
        self._count_poison(reason)

    def _count_poison(self, reason: str) -> None:
        budget, window = self.budget, self.settings.poison_window
        budget.poisoned += 1
        at = self.meta.sequence + budget.poisoned  # groups that were ready or poison, so far
        budget.poison = [entry for entry in budget.poison if entry[0] > at - window] + [(at, reason[:200])]
        self._touch("budget")
        bad = [text for _, text in budget.poison]
        if len(bad) > self.settings.max_poison_rate * window:
            top, count = _most([text.split(":")[0] for text in bad])
            last = [text for text in bad if text.split(":")[0] == top][-1]
            self._spend(
                "poison.budget",
                f"{len(bad)} of the last {min(at, window)} groups were poisoned, most by {top} ({count}); "
                f"the last: {last}",
            )

    # ------------------------------------------------------------ failures with a fixed budget

    def _count_failed(self, reason: str, detail: str) -> None:
        """A group died by one of the reasons of `_CODES`."""
        code, what = _CODES[reason]
        failed = self.ended_counts[State.DEAD, reason] - self.budget.forgiven.get(reason, 0)
        limit = self.settings.max_failed_groups
        if failed > limit:
            self._spend(code, f"{failed} groups failed in their {what}, {limit} are allowed; the last: {detail}")

    # ------------------------------------------------------------ filters

    def _verdict(self, group: Group) -> Verdict | None:
        """What the filters say about a group with all of its rewards; None: it is READY."""
        if not self.filters:
            return None
        samples = [group.samples[index] for index in sorted(group.samples)]
        rewards = [sample.reward or 0.0 for sample in samples]
        for name, ask in self.filters:
            lengths, parts = [sample.length for sample in samples], [dict(sample.parts) for sample in samples]
            try:
                said = ask(rewards=list(rewards), lengths=lengths, parts=parts, group=group.id)
            except Exception as error:  # a user's function: whatever it raises is this group's end, not the service's
                return State.DEAD, "filter_failed", f"{name}: {type(error).__name__}: {error}"
            if not isinstance(said, str):
                return State.DEAD, "filter_failed", f"{name}: it returned {type(said).__name__}, not a text"
            if said:
                return State.DROPPED, "zero_variance" if name == ZERO_VARIANCE else "filtered", f"{name}: {said}"
        return None

    def _end_by(self, group: Group, verdict: Verdict, now: float) -> None:
        state, reason, detail = verdict
        self._end(group, state, reason, now, detail)
        if state == State.DEAD:
            self._count_failed(reason, detail)
        else:
            self._count_filtered(detail)

    def _count_filtered(self, detail: str) -> None:
        budget, window = self.budget, self.settings.filter_window
        budget.filtered_total += 1
        at = self.meta.sequence + budget.filtered_total  # groups that were ready or filtered, so far
        budget.filtered = [entry for entry in budget.filtered if entry[0] > at - window] + [(at, detail[:200])]
        self._touch("budget")
        dropped = [text for _, text in budget.filtered]
        if at >= window and len(dropped) >= max(1.0, self.settings.max_filtered_rate * window):
            top, count = _most([text.split(":")[0] for text in dropped])
            self._spend(
                "filter.rate",
                f"{len(dropped)} of the last {window} groups were filtered, most by {top} ({count}); "
                f"the last: {dropped[-1]}",
            )


#: Reason of a dead group -> the error that ends the run, and what failed.
_CODES = {
    "reward_failed": ("reward.budget", "reward"),
    "filter_failed": ("filter.budget", "filter"),
    ENVIRONMENT_FAILED: ("environment.budget", "environment"),
}


def _most(kinds: list[str]) -> tuple[str, int]:
    top = max(sorted(set(kinds)), key=kinds.count)
    return top, kinds.count(top)
