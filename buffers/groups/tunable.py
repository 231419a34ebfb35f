"""Live tuning in the state machine: settings that change while it runs, and the plan of batch sizes.

Called through `buffers.groups.machine.Groups`; the layer right above the book. Guarantees:
1. a change is made as a whole or refused (`tune.refused`); it is numbered, persisted in the row `tuning` and told to
   the history, one event per key; it survives a restart of the service and wins over the configuration file;
2. a group keeps the bound and the number of uses that it was issued under;
3. the run's length stays in steps: the total of its groups is the sum of the plan over all steps;
4. a larger batch counts from the next claim; a smaller one from the first step from which the schedule of everything
   that is outstanding stays feasible, and leases are judged by the plan: (F) holds through the change, and with it the
   theorem;
5. `pipeline_depth = "auto"` changes the depth by what the learner's claims show; each change is one by author `auto`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from asyncrl.config import AlgorithmConfig
from buffers.groups.book import Book
from buffers.groups.records import Settings
from buffers.groups.schedule import Plan, capacity, levels
from buffers.groups.tunable_settings import (
    ALGORITHM,
    KEPT_CHANGES,
    SHORT,
    DepthController,
    Tuning,
    checked,
    dotted,
    flat,
    judged,
    refused,
)

KEPT_IN_CHECKPOINT = 16  # changes that can be undone even after a loss of the store
Changed = dict[str, tuple[Any, Any]]


class Tunable(Book):
    """Book plus what `asyncrl tune` does. `base` are the settings of the configuration, `settings` those in force."""

    def __init__(self, settings: Settings, *, epoch: int = 1, wall_offset: float = 0.0) -> None:
        super().__init__(settings, epoch=epoch, wall_offset=wall_offset)
        self.base = settings
        self._controller = DepthController(settings.learner_idle_target)
        self._watched: tuple[int, float, float | None] | None = None  # step, claim asked, claimed

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Take over persisted rows; the tuned settings win over those of the configuration."""
        super().load(rows)
        if self.tuning.number:
            self._put_in_force()

    # ------------------------------------------------------------ tune and undo

    def tune(self, changes: Mapping[str, Any], *, author: str, now: float) -> tuple[int, Changed, str]:
        """Change settings: the number of the change, key -> (old, new), a note. Keys dotted or short."""
        values = dict(self.tuning.values)
        for key, value in changes.items():
            values[dotted(key)] = checked(dotted(key), value)
        if not changes:
            raise refused("nothing to change")
        return self._change(values, author=author, now=now)

    def undo_tune(self, number: int, *, author: str, now: float) -> tuple[int, Changed, str]:
        """Go back to the settings in force after change `number`; 0 is the configuration. A change of its own."""
        if number == 0:
            return self._change({}, author=author, now=now, undo=True)
        if number not in self.tuning.past:
            known = f"{min(self.tuning.past)} to {self.tuning.number}" if self.tuning.past else "none"
            raise refused(f"change {number} is not known; known are 0 (the configuration) and {known}")
        return self._change(dict(self.tuning.past[number]), author=author, now=now, undo=True)

    def _change(
        self, values: dict[str, Any], *, author: str, now: float, undo: bool = False
    ) -> tuple[int, Changed, str]:
        before, after = self._in_force(self.tuning.values), self._in_force(values)
        keys = sorted({*self.tuning.values, *values})
        changed = {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}
        if not changed:
            return self.tuning.number, {}, ""
        self._judge(after)
        judged(values, self.base.algorithm)
        old_depth = self.settings.depth
        self.tuning.values = values
        notes = [self._replan(int(after["buffer.batch_groups"]))] if "buffer.batch_groups" in changed else []
        self._put_in_force()
        if self.settings.depth != old_depth and "buffer.pipeline_depth" not in changed:
            notes.append(f"pipeline_depth is {self.settings.depth} now")
        if "buffer.max_staleness" in changed:
            notes.append("groups that are leased keep their bound")
        self._tell(changed, author=author, now=now, undo=undo)
        return self.tuning.number, changed, "; ".join(filter(None, notes))

    def _tell(self, changed: Changed, *, author: str, now: float, undo: bool = False) -> None:
        tuning = self.tuning
        tuning.number += 1
        tuning.author = author[:200]
        tuning.past[tuning.number] = dict(tuning.values)
        for number in sorted(tuning.past)[:-KEPT_CHANGES]:
            del tuning.past[number]
        for key, (old, new) in changed.items():
            more = {"undo": True} if undo else {}
            self._event(now, "tune", n=tuning.number, author=tuning.author, key=key, old=old, new=new, **more)
        self._touch("tuning")

    def tuning_text(self) -> str:
        """What a checkpoint keeps of the changes, so that even without the store they stay in force."""
        if not self.tuning.number:
            return ""
        newest = sorted(self.tuning.past)[-KEPT_IN_CHECKPOINT:]
        kept = msgspec.structs.replace(self.tuning, past={number: self.tuning.past[number] for number in newest})
        return msgspec.json.encode(kept).decode()

    def adopt_tuning(self, text: str) -> None:
        """The changes as a checkpoint knows them, where those here are older (the store was lost or went back)."""
        found = msgspec.json.decode(text, type=Tuning) if text else Tuning()
        if found.number > self.tuning.number:
            self.tuning = found
            self._put_in_force()
            self._touch("tuning")

    def tuned(self) -> dict[str, Any]:
        """Every setting that can be tuned, as it is in force."""
        return self._in_force(self.tuning.values)

    def _in_force(self, values: Mapping[str, Any]) -> dict[str, Any]:
        base = self.base
        depth = base.depth if base.depth_rule == "fixed" else base.depth_rule
        known = {
            **{key: getattr(base, short) for short, key in SHORT.items() if short != "pipeline_depth"},
            "buffer.pipeline_depth": depth,
            **{f"{ALGORITHM}{name}": value for name, value in flat(base.algorithm).items()},
        }
        return {**known, **values}

    @staticmethod
    def _judge(values: Mapping[str, Any]) -> None:
        """The rules across settings, as for the configuration file."""
        eta, depth, batch = (values[SHORT[key]] for key in ("max_staleness", "pipeline_depth", "batch_groups"))
        if isinstance(depth, int) and depth > eta:
            raise refused(
                f"pipeline_depth = {depth} is above max_staleness = {eta}: work that deep would be too old when its "
                "turn comes; change both, or set pipeline_depth = max"
            )
        minibatches = values.get(f"{ALGORITHM}minibatches", AlgorithmConfig().minibatches)
        if minibatches > batch:
            raise refused(f"learner.algorithm.minibatches = {minibatches} exceeds batch_groups = {batch}")

    def _put_in_force(self) -> None:
        """`settings` and `plan` from the configuration and the overrides."""
        base, tuning, values = self.base, self.tuning, self._in_force(self.tuning.values)
        eta, depth = values["buffer.max_staleness"], values["buffer.pipeline_depth"]
        rule = depth if isinstance(depth, str) else "fixed"
        steps, total = base.steps or -(-base.total_groups // base.batch_groups), base.total_groups
        if tuning.plan:
            self.plan = Plan(tuning.plan)
            total += self.plan.capacity(0, steps - 1) - steps * base.batch_groups
        if rule == "auto":
            depth = min(max(1, tuning.depth), eta)
        self.settings = msgspec.structs.replace(
            base,
            max_staleness=eta,
            depth=eta if rule == "max" else min(depth, eta),
            depth_rule=rule,
            on_late=values["buffer.on_late"],
            late_timeout_s=values["buffer.late_timeout_s"],
            batch_groups=values["buffer.batch_groups"],
            max_reuse=values["buffer.max_reuse"],
            max_groups_in_flight=values["producers.max_groups_in_flight"],
            total_groups=total,
            steps=steps if tuning.plan else base.steps,
        )

    # ------------------------------------------------------------ the size of batches

    def batch_size(self, step: int) -> int:
        """How many groups the batch of `step` holds, by the plan and by what is left of the run."""
        return min(self.plan.size(step), self.unclaimed)

    def _replan(self, size: int) -> str:
        """A new size from the first step from which nothing that is outstanding becomes infeasible; a note."""
        v = self.frontier
        first, last = v + 1, max((v, *self.due)) + 2
        for step in range(first, last + 1):
            plan = self.plan.changed(step, size)
            counts = list(levels(self.due, v))
            if all(
                n <= max(capacity(plan, v, u), 0) or plan.capacity(v, u) >= self.plan.capacity(v, u) for u, n in counts
            ):
                break
        self.plan, self.tuning.plan = plan, plan.changes
        if step == first:
            return ""
        due = sum(count for u, count in self.due.items() if u < step)
        return f"batch_groups = {size} from step {step} on: {due} groups must be trained before"

    # ------------------------------------------------------------ pipeline_depth = "auto"

    def _watch_asked(self, step: int, now: float) -> None:
        """The learner asks for the batch of `step`: the step before is over."""
        last, self._watched = self._watched, (step, now, None)
        if self.settings.depth_rule != "auto" or last is None or last[0] != step - 1 or last[2] is None:
            return
        self._observe(idle_s=last[2] - last[1], step_s=now - last[1], now=now)

    def _watch_claimed(self, step: int, now: float) -> None:
        if self._watched is not None and self._watched[0] == step:
            self._watched = (step, self._watched[1], now)

    def _observe(self, *, idle_s: float, step_s: float, now: float) -> None:
        depth, limit = self.settings.depth, self.settings.max_staleness
        wanted = self._controller.observe(idle_s=idle_s, step_s=step_s, depth=depth, limit=limit)
        if wanted != depth:
            self.tuning.depth = wanted
            self._put_in_force()
            self._tell({"buffer.pipeline_depth": (depth, wanted)}, author="auto", now=now)
